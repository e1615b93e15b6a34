"""The number of splits that the host chooses."""

from __future__ import annotations

import itertools

import pytest

from cute_attn.splits import MAX_AUTO_SPLITS, Work, choose_num_splits

TILE = 256
SLOTS = 264  # an H200's, with two blocks a multiprocessor


@pytest.mark.parametrize("blocks", [1, 3, 8, 64, 131, 264, 265, 1000, 100_000])
@pytest.mark.parametrize("tiles", [1, 2, 7, 32, 500, 10_000])
def test_bounds(blocks: int, tiles: int) -> None:
    splits = choose_num_splits(Work(blocks, tiles, TILE, SLOTS))
    assert 1 <= splits <= min(tiles, MAX_AUTO_SPLITS)


def test_nothing_to_split() -> None:
    assert choose_num_splits(Work(0, 100, TILE, SLOTS)) == 1
    assert choose_num_splits(Work(8, 0, TILE, SLOTS)) == 1
    assert choose_num_splits(Work(8, 1, TILE, SLOTS)) == 1


def test_full_waves_are_not_split() -> None:
    for waves in (1, 2, 4):
        assert choose_num_splits(Work(SLOTS * waves, 32, TILE, SLOTS)) == 1


def test_few_blocks_are_split_to_fill_the_device() -> None:
    splits = choose_num_splits(Work(8, 512, TILE, SLOTS))
    assert 0.5 * SLOTS <= 8 * splits <= SLOTS


def test_time_is_near_that_of_evenly_shared_work() -> None:
    """Beyond it lie the start of a block, a tile that others cannot help with, and less than one wave."""
    for tiles, blocks in itertools.product((8, 32, 256, 4096), range(8, 8 * 60, 8)):
        splits = choose_num_splits(Work(blocks, tiles, TILE, SLOTS))
        time = -(-blocks * splits // SLOTS) * -(-tiles // splits)
        assert time <= 1.5 * blocks * tiles / SLOTS + 8, (tiles, blocks)
