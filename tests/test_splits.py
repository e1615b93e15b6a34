"""The number of splits that the host chooses."""

from __future__ import annotations

import pytest

from cute_attn.splits import MAX_AUTO_SPLITS, Work, choose_num_splits

TILE, MULTIPROCESSORS, SLOTS = 64, 132, 396  # an H200's, with three blocks a multiprocessor
PARTIAL_TOKENS = 8 * 132 * 4 / 512  # of 8 rows, bf16, head dim 128
HEADS_KV = 8


def splits_of(blocks: int, tiles: int) -> int:
    return choose_num_splits(Work(blocks, tiles, TILE, MULTIPROCESSORS, SLOTS, PARTIAL_TOKENS))


@pytest.mark.parametrize("blocks", [1, 3, 8, 64, 131, 264, 265, 1000, 100_000])
@pytest.mark.parametrize("tiles", [1, 2, 7, 32, 500, 10_000])
def test_bounds(blocks: int, tiles: int) -> None:
    assert 1 <= splits_of(blocks, tiles) <= min(tiles, MAX_AUTO_SPLITS)


def test_nothing_to_split() -> None:
    assert splits_of(0, 100) == 1
    assert splits_of(8, 0) == 1
    assert splits_of(8, 1) == 1


# The fastest of those tried on an H200, bf16, head dim 128; between the two all were within a percent or two.
MEASURED = {
    (1, 512): (8, 8),
    (1, 1024): (8, 16),
    (1, 2048): (8, 16),
    (1, 8192): (16, 16),
    (1, 131_072): (16, 32),
    (8, 1024): (1, 4),
    (8, 8192): (1, 6),
    (32, 2048): (1, 1),
    (32, 8192): (1, 1),
    (50, 2048): (1, 4),
    (50, 8192): (3, 5),
    (64, 512): (1, 1),
    (64, 8192): (3, 4),
    (100, 1024): (1, 1),
    (100, 2048): (1, 1),
    (100, 8192): (2, 2),
    (128, 1024): (1, 1),
    (128, 2048): (1, 1),
    (128, 8192): (2, 2),
}


@pytest.mark.parametrize(("batch", "length"), MEASURED)
def test_what_was_measured_is_chosen(batch: int, length: int) -> None:
    fewest, most = MEASURED[batch, length]
    assert fewest <= splits_of(batch * HEADS_KV, length // TILE) <= most


@pytest.mark.parametrize("tiles", [8, 32, 128, 1024])
def test_time_is_near_that_of_evenly_shared_work(tiles: int) -> None:
    """At every batch: what one wave more costs is made good by splits."""
    for batch in range(1, 100):
        blocks = batch * HEADS_KV
        splits = splits_of(blocks, tiles)
        per_block = -(-tiles // splits)
        full, rest = divmod(blocks * splits, SLOTS)
        time = per_block * (full * SLOTS / MULTIPROCESSORS + (max(1.0, rest / MULTIPROCESSORS) if rest else 0.0))
        assert time <= 1.3 * blocks * tiles / MULTIPROCESSORS + 4, batch
