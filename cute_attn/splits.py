"""How many blocks share a sequence's tokens, chosen on the host from shapes alone.

Lengths live on the device and may change between replays of a captured graph, so the choice goes by the capacity: a
block finds its own part of the actual length, which is empty where there are more blocks than tiles.

The choice is that of least expected time, in a model of four facts measured on an H200: a block alone reads tile after
tile at its own rate; about as many blocks as there are multiprocessors together reach the memory's bandwidth, and more
of them are slower each; the last block of a sequence reads every part back; and where blocks come in several waves,
those of the last end one by one, and partial results are written and read beside other blocks' tokens.
"""

from __future__ import annotations

from typing import NamedTuple


class Work(NamedTuple):
    """What is to be shared out.

    Attributes:
        blocks: of a launch without splits: tiles of rows x heads_kv x batch.
        tiles: of tokens that a block without splits may have to read.
        tile_tokens: tokens of a tile.
        multiprocessors: of the device.
        slots: blocks that the device runs at one time.
        partial_tokens: a block's partial result, in tokens of the same number of bytes.
    """

    blocks: int
    tiles: int
    tile_tokens: int
    multiprocessors: int
    slots: int
    partial_tokens: float


MAX_AUTO_SPLITS = 128  # more parts than this take longer to merge than they save
MAX_WAVES = 6  # further ones would even out less than their starts cost
START_TOKENS = 64  # starting a wave of blocks takes the time in which a block reads so many tokens
MERGE_TOKENS = 12  # the same of what the last block reads back for each part
MERGE_PASSES = 2.5  # what partial results cost in several waves, in times that memory reads as many bytes
UNEVEN = 0.25  # of a block's reading: how long the memory is idle when blocks that came in several waves end


def choose_num_splits(work: Work) -> int:
    """The number of parts for which the last block is expected to end first; the smallest of equals."""
    if work.blocks == 0 or work.tiles <= 1:
        return 1
    most = min(work.tiles, MAX_AUTO_SPLITS, max(1, MAX_WAVES * work.slots // work.blocks))
    return min(range(1, most + 1), key=lambda splits: (_time(work, splits), splits))


def _time(work: Work, splits: int) -> float:
    """In tokens that a block alone reads meanwhile."""
    blocks, tokens = work.blocks * splits, -(-work.tiles // splits) * work.tile_tokens
    time = tokens * max(1.0, blocks / work.multiprocessors)  # as fast as one alone, or as the memory's bandwidth allows
    time += START_TOKENS * -(-blocks // work.slots)
    if splits > 1:
        time += MERGE_TOKENS * splits
    if blocks > work.slots:
        time += UNEVEN * tokens
        if splits > 1:
            time += MERGE_PASSES * work.partial_tokens * (blocks + work.blocks) / work.multiprocessors
    return time
