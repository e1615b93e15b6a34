"""Wavefronts and sectors against a slow model that follows the text lane by lane, and against known patterns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from layouts.simulator.traffic import global_sectors, matrix_wavefronts, shared_wavefronts

WIDTHS = (1, 2, 4, 8, 16)
LANES = np.arange(32)


def slow_wavefronts(addresses: dict[int, int], width: int, merges: bool = True) -> tuple[int, int]:
    """Of one warp: ``addresses`` by active lane."""
    lanes_in_a_phase = min(32, 128 // width)
    if (
        merges
        and width > 4
        and any(
            all(addresses[lane] == addresses.get(lane ^ distance, addresses[lane]) for lane in addresses)
            for distance in (1, 2)
        )
    ):
        lanes_in_a_phase *= 2
    phases = defaultdict(list)
    for lane, address in addresses.items():
        phases[lane // lanes_in_a_phase].append(address)
    return sum(slow_phase(phase, width) for phase in phases.values()), len(phases)


def slow_phase(addresses: list[int], width: int) -> int:
    words_of_bank = defaultdict(set)
    for address in addresses:
        for byte in range(address, address + width):
            words_of_bank[byte // 4 % 32].add(byte // 4)
    return max(len(words) for words in words_of_bank.values())


def slow_sectors(addresses: dict[int, int], width: int) -> tuple[int, int]:
    touched = {byte for address in addresses.values() for byte in range(address, address + width)}
    return len({byte // 32 for byte in touched}), -(-len(touched) // 32)


def swizzle(offset: np.ndarray) -> np.ndarray:
    """S<3,3,3> of 16-bit elements, in bytes: bits 4..6 take up bits 7..9."""
    return offset ^ ((offset >> 7 & 7) << 4)


def shared_patterns(width: int) -> Iterator[np.ndarray]:
    """Rows of 32 addresses."""
    rng = np.random.default_rng(width)
    for stride in (1, 2, 3, 5, 8, 16, 17, 32, 33):
        yield LANES * width * stride
    yield LANES[::-1] * width
    yield LANES * 128  # one bank
    yield np.zeros(32, int)
    for repeat in (2, 4, 8, 16):
        yield LANES // repeat * width
        yield LANES % repeat * width
        yield LANES % repeat * 128
    yield (LANES & ~2) * width  # lanes i and i ^ 2 agree
    yield (LANES & ~2) * 128
    yield np.where(LANES < 16, LANES & ~1, LANES & ~2) * width  # one half pairs one way, one half the other
    for row_bytes in (64, 128, 256, 144, 136 // width * width):
        tile = LANES % 8 * row_bytes + LANES // 8 * 16
        yield tile
        yield swizzle(tile)
        yield LANES // 8 * row_bytes + LANES % 8 * width
    for words in (8, 40, 200, 5000):
        for _ in range(6):
            yield rng.integers(0, words, 32) * width
            yield np.repeat(rng.integers(0, words, 16), 2) * width
            yield rng.integers(0, words, 32) * 128
            yield rng.permutation(32) * width


def masks() -> Iterator[np.ndarray]:
    rng = np.random.default_rng(0)
    for part in (0.1, 0.5, 0.9):
        yield rng.random(32) < part
    yield LANES < 11
    yield LANES % 2 == 0
    yield LANES % 4 == 3
    yield LANES == 13
    yield LANES < 0
    yield LANES >= 0


def expected(
    model: Callable[[dict[int, int], int], tuple[int, int]], address: np.ndarray, width: int, active: np.ndarray
) -> list[list[int]]:
    pairs = [
        model({lane: int(row[lane]) for lane in range(32) if mask[lane]}, width)
        for row, mask in zip(address, active, strict=True)
    ]
    return [[first for first, _ in pairs], [second for _, second in pairs]]


@pytest.mark.parametrize("dtype", [np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("width", WIDTHS)
def test_shared_wavefronts_follow_the_slow_model(width: int, dtype: type) -> None:
    address = np.stack(list(shared_patterns(width)))
    full = np.ones(address.shape, bool)
    want = expected(slow_wavefronts, address, width, full)
    for active in (None, full):
        assert [list(got) for got in shared_wavefronts(address.astype(dtype), width, active)] == want
    for mask in masks():
        active = np.broadcast_to(mask, address.shape)
        got = shared_wavefronts(address.astype(dtype), width, active)
        assert [list(values) for values in got] == expected(slow_wavefronts, address, width, active)


def stored(addresses: dict[int, int], width: int) -> tuple[int, int]:
    return slow_wavefronts(addresses, width, merges=False)


@pytest.mark.parametrize("width", WIDTHS)
def test_phases_of_stores_do_not_merge(width: int) -> None:
    address = np.stack(list(shared_patterns(width)))
    for mask in masks():
        active = np.broadcast_to(mask, address.shape)
        got = shared_wavefronts(address, width, active, merges=False)
        assert [list(values) for values in got] == expected(stored, address, width, active)


@pytest.mark.parametrize("width", WIDTHS)
def test_warps_do_not_mix(width: int) -> None:
    """Each warp with a mask of its own, and each warp alone."""
    rng = np.random.default_rng(7)
    address = rng.integers(0, 300, (200, 32)) * width
    active = rng.random((200, 32)) < rng.random((200, 1))
    got = shared_wavefronts(address, width, active)
    assert [list(values) for values in got] == expected(slow_wavefronts, address, width, active)
    for warp in range(0, 200, 23):
        alone = shared_wavefronts(address[warp : warp + 1], width, active[warp : warp + 1])
        assert [values[0] for values in alone] == [values[warp] for values in got]


def test_where_an_aligned_tile_starts_does_not_matter() -> None:
    address = np.random.default_rng(1).integers(0, 1000, (50, 32)) * 16
    moved = (address + 2**32 - 16 * 1024).astype(np.uint32)
    assert np.array_equal(shared_wavefronts(address, 16, None), shared_wavefronts(moved, 16, None))


@pytest.mark.parametrize(
    ("pattern", "width", "wavefronts", "ideal"),
    [
        (LANES * 4, 4, 1, 1),
        (LANES, 1, 1, 1),
        (LANES * 2, 2, 1, 1),
        (LANES * 8, 8, 2, 2),
        (LANES * 16, 16, 4, 4),
        (LANES * 8, 4, 2, 1),
        (LANES * 128, 4, 32, 1),
        (LANES * 132, 4, 1, 1),
        (LANES * 128, 16, 32, 4),
        (LANES * 144, 16, 4, 4),
        (LANES * 0, 4, 1, 1),
        (LANES * 0, 8, 1, 1),
        (LANES * 0, 16, 2, 2),
        (LANES // 2 * 8, 8, 1, 1),
        (LANES // 2 * 16, 16, 2, 2),
        (LANES % 4 * 16, 16, 4, 4),  # lanes i and i ^ 4 agree: no merging
        (np.where(LANES < 16, LANES // 2, LANES % 2) * 16, 16, 4, 4),  # each half pairs, but not in the same way
        (LANES // 4 % 2 * 128 + LANES // 8 * 16, 16, 4, 2),  # merged halves with a two-way conflict
    ],
)
def test_known_shared_accesses(pattern: np.ndarray, width: int, wavefronts: int, ideal: int) -> None:
    got = shared_wavefronts(pattern[None], width, None)
    assert [int(values[0]) for values in got] == [wavefronts, ideal]


def test_matrix_rows() -> None:
    row = np.arange(8)
    conflict_free = np.stack([row * 128 + m * 16 for m in range(4)])
    matrices = np.stack(
        [swizzle(conflict_free), conflict_free, np.stack([row * 144 + m * 16 for m in range(4)]), np.zeros((4, 8), int)]
    )
    wavefronts, ideal = matrix_wavefronts(matrices)
    assert wavefronts.tolist() == [4, 32, 4, 4]
    assert ideal.tolist() == [4, 4, 4, 4]


@pytest.mark.parametrize("matrices", [1, 2, 4])
def test_matrix_rows_follow_the_slow_model(matrices: int) -> None:
    rng = np.random.default_rng(matrices)
    rows = rng.integers(0, 64, (60, matrices, 8)).astype(np.uint32) * 16
    wavefronts, ideal = matrix_wavefronts(rows)
    assert wavefronts.tolist() == [sum(slow_phase(matrix, 16) for matrix in warp) for warp in rows.tolist()]
    assert ideal.tolist() == [matrices] * 60


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
@pytest.mark.parametrize("width", [*WIDTHS, 32])
def test_global_sectors_follow_the_slow_model(width: int, dtype: type) -> None:
    rng = np.random.default_rng(width)
    base = 0x7F00_0000_0000
    address = np.stack([*shared_patterns(width), *(rng.integers(0, 2000, (20, 32)) * width + 16 // width * width)])
    address = (address // width * width + base).astype(dtype)
    for mask in [np.ones(32, bool), *masks()]:
        active = np.broadcast_to(mask, address.shape)
        want = expected(slow_sectors, address, width, active)
        assert [list(values) for values in global_sectors(address, width, active)] == want
    assert [list(values) for values in global_sectors(address, width, None)] == want  # the last mask is full


@pytest.mark.parametrize(
    ("pattern", "width", "sectors", "ideal"),
    [
        (LANES * 4, 4, 4, 4),
        (LANES * 4 + 4, 4, 5, 4),
        (LANES * 16, 16, 16, 16),
        (LANES * 16 + 16, 16, 17, 16),
        (LANES * 32, 4, 32, 4),
        (LANES * 0, 4, 1, 1),
        (LANES, 1, 1, 1),
        (LANES % 4 * 16 + LANES // 4 * 80, 16, 20, 16),  # rows of 80 bytes: half of them start inside a sector
    ],
)
def test_known_global_accesses(pattern: np.ndarray, width: int, sectors: int, ideal: int) -> None:
    got = global_sectors(pattern[None], width, None)
    assert [int(values[0]) for values in got] == [sectors, ideal]


def test_inputs_stay_as_they_were() -> None:
    address = np.random.default_rng(3).integers(0, 99, (8, 32)).astype(np.uint32) * 16
    active = address % 3 > 0
    before = address.copy(), active.copy()
    shared_wavefronts(address, 16, active)
    global_sectors(address, 16, active)
    assert np.array_equal(address, before[0])
    assert np.array_equal(active, before[1])


@pytest.mark.parametrize("width", [0, 3, 12, 32])
def test_a_width_that_shared_memory_lacks(width: int) -> None:
    with pytest.raises(ValueError, match=f"width is {width}"):
        shared_wavefronts(LANES[None], width, None)


def test_a_width_that_global_memory_lacks() -> None:
    with pytest.raises(ValueError, match="width is 64"):
        global_sectors(LANES[None], 64, None)
