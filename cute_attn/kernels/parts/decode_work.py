"""Which block of a decode launch computes what.

The grid is (row tiles x heads_kv, batch, num_splits). A row is one query head of one query token; those that read the
same head of the cache lie together, so that the cache is read once for all of them:

    row        0        1      ...   group-1     group    group+1   ...      group * q_len - 1
    token      0        0      ...      0          1         1      ...          q_len - 1
    head     first   first+1   ...    last       first    first+1   ...            last

A sequence's tokens are shared by blocks in whole steps of ``tile_tokens``, either evenly or in parts of a fixed size.
Parts of a fixed size begin at multiples of it, wherever a window begins, so that a row's result depends on nothing but
its own sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from cute_attn.decode_configs import DecodeConfig
from cute_attn.decode_problem import DecodeArguments, DecodeProblem


@dataclass(frozen=True)
class DecodeWork:
    """What one block computes.

    Attributes:
        batch: the sequence.
        head_kv: the head of the cache.
        first_row: of the block's tile of rows.
        rows: valid rows of the head of the cache, those of all blocks.
        group: query heads of a head of the cache.
        q_len: query tokens of a sequence.
        length: tokens of the sequence.
        begin, end: the tokens that this block reads; none where ``end <= begin``.
        split: which part this is.
        steps: steps of ``tile_tokens`` that the sequence's visible tokens take, or with a fixed size parts of it.
        steps_per_split: of each part; 1 with a fixed size.
    """

    batch: Int32
    head_kv: Int32
    first_row: Int32
    rows: Int32
    group: Int32
    q_len: Int32
    length: Int32
    begin: Int32
    end: Int32
    split: Int32
    steps: Int32
    steps_per_split: Int32

    @property
    def has_part(self) -> Boolean:
        """Whether this block has tokens, or the sequence has none and this is its first block."""
        return (self.split == 0) | (self.split * self.steps_per_split < self.steps)

    @cute.jit
    def count_parts(self) -> Int32:
        """How many blocks share the sequence."""
        return max(cute.ceil_div(self.steps, self.steps_per_split), 1)

    def token_of(self, row: Int32) -> Int32:
        """The query token of a row of the head of the cache."""
        return row // self.group

    def head_of(self, row: Int32) -> Int32:
        """The query head of a row of the head of the cache."""
        return self.head_kv * self.group + row % self.group


@cute.jit
def decode_work(arguments: DecodeArguments, problem: DecodeProblem, config: DecodeConfig) -> DecodeWork:
    """The work of this block."""
    column, batch, split = cute.arch.block_idx()
    heads_kv = arguments.k.shape[2]
    q_len, heads = arguments.q.shape[1], arguments.q.shape[2]
    group = heads // heads_kv
    row_tiles = cute.arch.grid_dim()[0] // heads_kv

    if const_expr(problem.page_size):
        capacity = arguments.k_page_table.shape[1] * problem.page_size
    else:
        capacity = arguments.k.shape[1]
    length = min(max(arguments.lengths[batch], 0), capacity)
    start = Int32(0)
    if const_expr(problem.bounded_left):
        start = max(length - q_len + 1 - arguments.window, 0)

    size = arguments.split_size
    steps_per_split = Int32(1)
    if size == 0:
        size = Int32(config.tile_tokens)
    first = start // size
    steps = cute.ceil_div(length, size) - first
    if arguments.split_size == 0:
        steps_per_split = max(cute.ceil_div(steps, arguments.num_splits), 1)
    begin = (first + split * steps_per_split) * size
    return DecodeWork(
        batch=batch,
        head_kv=column // row_tiles,
        first_row=column % row_tiles * config.tile_m,
        rows=group * q_len,
        group=group,
        q_len=q_len,
        length=length,
        begin=max(begin, start),
        end=min(begin + steps_per_split * size, length),
        split=split,
        steps=steps,
        steps_per_split=steps_per_split,
    )
