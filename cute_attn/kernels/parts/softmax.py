"""Online softmax over the accumulators of S, one tile of keys after another.

Algorithm: Milakov and Gimelshein, arXiv 1805.02867; delayed division as in FlashAttention-2, arXiv 2307.08691, 3.1.
For a row with scores x so far, with s = scale * log2(e):

    row_max = max x        P = 2^(s x - s row_max)        row_sum = sum P        O = P V

A row that has seen no key has row_max = -inf and row_sum = 0. No finite number stands for minus infinity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr, range_constexpr

from cute_attn.kernels.parts.rare import once_if

LN2 = math.log(2.0)
QUAD = (1, 2)  # the four lanes that hold one row of accumulators are neighbours at these distances
STEP = 4  # columns that a thread holds of each row in 16 keys
HUGE = 1024.0  # scaled maxima up to here are rounded by at most 2^-15, which P in 16 bits does not show


@dataclass(frozen=True)
class OnlineSoftmax:
    """Running maxima and sums of one thread's rows.

    Attributes:
        scale_log2: softmax scale times log2(e), positive.
        row_max: (rows,) maxima of the unscaled scores.
        shift: (rows,) what is subtracted from the present tile's scaled scores.
        row_sum: (rows,) sums of this thread's own columns; ``finish`` adds the four lanes up.
    """

    scale_log2: Float32
    row_max: cute.Tensor
    shift: cute.Tensor
    row_sum: cute.Tensor

    @staticmethod
    def of(rows: int, scale_log2: Float32) -> OnlineSoftmax:
        """Rows that have seen no key yet."""
        row_max, shift, row_sum = (cute.make_rmem_tensor(rows, Float32) for _ in range(3))
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        return OnlineSoftmax(scale_log2, row_max, shift, row_sum)

    @property
    def rows(self) -> int:
        return cute.size(self.row_max)

    @cute.jit
    def advance(self, scores: cute.Tensor) -> cute.Tensor:
        """Takes a tile of scores (rows, columns) into the maxima.

        Returns the factors (rows,) by which everything summed before must shrink.
        """
        factors = cute.make_rmem_tensor(self.rows, Float32)
        huge = cutlass.Boolean(False)
        for r in range_constexpr(self.rows):
            seen = self.row_max[r]
            row_max = largest([seen, *(scores[r, c] for c in range(cute.size(scores, mode=[1])))])
            for lane in QUAD:
                row_max = cute.arch.fmax(row_max, cute.arch.shuffle_sync_bfly(row_max, offset=lane))
            self.row_max[r] = row_max
            self.shift[r] = finite_or_zero(row_max) * self.scale_log2
            factors[r] = exp2(seen * self.scale_log2 - self.shift[r])
            self.row_sum[r] = self.row_sum[r] * factors[r]
            huge = huge | (cute.arch.fmax(self.shift[r], -self.shift[r]) > HUGE)
        for zero in cutlass.range(once_if(cute.arch.vote_any_sync(huge)), unroll=1):
            self.centre(scores, zero.to(Float32))
        return factors

    @cute.jit
    def centre(self, scores: cute.Tensor, zero: Float32) -> None:
        """Subtracts the maxima before scaling, so that the largest P is exactly 1 however large the scores are."""
        for r in range_constexpr(self.rows):
            row_max = finite_or_zero(self.row_max[r]) + zero
            for c in range_constexpr(cute.size(scores, mode=[1])):
                scores[r, c] = scores[r, c] - row_max
            self.shift[r] = Float32(0.0)

    @cute.jit
    def weigh(self, scores: cute.Tensor, p: cute.Tensor, step: int) -> None:
        """Fills 16 keys' columns of P (rows, columns) and adds them to the sums, before they are rounded."""
        for r in range_constexpr(self.rows):
            for c in range_constexpr(STEP * step, STEP * (step + 1)):
                weight = exp2(scores[r, c] * self.scale_log2 - self.shift[r])
                self.row_sum[r] = self.row_sum[r] + weight
                p[r, c] = weight.to(p.element_type)

    @cute.jit
    def finish(self, lse: cute.Tensor | None) -> cute.Tensor:
        """Returns the factors (rows,) that O still needs; fills ``lse`` (rows,) with natural log-sum-exps."""
        factors = cute.make_rmem_tensor(self.rows, Float32)
        for r in range_constexpr(self.rows):
            row_sum = self.row_sum[r]
            for lane in QUAD:
                row_sum = row_sum + cute.arch.shuffle_sync_bfly(row_sum, offset=lane)
            empty = row_sum == 0.0
            factors[r] = Float32(0.0) if empty else cute.arch.rcp_approx(row_sum)
            if const_expr(lse is not None):
                natural = self.row_max[r] * self.scale_log2 * LN2 + cute.math.log(row_sum)
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
