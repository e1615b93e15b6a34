"""Traffic of cp.async against a slow model that follows the text transfer by transfer, and against known patterns."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np
import pytest

from layouts.simulator.copy_traffic import copy_traffic

LANES = np.arange(32)


def slow_bypass(lanes: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Wavefronts and sectors of one warp's .cg: (place, source) by active lane."""
    halves = defaultdict(set)
    for place, source in lanes.values():
        halves[source // 32, place // 32, (source ^ place) // 16 % 2].add(source // 16 % 2)
    shapes = defaultdict(list)
    for (sector, piece, crossed), taken in halves.items():
        shape = (sector // 4, piece // 4, crossed, frozenset(taken), (sector ^ piece) % 2)
        shapes[shape].append((sector, piece))
    wavefronts = sum(
        max(most(sectors), most(pieces)) for sectors, pieces in (zip(*x, strict=True) for x in shapes.values())
    )
    return wavefronts, len(halves)


def slow_cached(lanes: dict[int, tuple[int, int]], width: int) -> tuple[int, int]:
    """The same of .ca."""
    phases = defaultdict(list)
    for lane, pair in lanes.items():
        phases[lane // (128 // width)].append(pair)
    wavefronts = 0
    for pairs in phases.values():
        taken = most(source // width % (128 // width) for _, source in pairs)
        wavefronts += max(taken, most(cell % (128 // width) for cell in {place // width for place, _ in pairs}))
    return wavefronts, len({source // 32 for _, source in lanes.values()})


def most(values: Iterable[int]) -> int:
    """How often the most frequent one occurs."""
    return max(Counter(values).values())


def random_addresses(rng: np.random.Generator, width: int) -> np.ndarray:
    """(warps, 32): rows of a tile at some stride, in order or not, and addresses without any order."""
    rows = [
        LANES // per_row * stride + LANES % per_row * width + width * int(rng.integers(0, 9))
        for per_row in (1, 2, 4, 8, 32)
        for stride in (width * per_row, 80, 112, 128, 144, 1024)
    ]
    rows += [rng.permutation(row) for row in rows]
    rows += [rng.integers(0, limit, 32) * width for limit in (8, 40, 500)]
    return np.stack(rows)


@pytest.mark.parametrize(("bypass", "width"), [(True, 16), (False, 16), (False, 8), (False, 4)])
def test_copies_follow_the_slow_model(bypass: bool, width: int) -> None:
    rng = np.random.default_rng(width)
    for part in (0.1, 0.6, 1.1):
        place, source = random_addresses(rng, width), random_addresses(rng, width)
        source = source[rng.permutation(len(source))] + 2**33 * width
        active = rng.random(place.shape) < part
        (wavefronts, _), (sectors, _) = copy_traffic(place, source, width, bypass, active)
        for warp, mask in enumerate(active):
            lanes = {int(lane): (int(place[warp, lane]), int(source[warp, lane])) for lane in np.flatnonzero(mask)}
            slow = (slow_bypass(lanes) if bypass else slow_cached(lanes, width)) if lanes else (0, 0)
            assert (wavefronts[warp], sectors[warp]) == slow


@pytest.mark.parametrize(
    ("place", "source", "wavefronts", "sectors"),
    [
        (LANES * 16, LANES * 16, 4, 16),
        (LANES * 16 ^ (LANES // 8 % 8) * 16, LANES * 16, 4, 16),  # swizzled: halves of a sector stay together
        (LANES * 16 + LANES // 8 * 16, LANES * 16, 10, 24),  # rows padded by 16 bytes: every other one is read twice
        (LANES * 16, LANES * 16 + 16, 12, 32),
        (LANES * 128, LANES * 16, 32, 32),
        (LANES * 16, LANES * 64, 32, 32),
    ],
)
def test_known_copies_past_l1(place: np.ndarray, source: np.ndarray, wavefronts: int, sectors: int) -> None:
    found = copy_traffic(place[None], source[None], 16, bypass=True)
    assert [[int(x[0]) for x in pair] for pair in found] == [[wavefronts, 4], [sectors, 16]]


@pytest.mark.parametrize("bypass", [False, True])
def test_lanes_that_read_nothing_store_zeros(bypass: bool) -> None:
    """Half a warp copies 256 bytes; the other half stores as many zeros, and touches no global memory."""
    place = LANES[None] * 16
    (wavefronts, ideal), (sectors, _) = copy_traffic(place, place, 16, bypass, reads=(LANES < 16)[None])
    assert (wavefronts[0], ideal[0], sectors[0]) == (4, 4, 8)
    (wavefronts, _), (sectors, ideal) = copy_traffic(place, place, 16, bypass, (LANES < 8)[None], (LANES > 8)[None])
    assert (wavefronts[0], sectors[0], ideal[0]) == (1, 0, 0)
