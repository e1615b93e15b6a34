"""Calls of the prefill kernel through the simulator, held to the bounds of the GPU tests.

``python -m tests.simulator.prefill_cases --count 200`` draws that many: ragged shapes, options, layouts, schedules. It
prints its seed, with which ``--seed`` draws the same again, and ``--only`` one of them.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from cute_attn.arch import arch_by_name
from cute_attn.compiler import build
from cute_attn.configs import SEED_CONFIGS, TABLE, PrefillConfig, default_config
from cute_attn.problem import KernelSpec, PrefillArguments, PrefillProblem
from layouts.simulator.errors import SimulatorError
from layouts.simulator.report import Report
from layouts.simulator.scheduler import SCHEDULES
from layouts.simulator.simulate import simulate
from tests.gpu import check
from tests.gpu.cases import Case, Shape, draw, plain
from tests.gpu.tensors import Tensors, make_tensors

ARCHS = ("sm_80", "sm_86", "sm_90a", "sm_120a")
DTYPES = ("float16", "bfloat16")
LONGEST = 300
WIDE = 1000  # a window that hides nothing of the lengths used here


@dataclass(frozen=True)
class Tiling:
    """A tiling as the tests compile it: for which architecture, and at which head dim."""

    gpu_arch: str
    head_dim: int
    config: PrefillConfig


def default_tilings() -> list[Tiling]:
    """Each distinct (config, head dim) of the table for ARCHS once, spread over the architectures that have it."""
    archs_of: dict[tuple[PrefillConfig, int], list[str]] = {}
    for gpu_arch in ARCHS:
        arch = arch_by_name(gpu_arch)
        for row in TABLE:
            if arch.capability in row.archs:
                assert default_config(arch, row.head_dim, row.head_dim) == row.config
                archs_of.setdefault((row.config, row.head_dim), []).append(gpu_arch)
    used = Counter[str]()
    tilings = []
    for (config, head_dim), archs in sorted(archs_of.items(), key=lambda item: (len(item[1]), item[0][1])):
        gpu_arch = min(archs, key=lambda name: used[name])
        used[gpu_arch] += 1
        tilings.append(Tiling(gpu_arch, head_dim, config))
    return tilings


def calls(problem: PrefillProblem, config: PrefillConfig) -> Iterator[Case]:
    """Ragged calls of one kernel: causal, windowed and unmasked, each in another storage.

    Lengths stand at the tile's edges. Some queries see no key: causal with fewer keys than queries, and sequences
    without keys. Windows that the problem does not bound have no effect.
    """
    m, n = config.tile_m, config.tile_n
    if problem.varlen:
        shapes = (
            Shape((m + 5, 1, 0, 40), (n + 3, 0, 9, 17), heads_kv=1, group=3),
            Shape((3, 70, m), (2 * n + 1, 0, n - 1), heads_kv=2),
            Shape((1, 17), (n, 2 * n + 7), heads_kv=2, group=2),
        )
    else:
        shapes = (
            Shape.dense(m + 5, n + 3, heads_kv=1, group=3),
            Shape.dense(70, 2 * n + 1, batch=2, heads_kv=2),
            Shape.dense(1, n - 1, heads_kv=2, group=2),
        )
    options: tuple[tuple[tuple[int, int], str, str], ...] = (
        ((WIDE, 0), "bhsd", "fused"),
        ((7, 5), "bshd", "transposed"),
        ((WIDE, WIDE), "bhsd", "padded"),
    )
    for number, (shape, (window, layout, storage)) in enumerate(zip(shapes, options, strict=True)):
        yield Case(problem, shape, window, layout=layout, storage=storage, config=config, seed=number)


@functools.cache
def compiled(spec: KernelSpec) -> Any:
    """The kernel of a spec with its PTX, at ptxas's first level: the PTX is the same at all of them."""
    with tempfile.TemporaryDirectory() as folder:
        spec.config.check_fits(spec.arch, spec.problem.head_dim, spec.problem.head_dim_v)
        return build._compile(spec, f"--keep-ptx --dump-dir {folder}")


def spec_of(case: Case, gpu_arch: str) -> KernelSpec:
    arch, problem = arch_by_name(gpu_arch), case.problem
    config = case.config or default_config(arch, problem.head_dim, problem.head_dim_v)
    assert not isinstance(config, str)
    return KernelSpec(problem, config, arch)


def arguments(case: Case, tensors: Tensors) -> tuple[PrefillArguments, torch.Tensor | None]:
    """The kernel's arguments for a call, and its lse, poisoned."""
    problem, shape = case.problem, case.shape
    scale = 1 / math.sqrt(problem.head_dim) if case.scale is None else case.scale
    sizes = (shape.heads_q, tensors.q.shape[0]) if problem.varlen else (shape.batch, shape.heads_q, shape.q_lens[0])
    lse = torch.full(sizes, math.nan) if problem.return_lse else None
    lengths = tensors.lengths
    return PrefillArguments(
        q=tensors.q if scale > 0 else -tensors.q,
        k=tensors.k,
        v=tensors.v,
        out=tensors.out,
        lse=lse,
        cu_seqlens_q=lengths.get("cu_seqlens_q"),
        cu_seqlens_k=lengths.get("cu_seqlens_k"),
        scale_log2=abs(scale) * math.log2(math.e),
        window_left=case.window[0],
        window_right=case.window[1],
        heads_second=int(case.layout == "bhsd" or problem.varlen),
    ), lse


def simulated(case: Case, gpu_arch: str, schedule: str = "lockstep", seed: int = 0) -> Report:
    """Run a call in the simulator and assert that every row is right, and that nothing else was written.

    Returns:
        What the simulator found.
    """
    tensors = make_tensors(case, "cpu")
    given, lse = arguments(case, tensors)
    report = simulate(compiled(spec_of(case, gpu_arch)), given, schedule=schedule, seed=seed)
    check.assert_nothing_written_beyond(tensors)
    check.assert_right(case, tensors, check.Result(tensors.out, lse))
    return report


def bank_conflicts(report: Report) -> int:
    """Excess wavefronts of loads, stores and matrix moves."""
    return report.excess_wavefronts - copy_excess(report)


def copy_excess(report: Report) -> int:
    """Excess wavefronts of copies, to which the rows' places in global memory contribute: no layout avoids that part.

    None where each row of the tensors starts at a multiple of 128 bytes and shared memory is swizzled.
    """
    copies = [each for each in report.instructions if each.opcode.startswith("cp.async")]
    return sum(each.wavefronts - each.ideal_wavefronts for each in copies)


def draw_short(problem: PrefillProblem, seed: int) -> Case:
    """A random call with at least one query and key, none of its lengths above LONGEST."""
    case = draw(problem, seed)
    q_lens, k_lens = (tuple(min(n, LONGEST) for n in lens) for lens in (case.shape.q_lens, case.shape.k_lens))
    if not max(q_lens):
        q_lens = (5,) * len(q_lens)
    if not max(k_lens):
        k_lens = (3,) * len(k_lens)
    shape = Shape(q_lens, k_lens, min(case.shape.heads_kv, 2), min(case.shape.group, 3))
    return replace(case, shape=shape)


# What random calls are drawn from: few enough kernels that compiling them takes less time than the calls.
PROBLEMS = (
    plain(64, bounded_right=True, return_lse=True),
    plain(128, "bfloat16", bounded_left=True, bounded_right=True, return_lse=True),
    plain(64, "bfloat16", varlen=True, bounded_right=True, return_lse=True),
    plain(128, varlen=True, bounded_left=True),
    replace(plain(40), head_dim_v=72),
    plain(256, bounded_left=True, bounded_right=True),
)
OTHER_TILINGS = (
    *SEED_CONFIGS.values(),
    PrefillConfig(64, 32, 4, 1, q_in_regs=True, o_fp32=False),
    PrefillConfig(64, 64, 4, 4),
)


@dataclass(frozen=True)
class Drawn:
    """A random call, and how it is run."""

    case: Case
    gpu_arch: str
    schedule: str
    seed: int


def draw_run(seed: int, number: int) -> Drawn:
    """The random run of a number under a seed."""
    rng = random.Random(f"{seed} {number}")
    case = draw_short(rng.choice(PROBLEMS), rng.randrange(2**31))
    if case.problem.head_dim == 64 and rng.random() < 0.5:
        return Drawn(replace(case, config=rng.choice(OTHER_TILINGS)), "sm_80", rng.choice(SCHEDULES), number)
    return Drawn(case, rng.choice(ARCHS), rng.choice(SCHEDULES), number)


def complaint(drawn: Drawn) -> str:
    """What is wrong with a run; empty if nothing is."""
    try:
        report = simulated(drawn.case, drawn.gpu_arch, drawn.schedule, drawn.seed)
    except (AssertionError, SimulatorError) as error:
        return f"{type(error).__name__}: {error}"
    conflicts = bank_conflicts(report)
    excess = f"{conflicts} excess wavefronts of loads and stores" if conflicts else ""
    return "\n".join([*map(str, report.findings), *filter(None, [excess])])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator.prefill_cases", description=__doc__)
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
