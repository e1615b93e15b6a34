"""Which block computes what: a flat grid, decoded into (query tile, head, sequence).

Dense batches. Blocks of one head follow one another, so that its K and V stay in the L2 cache. Causal blocks differ in
length; there the heads are taken in groups whose K and V fit the L2 cache together, and inside a group all heads'
longest tiles come first (longest processing time first), so that the grid ends evenly:

    block     0      1      2      3      4      5     ...
    tile     last   last   last   last-1 last-1 last-1 ...
    head      0      1      2      0      1      2     ...    (a group of 3 heads)

Packed batches. Sequence b owns the tile slots

    floor(cu_seqlens[b] / tile_m) + b  ...  floor(cu_seqlens[b + 1] / tile_m) + b

which is at least as many as its length can fill, so a slot's sequence is found by binary search in cu_seqlens alone:
neither the grid nor the result depends on a maximum length, and nothing is read back to the host.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

L2_BYTES = 32 * 2**20  # what K and V of one group of heads may take, of the 40 to 60 MB of the large GPUs


class Work(NamedTuple):
    """What one block computes: a tile of query rows of a head of a sequence. A negative tile is no work."""

    tile: Int32
    head: Int32
    batch: Int32
    q_start: Int32
    q_len: Int32
    k_start: Int32
    k_len: Int32


@cute.jit
def heads_per_group(heads: Int32, k_len: Int32, bytes_per_key: int) -> Int32:
    """Heads whose keys and values fit the L2 cache together, in groups as equal as can be.

    A small last group would leave its longest tiles to the end of the grid.
    """
    at_once = max(1, L2_BYTES // bytes_per_key // max(k_len, 1))
    groups = (heads - 1) // at_once + 1
    return (heads - 1) // groups + 1


@cute.jit
def dense_work(block: Int32, num_tiles: Int32, group: Int32, batch_heads: tuple, lengths: tuple) -> Work:
    """The work of a block of a dense batch of (batch, heads) with (q_len, k_len)."""
    batches, heads = batch_heads
    first = block // (num_tiles * group) * group  # of the group's rows of (batch, head)
    rest = block - first * num_tiles
    members = min(group, batches * heads - first)
    row = first + rest % members
    tile = num_tiles - 1 - rest // members
    return Work(tile, row % heads, row // heads, Int32(0), lengths[0], Int32(0), lengths[1])


@cute.jit
def packed_work(block: Int32, num_slots: Int32, cu_seqlens: tuple, totals: tuple, tile_m: int) -> Work:
    """The work of a block of a packed batch with (cu_seqlens_q, cu_seqlens_k) and (total_q, total_k)."""
    cu_seqlens_q, cu_seqlens_k = cu_seqlens
    slot = block % num_slots
    batch = sequence_of_slot(slot, cu_seqlens_q, tile_m)
    q_start, q_len = sequence_rows(cu_seqlens_q, batch, totals[0])
    k_start, k_len = sequence_rows(cu_seqlens_k, batch, totals[1])
    tile = (q_len + tile_m - 1) // tile_m - 1 - (slot - first_slot(cu_seqlens_q, batch, tile_m))
    return Work(tile, block // num_slots, batch, q_start, q_len, k_start, k_len)


def first_slot(cu_seqlens: cute.Tensor, batch: Int32, tile_m: int) -> Int32:
    return cu_seqlens[batch] // tile_m + batch


@cute.jit
def sequence_rows(cu_seqlens: cute.Tensor, batch: Int32, total: Int32) -> tuple[Int32, Int32]:
    """(first row, rows) of a sequence, kept inside the tensor whatever cu_seqlens says."""
    start = min(max(cu_seqlens[batch], 0), total)
    end = min(max(cu_seqlens[batch + 1], start), total)
    return start, end - start


@cute.jit
def sequence_of_slot(slot: Int32, cu_seqlens: cute.Tensor, tile_m: int) -> Int32:
    """The last sequence whose first slot is at or before ``slot``."""
    low = Int32(0)
    high = cu_seqlens.shape[0] - 1
    while high - low > 1:
        middle = (low + high) // 2
        if first_slot(cu_seqlens, middle, tile_m) <= slot:
            low = middle
        else:
            high = middle
    return low
