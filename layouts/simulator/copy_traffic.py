"""Memory traffic of cp.async, in the terms of ``traffic``: what it takes depends on both of its sides.

``.ca`` copies go through L1: a wavefront takes words out of the banks of a cache line, one from each, and puts them
into the banks of shared memory. ``.cg`` copies pass L1 by: each sector that comes from L2 is written to one aligned 32
bytes of shared memory, as it is or with its halves exchanged. A sector whose halves go to different places is therefore
read twice, as happens with rows padded by 16 bytes.

Both rules were found from Nsight Compute's numbers for an H200 (sm_90): ``tests.simulator.recording``. Sectors are
counted by the hardware. So are the wavefronts of .ca, with one more a warp if 16-byte copies of 8 neighbouring lanes
reach into a second line. Those of .cg are what Nsight Compute computes from the addresses; they do not go through the
pipe whose wavefronts the hardware counts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from layouts.simulator.traffic import (
    SECTOR_BYTES,
    WARP,
    WAVEFRONT_BYTES,
    Counts,
    Lanes,
    global_sectors,
    phase_wavefronts,
    shared_wavefronts,
)

_HALF_BYTES = SECTOR_BYTES // 2
_SECTORS = WAVEFRONT_BYTES // SECTOR_BYTES
_LINES_BITS = 12  # a block's shared memory has at most 2**12 lines

Traffic = tuple[tuple[Counts, Counts], tuple[Counts, Counts]]


def copy_traffic(
    place: NDArray[np.integer],
    source: NDArray[np.integer],
    width: int,
    bypass: bool,
    active: Lanes | None = None,
    reads: Lanes | None = None,
) -> Traffic:
    """Wavefronts and sectors of cp.async, warp by warp.

    Args:
        place: (warps, 32) byte addresses in shared memory, aligned to ``width``.
        source: (warps, 32) byte addresses in global memory, aligned to ``width``.
        width: bytes a lane: 4, 8 or 16.
        bypass: whether the copy is .cg.
        active: (warps, 32), the lanes that take part; None stands for all.
        reads: of these, the lanes that read anything; the others store zeros. None stands for all.

    Returns:
        the wavefronts and their ideal, and the sectors and their ideal, each (warps,).
    """
    if reads is not None:
        reading = reads if active is None else reads & active
        zeroing = ~reads if active is None else active & ~reads
        stored = shared_wavefronts(place, width, zeroing, merges=False)
        copied, read = copy_traffic(place, source, width, bypass, reading)
        return (copied[0] + stored[0], copied[1] + stored[1]), read
    if active is not None and active.all():
        active = None
    sectors, ideal_sectors = global_sectors(source, width, active)
    _, ideal = shared_wavefronts(place, width, active, merges=False)
    if not bypass:
        return (_cached_wavefronts(place, source, width, active), ideal), (sectors, ideal_sectors)
    wavefronts, sectors = _bypassing(place, source, active)
    return (wavefronts, ideal), (sectors, ideal_sectors)


def _cached_wavefronts(
    place: NDArray[np.integer], source: NDArray[np.integer], width: int, active: Lanes | None
) -> Counts:
    """Of each phase, the most lanes that take from one column of banks, or the most cells put into one.

    That many could do. Hardware takes more if it is some lanes whose sources conflict, and others whose places do.
    """
    columns = WAVEFRONT_BYTES // width
    put = phase_wavefronts(place, width, active)
    phases = len(source) * WARP // columns
    column = (source // width % columns).astype(np.int64).reshape(phases, columns)
    number = column + np.arange(phases)[:, None] * columns
    if active is not None:
        number = number[active.reshape(phases, columns)]
    taken = np.bincount(number.ravel(), minlength=phases * columns).reshape(phases, columns).max(axis=1)
    return np.maximum(put, taken.reshape(put.shape)).sum(axis=1)


def _bypassing(place: NDArray[np.integer], source: NDArray[np.integer], active: Lanes | None) -> tuple[Counts, Counts]:
    """Wavefronts and sectors of .cg.

    A *transfer* takes a sector, or one half of it, to one aligned 32 bytes of shared memory, its halves exchanged or
    not. One wavefront makes transfers of one shape: from one cache line to one line of shared memory, of the same
    halves to the same halves, between sectors an even number of places apart or an odd one; and at most one from each
    sector and to each 32 bytes.
    """
    warps = len(place)
    if active is not None:  # inactive lanes repeat the transfer of the first active one, which adds nothing
        first = np.arange(warps), active.argmax(axis=1)
        place, source = (np.where(active, x, x[first][:, None]) for x in (place, source))
    line, sector, half = _parts(source)
    other_line, piece, other_half = _parts(place)
    crossed = half ^ other_half
    transfer = (((line << _LINES_BITS | other_line) * 2 + crossed) * _SECTORS + sector) * _SECTORS + piece
    key = np.sort(transfer * 2 + half, axis=1)
    transfer, half = key // 2, key % 2
    is_new = np.ones(key.shape, bool)
    is_new[:, 1:] = transfer[:, 1:] != transfer[:, :-1]
    last = np.ones(key.shape, bool)
    last[:, :-1] = is_new[:, 1:]
    transfer, warp = transfer[is_new], np.nonzero(is_new)[0]
    halves = half[is_new] + 2 * half[last]  # 0: the first alone, 3: the second alone, 2: both
    sector, piece = transfer // _SECTORS % _SECTORS, transfer % _SECTORS
    shape = ((transfer // _SECTORS**2 * 4 + halves) * 2 + (sector ^ piece) % 2) * warps + warp
    shapes, number = np.unique(shape, return_inverse=True)
    most = np.maximum(_most(number, sector), _most(number, piece))
    wavefronts = np.bincount(shapes % warps, most, warps).astype(np.int64)
    sectors = np.count_nonzero(is_new, axis=1)
    some = True if active is None else active.any(axis=1)
    return wavefronts * some, sectors * some


def _parts(address: NDArray[np.integer]) -> tuple[Counts, Counts, Counts]:
    """The number of the address's line, counted from the warp's first one, and its sector and half in there."""
    halves: Counts = address.astype(np.int64) // _HALF_BYTES
    line = halves // (2 * _SECTORS)
    return line - line.min(axis=1)[:, None], halves // 2 % _SECTORS, halves % 2


def _most(number: Counts, column: Counts) -> Counts:
    """Of each number from 0 on, how often it stands with the column with which it stands most often."""
    often = np.bincount(number * _SECTORS + column, minlength=(int(number.max()) + 1) * _SECTORS)
    return often.reshape(-1, _SECTORS).max(axis=1)
