"""Decode's configs: names, what they refuse, what fits where, and the table of defaults."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from cute_attn.arch import ARCHS, Arch, arch_by_name
from cute_attn.compiler import keys
from cute_attn.decode_configs import (
    MAX_ELEMENTS,
    TABLE,
    DecodeConfig,
    RolesConfig,
    StreamsConfig,
    default_decode_config,
    parse_decode_config,
    seed_config,
)
from cute_attn.decode_problem import DecodeProblem
from cute_attn.kernels.parts.roles import edges
from cute_attn.problem import KernelSpec

HEAD_DIMS = range(16, 257, 16)
CACHE_DTYPES = ("float16", "int8", "float8_e4m3fn")
ROWS = (1, 4, 8, 9, 16, 32, 33, 64, 512)
CONFIGS: tuple[DecodeConfig, ...] = (
    StreamsConfig(),
    StreamsConfig(32, 1, 64, 8, 5),
    RolesConfig(),
    RolesConfig(16, 2, 64, 3, 32, 4, False, "none"),
)
PROBLEM = DecodeProblem("float16", "float16", 128)

# KB of shared memory that all blocks of a multiprocessor share, and that CUDA takes of it for each block.
MULTIPROCESSOR_KIB = {163: 164, 99: 100, 227: 228}
RESERVED_KIB = 1


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_names_say_everything(config: DecodeConfig) -> None:
    assert parse_decode_config(config.name) == config
    spec = KernelSpec(PROBLEM, config, arch_by_name("sm_90a"))
    assert keys.spec_of(keys.describe(spec)) == spec


@pytest.mark.parametrize("name", ["", "streams", "128x64_w4", "roles_8", "streams_8x16_w4_s3_b2 "])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="config"):
        parse_decode_config(name)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (StreamsConfig, "tile_m", 24),
        (StreamsConfig, "tile_n", 8),
        (StreamsConfig, "num_warps", 3),
        (StreamsConfig, "num_stages", 1),
        (StreamsConfig, "blocks_per_multiprocessor", 0),
        (RolesConfig, "tile_m", 64),
        (RolesConfig, "k_part_bytes", 32),
        (RolesConfig, "k_buffers", 1),
        (RolesConfig, "v_tile", 16),
        (RolesConfig, "v_buffers", 1),
        (RolesConfig, "row_max", "volatile"),
    ],
)
def test_fields_are_checked(kind: Any, field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field} must be"):
        kind(**{field: value})


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.gpu_arch)
def test_defaults_fit(arch: Arch) -> None:
    """One block into a block's limit, and as many as the config says into a multiprocessor."""
    room = MULTIPROCESSOR_KIB[arch.smem_bytes // 1024] * 1024
    for head_dim, cache_dtype, rows in product(HEAD_DIMS, CACHE_DTYPES, ROWS):
        problem = DecodeProblem("float16", cache_dtype, head_dim, 16)
        config = default_decode_config(arch, problem, rows)
        config.check_fits(arch, problem)
        blocks = config.blocks_per_multiprocessor
        assert blocks * (config.smem_bytes(problem) + RESERVED_KIB * 1024) <= room, (head_dim, cache_dtype, config)


def test_defaults_hold_all_rows_where_registers_allow() -> None:
    arch = arch_by_name("sm_90a")
    for head_dim, rows in product(HEAD_DIMS, ROWS):
        tile_m = default_decode_config(arch, DecodeProblem("float16", "float16", head_dim), rows).tile_m
        assert tile_m * head_dim <= MAX_ELEMENTS
        if tile_m < min(rows, 32):
            assert 2 * tile_m * head_dim > MAX_ELEMENTS


def test_every_row_of_the_table_is_used() -> None:
    used = {
        (row.archs, row.row_bytes, row.elements)
        for arch, head_dim, cache_dtype, rows in product(ARCHS.values(), HEAD_DIMS, CACHE_DTYPES, ROWS)
        for row in [_row(arch, DecodeProblem("float16", cache_dtype, head_dim), rows)]
    }
    assert used == {(row.archs, row.row_bytes, row.elements) for row in TABLE}
    assert all(row.reason for row in TABLE)


def _row(arch: Arch, problem: DecodeProblem, rows: int) -> Any:
    config = default_decode_config(arch, problem, rows)
    elements = config.tile_m * problem.head_dim
    return next(
        row
        for row in TABLE
        if arch.capability in row.archs and problem.row_bytes <= row.row_bytes and elements <= row.elements
    )


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.gpu_arch)
@pytest.mark.parametrize("rows", [4, 32])
def test_the_seed_fits_everywhere(arch: Arch, rows: int) -> None:
    """Head dims that are multiples of 64, which the kernel it stands for takes, and most others."""
    for head_dim, cache_dtype in product((64, 80, 96, 128, 160, 192, 256), CACHE_DTYPES):
        problem = DecodeProblem("float16", cache_dtype, head_dim)
        seed_config(arch, problem, rows).check_fits(arch, problem)


def test_too_much_is_refused_by_name() -> None:
    small, wide = arch_by_name("sm_86"), DecodeProblem("float16", "float16", 256)
    with pytest.raises(ValueError, match=r"shared memory at head_dim 256 .* sm_86"):
        StreamsConfig(8, 1, 16, 8, 3).check_fits(small, wide)
    with pytest.raises(ValueError, match="registers"):
        RolesConfig(32).check_fits(arch_by_name("sm_90a"), DecodeProblem("float16", "int8", 240))


def test_groups_of_gemm1_split_the_head_dim() -> None:
    def warps(head_dim: int) -> int:
        return RolesConfig().warps_per_group(DecodeProblem("float16", "float16", head_dim))

    assert [warps(d) for d in (16, 64, 80, 96, 128, 192, 240, 256)] == [1, 1, 1, 2, 2, 4, 1, 4]


@pytest.mark.parametrize(("v_tile", "head_dim", "arrivals"), [(64, 128, 2), (32, 128, 4), (64, 256, 4), (32, 64, 2)])
def test_arrivals_of_the_barriers(v_tile: int, head_dim: int, arrivals: int) -> None:
    """P's buffer is free when every warp that reads its tile has, once for each tile of V."""
    problem = DecodeProblem("float16", "float16", head_dim)
    counts = {edge.name: (edge.count, edge.arrivals) for edge in edges(RolesConfig(v_tile=v_tile), problem)}
    assert counts["p_full"] == (4, 1)
    assert counts["p_empty"] == (4, arrivals)
    if head_dim > 64:
        group = head_dim // 64
        buffers = 2 * 4 // group
        assert counts["v_full"] == (buffers, 32 * group)
        assert counts["v_empty"] == (buffers, group)
    else:
        assert "v_full" not in counts
