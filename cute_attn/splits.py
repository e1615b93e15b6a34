"""How many blocks share a sequence's tokens, chosen on the host from shapes alone.

Lengths live on the device and may change between replays of a captured graph, so the choice goes by the capacity: a
block finds its own part of the actual length, which is empty where there are more blocks than tiles.
"""

from __future__ import annotations

from typing import NamedTuple


class Work(NamedTuple):
    """What is to be shared out.

    Attributes:
        blocks: of a launch without splits: tiles of rows x heads_kv x batch.
        tiles: of tokens that a block without splits may have to read.
        tile_tokens: tokens of a tile.
        slots: blocks that the device runs at one time.
    """

    blocks: int
    tiles: int
    tile_tokens: int
    slots: int


MAX_AUTO_SPLITS = 128  # more parts than this take longer to merge than they save
START_TOKENS = 384  # starting a block, and filling its pipeline, take the time of reading so many tokens
MERGE_TOKENS = 32  # the same of what the last block reads back for each part


def choose_num_splits(work: Work) -> int:
    """The number of parts for which the last block is expected to end first; the smallest of equals.

    Blocks run in waves of ``slots``: n parts take ceil(blocks x n / slots) waves of ceil(tiles / n) tiles each.
    """
    if work.blocks == 0 or work.tiles <= 1:
        return 1
    most = min(work.tiles, MAX_AUTO_SPLITS, max(1, 4 * work.slots // work.blocks))
    return min(range(1, most + 1), key=lambda splits: (_time(work, splits), splits))


def _time(work: Work, splits: int) -> int:
    """In tokens that one block reads."""
    waves = -(-work.blocks * splits // work.slots)
    merging = MERGE_TOKENS * splits if splits > 1 else 0
    return waves * (-(-work.tiles // splits) * work.tile_tokens + START_TOKENS) + merging
