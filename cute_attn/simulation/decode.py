"""A call of the decode kernel, simulated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_attn import reference
from cute_attn.caches import Cache, ContiguousCache, PagedCache
from cute_attn.decode_configs import DecodeConfig
from cute_attn.decode_problem import DecodeArguments, DecodeProblem
from cute_attn.errors import argument_error
from cute_attn.plan import LOG2_E
from cute_attn.problem import KernelSpec
from cute_attn.simulation.outcome import Outcome, Rows, Run, outcome_of, run_kernel

SCALES = (0.05, 0.04)  # of a quantised cache
SOFTCAP = 3.0
SHORTER = 17  # tokens that each sequence has less than the one before


@dataclass(frozen=True)
class DecodeCall:
    """A call of decode with random inputs.

    Attributes:
        batch: sequences, each ``SHORTER`` tokens shorter than the one before.
        heads, kv_heads: how many; ``heads`` is a multiple of ``kv_heads``.
        q_len: query tokens of a sequence.
        length: tokens of the first sequence.
        window: tokens that a query sees, its own counted; used by kernels with a window.
        num_splits: blocks that share a sequence.
        seed: of the inputs.
    """

    batch: int = 2
    heads: int = 8
    kv_heads: int = 2
    q_len: int = 1
    length: int = 199
    window: int = 100
    num_splits: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise argument_error("kv_heads", "it", self.kv_heads, f"a divisor of heads, {self.heads}")

    @property
    def rows(self) -> int:
        """Of a head of the cache."""
        return self.heads // self.kv_heads * self.q_len

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([max(self.length - SHORTER * b, 0) for b in range(self.batch)], dtype=torch.int32)


def simulate_decode(spec: KernelSpec, call: DecodeCall, run: Run | None = None) -> Outcome:
    """Compile a decode kernel and simulate a call of it, into an output full of NaN.

    Raises:
        KernelCompileError: the kernel does not compile.
        RuntimeError: the simulator cannot run it.
    """
    problem, config = spec.problem, spec.config
    assert isinstance(problem, DecodeProblem)
    assert isinstance(config, DecodeConfig)
    chance = torch.Generator().manual_seed(call.seed)
    cache = _cache(problem, call, chance)
    arguments = _arguments(problem, config, call, cache, chance)
    report = run_kernel(spec, arguments, run)
    return outcome_of(spec, call, report, _rows(problem, call, cache, arguments))


def _cache(problem: DecodeProblem, call: DecodeCall, chance: torch.Generator) -> Cache:
    """Every token that no sequence has is NaN, or where the dtype has none the largest number."""
    dtype, page = getattr(torch, problem.cache_dtype), problem.page_size
    capacity = -(-call.length // page) * page if page else call.length
    count = call.batch * capacity // page if page else 0
    order = torch.randperm(count, generator=chance)
    pools = []
    for scale in SCALES:
        x = torch.randn(call.batch, capacity, call.kv_heads, problem.head_dim, generator=chance)
        if problem.quantised:
            x = (x / scale).round().clamp(-127, 127)
        for sequence, length in enumerate(call.lengths.tolist()):
            x[sequence, length:] = 127 if problem.cache_dtype == "int8" else math.nan
        if page:
            pages = x.view(count, page, call.kv_heads, problem.head_dim)
            x = torch.empty_like(pages)
            x[order] = pages
        pools.append(x.to(dtype))
    scales = SCALES if problem.quantised else None
    if page:
        return PagedCache(pools[0], pools[1], order.view(call.batch, -1).to(torch.int32), scales)
    return ContiguousCache(pools[0], pools[1], scales)


def _arguments(
    problem: DecodeProblem, config: DecodeConfig, call: DecodeCall, cache: Cache, chance: torch.Generator
) -> DecodeArguments:
    rows = (call.batch, call.q_len, call.heads, problem.head_dim)
    q = torch.randn(rows, generator=chance).to(getattr(torch, problem.dtype))
    blocks = -(-call.rows // config.tile_m) * call.kv_heads * call.batch
    scales = [torch.tensor([scale]) for scale in SCALES] if problem.quantised else [None, None]
    return DecodeArguments(
        q=q,
        k=cache.k_bits,
        v=cache.v_bits,
        out=torch.full_like(q, math.nan),
        lse=torch.full(rows[:-1], math.nan) if problem.return_lse else None,
        lengths=call.lengths,
        k_page_table=cache.k_page_table,
        v_page_table=cache.v_page_table,
        sinks=torch.randn(call.heads, generator=chance) if problem.sinks else None,
        k_scale=scales[0],
        v_scale=scales[1],
        partials=torch.full((blocks * call.num_splits * config.partial_elements(problem.head_dim),), math.nan),
        semaphores=torch.zeros(blocks, dtype=torch.int32),
        scale_log2=LOG2_E / math.sqrt(problem.head_dim),
        v_factor=1.0,
        softcap=SOFTCAP,
        window=call.window,
        num_splits=call.num_splits,
        split_size=0,
    )


def _rows(problem: DecodeProblem, call: DecodeCall, cache: Cache, arguments: DecodeArguments) -> Rows:
    options: dict[str, Any] = {
        "window": call.window if problem.bounded_left else None,
        "softcap": SOFTCAP if problem.softcap else None,
        "sinks": arguments.sinks,
    }

    def decode(compute: torch.dtype, out: torch.dtype) -> tuple[Tensor, Tensor]:
        precision = reference.Precision(compute, out)
        results = reference.decode(arguments.q, cache, call.lengths, precision=precision, return_lse=True, **options)
        assert isinstance(results, tuple)
        return results

    dtype = arguments.out.dtype
    expected, lse = decode(torch.float32, torch.float32)
    rows = Rows.of(arguments.out, expected, decode(dtype, dtype)[0])
    return rows if arguments.lse is None else rows.with_lse(arguments.lse, lse)
