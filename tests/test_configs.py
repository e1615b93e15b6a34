"""The config table: what fits where, names that read back, and every refusal."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from cute_attn.arch import ARCHS, KIB, Arch
from cute_attn.configs import (
    PADDING,
    SEED_CONFIGS,
    SEED_TILES,
    TABLE,
    PrefillConfig,
    default_config,
    parse_config,
)

HEAD_DIMS = range(8, 257, 8)
MMA_K = 16  # the depth of an mma instruction: head dims in shared memory are multiples of it
CHUNK = 8  # elements of a 16-byte copy

SAMPLE_CONFIGS = [
    PrefillConfig(16 * warps * rows, tile_n, warps, stages, swizzle, q_in_regs, o_fp32, o_store)
    for warps in (4, 8)
    for rows, tile_n, stages in itertools.product((1, 2), range(4 * warps, 257, 4 * warps), (1, 2, 4))
    for swizzle, q_in_regs, o_fp32 in itertools.product(*[(True, False)] * 3)
    for o_store in ("smem", "shuffle")
]


def arch_id(arch: Arch) -> str:
    return arch.gpu_arch


@pytest.mark.parametrize("arch", ARCHS.values(), ids=arch_id)
class TestDefaults:
    def test_fits_shared_memory_for_every_pair_of_head_dims(self, arch: Arch) -> None:
        for head_dim, head_dim_v in itertools.product(HEAD_DIMS, HEAD_DIMS):
            default_config(arch, head_dim, head_dim_v).check_fits(arch, head_dim, head_dim_v)

    def test_head_dim_above_256_is_refused(self, arch: Arch) -> None:
        with pytest.raises(ValueError, match="head_dim must be at most 256, got 264"):
            default_config(arch, 64, 264)

    def test_every_row_of_the_table_is_reachable(self, arch: Arch) -> None:
        chosen = {default_config(arch, head_dim, head_dim) for head_dim in HEAD_DIMS}
        assert chosen == {row.config for row in TABLE if arch.capability in row.archs}


def test_every_architecture_and_reason_is_in_the_table() -> None:
    assert {capability for row in TABLE for capability in row.archs} == set(ARCHS)
    assert all(row.reason for row in TABLE)


def test_shared_memory_of_the_architectures() -> None:
    expected = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
    assert {number: arch.smem_bytes // KIB for number, arch in ARCHS.items()} == expected


class TestNames:
    def test_every_config_name_reads_back(self) -> None:
        assert len({config.name for config in SAMPLE_CONFIGS}) == len(SAMPLE_CONFIGS)
        for config in SAMPLE_CONFIGS:
            assert parse_config(config.name, head_dim=128) == config

    def test_seed_tilings_are_all_there(self) -> None:
        assert set(SEED_TILES) >= {(64, 64), (64, 32), (128, 64), (128, 128)}
        assert len(SEED_CONFIGS) == 2 * len(SEED_TILES)

    @pytest.mark.parametrize("name", SEED_CONFIGS)
    def test_seed_name(self, name: str) -> None:
        """As in the CUDA original: 16 rows a warp, padded rows, shuffled stores, Q in registers below head dim 64."""
        config = parse_config(name, head_dim=128)
        assert name == f"seed_{config.tile_m}x{config.tile_n}_{config.num_stages}stage"
        assert config.tile_m == 16 * config.num_warps
        assert (config.swizzle, config.o_store, config.q_in_regs) == (False, "shuffle", False)
        assert parse_config(name, head_dim=32) == replace(config, q_in_regs=True)
        assert parse_config(name, head_dim=64) == config

    @pytest.mark.parametrize("name", ["", "seed_32x32_1stage", "128x64", PrefillConfig().name + "_"])
    def test_unknown_name(self, name: str) -> None:
        with pytest.raises(ValueError, match=r"config: it is .*; allowed: seed_64x64_1stage, ") as error:
            parse_config(name, head_dim=64)
        assert repr(name) in str(error.value)

    def test_name_of_an_impossible_config(self) -> None:
        with pytest.raises(ValueError, match="tile_m must be 64 or 128 with 4 warps, got 32"):
            parse_config(PrefillConfig().name.replace("128x64", "32x64"), head_dim=64)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_warps", 2, "num_warps must be 4 or 8, got 2"),
        ("num_warps", 16, "num_warps must be 4 or 8, got 16"),
        ("tile_m", 32, "tile_m must be 64 or 128 with 4 warps, got 32"),
        ("tile_m", 96, "tile_m must be 64 or 128 with 4 warps, got 96"),
        ("tile_m", 256, "tile_m must be 64 or 128 with 4 warps, got 256"),
        ("tile_n", 0, "tile_n must be a multiple of 16 from 16 to 256 with 4 warps, got 0"),
        ("tile_n", 8, "tile_n must be a multiple of 16 from 16 to 256 with 4 warps, got 8"),
        ("tile_n", 72, "tile_n must be a multiple of 16 from 16 to 256 with 4 warps, got 72"),
        ("tile_n", 272, "tile_n must be a multiple of 16 from 16 to 256 with 4 warps, got 272"),
        ("num_stages", 0, "num_stages must be 1, 2 or 4, got 0"),
        ("num_stages", 3, "num_stages must be 1, 2 or 4, got 3"),
        ("o_store", "tma", "o_store must be 'smem' or 'shuffle', got 'tma'"),
    ],
)
def test_invalid_field(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PrefillConfig(), **{field: value})


@pytest.mark.parametrize("tile_n", [16, 48, 80, 288])
def test_tile_n_with_8_warps(tile_n: int) -> None:
    with pytest.raises(ValueError, match=f"tile_n must be a multiple of 32 from 32 to 256 with 8 warps, got {tile_n}"):
        PrefillConfig(128, tile_n, 8)


class TestTiles:
    def test_copies_cover_every_tile_without_overhang(self) -> None:
        for config in SAMPLE_CONFIGS:
            rows_per_pass, rest = divmod(config.num_threads * CHUNK, config.head_dim_multiple)
            assert rest == 0, config.name
            assert config.tile_m % rows_per_pass == 0, config.name
            assert config.tile_n % rows_per_pass == 0, config.name

    def test_tile_dim_is_the_next_multiple(self) -> None:
        for config in SAMPLE_CONFIGS:
            assert config.head_dim_multiple % MMA_K == 0, config.name
            for head_dim in HEAD_DIMS:
                tile_dim = config.tile_dim(head_dim)
                assert tile_dim % config.head_dim_multiple == 0, config.name
                assert head_dim <= tile_dim < head_dim + config.head_dim_multiple, config.name

    def test_default_tiles_waste_little_of_common_head_dims(self) -> None:
        """Head dims that models use need no padding: padded columns cost copies and mma instructions."""
        for arch, head_dim in itertools.product(ARCHS.values(), (32, 64, 96, 128, 192, 256)):
            assert default_config(arch, head_dim, head_dim).tile_dim(head_dim) == head_dim, (arch, head_dim)

    def test_padding_is_one_chunk(self) -> None:
        padded = PrefillConfig(swizzle=False)
        assert PADDING == CHUNK
        assert padded.row_elements(64) == PrefillConfig().row_elements(64) + PADDING

    def test_too_large_for_the_architecture(self) -> None:
        config = PrefillConfig(128, 128, 8, num_stages=4)
        need = config.smem_bytes(128, 128)
        assert need == (128 + 4 * 128) * 128 * 2
        message = f"{config.name}.* shared memory at head_dim 128 .* is {need} bytes; allowed: 101376 bytes on sm_86"
        with pytest.raises(ValueError, match=message):
            config.check_fits(ARCHS[86], 128, 128)
        config.check_fits(ARCHS[80], 128, 128)

    def test_shared_memory_with_unequal_head_dims(self) -> None:
        """K and V have buffers of their own sizes, unless they share one; O is staged where Q was."""
        config = PrefillConfig(128, 64, 4, num_stages=2, o_store="shuffle")
        assert config.smem_elements(64, 256) == (128 * 64, 64 * 64, 64 * 256)
        assert replace(config, num_stages=4).smem_elements(64, 256) == (128 * 64, 2 * 64 * 64, 2 * 64 * 256)
        assert replace(config, num_stages=1).smem_elements(64, 256) == (128 * 64, 64 * 256, 0)
        assert replace(config, o_store="smem").smem_elements(64, 256) == (128 * 256, 64 * 64, 64 * 256)
