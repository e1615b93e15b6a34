"""Which keys a query row may see, which tiles of keys a block must visit, and which of those need a mask.

Query row i of a sequence with q_len queries and k_len keys sees key j when

    0 <= j < k_len
    j <= i + (k_len - q_len) + window_right     if bounded on the right (causal: window_right = 0)
    j >= i + (k_len - q_len) - window_left      if bounded on the left

so that the last query is aligned with the last key, as in flash-attn since 2.1. For one block of query rows:

    keys     0 ........ begin ........ full_begin ............ full_end ........ end ........ k_len
    tiles    |  hidden  |    masked    |       full: no mask    |    masked    |   hidden    |
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from cute_attn.configs import PrefillConfig
from cute_attn.problem import PrefillProblem


@dataclass(frozen=True)
class KeyBounds:
    """The visible keys of one block's query rows.

    Attributes:
        config: tile sizes.
        problem: which sides are bounded.
        first_row: the block's first query row.
        q_len, k_len: the sequence's lengths.
        window_left, window_right: widths of the bounded sides.
    """

    config: PrefillConfig
    problem: PrefillProblem
    first_row: Int32
    q_len: Int32
    k_len: Int32
    window_left: Int32
    window_right: Int32

    @cute.jit
    def tiles(self) -> tuple[Int32, Int32, Int32, Int32]:
        """Tile numbers (begin, full_begin, full_end, end): visit begin..end, mask all but full_begin..full_end."""
        align = self.k_len - self.q_len
        last_row = min(self.first_row + self.config.tile_m, self.q_len) - 1
        end = self.k_len
        full_end = self.k_len
        if const_expr(self.problem.bounded_right):
            end = min(end, last_row + align + self.window_right + 1)
            full_end = min(full_end, self.first_row + align + self.window_right + 1)
        begin = Int32(0)
        full_begin = Int32(0)
        if const_expr(self.problem.bounded_left):
            begin = max(begin, self.first_row + align - self.window_left)
            full_begin = max(full_begin, last_row + align - self.window_left)
        end = (max(end, 0) + self.config.tile_n - 1) // self.config.tile_n
        begin = begin // self.config.tile_n
        full_end = max(full_end, 0) // self.config.tile_n
        full_begin = (full_begin + self.config.tile_n - 1) // self.config.tile_n
        return begin, full_begin, full_end, end

    @cute.jit
    def hide(self, scores: cute.Tensor, coordinates: cute.Tensor, first_key: Int32) -> None:
        """Sets the scores (rows, columns) of hidden keys to -inf.

        ``coordinates`` holds each score's (row, column) in the tile, whose columns begin at ``first_key``. Only a
        thread's first column is dynamic: the others lie at static distances, so each test is against a constant.
        """
        columns = cute.size(scores, mode=[1])
        align = self.k_len - self.q_len
        thread_key = first_key + coordinates[0, 0][1]
        for r in range_constexpr(cute.size(scores, mode=[0])):
            row = self.first_row + coordinates[r, 0][0]
            end = self.k_len
            if const_expr(self.problem.bounded_right):
                end = min(end, row + align + self.window_right + 1)
            end = end - thread_key
            begin = Int32(0)
            if const_expr(self.problem.bounded_left):
                begin = row + align - self.window_left - thread_key
            for c in range_constexpr(columns):
                column = column_distance(c)
                hidden = column >= end
                if const_expr(self.problem.bounded_left):
                    hidden = hidden | (column < begin)
                scores[r, c] = -Float32.inf if hidden else scores[r, c]


def column_distance(c: int) -> int:
    """Columns from a thread's first to its c-th in a row of m16n8k16 accumulators: pairs, 8 columns apart."""
    return c // 2 * 8 + c % 2
