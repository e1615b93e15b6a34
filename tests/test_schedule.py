"""Which block computes what, and which keys it visits: every row, head and key exactly once, by brute force.

These tests run the kernel's own functions (``parts/schedule.py``, ``parts/mask.py``): compiled for the processor, over
all the blocks of a launch, in loops that stand for the grid. Only the two lines of ``PrefillKernel.__call__`` that
count the tiles are written down here again.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass import Float32, Int32, range_constexpr
from cutlass.cute.runtime import from_dlpack

from cute_attn.configs import PrefillConfig
from cute_attn.kernels.parts.mask import KeyBounds
from cute_attn.kernels.parts.schedule import dense_work, heads_per_group, packed_work
from cute_attn.kernels.parts.tiles import PrefillTiles
from cute_attn.options import MAX_LENGTH, UNBOUNDED
from cute_attn.problem import PrefillProblem
from cute_attn.reference import visible_keys

WORK = 7  # fields of schedule.Work
TILE, HEAD, BATCH, Q_START, Q_LEN, K_START, K_LEN = range(WORK)
MOST_BLOCKS = 3000
MASKS = [(False, False), (False, True), (True, False), (True, True)]  # (bounded_left, bounded_right)
CONFIGS = [PrefillConfig(64, 16, 4), PrefillConfig(128, 48, 4), PrefillConfig(128, 32, 8), PrefillConfig(64, 128, 4)]


@pytest.fixture(scope="module")
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def on_host(tensor: torch.Tensor) -> Any:
    return from_dlpack(tensor).mark_layout_dynamic(leading_dim=tensor.dim() - 1)


# Blocks


@cute.jit
def dense_grid(
    works: cute.Tensor, num_tiles: Int32, batch: Int32, heads: Int32, k_len: Int32, group_bytes: Int32, grouped: Int32
) -> None:
    """The works of all blocks of a dense batch. Queries are counted in tiles alone."""
    group = Int32(1)
    if grouped != 0:
        group = heads_per_group(batch * heads, k_len, group_bytes)
    for block in cutlass.range(works.shape[0]):
        work = dense_work(block, num_tiles, group, (batch, heads), (Int32(0), k_len))
        for field in range_constexpr(WORK):
            works[block, field] = work[field]


@cute.jit
def packed_grid(
    works: cute.Tensor, num_slots: Int32, cu_seqlens_q: cute.Tensor, cu_seqlens_k: cute.Tensor,
    total_q: Int32, total_k: Int32, tile_m: cutlass.Constexpr[int],
) -> None:  # fmt: skip
    """The works of all blocks of a packed batch."""
    for block in cutlass.range(works.shape[0]):
        work = packed_work(block, num_slots, (cu_seqlens_q, cu_seqlens_k), (total_q, total_k), tile_m)
        for field in range_constexpr(WORK):
            works[block, field] = work[field]


@cute.jit
def group_of(result: cute.Tensor, heads: Int32, k_len: Int32, bytes_per_key: Int32) -> None:
    result[0] = heads_per_group(heads, k_len, bytes_per_key)


@pytest.mark.parametrize("grouped", [0, 1])
def test_a_dense_grid_computes_each_tile_of_each_head_once(grouped: int, rng: np.random.Generator) -> None:
    run = cute.compile(dense_grid, on_host(torch.zeros(1, WORK, dtype=torch.int32)), *[Int32(1)] * 6)
    for _ in range(2000):
        batch, heads = rng.integers(1, 40, 2).tolist()
        num_tiles = int(rng.integers(1, MOST_BLOCKS // (batch * heads) + 2))
        k_len = int(rng.choice([0, 1, 127, 4096, 100_000, 10_000_000, MAX_LENGTH]))
        bytes_per_key = int(rng.choice([32, 256, 512, 1024]))
        works = torch.full((num_tiles * batch * heads, WORK), -7, dtype=torch.int32)
        run(on_host(works), num_tiles, batch, heads, k_len, bytes_per_key, grouped)
        computed = works.numpy()
        numbers = (computed[:, BATCH] * heads + computed[:, HEAD]) * num_tiles + computed[:, TILE]
        assert (np.sort(numbers) == np.arange(len(works))).all()
        assert computed[:, [TILE, HEAD, BATCH]].min() >= 0
        assert computed[:, TILE].max() < num_tiles
        assert computed[:, HEAD].max() < heads
        # Longest tiles first inside a group: the tile number only rises where a new group of heads begins.
        rises = np.flatnonzero(np.diff(computed[:, TILE]) > 0)
        assert (computed[rises, TILE] == 0).all()


def test_groups_of_heads_are_as_equal_as_can_be(rng: np.random.Generator) -> None:
    result = torch.zeros(1, dtype=torch.int32)
    run = cute.compile(group_of, on_host(result), *[Int32(1)] * 3)
    for _ in range(2000):
        heads = int(2 ** rng.uniform(0, 30))
        k_len = int(2 ** rng.uniform(0, 30)) - 1
        bytes_per_key = int(rng.integers(2, 65)) * 16
        run(on_host(result), heads, k_len, bytes_per_key)
        at_once = max(1, 2**25 // bytes_per_key // max(k_len, 1))
        groups = -(-heads // at_once)
        assert int(result) == -(-heads // groups)


@pytest.mark.parametrize("tile_m", [64, 128, 256])
def test_a_packed_grid_computes_each_tile_of_each_sequence_once(tile_m: int, rng: np.random.Generator) -> None:
    one = on_host(torch.zeros(1, dtype=torch.int32))
    run = cute.compile(
        packed_grid, on_host(torch.zeros(1, WORK, dtype=torch.int32)), Int32(1), one, one, Int32(1), Int32(1), tile_m
    )
    for _ in range(1500):
        batch, heads = int(rng.integers(1, 20)), int(rng.integers(1, 4))
        cu_seqlens = []
        for longest in rng.choice([1, 2, tile_m - 1, tile_m, tile_m + 1, 5 * tile_m], 2):
            lengths = rng.integers(0, longest + 1, batch) * (rng.random(batch) < rng.choice([0.2, 0.7, 1.0]))
            cu_seqlens.append(np.concatenate([[0], np.cumsum(lengths)]))
        q_bounds, k_bounds = (bounds.tolist() for bounds in cu_seqlens)
        total_q, total_k = (bounds[-1] + int(rng.choice([0, 1, 3 * tile_m])) for bounds in (q_bounds, k_bounds))
        num_slots = total_q // tile_m + batch
        works = torch.full((num_slots * heads, WORK), -7, dtype=torch.int32)
        tensors = [on_host(torch.tensor(bounds, dtype=torch.int32)) for bounds in (q_bounds, k_bounds)]
        run(on_host(works), num_slots, *tensors, total_q, total_k)
        computed = works[works[:, TILE] >= 0].tolist()
        expected = [
            [tile, head, i, q_start, q_stop - q_start, k_start, k_stop - k_start]
            for i, ((q_start, q_stop), (k_start, k_stop)) in enumerate(
                zip(pairwise(q_bounds), pairwise(k_bounds), strict=True)
            )
            for head in range(heads)
            for tile in range(-(-(q_stop - q_start) // tile_m))
        ]
        assert sorted(computed) == sorted(expected)


def test_wrong_cumulative_lengths_stay_inside_the_tensors(rng: np.random.Generator) -> None:
    one = on_host(torch.zeros(1, dtype=torch.int32))
    tile_m = 64
    run = cute.compile(
        packed_grid, on_host(torch.zeros(1, WORK, dtype=torch.int32)), Int32(1), one, one, Int32(1), Int32(1), tile_m
    )
    for _ in range(1000):
        batch, total_q, total_k = rng.integers(1, 20), int(rng.integers(0, 2000)), int(rng.integers(0, 2000))
        wrong = rng.choice([-(2**31), -5, 0, 3, 500, 1500, 2500, 2**31 - 1], (2, batch + 1))
        num_slots = total_q // tile_m + int(batch)
        works = torch.full((num_slots * 2, WORK), -7, dtype=torch.int32)
        tensors = [on_host(torch.tensor(bounds, dtype=torch.int32)) for bounds in wrong]
        run(on_host(works), num_slots, *tensors, total_q, total_k)
        computed = works.numpy()
        for start, length, total in ((Q_START, Q_LEN, total_q), (K_START, K_LEN, total_k)):
            assert computed[:, [start, length]].min() >= 0
            assert (computed[:, start] + computed[:, length]).max() <= total


def test_hundred_thousand_sequences_and_the_longest_total() -> None:
    one = on_host(torch.zeros(1, dtype=torch.int32))
    tile_m, batch = 128, 100_000
    run = cute.compile(
        packed_grid, on_host(torch.zeros(1, WORK, dtype=torch.int32)), Int32(1), one, one, Int32(1), Int32(1), tile_m
    )
    bounds = torch.linspace(0, MAX_LENGTH, batch + 1, dtype=torch.float64).long().int()
    num_slots = MAX_LENGTH // tile_m + batch
    works = torch.full((num_slots, WORK), -7, dtype=torch.int32)
    run(on_host(works), num_slots, on_host(bounds), on_host(bounds), MAX_LENGTH, MAX_LENGTH)
    computed = works[works[:, TILE] >= 0].long()
    tiles = (bounds.diff().long() + tile_m - 1) // tile_m
    assert (torch.bincount(computed[:, BATCH], minlength=batch) == tiles).all()
    numbers = computed[:, BATCH] * int(tiles.max()) + computed[:, TILE]
    assert len(numbers.unique()) == len(numbers)
    assert (computed[:, TILE] < tiles[computed[:, BATCH]]).all()


# Keys


class Masking:
    """The main loop's visits and masks, without its arithmetic."""

    def __init__(self, config: PrefillConfig, bounded_left: bool, bounded_right: bool) -> None:
        self.config = config
        self.problem = PrefillProblem("float16", 16, 16, bounded_left=bounded_left, bounded_right=bounded_right)
        self.tiles = PrefillTiles(config, 16, 16, cutlass.Float16)

    @cute.jit
    def bounds(self, result: cute.Tensor, lengths: cute.Tensor, window_left: Int32, window_right: Int32) -> None:
        """(begin, full_begin, full_end, end) of the query tile lengths[0] with q_len lengths[1], k_len lengths[2]."""
        bounds = KeyBounds(
            self.config, self.problem, lengths[0] * self.config.tile_m, lengths[1], lengths[2], window_left,
            window_right,
        )  # fmt: skip
        for i, number in enumerate(bounds.tiles()):
            result[i] = number

    @cute.jit
    def seen(self, counts: cute.Tensor, q_len: Int32, k_len: Int32, window_left: Int32, window_right: Int32) -> None:
        """Counts how often each row (of whole tiles) sees each key (of whole tiles)."""
        tile_m, tile_n = self.config.tile_m, self.config.tile_n
        for row_tile in cutlass.range((q_len + tile_m - 1) // tile_m):
            bounds = KeyBounds(self.config, self.problem, row_tile * tile_m, q_len, k_len, window_left, window_right)
            begin, full_begin, full_end, end = bounds.tiles()
            for i in cutlass.range(end - begin):
                tile = end - 1 - i
                for thread in cutlass.range(self.config.num_threads):
                    positions = self.tiles.positions(thread, tile_n)
                    scores = cute.make_rmem_tensor(positions.shape, Float32)
                    scores.fill(0.0)
                    if (tile >= full_end) | (tile < full_begin):
                        bounds.hide(scores, positions, tile * tile_n)
                    for r in range_constexpr(cute.size(scores, mode=[0])):
                        for c in range_constexpr(cute.size(scores, mode=[1])):
                            row, key = positions[r, c][0] + row_tile * tile_m, positions[r, c][1] + tile * tile_n
                            if scores[r, c] == 0.0:
                                counts[row, key] = counts[row, key] + 1

    def compiled(self) -> Any:
        return cute.compile(self.seen, on_host(torch.zeros(1, 1, dtype=torch.int32)), *[Int32(1)] * 4)


@pytest.mark.parametrize(("bounded_left", "bounded_right"), MASKS)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_each_visible_key_is_seen_once_and_no_other(
    config: PrefillConfig, bounded_left: bool, bounded_right: bool, rng: np.random.Generator
) -> None:
    run = Masking(config, bounded_left, bounded_right).compiled()
    edges = [n + d for n in (0, config.tile_m, config.tile_n, 2 * config.tile_n) for d in (-1, 0, 1) if n + d >= 0]
    for _ in range(60):
        q_len, k_len = (int(rng.choice([*edges, *rng.integers(0, 300, 4)])) for _ in range(2))
        widths = [int(rng.choice([0, 1, 2, config.tile_n, *rng.integers(0, 300, 3)])) for _ in range(2)]
        left = min(widths[0], k_len) if bounded_left else UNBOUNDED  # as plan.py narrows them
        right = min(widths[1], q_len) if bounded_right else UNBOUNDED
        rows, keys = (-(-n // tile) * tile + 1 for n, tile in ((q_len, config.tile_m), (k_len, config.tile_n)))
        counts = torch.zeros(rows, keys, dtype=torch.int32)
        run(on_host(counts), q_len, k_len, left, right)
        positions = torch.arange(q_len) + k_len - q_len
        expected = visible_keys(positions, torch.arange(k_len), left, right)
        assert (counts[:q_len, :k_len] == expected).all(), (q_len, k_len, left, right)
        assert not counts[:, k_len:].any(), (q_len, k_len, left, right)


LONGEST = [  # (row_tile, q_len, k_len, total_q): a packed sequence among others that have all other queries
    (0, 1, MAX_LENGTH, MAX_LENGTH),
    (0, MAX_LENGTH, 1, MAX_LENGTH),
    (0, MAX_LENGTH, MAX_LENGTH, MAX_LENGTH),
    (MAX_LENGTH // 128 - 1, MAX_LENGTH, MAX_LENGTH, MAX_LENGTH),
]


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("case", LONGEST)
def test_bounds_do_not_overflow(case: tuple[int, int, int, int], narrow: bool) -> None:
    """At the largest lengths, with the widest windows that hide nothing, tile numbers are those of exact arithmetic."""
    row_tile, q_len, k_len, total_q = case
    left, right = (0, 0) if narrow else (MAX_LENGTH, total_q - 1)
    config = PrefillConfig(128, 64, 4)
    result = torch.zeros(4, dtype=torch.int32)
    lengths = torch.tensor([row_tile, q_len, k_len], dtype=torch.int32)
    Masking(config, True, True).bounds(on_host(result), on_host(lengths), Int32(left), Int32(right))
    first = row_tile * config.tile_m + k_len - q_len
    last = min((row_tile + 1) * config.tile_m, q_len) - 1 + k_len - q_len
    n = config.tile_n
    begin, full_begin = max(first - left, 0) // n, -(-max(last - left, 0) // n)
    full_end, end = max(min(first + right + 1, k_len), 0) // n, -(-max(min(last + right + 1, k_len), 0) // n)
    assert result.tolist() == [begin, full_begin, full_end, end]
