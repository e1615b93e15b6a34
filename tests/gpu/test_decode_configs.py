"""Decode's configs other than the defaults: both arrangements in their variants, and those of smaller architectures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_attn.arch import arch_of
from cute_attn.decode_configs import DecodeConfig, RolesConfig, StreamsConfig, default_decode_config, seed_config
from tests.gpu.decode_cases import DecodeCase, plain
from tests.gpu.decode_check import check_decode

PROBLEMS = (
    plain(128, "bfloat16", return_lse=True),
    plain(128, "float16", page_size=16, bounded_left=True),
    plain(128, "bfloat16", "int8", page_size=64, sinks=True, return_lse=True),
    plain(64, "float16", "float8_e4m3fn", softcap=True),
)
LENGTHS = (515, 0, 1, 64, 1300)

CONFIGS: tuple[DecodeConfig, ...] = (
    StreamsConfig(8, 3, 16, 4, 2),
    StreamsConfig(8, 1, 16, 8, 3),
    StreamsConfig(16, 1, 64, 2, 2),
    StreamsConfig(32, 1, 16, 1, 4),
    RolesConfig(8),
    RolesConfig(16, row_max="none"),
    RolesConfig(32, v_by_group=False),
    RolesConfig(16, 1, 64, 3, 32, 4),
    RolesConfig(16, 1, 64, 2, 32, 2, v_by_group=False, row_max="none"),
    RolesConfig(32, 1, 128, 2, 64, 2, row_max="none"),
)
CASES = [
    DecodeCase(PROBLEMS[i % 4], LENGTHS, q_len=2, window=100, config=config, seed=i) for i, config in enumerate(CONFIGS)
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.spec.name)
@pytest.mark.parametrize("splits", [1, 3])
def test_configs(case: DecodeCase, splits: int) -> None:
    check_decode(replace(case, num_splits=splits))


# Head dim 256 in the 99 KB of sm_86: more than one V tile for each tile of P, in shuffled pages of every size.
SMALL = [
    DecodeCase(problem, (515,), heads_kv=1, group=group, num_splits=2, config=make(arch_of(86), problem, group))
    for page in (16, 32, 64, 128)
    for problem in (plain(256, "float16", page_size=page),)
    for make, group in ((seed_config, 4), (default_decode_config, 4))
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.spec.name)
def test_configs_for_99_kb_of_shared_memory(case: DecodeCase) -> None:
    check_decode(case)
