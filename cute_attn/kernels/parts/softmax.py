"""Online softmax over the accumulators of S, one tile of keys after another.

Algorithm: Milakov and Gimelshein, arXiv 1805.02867; delayed division as in FlashAttention-2, arXiv 2307.08691, 3.1.
For a row with scores x so far, with s = scale * log2(e):

    P = 2^(s x - s row_max)        row_sum = sum P        O = P V

row_max need not be the maximum, only near it: it moves, and everything summed before is rescaled, when s x exceeds
s row_max by more than SLACK. Most tiles then rescale nothing (the idea is FlashAttention-4's). P is at most 2^SLACK,
far from where 16 bits end.

The row sums come from the tensor cores, as P times a column of ones. So they add up the very P, rounded to 16 bits,
that multiplies V: rounding P cannot make the weights sum to anything but one, however large the scores. Each tile is
summed from zero and then added, because tensor cores truncate: over thousands of steps that would show. Log-sum-exps
are made of sums of P before it is rounded, by those kernels that return them.

A row that has seen no key has row_max = -inf and row_sum = 0. No finite number stands for minus infinity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from cute_attn.kernels.parts.rare import once_if
from cute_attn.kernels.parts.tiles import PrefillTiles, rows_and_columns

LN2 = math.log(2.0)
SLACK = 8.0  # log2 of how far P may exceed 1
QUAD = (1, 2)  # the four lanes that hold one row of accumulators are neighbours at these distances
STEP = 4  # columns that a thread holds of each row in 16 keys


@dataclass(frozen=True)
class OnlineSoftmax:
    """Running maxima and sums of one thread's rows.

    Attributes:
        scale_log2: softmax scale times log2(e), positive.
        row_max: (rows,) what the exponents are relative to, in unscaled scores.
        shift: (rows,) row_max scaled, 0 for rows that have seen no key.
        mma: multiplies P by the column of ones.
        ones: its B operand.
        sums: its accumulators, of one tile; each of 8 columns holds the row's sum.
        row_sum: (rows,) sums of all tiles so far.
        exact_sums: None, or (rows,) sums of this thread's own columns of P before rounding, for log-sum-exps.
    """

    scale_log2: Float32
    row_max: cute.Tensor
    shift: cute.Tensor
    mma: cute.TiledMma
    ones: cute.Tensor
    sums: cute.Tensor
    row_sum: cute.Tensor
    exact_sums: cute.Tensor | None

    @staticmethod
    def of(tiles: PrefillTiles, thread: Int32, scale_log2: Float32, with_lse: bool) -> OnlineSoftmax:
        """Rows that have seen no key yet."""
        mma = tiles.mma(columns=8)
        mine = mma.get_slice(thread)
        sums = cute.make_rmem_tensor(mine.partition_shape_C((tiles.config.tile_m, 8)), Float32)
        ones = cute.make_rmem_tensor(mine.partition_shape_B((8, 16)), tiles.dtype)
        row_max, shift, row_sum, exact_sums = (cute.make_rmem_tensor(cute.size(sums) // 2, Float32) for _ in range(4))
        row_max.fill(-Float32.inf)
        for zeros in (shift, row_sum, exact_sums):
            zeros.fill(0.0)
        ones.fill(1.0)
        return OnlineSoftmax(scale_log2, row_max, shift, mma, ones, sums, row_sum, exact_sums if with_lse else None)

    @property
    def rows(self) -> int:
        return cute.size(self.row_max)

    @cute.jit
    def advance(self, scores: cute.Tensor) -> Any:
        """Takes a tile of scores (rows, columns) into the maxima.

        Returns row_max as it was, (rows,), and how often to ``shrink`` (0 or 1).
        """
        seen = cute.make_rmem_tensor(self.rows, Float32)
        moved = cutlass.Boolean(False)
        for r in range_constexpr(self.rows):
            seen[r] = self.row_max[r]
            row_max = largest([seen[r], *(scores[r, c] for c in range(cute.size(scores, mode=[1])))])
            for lane in QUAD:
                row_max = cute.arch.fmax(row_max, cute.arch.shuffle_sync_bfly(row_max, offset=lane))
            moves = (row_max - seen[r]) * self.scale_log2 > SLACK
            self.row_max[r] = row_max if moves else seen[r]
            self.shift[r] = finite_or_zero(self.row_max[r]) * self.scale_log2
            moved = moved | moves
        return seen, once_if(cute.arch.vote_any_sync(moved))

    @cute.jit
    def shrink(self, seen: cute.Tensor, zero: Int32) -> cute.Tensor:
        """Rescales the sums to the new maxima; returns the factors (rows,) by which O must shrink, too.

        ``zero`` is the index of the loop of ``once_if`` that this runs in.
        """
        factors = cute.make_rmem_tensor(self.rows, Float32)
        for r in range_constexpr(self.rows):
            factors[r] = exp2(seen[r] * self.scale_log2 - self.shift[r] + zero.to(Float32))
            self.row_sum[r] = self.row_sum[r] * factors[r]
            if const_expr(self.exact_sums is not None):
                self.exact_sums[r] = self.exact_sums[r] * factors[r]
        return factors

    @cute.jit
    def weigh(self, scores: cute.Tensor, p: cute.Tensor, step: int) -> None:
        """Fills 16 keys' columns of P (rows, columns)."""
        for r in range_constexpr(self.rows):
            for c in range_constexpr(STEP * step, STEP * (step + 1)):
                weight = exp2(scores[r, c] * self.scale_log2 - self.shift[r])
                if const_expr(self.exact_sums is not None):
                    self.exact_sums[r] = self.exact_sums[r] + weight
                p[r, c] = weight.to(p.element_type)

    def add(self, p: cute.Tensor, first: bool, last: bool) -> None:
        """Adds the fragments of P for 16 keys, the ``first`` or the ``last`` of a tile, to the row sums."""
        if first:
            self.sums.fill(0.0)
        cute.gemm(self.mma, self.sums, p, self.ones[None, None, 0], self.sums)
        if last:
            sum_rows = cute.make_tensor(self.sums.iterator, rows_and_columns(self.sums.layout))
            for r in range(self.rows):
                self.row_sum[r] = self.row_sum[r] + sum_rows[r, 0]

    @cute.jit
    def finish(self, lse: cute.Tensor | None) -> cute.Tensor:
        """Returns the factors (rows,) that O still needs; fills ``lse`` (rows,) with natural log-sum-exps."""
        factors = cute.make_rmem_tensor(self.rows, Float32)
        for r in range_constexpr(self.rows):
            empty = self.row_sum[r] == 0.0
            factors[r] = Float32(0.0) if empty else cute.arch.rcp_approx(self.row_sum[r])
            if const_expr(lse is not None):
                row_sum = self.exact_sums[r]
                for lane in QUAD:
                    row_sum = row_sum + cute.arch.shuffle_sync_bfly(row_sum, offset=lane)
                natural = self.shift[r] * LN2 + cute.math.log(row_sum)
                lse[r] = -Float32.inf if empty else natural
        return factors


def exp2(x: Float32) -> Float32:
    return cute.math.exp2(x, fastmath=True)


@cute.jit
def finite_or_zero(x: Float32) -> Float32:
    """0 for -inf: what to subtract from the scores of a row that has seen no key."""
    return Float32(0.0) if x == -Float32.inf else x


def largest(values: list[Float32]) -> Float32:
    """Maximum by a tree, so that the maxima do not wait for one another."""
    while len(values) > 1:
        pairs = [cute.arch.fmax(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]
