"""The machine code of the default kernels: what the compiler made of them, for every generation of GPUs.

Upgrades of the compiler and small changes of a kernel have made others spill or fall back to narrow copies without a
word. This needs no GPU; two processes compile at a time, because the compiler is not thread safe.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import pytest

from cute_attn.arch import arch_by_name
from cute_attn.compiler.inspect import KernelReport, inspect_kernel
from cute_attn.compiler.kernel_sets import core_prefill_kernels
from cute_attn.configs import SEED_CONFIGS, PrefillConfig, default_config, parse_config
from cute_attn.problem import KernelSpec, PrefillProblem

MAX_WORKERS = 8  # each takes about half a gigabyte

ARCHS = [arch_by_name(name) for name in ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")]

# Beside the kernels that are compiled on import: the largest head dim, and every option at once.
OTHER_PROBLEMS = [
    PrefillProblem("float16", 256, 256),
    PrefillProblem("bfloat16", 128, 128, bounded_left=True, bounded_right=True, varlen=True, return_lse=True),
]
DEFAULTS = [spec for arch in ARCHS for spec in core_prefill_kernels(arch)] + [
    KernelSpec(problem, default_config(arch, problem.head_dim, problem.head_dim_v), arch)
    for arch in ARCHS
    for problem in OTHER_PROBLEMS
]
SEEDS = [
    KernelSpec(PrefillProblem("float16", 64, 64), parse_config(name, 64), arch_by_name("sm_80"))
    for name in SEED_CONFIGS
]


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> Iterator[dict[KernelSpec, Future[KernelReport]]]:
    """The report of every selected kernel, as soon as it is compiled."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    selected: list[Any] = [item.callspec.params["spec"] for item in items if item.module is request.module]
    workers = ProcessPoolExecutor(min(os.cpu_count() or 1, MAX_WORKERS), multiprocessing.get_context("spawn"))
    yield {spec: workers.submit(inspect_kernel, spec) for spec in selected}
    workers.shutdown(cancel_futures=True)


@pytest.mark.parametrize("spec", DEFAULTS + SEEDS, ids=lambda spec: spec.name)
def test_machine_code(spec: KernelSpec, reports: dict[KernelSpec, Future[KernelReport]]) -> None:
    report = reports[spec].result()
    assert_no_spills(report)
    assert_shared_memory(report, spec)
    assert_loads(report)
    assert_tensor_cores_are_fed(report, spec)
    assert_stores(report, spec.config)


def assert_no_spills(report: KernelReport) -> None:
    assert (report.stack_bytes, report.spill_store_bytes, report.spill_load_bytes) == (0, 0, 0)
    assert report.count("STL") == report.count("LDL") == 0


def assert_shared_memory(report: KernelReport, spec: KernelSpec) -> None:
    assert report.smem_bytes == report.config_smem_bytes <= spec.arch.smem_bytes


def assert_loads(report: KernelReport) -> None:
    """Q, K and V arrive by cp.async of 16 bytes that goes past the L1 cache, and by nothing else."""
    assert report.count("LDGSTS") == report.count("LDGSTS", "BYPASS", "128") > 0


def assert_tensor_cores_are_fed(report: KernelReport, spec: KernelSpec) -> None:
    """Each copy of the main loop multiplies whole tiles, and fetches each fragment once by ldmatrix.x4."""
    config, problem = spec.config, spec.problem
    tile_d, tile_dv = config.tile_dim(problem.head_dim), config.tile_dim(problem.head_dim_v)
    rows = config.tile_m // (16 * config.num_warps)  # of 16, for one warp
    score_mma = rows * (config.tile_n // 8) * (tile_d // 16)
    out_mma = rows * (tile_dv // 8 + 1) * (config.tile_n // 16)  # V has one more column: the ones of the row sums
    loops, rest = divmod(report.count("HMMA", "16816", "F32"), score_mma + out_mma)
    assert loops > 0
    assert rest == 0
    assert report.count("HMMA") == loops * (score_mma + out_mma)
    k_fetches, v_fetches = config.tile_n * tile_d // 256, config.tile_n * tile_dv // 256
    q_fetches = rows * tile_d // 16
    assert report.count("LDSM", "MT88", "4") == loops * v_fetches
    assert report.count("LDSM", "M88", "4") == loops * k_fetches + q_fetches * (1 if config.q_in_regs else loops)
    assert report.count("LDSM") == report.count("LDSM", "4")


def assert_stores(report: KernelReport, config: PrefillConfig) -> None:
    """O leaves in 16-byte stores: through shared memory two elements at a time, or by shuffles with no store there."""
    assert report.count("STG", "128") > 0
    assert report.count("STG", "U16") == report.count("STS", "U16") == 0
    if config.o_store == "shuffle":
        assert report.count("SHFL") > 2 * rows_of_a_thread(config)


def rows_of_a_thread(config: PrefillConfig) -> int:
    return math.ceil(config.tile_m / (8 * config.num_warps))
