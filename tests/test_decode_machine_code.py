"""The machine code of decode's default kernels, and of the seed's arrangement, for every generation of GPUs."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import pytest

from cute_attn.arch import arch_by_name
from cute_attn.compiler.inspect import KernelReport, inspect_kernel
from cute_attn.compiler.kernel_sets import core_decode_kernels
from cute_attn.decode_configs import RolesConfig, StreamsConfig, default_decode_config, seed_config
from cute_attn.decode_problem import DecodeProblem
from cute_attn.problem import KernelSpec

MAX_WORKERS = 8  # each takes about half a gigabyte

ARCHS = [arch_by_name(name) for name in ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")]
ALL_OPTIONS = {"bounded_left": True, "softcap": True, "sinks": True, "return_lse": True}

# Beside the kernels that are compiled on import: every option at once with each kind of cache, and more rows.
OTHERS = [
    (DecodeProblem("bfloat16", "int8", 128, 16, **ALL_OPTIONS), 4),
    (DecodeProblem("bfloat16", "float8_e4m3fn", 128, 64, **ALL_OPTIONS), 16),
    (DecodeProblem("float16", "float16", 256, 8, **ALL_OPTIONS), 8),
    (DecodeProblem("bfloat16", "bfloat16", 64, 0, **ALL_OPTIONS), 32),
]
DEFAULTS = [spec for arch in ARCHS for spec in core_decode_kernels(arch)] + [
    KernelSpec(problem, default_decode_config(arch, problem, rows), arch) for arch in ARCHS for problem, rows in OTHERS
]
SEEDS = [
    KernelSpec(problem, seed_config(arch, problem, rows), arch)
    for arch in ARCHS
    for problem, rows in ((DecodeProblem("float16", "float16", 128, 64), 8), OTHERS[1])
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
    assert (report.stack_bytes, report.spill_store_bytes, report.spill_load_bytes) == (0, 0, 0)
    assert report.count("STL") == report.count("LDL") == 0
    assert report.smem_bytes == report.config_smem_bytes <= spec.arch.smem_bytes
    # The cache arrives by cp.async of 16 bytes that goes past the L1 cache and has the L2 fetch 128.
    assert report.count("LDGSTS") == report.count("LDGSTS", "BYPASS", "LTC128B", "128") > 0
    assert report.count("STG", "128") > 0  # partial results
    assert report.count("ATOMG", "INC") + report.count("ATOM", "INC") == 1  # the semaphore
    if isinstance(spec.config, RolesConfig):
        assert_roles(report, spec)
    else:
        assert_streams(report, spec)


def assert_streams(report: KernelReport, spec: KernelSpec) -> None:
    """One copy of the main loop, in which every product is made once and every fragment fetched once."""
    config, problem = spec.config, spec.problem
    assert isinstance(config, StreamsConfig)
    columns, tokens, dims = config.tile_m // 8, config.tile_n // 16, problem.head_dim // 16
    assert report.count("HMMA", "16816", "F32") == report.count("HMMA") == columns * tokens * (2 * dims + 1)
    fetches = tokens * dims // problem_blocks(spec)
    assert report.count("LDSM", "M88") == report.count("LDSM", "MT88") == fetches
    assert report.count("MOVM") == 2 * columns * tokens  # P^T, from accumulators to operands
    assert report.count("SYNCS") == report.count("ARRIVES") == 0
    limit = 65536 // (config.num_threads * config.blocks_per_multiprocessor)
    assert report.registers <= min(255, limit)


def problem_blocks(spec: KernelSpec) -> int:
    """Blocks of 16 dims that one ldmatrix.x4 fetches."""
    return 2 if spec.problem.quantised else 1


def assert_roles(report: KernelReport, spec: KernelSpec) -> None:
    """mbarriers are there: on the older GPUs their arrivals are atomics on shared memory."""
    assert report.count("HMMA", "16816", "F32") == report.count("HMMA") > 0
    assert report.count("LDSM", "M88") > 0
    assert report.count("LDSM", "MT88") > 0
    arrivals = report.count("SYNCS") if spec.arch.capability >= 90 else report.count("ATOMS", "ARRIVE", "64")
    assert arrivals > 0, dict(report.opcodes)
    assert report.count("ARRIVES", "LDGSTSBAR") > 0  # copies of V say themselves that they have landed
