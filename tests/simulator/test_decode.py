"""Decode through the simulator: all rows of the table of defaults, the seed's arrangement, cases others miss."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from cute_attn.arch import arch_by_name
from cute_attn.caches import PagedCache
from cute_attn.decode_configs import TABLE, DecodeConfig, RolesConfig, StreamsConfig, default_decode_config, seed_config
from cute_attn.decode_problem import DecodeProblem
from layouts.simulator.scheduler import SCHEDULES
from layouts.simulator.simulate import simulate
from tests.simulator.decode_cases import (
    DecodeCase,
    arguments,
    assert_right,
    compiled,
    draw_run,
    make_tensors,
    simulated,
    spec_of,
)
from tests.simulator.prefill_cases import bank_conflicts, copy_excess

LINE_BYTES = 128  # of global memory, which copies take part by part where they start within one
EVERYTHING = {"bounded_left": True, "softcap": True, "sinks": True, "return_lse": True}
PLAIN = DecodeProblem("float16", "float16", 64)
PAGED = DecodeProblem("bfloat16", "bfloat16", 128, 16, return_lse=True)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The references' small products are slower on more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def assert_clean(case: DecodeCase, gpu_arch: str, schedule: str = "lockstep") -> None:
    report = simulated(case, gpu_arch, schedule)
    assert not report.findings, (case, schedule, report.findings)
    if case.problem.head_dim in (64, 128, 256):  # rows of O that fill whole warps
        assert bank_conflicts(report) == 0, report.table()
        config = spec_of(case, gpu_arch).config
        if not (isinstance(config, RolesConfig) and config.k_part_bytes < LINE_BYTES):  # parts that start within lines
            assert copy_excess(report) == 0, report.table()


# A problem and a number of rows for which each row of the table is the default, and an architecture that has it.
TABLE_CASES = [
    ("sm_90a", DecodeProblem("float16", "int8", 64, 16, **EVERYTHING), 8),
    ("sm_90a", DecodeProblem("bfloat16", "float8_e4m3fn", 128, 64, **EVERYTHING), 8),
    ("sm_90a", DecodeProblem("bfloat16", "bfloat16", 128, 16, **EVERYTHING), 6),
    ("sm_90a", DecodeProblem("bfloat16", "bfloat16", 64, 0, **EVERYTHING), 32),
    ("sm_90a", DecodeProblem("float16", "float16", 128, 8, **EVERYTHING), 16),
    ("sm_90a", DecodeProblem("float16", "float16", 256, 0, **EVERYTHING), 10),
    ("sm_80", DecodeProblem("float16", "float16", 32, 16, **EVERYTHING), 8),
    ("sm_80", DecodeProblem("float16", "int8", 128, 0, **EVERYTHING), 8),
    ("sm_80", DecodeProblem("bfloat16", "float8_e4m3fn", 128, 128, **EVERYTHING), 12),
    ("sm_80", DecodeProblem("bfloat16", "bfloat16", 112, 64, **EVERYTHING), 4),
    ("sm_80", DecodeProblem("float16", "float16", 208, 16, **EVERYTHING), 4),
    ("sm_86", DecodeProblem("float16", "float16", 16, 16, **EVERYTHING), 8),
    ("sm_86", DecodeProblem("bfloat16", "float8_e4m3fn", 96, 16, **EVERYTHING), 8),
    ("sm_120a", DecodeProblem("bfloat16", "bfloat16", 96, 16, **EVERYTHING), 8),
    ("sm_86", DecodeProblem("float16", "float16", 256, 32, **EVERYTHING), 8),
]


def test_the_cases_are_of_every_row_of_the_table() -> None:
    defaults = [
        (arch_by_name(arch), default_decode_config(arch_by_name(arch), problem, rows), problem)
        for arch, problem, rows in TABLE_CASES
    ]
    for row in TABLE:
        assert any(
            arch.capability in row.archs
            and replace(config, tile_m=8) == row.config
            and problem.row_bytes <= row.row_bytes
            and config.tile_m * problem.head_dim <= row.elements
            for arch, config, problem in defaults
        ), row


@pytest.mark.parametrize("number", range(len(TABLE_CASES)), ids=[f"{a}-{p.name}" for a, p, _ in TABLE_CASES])
def test_default_configs(number: int) -> None:
    """All options at once, two query tokens, splits, a length of 0, and garbage wherever no query looks."""
    gpu_arch, problem, rows = TABLE_CASES[number]
    schedule = SCHEDULES[number % len(SCHEDULES)]
    case = DecodeCase(problem, (0, 1, 301), q_len=2, group=rows // 2, heads_kv=1, window=130, num_splits=2, spare=20)
    assert_clean(case, gpu_arch, schedule)


ROLES = [
    ("sm_80", RolesConfig(8)),
    ("sm_80", RolesConfig(16, row_max="none")),
    ("sm_80", RolesConfig(16, v_by_group=False)),
    ("sm_90a", RolesConfig(8, k_part_bytes=64, v_tile=32, k_buffers=3, v_buffers=3)),
    ("sm_86", RolesConfig(16, k_part_bytes=64, v_tile=32, row_max="none", v_by_group=False)),
]


@pytest.mark.parametrize("schedule", ["serial", "random"])
@pytest.mark.parametrize(("gpu_arch", "config"), ROLES, ids=[config.name for _, config in ROLES])
def test_roles(gpu_arch: str, config: RolesConfig, schedule: str) -> None:
    """No race, no deadlock and no wrong count of arrivals, whoever of the roles runs ahead."""
    problem = DecodeProblem("bfloat16", "bfloat16", 128, 16, bounded_left=True, return_lse=True)
    case = DecodeCase(problem, (600,), q_len=2, group=4, heads_kv=1, window=500, config=config)
    assert_clean(case, gpu_arch, schedule)


@pytest.mark.parametrize("gpu_arch", ["sm_80", "sm_86"])
@pytest.mark.parametrize(
    "problem",
    [
        DecodeProblem("float16", "int8", 64, 8, **EVERYTHING),
        DecodeProblem("bfloat16", "float8_e4m3fn", 256, 16, **EVERYTHING),
        DecodeProblem("float16", "float16", 80, 0, **EVERYTHING),
    ],
    ids=lambda problem: problem.name,
)
def test_the_seeds_tiling(gpu_arch: str, problem: DecodeProblem) -> None:
    config = seed_config(arch_by_name(gpu_arch), problem, 32)
    case = DecodeCase(problem, (5, 513), q_len=4, group=5, heads_kv=1, window=400, config=config)
    assert_clean(case, gpu_arch, "random")


CONFIGS: tuple[DecodeConfig, ...] = (StreamsConfig(), RolesConfig(8))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_all_logits_far_below_zero(config: DecodeConfig) -> None:
    """Rows whose logits all lie at -2e5 give the mean of V: no finite number stands for minus infinity."""
    for splits in (1, 3):
        case = DecodeCase(PAGED, (1, 300), extreme=-2e5, num_splits=splits, config=config)
        assert_clean(case, "sm_80")


@pytest.mark.parametrize("softcap", [0.5, 1e6])
def test_softcaps_far_from_the_scores(softcap: float) -> None:
    """A cap far above them changes next to nothing, to the bit of float32."""
    problem = replace(PAGED, softcap=True)
    assert_clean(DecodeCase(problem, (70, 200), q_len=2, scale=1.0, softcap=softcap), "sm_90a")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize("splits", [1, 2, 5, 40])
def test_split_counts(config: DecodeConfig, splits: int) -> None:
    """More splits than tiles, and empty ones."""
    assert_clean(DecodeCase(PAGED, (0, 1, 64, 259), num_splits=splits, config=config), "sm_90a")


def exact_window(q_len: int, window: int, length: int, config: DecodeConfig) -> torch.Tensor:
    """out of a call whose keys are 0 and whose values are the tokens' numbers: means over what each query sees."""
    problem = DecodeProblem("float16", "float16", 16, 8, bounded_left=True)
    case = DecodeCase(problem, (length,), q_len=q_len, heads_kv=1, group=2, window=window, config=config)
    tensors = make_tensors(case, 1, config)
    assert isinstance(tensors.cache, PagedCache)
    table = tensors.cache.k_page_table[0]
    tensors.q.zero_()
    for token in range(max(0, length - q_len + 1 - window), length):
        tensors.cache.k[table[token // 8], token % 8] = 0
        tensors.cache.v[table[token // 8], token % 8] = token
    report = simulate(compiled(spec_of(case, "sm_80")), arguments(case, tensors, 1, config))
    assert not report.findings
    return tensors.out[0, :, 0, 0]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize(
    ("q_len", "window", "length"), [(1, 1, 70), (1, 2, 65), (4, 8, 100), (4, 64, 64), (3, 33, 300)]
)
def test_windows_begin_exactly(config: DecodeConfig, q_len: int, window: int, length: int) -> None:
    out = exact_window(q_len, window, length, config)
    for i in range(q_len):
        last = length - q_len + i
        first = max(0, last - window + 1)
        assert float(out[i]) == pytest.approx((first + last) / 2, rel=2**-11, abs=0)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_a_fixed_split_size_gives_bits_of_its_own(config: DecodeConfig) -> None:
    """They do not depend on the number of splits, which goes by the capacity of the cache."""

    def bits(case: DecodeCase, num_splits: int) -> torch.Tensor:
        tensors = make_tensors(case, num_splits, config)
        report = simulate(compiled(spec_of(case, "sm_80")), arguments(case, tensors, num_splits, config))
        assert not report.findings
        assert_right(case, tensors)
        return tensors.out[0]

    steps = 3 if isinstance(config, StreamsConfig) else 1
    alone = DecodeCase(PLAIN, (700,), split_size=steps, config=config)
    assert torch.equal(bits(alone, 4), bits(alone, 9))


@pytest.mark.parametrize("number", range(8))
def test_random_calls(number: int) -> None:
    drawn = draw_run(20261201, number)
    report = simulated(drawn.case, drawn.gpu_arch, drawn.schedule, drawn.seed)
    assert not report.findings, (drawn, report.findings)


def test_lengths_outside_of_the_cache() -> None:
    """A length beyond the capacity counts as the capacity, and a negative one as 0."""
    case = DecodeCase(PAGED, (64, 64))
    config = StreamsConfig()
    case = replace(case, config=config)
    tensors = make_tensors(case, 1, config)
    tensors.lengths[:] = torch.tensor([2**31 - 1, -7], dtype=torch.int32)
    report = simulate(compiled(spec_of(case, "sm_80")), arguments(case, tensors, 1, config))
    assert not report.findings
    assert tensors.out[0].isfinite().all()
    assert not tensors.out[1].any()
    assert tensors.lse is not None
    assert (tensors.lse[1] == -math.inf).all()
