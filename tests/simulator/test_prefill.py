"""Every default config, and the seed's tilings, through the simulator: numbers, no findings, no bank conflicts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_attn.configs import SEED_CONFIGS, PrefillConfig, parse_config
from cute_attn.problem import PrefillProblem
from layouts.simulator.scheduler import SCHEDULES
from layouts.simulator.simulate import simulate
from tests.gpu import check
from tests.gpu.cases import Case, Shape, plain
from tests.gpu.tensors import make_tensors
from tests.simulator.prefill_cases import (
    ARCHS,
    DTYPES,
    arguments,
    bank_conflicts,
    calls,
    compiled,
    copy_excess,
    default_tilings,
    draw_run,
    simulated,
    spec_of,
)

# One kernel serves every mask if it is compiled with both bounds; packed calls need a kernel of their own.
BOTH_BOUNDS = {"bounded_left": True, "bounded_right": True, "return_lse": True}
# Of the seed's tilings, one after the other: kernels that lack masks or a log-sum-exp are other code.
SEED_FLAGS: tuple[dict[str, Any], ...] = (
    BOTH_BOUNDS,
    {},
    {"varlen": True, "bounded_right": True},
    {"bounded_right": True},
    {"varlen": True, "bounded_left": True, "return_lse": True},
)
SEED_HEAD_DIMS = (64, 128)
# Excess wavefronts of copies in each of ``calls``. A line of global memory is 8 chunks of 16 bytes; if a row of a
# tensor starts in the middle of one, its copies take more wavefronts than its bytes fill, in any layout of shared
# memory: so do those of every "padded" storage, whose rows are 112 or 48 bytes off, and of head dim 96. Rows of shared
# memory that are padded by one chunk add to it, as every other row then starts in the middle of a sector. Swizzled rows
# have no excess if those of the tensors start at lines.
COPY_EXCESS = {
    "sm_80-d96": (1764, 1956, 2080), "sm_90a-d128": (0, 0, 1644), "sm_80-d256": (0, 0, 10804),
    "sm_86-d256": (0, 0, 10804), "sm_120a-d128": (0, 0, 812), "sm_86-d64": (0, 0, 1654),
    "seed_64x64_1stage": (1599, 2952, 1450), "seed_64x64_2stage": (3234, 7568, 2900),
    "seed_64x32_1stage": (1326, 1058, 2609), "seed_64x32_2stage": (1950, 4240, 1428),
    "seed_128x64_1stage": (2280, 1474, 4865), "seed_128x64_2stage": (3822, 4240, 2900),
    "seed_128x32_1stage": (1305, 1288, 714), "seed_128x32_2stage": (3276, 2532, 5218),
    "seed_128x128_1stage": (3159, 3784, 2922), "seed_128x128_2stage": (7056, 4612, 18754),
}  # fmt: skip
# Excess wavefronts of ``padded_call`` by head dim: of stores, of copies, and of copies to swizzled rows. 8 lanes write
# 8 chunks at once: one row where the tile's head dim is a multiple of 64, else 2 rows of 4 chunks or 4 rows of 2.
# Padded rows overlap in some banks then; swizzled ones do not. At head dim 40 the tensors' rows, of 80 bytes, start
# anywhere.
PADDED_EXCESS = {32: (282, 2392, 0), 40: (426, 5652, 5652)}

DEFAULTS = default_tilings()
NAMES = [f"{tiling.gpu_arch}-d{tiling.head_dim}" for tiling in DEFAULTS]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The references' small products are slower on more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def assert_clean(name: str, problem: PrefillProblem, config: PrefillConfig, gpu_arch: str, number: int) -> None:
    """All of ``calls`` give the right numbers without a finding or a bank conflict, each in another schedule."""
    for turn, case in enumerate(calls(problem, config)):
        schedule = SCHEDULES[(number + turn) % len(SCHEDULES)]
        report = simulated(case, gpu_arch, schedule, seed=number)
        assert not report.findings, (case, schedule, report.findings)
        assert bank_conflicts(report) == 0, f"{case}, {schedule}\n{report.table()}"
        assert copy_excess(report) == COPY_EXCESS[name][turn], f"{case}, {schedule}\n{report.table()}"


@pytest.mark.parametrize("number", range(len(DEFAULTS)), ids=NAMES)
def test_default_configs(number: int) -> None:
    tiling = DEFAULTS[number]
    problem = plain(tiling.head_dim, DTYPES[number % 2], varlen=number // 2 % 2 == 1, **BOTH_BOUNDS)
    assert_clean(NAMES[number], problem, tiling.config, tiling.gpu_arch, number)


def test_default_configs_are_of_every_architecture() -> None:
    assert {tiling.gpu_arch for tiling in DEFAULTS} == set(ARCHS)


@pytest.mark.parametrize("number", range(len(SEED_CONFIGS)), ids=list(SEED_CONFIGS))
def test_seed_tilings(number: int) -> None:
    head_dim = SEED_HEAD_DIMS[number % len(SEED_HEAD_DIMS)]
    config = parse_config(list(SEED_CONFIGS)[number], head_dim)
    problem = plain(head_dim, DTYPES[number // 2 % 2], **SEED_FLAGS[number % len(SEED_FLAGS)])
    assert_clean(list(SEED_CONFIGS)[number], problem, config, "sm_80", number)


def padded_call(head_dim: int, config: PrefillConfig) -> Case:
    shape = Shape.dense(70, 200, heads_kv=1, group=2)
    return Case(plain(head_dim, "bfloat16", bounded_right=True), shape, config=config)


@pytest.mark.parametrize("head_dim", PADDED_EXCESS)
def test_padded_rows_conflict_in_writes_alone(head_dim: int) -> None:
    config = parse_config("seed_64x64_2stage", head_dim)
    report = simulated(padded_call(head_dim, config), "sm_80")
    assert not report.findings
    of_stores, of_copies, of_swizzled_copies = PADDED_EXCESS[head_dim]
    assert (bank_conflicts(report), copy_excess(report)) == (of_stores, of_copies)
    conflicts = {each.opcode for each in report.instructions if each.wavefronts > each.ideal_wavefronts}
    assert conflicts == {"cp.async.cg.shared.global", "st.shared.v4.b32"}
    swizzled = simulated(padded_call(head_dim, replace(config, swizzle=True)), "sm_80")
    assert not swizzled.findings
    assert (bank_conflicts(swizzled), copy_excess(swizzled)) == (0, of_swizzled_copies)


@pytest.mark.parametrize("storage", ["expanded", "padded"])
def test_no_keys_at_all(storage: str) -> None:
    """The operator does not launch where no query sees a key; the kernel gives zeros and -inf all the same."""
    tiling = DEFAULTS[0]
    problem = plain(tiling.head_dim, DTYPES[0], **BOTH_BOUNDS)
    case = Case(problem, Shape.dense(19, 0, heads_kv=2), (0, 0), storage=storage, config=tiling.config)
    assert not simulated(case, tiling.gpu_arch).findings


def test_a_wrong_mask_is_noticed() -> None:
    """The bound is narrow enough to see one key too few."""
    tiling = DEFAULTS[0]
    case = next(calls(plain(tiling.head_dim, DTYPES[0], **BOTH_BOUNDS), tiling.config))
    tensors = make_tensors(case, "cpu")
    given, lse = arguments(case, tensors)
    simulate(compiled(spec_of(case, tiling.gpu_arch)), given, checked=False)
    check.assert_right(case, tensors, check.Result(tensors.out, lse))
    with pytest.raises(AssertionError, match="rows are wrong"):
        check.assert_right(replace(case, window=(case.window[0], 1)), tensors, check.Result(tensors.out, lse))


def test_draws_repeat() -> None:
    assert draw_run(7, 3) == draw_run(7, 3) != draw_run(7, 4)
