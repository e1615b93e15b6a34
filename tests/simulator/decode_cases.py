"""Calls of the decode kernel through the simulator, held to the bounds of the GPU tests.

``python -m tests.simulator.decode_cases --count 200`` draws that many: ragged lengths, pages, dtypes, options, splits,
schedules. It prints its seed, with which ``--seed`` draws the same again, and ``--only`` one of them.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cute_attn import reference
from cute_attn.arch import arch_by_name
from cute_attn.caches import Cache, ContiguousCache, PagedCache
from cute_attn.compiler import build
from cute_attn.decode_configs import DecodeConfig, RolesConfig, default_decode_config
from cute_attn.decode_problem import DecodeArguments, DecodeProblem
from cute_attn.problem import KernelSpec
from cute_attn.reference.decode import cached
from layouts.simulator.errors import SimulatorError
from layouts.simulator.report import Report
from layouts.simulator.scheduler import SCHEDULES
from layouts.simulator.simulate import simulate
from tests.gpu.check import LSE_ABSOLUTE, LSE_RELATIVE, row_bounds
from tests.simulator.prefill_cases import bank_conflicts

ARCHS = ("sm_80", "sm_86", "sm_90a", "sm_120a")
LOG2_E = math.log2(math.e)
GARBAGE_PAGE = 2**30  # in table entries of pages that no query sees


@dataclass(frozen=True)
class DecodeCase:
    """One call: its kernel, sizes, options, and the random numbers it is made of.

    Attributes:
        lengths: tokens of each sequence.
        spare: tokens of capacity beyond the longest.
        scale: softmax scale; None for the default.
        extreme: all scores lie at about so much, instead of being random.
        heads_first: the pool is (page, head, token, dim).
        two_tables: k and v have page indices of their own.
        split_size: in steps of the config; 0 where ``num_splits`` decides.
    """

    problem: DecodeProblem
    lengths: tuple[int, ...]
    q_len: int = 1
    heads_kv: int = 2
    group: int = 4
    spare: int = 0
    window: int = 0
    softcap: float = 3.0
    scale: float | None = None
    scales: tuple[float, float] = (0.05, 0.04)
    extreme: float = 0.0
    heads_first: bool = False
    two_tables: bool = False
    num_splits: int = 1
    split_size: int = 0
    config: DecodeConfig | None = None
    seed: int = 0

    @property
    def rows(self) -> int:
        return self.group * self.q_len


@dataclass
class DecodeTensors:
    """A call's tensors on the CPU; whatever no query sees is NaN."""

    q: Tensor
    cache: Cache
    lengths: Tensor
    sinks: Tensor | None
    out: Tensor
    out_buffer: Tensor
    lse: Tensor | None
    partials: Tensor
    semaphores: Tensor
    seen: list[Tensor] = field(default_factory=list)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int8) if x.element_size() == 1 else x


def make_tensors(case: DecodeCase, num_splits: int, config: DecodeConfig) -> DecodeTensors:
    problem = case.problem
    random_numbers = torch.Generator().manual_seed(case.seed)
    dtype, cache_dtype = getattr(torch, problem.dtype), getattr(torch, problem.cache_dtype)
    batch, heads, dim = len(case.lengths), case.heads_kv * case.group, problem.head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random_numbers)

    q = normal(batch, case.q_len, heads, dim)
    page = problem.page_size
    capacity = max(max(case.lengths), 1) + case.spare
    capacity = -(-capacity // page) * page if page else capacity
    k, v = normal(batch, capacity, case.heads_kv, dim), normal(batch, capacity, case.heads_kv, dim)
    if case.extreme:
        q, k = torch.ones_like(q), torch.full_like(k, case.extreme * math.sqrt(dim) / dim)
        v = torch.ones_like(v)
    nan = math.nan
    if problem.quantised:
        k, v = (x / s for x, s in zip((k, v), case.scales, strict=True))
        if problem.cache_dtype == "int8":
            k, v = k.round().clamp(-128, 127), v.round().clamp(-128, 127)
            nan = 127.0
        else:
            k, v = k.clamp(-448, 448), v.clamp(-448, 448)
    for b, length in enumerate(case.lengths):
        first = max(0, length - case.q_len + 1 - case.window) if problem.bounded_left else 0
        for x in (k, v):
            x[b, length:] = nan
            x[b, :first] = nan
    k, v = k.to(cache_dtype), v.to(cache_dtype)
    scale = case.scales if problem.quantised else None
    if page:
        cache: Cache = _paged(case, k, v, scale, random_numbers)
    elif case.heads_first:
        k, v = (bits(x).transpose(1, 2).contiguous().transpose(1, 2).view(cache_dtype) for x in (k, v))
        cache = ContiguousCache(k, v, scale)
    else:
        cache = ContiguousCache(k, v, scale)
    out_buffer = torch.full((batch, case.q_len, heads + 1, dim), math.nan, dtype=dtype)
    row_tiles = -(-case.rows // config.tile_m)
    blocks = batch * case.heads_kv * row_tiles
    sinks = normal(heads) * 2 if problem.sinks else None
    if sinks is not None:
        sinks[0] = -math.inf
    return DecodeTensors(
        q=q.to(dtype),
        cache=cache,
        lengths=torch.tensor(case.lengths, dtype=torch.int32),
        sinks=sinks,
        out=out_buffer[:, :, :heads],
        out_buffer=out_buffer,
        lse=torch.full((batch, case.q_len, heads), math.nan) if problem.return_lse else None,
        partials=torch.full((blocks * num_splits * config.partial_elements(dim),), math.nan),
        semaphores=torch.zeros(blocks, dtype=torch.int32),
    )


def _paged(case: DecodeCase, k: Tensor, v: Tensor, scale: Any, random_numbers: torch.Generator) -> PagedCache:
    """Shuffled pages, with some that nobody owns."""
    problem, (batch, capacity, heads_kv, dim) = case.problem, k.shape
    page = problem.page_size
    count = batch * capacity // page
    pools, tables = [], []
    order = torch.randperm(2 * count + 1, generator=random_numbers)[:count]
    for x in (k, v):
        if case.two_tables:
            order = torch.randperm(2 * count + 1, generator=random_numbers)[:count]
        pool = torch.full((2 * count + 1, page, heads_kv, dim), math.nan).to(x.dtype)
        bits(pool)[order] = bits(x).reshape(count, page, heads_kv, dim)
        if case.heads_first:
            pool = bits(pool).transpose(1, 2).contiguous().transpose(1, 2).view(x.dtype)
        pools.append(pool)
        table = order.view(batch, -1).to(torch.int32)
        for b, length in enumerate(case.lengths):
            first = max(0, length - case.q_len + 1 - case.window) if problem.bounded_left else 0
            table[b, -(-length // page) :] = GARBAGE_PAGE
            table[b, : first // page] = -5
        tables.append(table)
    return PagedCache(pools[0], pools[1], torch.stack(tables, 1) if case.two_tables else tables[0], scale)


@functools.cache
def compiled(spec: KernelSpec) -> Any:
    """The kernel of a spec with its PTX, at ptxas's first level: the PTX is the same at all of them."""
    with tempfile.TemporaryDirectory() as folder:
        spec.check_fits()
        return build._compile(spec, f"--keep-ptx --dump-dir {folder}")


def spec_of(case: DecodeCase, gpu_arch: str) -> KernelSpec:
    arch = arch_by_name(gpu_arch)
    return KernelSpec(case.problem, case.config or default_decode_config(arch, case.problem, case.rows), arch)


def arguments(case: DecodeCase, tensors: DecodeTensors, num_splits: int, config: DecodeConfig) -> DecodeArguments:
    problem, cache = case.problem, tensors.cache
    scale = 1 / math.sqrt(problem.head_dim) if case.scale is None else case.scale
    k_scale, v_scale = (torch.tensor([s]) for s in (cache.k_scale, cache.v_scale))
    return DecodeArguments(
        q=tensors.q,
        k=bits(cache.k),
        v=bits(cache.v),
        out=tensors.out,
        lse=tensors.lse,
        lengths=tensors.lengths,
        k_page_table=cache.k_page_table,
        v_page_table=cache.v_page_table,
        sinks=tensors.sinks,
        k_scale=k_scale if problem.quantised else None,
        v_scale=v_scale if problem.quantised else None,
        partials=tensors.partials,
        semaphores=tensors.semaphores,
        scale_log2=scale * LOG2_E,
        v_factor=1.0,
        softcap=case.softcap,
        window=case.window,
        num_splits=num_splits,
        split_size=case.split_size * config.tile_tokens,
    )


def simulated(case: DecodeCase, gpu_arch: str, schedule: str = "lockstep", seed: int = 0) -> Report:
    """Run a call in the simulator and assert that every row is right, and that nothing else was written."""
    spec = spec_of(case, gpu_arch)
    config = spec.config
    assert isinstance(config, DecodeConfig)
    num_splits = case.num_splits
    if case.split_size:
        num_splits = max(1, -(-(max(case.lengths) + case.spare) // (case.split_size * config.tile_tokens)) + 1)
    tensors = make_tensors(case, num_splits, config)
    given = arguments(case, tensors, num_splits, config)
    report = simulate(compiled(spec), given, schedule=schedule, seed=seed)
    assert tensors.out_buffer[:, :, -1].isnan().all(), "elements beyond the output were written"
    assert not tensors.semaphores.any(), f"semaphores are left at {tensors.semaphores.tolist()}"
    assert_right(case, tensors)
    return report


def assert_right(case: DecodeCase, tensors: DecodeTensors) -> None:
    problem = case.problem
    options: dict[str, Any] = {
        "scale": case.scale,
        "window": case.window if problem.bounded_left else None,
        "softcap": case.softcap if problem.softcap else None,
        "sinks": tensors.sinks,
    }
    expected, lse = reference.decode(tensors.q.float(), tensors.cache, tensors.lengths, return_lse=True, **options)
    rough = torch_in_input_dtype(case, tensors)
    bound = row_bounds(expected, rough, tensors.q.dtype)
    error = (tensors.out.float() - expected).abs().amax(-1)
    wrong = ~(error <= bound)
    if wrong.any():
        first = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} rows are wrong, the first at {first}: "
            f"error {float(error[first]):.3g}, allowed {float(bound[first]):.3g}\n{case}"
        )
    if tensors.lse is not None:
        close = (tensors.lse - lse).abs() <= LSE_ABSOLUTE + LSE_RELATIVE * lse.abs()
        wrong = ~torch.where(lse.isinf(), tensors.lse == lse, close)
        if wrong.any():
            first = tuple(wrong.nonzero()[0].tolist())
            raise AssertionError(
                f"{int(wrong.sum())} of {wrong.numel()} rows of lse are wrong, the first at {first}: "
                f"{float(tensors.lse[first])!r}, expected {float(lse[first])!r}\n{case}"
            )


def torch_in_input_dtype(case: DecodeCase, tensors: DecodeTensors) -> Tensor:
    """The same attention as plain torch operations on 16-bit tensors, a quantised cache dequantised to these."""
    problem, cache, q = case.problem, tensors.cache, tensors.q
    scale = 1 / math.sqrt(problem.head_dim) if case.scale is None else case.scale
    out = torch.zeros_like(q)
    for b, length in enumerate(case.lengths):
        first = max(0, length - case.q_len + 1 - case.window) if problem.bounded_left else 0
        tokens = torch.arange(first, length)
        k, v = cached(cache, b, tokens, torch.float32)
        k, v = (x.to(q.dtype).repeat_interleave(case.group, dim=1).transpose(0, 1) for x in (k, v))
        positions = torch.arange(length - case.q_len, length)[:, None]
        seen = tokens <= positions
        if problem.bounded_left:
            seen &= tokens > positions - case.window
        logits = (q[b].transpose(0, 1) @ k.transpose(1, 2)) * scale
        if problem.softcap:
            logits = case.softcap * torch.tanh(logits / case.softcap)
        logits = logits.masked_fill(~seen, -math.inf)
        if tensors.sinks is not None:
            sink = tensors.sinks.to(q.dtype)[:, None, None].expand(-1, case.q_len, 1)
            logits = torch.cat([logits, sink], -1)
        weights = logits.softmax(dim=-1)[..., : len(tokens)].nan_to_num(0.0)
        out[b] = (weights @ v).transpose(0, 1)
    return out


# What random calls are drawn from: few enough kernels that compiling them takes less time than the calls.
PROBLEMS = (
    DecodeProblem("bfloat16", "bfloat16", 128),
    DecodeProblem("float16", "float16", 64, 16, bounded_left=True, return_lse=True),
    DecodeProblem("bfloat16", "bfloat16", 128, 64, sinks=True, return_lse=True),
    DecodeProblem("float16", "float16", 80, 8, softcap=True),
    DecodeProblem("bfloat16", "int8", 128, 32, bounded_left=True, sinks=True, return_lse=True),
    DecodeProblem("float16", "int8", 48, softcap=True, return_lse=True),
    DecodeProblem("bfloat16", "float8_e4m3fn", 128, 16),
    DecodeProblem("float16", "float8_e4m3fn", 256, 128, return_lse=True),
    DecodeProblem("float16", "float8_e4m3fn", 16, 24, bounded_left=True),
)


ROLES = (
    RolesConfig(8),
    RolesConfig(16, row_max="none", v_by_group=False),
    RolesConfig(16, k_part_bytes=64, v_tile=32, k_buffers=3, v_buffers=3),
)


@dataclass(frozen=True)
class Drawn:
    """A random call, and how it is run."""

    case: DecodeCase
    gpu_arch: str
    schedule: str
    seed: int


def draw_run(seed: int, number: int) -> Drawn:
    """The random run of a number under a seed."""
    rng = random.Random(f"{seed} {number}")
    lengths = tuple(
        rng.choice((0, 1, rng.randrange(1, 40), rng.randrange(1, 700), 64)) for _ in range(rng.choice((1, 2)))
    )
    sharing = rng.choice(("one", "even", "even", "fixed"))
    case = DecodeCase(
        rng.choice(PROBLEMS),
        lengths,
        q_len=rng.choice((1, 1, 2, 4)),
        heads_kv=rng.choice((1, 2)),
        group=rng.choice((1, 3, 4, 5, 8)),
        spare=rng.choice((0, 1, 30)),
        window=rng.choice((1, 2, 17, 64, 1000)),
        scale=rng.choice((None, None, 0.3)),
        extreme=rng.choice((0.0,) * 5 + (-2e5,)),
        heads_first=rng.random() < 0.5,
        two_tables=rng.random() < 0.5,
        num_splits=rng.randrange(2, 6) if sharing == "even" else 1,
        split_size=1 if sharing == "fixed" else 0,
        seed=rng.randrange(2**31),
    )
    if case.extreme and (case.problem.quantised or case.problem.softcap):
        case = replace(case, extreme=0.0)
    if case.problem in PROBLEMS[:6] and rng.random() < 0.4:
        return Drawn(replace(case, config=rng.choice(ROLES)), "sm_80", rng.choice(SCHEDULES), number)
    return Drawn(case, rng.choice(ARCHS), rng.choice(SCHEDULES), number)


def complaint(drawn: Drawn) -> str:
    """What is wrong with a run; empty if nothing is."""
    try:
        report = simulated(drawn.case, drawn.gpu_arch, drawn.schedule, drawn.seed)
    except (AssertionError, SimulatorError) as error:
        return f"{type(error).__name__}: {error}"
    # Rows of O that do not fill whole warps may share a bank where two of them meet, at the end of a block.
    whole = drawn.case.problem.head_dim in (64, 128, 256)
    conflicts = bank_conflicts(report)
    excess = f"{conflicts} excess wavefronts of loads and stores" if whole and conflicts else ""
    return "\n".join([*map(str, report.findings), *filter(None, [excess])])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator.decode_cases", description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, help="of the draws; a new one if not given")
    parser.add_argument("--only", type=int, help="run this number of the draws alone")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    torch.set_num_threads(1)
    numbers = range(options.count) if options.only is None else (options.only,)
    schedules, wrong = Counter[str](), 0
    for number in numbers:
        drawn = draw_run(seed, number)
        schedules[drawn.schedule] += 1
        found = complaint(drawn)
        if found:
            wrong += 1
            print(f"number {number} of seed {seed}: {drawn}\n{found}", flush=True)
        if (number + 1) % 25 == 0:
            print(f"{number + 1} drawn, {wrong} wrong", flush=True)
    runs = ", ".join(f"{count} {schedule}" for schedule, count in sorted(schedules.items()))
    print(f"{len(numbers) - wrong} of {len(numbers)} calls right and without a finding ({runs})")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
