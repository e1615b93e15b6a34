"""Calls of the prefill kernel through the simulator, held to the bounds of the GPU tests.

``python -m tests.simulator.prefill_cases --count 200`` draws that many: ragged shapes, options, layouts, schedules.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import tempfile
from dataclasses import replace
from typing import Any

import torch

from cute_attn.arch import arch_by_name
from cute_attn.compiler import build
from cute_attn.configs import SEED_CONFIGS, default_config
from cute_attn.problem import KernelSpec, PrefillArguments, PrefillProblem
from layouts.simulator.report import Report
from layouts.simulator.scheduler import SCHEDULES
from layouts.simulator.simulate import simulate
from tests.gpu import check
from tests.gpu.cases import Case, Shape, draw, plain
from tests.gpu.tensors import Tensors, make_tensors

LONGEST = 300


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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator.prefill_cases", description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    problems = [
        plain(64, bounded_right=True, return_lse=True),
        plain(128, "bfloat16", bounded_left=True, bounded_right=True, return_lse=True),
        plain(64, "bfloat16", varlen=True, bounded_right=True, return_lse=True),
        replace(plain(40), head_dim_v=72),
        plain(256, bounded_left=True),
    ]
    seeds = list(SEED_CONFIGS.values())
    rng = random.Random(options.seed)
    for number in range(options.count):
        problem = problems[number % len(problems)]
        case = draw_short(problem, options.seed + number)
        if problem.head_dim == 64 and rng.random() < 0.3:
            case = replace(case, config=rng.choice(seeds[:4]))
        schedule = SCHEDULES[number % len(SCHEDULES)]
        report = simulated(case, ("sm_80", "sm_90a")[number % 2], schedule, number)
        if report.findings:
            raise SystemExit(f"{case}, {schedule}:\n" + "\n".join(map(str, report.findings)))
        print(f"\r{number + 1}/{options.count}", end="", flush=True)
    print(" calls right, nothing found")


if __name__ == "__main__":
    main()
