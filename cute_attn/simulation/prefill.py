"""A call of the prefill kernel, simulated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_attn import reference
from cute_attn.configs import PrefillConfig
from cute_attn.errors import argument_error
from cute_attn.options import UNBOUNDED, check_layout
from cute_attn.plan import LOG2_E
from cute_attn.problem import KernelSpec, PrefillArguments
from cute_attn.simulation.outcome import Outcome, Rows, Run, outcome_of, run_kernel

SHORTER = 17  # rows that each packed sequence has less than the one before, of q and of k and v


@dataclass(frozen=True)
class Call:
    """A call of the prefill kernel, with random inputs.

    Attributes:
        batch, heads, kv_heads: how many; ``heads`` is a multiple of ``kv_heads``.
        q_len, k_len: rows of q, and of k and v; of packed sequences those of the first one, the others are each
            ``SHORTER`` rows shorter.
        window_left, window_right: how many keys are seen on each side; negative is unbounded.
        seed: of the inputs.
        layout: "bhsd" or "bshd", the order of dense tensors.
    """

    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    q_len: int = 133
    k_len: int = 199
    window_left: int = UNBOUNDED
    window_right: int = UNBOUNDED
    seed: int = 0
    layout: str = "bhsd"

    def __post_init__(self) -> None:
        check_layout(self.layout)
        if self.heads % self.kv_heads:
            raise argument_error("kv_heads", "it", self.kv_heads, f"a divisor of heads, {self.heads}")

    def packed_lengths(self, first: int) -> Tensor:
        """Cumulative lengths of the packed sequences, (batch + 1,) int32."""
        lengths = [0, *(max(first - SHORTER * b, 0) for b in range(self.batch))]
        return torch.tensor(lengths).cumsum(0).to(torch.int32)


def simulate_prefill(spec: KernelSpec, call: Call, run: Run | None = None) -> Outcome:
    """Compile a prefill kernel and simulate a call of it, into an output full of NaN.

    Args:
        spec: its bounds are those of the call's window; with varlen the sequences are packed, whatever the layout.

    Raises:
        KernelCompileError: the kernel does not compile.
        RuntimeError: the simulator cannot run it.
    """
    arguments = _arguments(spec, call)
    report = run_kernel(spec, arguments, run)
    return outcome_of(spec, call, report, _rows(spec, call, arguments))


def _arguments(spec: KernelSpec, call: Call) -> PrefillArguments:
    problem, chance = spec.problem, torch.Generator().manual_seed(call.seed)
    dtype, varlen = getattr(torch, problem.dtype), problem.varlen
    lengths = [call.packed_lengths(rows) if varlen else None for rows in (call.q_len, call.k_len)]

    def shape(heads: int, side: int, head_dim: int) -> tuple[int, ...]:
        """Of a tensor with so many rows as q (side 0) or k (side 1)."""
        packed, rows = lengths[side], (call.q_len, call.k_len)[side]
        if packed is not None:
            return int(packed[-1]), heads, head_dim
        return (call.batch, heads, rows, head_dim) if call.layout == "bhsd" else (call.batch, rows, heads, head_dim)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(shape(*sizes), generator=chance).to(dtype)

    q = normal(call.heads, 0, problem.head_dim)
    of_rows = (call.heads, q.shape[0]) if varlen else (call.batch, call.heads, call.q_len)
    return PrefillArguments(
        q=q,
        k=normal(call.kv_heads, 1, problem.head_dim),
        v=normal(call.kv_heads, 1, problem.head_dim_v),
        out=torch.full(shape(call.heads, 0, problem.head_dim_v), math.nan, dtype=dtype),
        lse=torch.full(of_rows, math.nan) if problem.return_lse else None,
        cu_seqlens_q=lengths[0],
        cu_seqlens_k=lengths[1],
        scale_log2=LOG2_E / math.sqrt(problem.head_dim),
        window_left=max(call.window_left, 0),
        window_right=max(call.window_right, 0),
        heads_second=int(call.layout == "bhsd"),
    )


def _rows(spec: KernelSpec, call: Call, arguments: PrefillArguments) -> Rows:
    """In the order of out's rows."""
    options: dict[str, Any] = {"window": (call.window_left, call.window_right), "layout": call.layout}
    if spec.problem.varlen:
        options.update(
            cu_seqlens_q=arguments.cu_seqlens_q,
            cu_seqlens_k=arguments.cu_seqlens_k,
            max_seqlen_q=call.q_len,
            max_seqlen_k=call.k_len,
        )

    def attention(precision: reference.Precision) -> tuple[Tensor, Tensor]:
        results = reference.attention(
            arguments.q, arguments.k, arguments.v, precision=precision, return_lse=True, **options
        )
        assert isinstance(results, tuple)
        return results

    expected, lse = attention(reference.Precision(torch.float32, torch.float32))
    rough, _ = attention(reference.Precision(arguments.out.dtype))
    # O in 16 bits between tiles is rounded once for every tile of keys.
    config = spec.config
    assert isinstance(config, PrefillConfig)
    roundings = 0 if config.o_fp32 else math.ceil(call.k_len / config.tile_n)
    rows = Rows.of(arguments.out, expected, rough, roundings)
    if arguments.lse is None:
        return rows
    heads_last = spec.problem.varlen or call.layout == "bshd"  # in out, though not in lse
    given, lse = (x.transpose(-1, -2) if heads_last else x for x in (arguments.lse, lse))
    return rows.with_lse(given, lse)
