"""Which block of a decode launch computes what.

The grid is (row tiles x heads_kv, batch, num_splits). A row is one query head of one query token; those that read the
same head of the cache lie together, so that the cache is read once for all of them:

    row        0        1      ...   group-1     group    group+1   ...      group * q_len - 1
    token      0        0      ...      0          1         1      ...          q_len - 1
    head     first   first+1   ...    last       first    first+1   ...            last

A sequence's tokens are shared by blocks in steps of ``tile_tokens``:

    evenly          step     0   1   2   3   4   5   6         in turn, so that a block's first step, and with it its
                    block    0   1   2   0   1   2   0         page indices, are known before the length is
    by split_size   step     0   1   2   3   4   5   6         in parts that begin at multiples of the size, so that a
                    block    0   0   1   1   2   2   3         row's result depends on nothing but its own sequence
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from cute_attn.decode_configs import DecodeConfig
from cute_attn.decode_problem import DecodeArguments, DecodeProblem
from cute_attn.kernels.parts.instructions import quotient


class DecodeGrid(NamedTuple):
    """What the host finds out for all blocks.

    Attributes:
        group: query heads of a head of the cache.
        row_tiles: of a head of the cache.
    """

    group: Int32
    row_tiles: Int32


@dataclass(frozen=True)
class DecodePlace:
    """What one block's place in the grid says.

    Attributes:
        batch: the sequence.
        head_kv: the head of the cache.
        first_row: of the block's tile of rows.
        rows: valid rows of the head of the cache, those of all blocks.
        group: query heads of a head of the cache.
        q_len: query tokens of a sequence.
        split: which of the blocks that share a sequence this is.
    """

    batch: Int32
    head_kv: Int32
    first_row: Int32
    rows: Int32
    group: Int32
    q_len: Int32
    split: Int32

    @cute.jit
    def token_of(self, row: Int32) -> Int32:
        """The query token of a row of the head of the cache."""
        token = Int32(0)
        if self.q_len > 1:
            token = quotient(row, self.group)
        return token

    def head_of(self, row: Int32) -> Int32:
        """The query head of a row of the head of the cache."""
        return self.head_kv * self.group + row - self.token_of(row) * self.group


@cute.jit
def decode_place(grid: DecodeGrid, q_len: Int32, tile_m: int) -> DecodePlace:
    """This block's place. Divisions are left out where they are by one, as nothing can be loaded before they end."""
    head_kv, batch, split = cute.arch.block_idx()
    first_row = Int32(0)
    if grid.row_tiles > 1:
        column = head_kv
        head_kv = quotient(column, grid.row_tiles)
        first_row = (column - head_kv * grid.row_tiles) * tile_m
    return DecodePlace(batch, head_kv, first_row, grid.group * q_len, grid.group, q_len, split)


@dataclass(frozen=True)
class DecodeWork:
    """The tokens that one block reads.

    Attributes:
        place: of the block.
        length: tokens of the sequence.
        first_token: of the block's first step.
        stride: tokens from one of its steps to the next.
        begin, end: what the block reads of its steps: tokens outside are hidden from all rows, or not its own.
        start: the first token that a row sees.
    """

    place: DecodePlace
    length: Int32
    first_token: Int32
    stride: Int32
    begin: Int32
    end: Int32
    start: Int32

    @property
    def has_part(self) -> Boolean:
        """Whether this block has tokens, or the sequence has none and this is its first block."""
        return (self.place.split == 0) | (self.first_token < self.length)

    @cute.jit
    def parts(self, arguments: DecodeArguments, config: DecodeConfig) -> Int32:
        """How many blocks share the sequence. Only their results depend on it, so that no load waits for divisions."""
        parts = Int32(0)
        if arguments.split_size > 0:
            last = quotient(self.length + (arguments.split_size - 1), arguments.split_size)
            parts = last - quotient(self.start, arguments.split_size)
        else:
            steps = quotient(self.length + (config.tile_tokens - 1), config.tile_tokens)
            parts = min(steps - quotient(self.start, config.tile_tokens), arguments.num_splits)
        return max(parts, 1)


@cute.jit
def first_token_of(arguments: DecodeArguments, config: DecodeConfig, place: DecodePlace, start: Int32) -> Int32:
    """The first token of a block's first step, where rows see tokens from ``start`` on."""
    tile = config.tile_tokens
    size = arguments.split_size
    first = (quotient(start, tile) + place.split) * tile
    if size > 0:
        first = place.split * size
        if start > 0:
            first = max(quotient(start, size) * size + first, quotient(start, tile) * tile)
    return first


@cute.jit
def stride_of(arguments: DecodeArguments, config: DecodeConfig) -> Int32:
    """Tokens from one step of a block to its next."""
    return arguments.num_splits * config.tile_tokens if arguments.split_size == 0 else Int32(config.tile_tokens)


@cute.jit
def decode_work(
    arguments: DecodeArguments, problem: DecodeProblem, config: DecodeConfig, place: DecodePlace, length: Int32
) -> DecodeWork:
    """The work of a block of a sequence with the given length, which may be any number."""
    if const_expr(problem.page_size):
        capacity = arguments.k_page_table.shape[1] * problem.page_size
    else:
        capacity = arguments.k.shape[1]
    length = min(max(length, 0), capacity)
    start = Int32(0)
    if const_expr(problem.bounded_left):
        start = max(length - place.q_len + 1 - arguments.window, 0)

    size = arguments.split_size
    first_token = first_token_of(arguments, config, place, start)
    begin, end = start, length
    if size > 0:
        begin = max(first_token, start)
        first_part = Int32(0)
        if const_expr(problem.bounded_left):
            first_part = quotient(start, size)
        end = min((first_part + place.split + 1) * size, length)
    return DecodeWork(place, length, first_token, stride_of(arguments, config), begin, end, start)
