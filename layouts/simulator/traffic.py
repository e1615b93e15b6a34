"""Memory traffic in Nsight Compute's terms: wavefronts of shared memory, sectors of global memory.

Shared memory has 32 banks of 4 bytes. A wavefront is one pass over them: each bank gives (or takes) one 4-byte word, to
as many lanes as ask for it. A warp's access is cut into *phases*, runs of lanes that a wavefront could serve if no two
of their words lay in one bank; a phase whose lanes touch n words of one bank takes n wavefronts.

An aligned access of 4, 8 or 16 bytes fills one *cell*: 1, 2 or 4 banks side by side. So the 32 banks are 32, 16 or 8
columns of cells, and the wavefronts of a phase are the most cells that it touches in one column.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Lanes = NDArray[np.bool_]

WARP = 32
BANK_BYTES = 4
WAVEFRONT_BYTES = 128
SECTOR_BYTES = 32
ROW_BYTES = 16  # of a matrix that ldmatrix or stmatrix moves


def shared_wavefronts(
    address: NDArray[np.integer], width: int, active: Lanes | None = None, merges: bool = True
) -> tuple[Counts, Counts]:
    """Wavefronts of ld.shared or st.shared, warp by warp.

    Phases: accesses up to 4 bytes wide have one, the warp; those of 8 bytes two, its halves; those of 16 bytes four,
    its quarters. Of loads, neighbouring phases merge (8 bytes: into the warp, 16 bytes: into halves, never further) if
    over the whole warp

    - every active lane i reads the address of lane i ^ 1, unless that one is inactive, or
    - every active lane i reads the address of lane i ^ 2, unless that one is inactive.

    Two lanes then share one return of data. So 16 bytes from one address for all take 2 wavefronts, but a pattern that
    repeats after 4 lanes takes 4. NVIDIA documents phases of up to 4 bytes; the rest was published from profiles, and
    agrees with the counters of an H200 on every pattern of ``tests.simulator.recording``.

    Args:
        address: (warps, 32) byte addresses below 2**32 in the block's own window, aligned to ``width``.
        width: bytes a lane: 1, 2, 4, 8 or 16.
        active: (warps, 32), the lanes that take part; None stands for all.
        merges: whether phases may merge, as those of loads do.

    Returns:
        Two arrays (warps,): the wavefronts, and the ideal: how many there were without conflicts, which is the number
        of phases (merged as above) with an active lane. Both are 0 for a warp with no active lane.

    Raises:
        ValueError: ``width`` is none of those.
    """
    if width not in (1, 2, 4, 8, 16):
        raise ValueError(f"width is {width} bytes a lane: shared memory is accessed by 1, 2, 4, 8 or 16")
    cell_bytes = max(width, BANK_BYTES)
    columns = WAVEFRONT_BYTES // cell_bytes
    cells = _units(address, cell_bytes).astype(np.uint32, copy=False)
    if active is not None and active.all():
        active = None
    wavefronts, ideal = _warp_wavefronts(cells, active, columns, lanes=columns)
    if columns == WARP or not merges:
        return wavefronts, ideal
    paired = np.flatnonzero(_lanes_pair(cells, active))
    if paired.size:
        some = None if active is None else active[paired]
        wavefronts[paired], ideal[paired] = _warp_wavefronts(cells[paired], some, columns, lanes=2 * columns)
    return wavefronts, ideal


def phase_wavefronts(address: NDArray[np.integer], width: int, active: Lanes | None = None) -> Counts:
    """Wavefronts of each phase of an access of 4, 8 or 16 bytes whose phases do not merge: (warps, phases)."""
    columns = WAVEFRONT_BYTES // width
    cells = _by_lane(_units(address, width).astype(np.uint32, copy=False), columns)
    masks = None if active is None else _by_lane(active, columns)
    return _phase_wavefronts(cells, masks, columns).reshape(len(address), WARP // columns)


def matrix_wavefronts(rows: NDArray[np.integer]) -> tuple[Counts, Counts]:
    """Wavefronts of ldmatrix or stmatrix, warp by warp: each 8x8 matrix of 16-bit elements is a phase.

    Args:
        rows: (warps, matrices, 8) byte addresses of the 16-byte rows, below 2**32.

    Returns:
        Two arrays (warps,): the wavefronts, and the ideal, one a matrix.
    """
    warps, matrices, count = rows.shape
    cells = _by_lane(_units(rows, ROW_BYTES).astype(np.uint32, copy=False), count)
    wavefronts = _phase_wavefronts(cells, None, WAVEFRONT_BYTES // ROW_BYTES).reshape(warps, matrices)
    return np.add.reduce(wavefronts, axis=1), np.full(warps, matrices, np.int64)


def global_sectors(address: NDArray[np.integer], width: int, active: Lanes | None = None) -> tuple[Counts, Counts]:
    """Sectors, the aligned 32 bytes that global memory moves, of a load or store, warp by warp.

    Args:
        address: (warps, 32) byte addresses, aligned to ``width``, so that a lane's bytes lie in one sector.
        width: bytes a lane: 1, 2, 4, 8, 16 or 32.
        active: (warps, 32), the lanes that take part; None stands for all.

    Returns:
        Two arrays (warps,): the distinct sectors, and the ideal: as many as the distinct bytes would fill. Both are 0
        for a warp with no active lane.

    Raises:
        ValueError: ``width`` is none of those.
    """
    if width not in (1, 2, 4, 8, 16, SECTOR_BYTES):
        raise ValueError(f"width is {width} bytes a lane: global memory is accessed by 1, 2, 4, 8, 16 or 32")
    units = _units(address, width)
    absent: Counts | int = 0
    if active is not None:
        # Inactive lanes share one unit after all others, which is not counted.
        units = np.where(active, units, np.iinfo(units.dtype).max)
        absent = np.asarray(~active.all(axis=1), np.int64)
    if (units[:, 1:] < units[:, :-1]).any():
        units = np.sort(units, axis=1)
    distinct = _distinct(units) - absent
    sectors = _distinct(_units(units, SECTOR_BYTES // width)) - absent
    return sectors, -(-distinct * width // SECTOR_BYTES)


def _units(address: NDArray[np.integer], size: int) -> NDArray[np.integer]:
    """Addresses in units of ``size`` bytes, a power of 2."""
    return address >> address.dtype.type(size.bit_length() - 1)


def _distinct(ascending: NDArray[np.integer]) -> Counts:
    """How many different values each row has."""
    return np.add.reduce(ascending[:, 1:] != ascending[:, :-1], axis=1, dtype=np.int64) + 1


def _lanes_pair(cells: NDArray[np.uint32], active: Lanes | None) -> Lanes:
    """The warps whose lanes agree two by two, i with i ^ 1 or i with i ^ 2, so that phases merge."""
    paired = np.zeros(len(cells), bool)
    if active is None and not ((cells[:, 0] == cells[:, 1]) | (cells[:, 0] == cells[:, 2])).any():
        return paired
    for distance in (1, 2):
        first, second = _partners(cells, distance)
        agree = first == second
        if active is not None:
            first_active, second_active = _partners(active, distance)
            agree |= ~(first_active & second_active)
        paired |= agree.reshape(len(cells), -1).all(axis=1)
    return paired


def _partners(lanes: NDArray, distance: int) -> tuple[NDArray, NDArray]:
    """Of each pair of lanes i, i ^ distance the first ones and the second ones: (warps, 16 / distance, distance)."""
    split = lanes.reshape(len(lanes), -1, 2, distance)
    return split[:, :, 0], split[:, :, 1]


def _warp_wavefronts(
    cells: NDArray[np.uint32], active: Lanes | None, columns: int, lanes: int
) -> tuple[Counts, Counts]:
    """Wavefronts and non-empty phases of each warp, if a phase has so many lanes."""
    warps, phases = len(cells), WARP // lanes
    wavefronts = _phase_wavefronts(_by_lane(cells, lanes), None if active is None else _by_lane(active, lanes), columns)
    wavefronts = wavefronts.reshape(warps, phases)
    ideal = np.full(warps, phases, np.int64) if active is None else np.count_nonzero(wavefronts, axis=1)
    return np.add.reduce(wavefronts, axis=1), ideal


def _by_lane(values: NDArray, lanes: int) -> NDArray:
    """(lanes, phases): numpy reduces the first axis much faster than a short last one."""
    return np.ascontiguousarray(values.reshape(-1, lanes).T)


def _phase_wavefronts(cells: NDArray[np.uint32], active: Lanes | None, columns: int) -> Counts:
    """The wavefronts of each phase: 0 if no lane is active. All arrays are (lanes, phases)."""
    taken = np.uint32(1) << (cells & np.uint32(columns - 1))
    if active is not None:
        taken *= active
    union = np.bitwise_or.reduce(taken, axis=0)
    if active is None and len(cells) == columns:
        conflict_free = union == np.uint32(2**columns - 1)
    else:
        # Powers of two add up to the union of their bits only if they differ.
        conflict_free = union == np.add.reduce(taken, axis=0, dtype=np.uint64)
    wavefronts = (union != 0).astype(np.int64)
    if not conflict_free.all():
        shared = np.flatnonzero(~conflict_free)
        cells = _without_inactive(cells[:, shared], None if active is None else active[:, shared])
        # Cells in one window as wide as the banks lie in different columns, or are the same cell.
        spread = np.flatnonzero(cells.max(axis=0) - cells.min(axis=0) >= columns)
        if spread.size:
            wavefronts[shared[spread]] = _most_cells_in_a_column(cells[:, spread], columns)
    return wavefronts


def _without_inactive(cells: NDArray[np.uint32], active: Lanes | None) -> NDArray[np.uint32]:
    """Inactive lanes repeat the cell of the first active one, which adds nothing."""
    if active is None:
        return cells
    return np.where(active, cells, cells[active.argmax(axis=0), np.arange(cells.shape[1])])


def _most_cells_in_a_column(cells: NDArray[np.uint32], columns: int) -> Counts:
    """Of each phase: how many different cells stand in the fullest column."""
    row_bits = np.uint32(25)  # 2**32 bytes are 2**25 rows of 128 bytes
    keys = ((cells & np.uint32(columns - 1)) << row_bits) | (cells >> np.uint32(columns.bit_length() - 1))
    keys = np.sort(keys.T, axis=1)  # (phases, lanes), so that a column's cells stand side by side
    is_new = np.ones(keys.shape, bool)
    np.not_equal(keys[:, 1:], keys[:, :-1], out=is_new[:, 1:])
    phases = np.arange(len(keys), dtype=np.uint32)
    column = (keys >> row_bits) + phases[:, None] * np.uint32(columns)
    per_column = np.bincount(column[is_new], minlength=len(keys) * columns)
    return np.ascontiguousarray(per_column.reshape(-1, columns).T).max(axis=0)
