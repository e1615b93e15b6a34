"""Online softmax over S^T, one tile of tokens after another, and its state of one warp.

As in ``softmax``: row_max follows the true maximum only when that exceeds it by more than SLACK, so that most tiles
rescale nothing and ask no other lane; row sums come from the tensor cores, as P times a column of ones, so that they
add up the very weights that multiply V. Scores here are scaled before anything else, so that caps and the factors of
single rows fit in: all of ``row_max`` and the scores are in units of log2.

A row's scores stand in one of two columns of a lane and in the 8 lanes of the same j (lane = 4 g + j).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr

from cute_attn.decode_problem import DecodeArguments, DecodeProblem
from cute_attn.kernels.parts.decode_products import Products, Queries
from cute_attn.kernels.parts.decode_work import DecodeWork
from cute_attn.kernels.parts.instructions import load_number, pack, sum_columns, transpose_8x8
from cute_attn.kernels.parts.rare import once_if
from cute_attn.kernels.parts.softmax import SLACK, exp2, finite_or_zero, largest

LOG2_E = 1.4426950408889634
LN2 = 1 / LOG2_E
SMALL = 0.25  # up to here the series of tanh is exact to float32
TOKENS_APART = (4, 8, 16)  # distances of the lanes that hold other tokens of the same rows


@dataclass(frozen=True)
class Scales:
    """What scores and values are multiplied by: numbers of the host and, of a quantised cache, others on the device.

    Those on the device are loaded first and multiplied where they are used: a product that stood with its loads would
    keep the queries and the cache waiting for them.

    Attributes:
        scale_log2: softmax scale x the host's scale of the keys x log2(e).
        v_factor: the host's scale of the values.
        k_scale, v_scale: of the device, or None.
    """

    scale_log2: Float32
    v_factor: Float32
    k_scale: Float32 | None
    v_scale: Float32 | None

    @staticmethod
    def load(problem: DecodeProblem, arguments: DecodeArguments) -> Scales:
        on_device = (arguments.k_scale, arguments.v_scale) if problem.quantised else ()
        loaded = [load_number(scale, Int32(0), Float32) for scale in on_device]
        return Scales(arguments.scale_log2, arguments.v_factor, *(loaded or (None, None)))

    @property
    def of_scores(self) -> Float32:
        return self.scale_log2 if self.k_scale is None else self.scale_log2 * self.k_scale

    @property
    def of_values(self) -> Float32:
        return self.v_factor if self.v_scale is None else self.v_factor * self.v_scale


@dataclass(frozen=True)
class ScoreScale:
    """From accumulators of S^T to scores in units of log2.

    Attributes:
        scales: of the launch.
        softcap: in natural units; None without.
        factors: (2 blocks_m,) by column, or None.
    """

    scales: Scales
    softcap: Float32 | None
    factors: cute.Tensor | None

    def apply(self, products: Products, scores: cute.Tensor) -> None:
        for block_m in range(products.blocks_m):
            for i in range(2):
                scale = self.scales.of_scores
                if self.factors is not None:
                    scale = scale * self.factors[2 * block_m + i]
                for block_n in range(products.blocks_n):
                    for half in range(2):
                        at = products.score_at(block_n, block_m) + 2 * half + i
                        scores[at] = self._capped(scores[at] * scale)

    def _capped(self, score: Float32) -> Float32:
        """softcap * tanh(score / softcap)."""
        if self.softcap is None:
            return score
        return self.softcap * LOG2_E * _tanh(score * cute.arch.rcp_approx(self.softcap))


@cute.jit
def _tanh(score: Float32) -> Float32:
    """tanh of a score in units of log2: the difference of 1 - 2 / (1 + exp(2 y)), which no y overflows, or for small y,
    where that difference loses digits, the first five terms of the series."""
    y = score * LN2
    square = y * y
    series = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    difference = 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + exp2(2.0 * score))
    return y * series if square < SMALL * SMALL else difference


@dataclass(frozen=True)
class TokenBounds:
    """Which tokens the rows of a block see: query i of a sequence stands at token length - q_len + i.

    Attributes:
        work: the block's work.
        bounded_left: whether there is a window.
        window: tokens that a query sees, its own counted.
    """

    work: DecodeWork
    bounded_left: bool
    window: Int32

    @staticmethod
    def of(work: DecodeWork, problem: DecodeProblem, arguments: DecodeArguments) -> TokenBounds:
        return TokenBounds(work, problem.bounded_left, arguments.window)

    @cute.jit
    def is_full(self, first_token: Int32, tokens: int) -> cutlass.Boolean:
        """Whether every row sees every token of a tile, as far as the block reads it."""
        full = first_token + tokens <= self.work.length - self.work.place.q_len + 1
        full = full & (first_token + tokens <= self.work.end) & (first_token >= self.work.begin)
        if const_expr(self.bounded_left):
            full = full & (first_token >= self.work.length - self.window)
        return full

    @cute.jit
    def hide(self, products: Products, scores: cute.Tensor, first_token: Int32, lane: Int32) -> None:
        """Sets the scores of hidden tokens to -inf."""
        work, place = self.work, self.work.place
        lane_token = first_token + lane // 4
        for block_m in range_constexpr(products.blocks_m):
            for i in range_constexpr(2):
                row = place.first_row + 8 * block_m + lane % 4 * 2 + i
                position = work.length - place.q_len + place.token_of(row)
                end = min(position + 1, work.end) - lane_token
                begin = work.begin
                if const_expr(self.bounded_left):
                    begin = max(begin, position + 1 - self.window)
                begin = begin - lane_token
                for block_n in range_constexpr(products.blocks_n):
                    for half in range_constexpr(2):
                        at = products.score_at(block_n, block_m) + 2 * half + i
                        token = 16 * block_n + 8 * half
                        hidden = (token >= end) | (token < begin)
                        scores[at] = -Float32.inf if hidden else scores[at]


@dataclass(frozen=True)
class ScoreMaker:
    """How scores are made.

    Attributes:
        queries: as operands B.
        scale: of the products.
        bounds: which tokens are seen.
    """

    queries: Queries
    scale: ScoreScale
    bounds: TokenBounds


def rescale(products: Products, output: cute.Tensor, factors: cute.Tensor) -> None:
    """Multiplies O^T by factors (2 blocks_m,) of the lane's columns."""
    for block_m in range(products.blocks_m):
        for block_d in range(products.blocks_d):
            for i in range(4):
                at = products.output_at(block_d, block_m) + i
                output[at] = output[at] * factors[2 * block_m + i % 2]


@dataclass(frozen=True)
class ColumnSoftmax:
    """Running maxima and sums of the lane's columns: (2 blocks_m,) tensors.

    Attributes:
        products: shapes and dtype.
        row_max: what the weights are relative to.
        row_sum: of the rounded weights.
        exact_sum: None, or of this lane's weights before rounding, for log-sum-exps.
    """

    products: Products
    row_max: cute.Tensor
    row_sum: cute.Tensor
    exact_sum: cute.Tensor | None

    @staticmethod
    def of(products: Products, with_lse: bool) -> ColumnSoftmax:
        row_max, row_sum, exact_sum = (cute.make_rmem_tensor(2 * products.blocks_m, Float32) for _ in range(3))
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        exact_sum.fill(0.0)
        return ColumnSoftmax(products, row_max, row_sum, exact_sum if with_lse else None)

    @property
    def columns(self) -> int:
        return 2 * self.products.blocks_m

    def _scores_of(self, column: int) -> list[int]:
        """Where a column's scores stand."""
        block_m, i = divmod(column, 2)
        at = self.products.score_at
        return [at(n, block_m) + 2 * half + i for n in range(self.products.blocks_n) for half in range(2)]

    @cute.jit
    def advance(self, scores: cute.Tensor, output: cute.Tensor | None) -> None:
        """Takes a tile of scores into the maxima; where one moves, what was summed before is rescaled.

        ``output`` is None for a warp that only makes weights; its sums are then of one tile, and begin anew.
        """
        if const_expr(output is None):
            for c in range_constexpr(self.columns):
                self.row_sum[c] = Float32(0.0)
                if const_expr(self.exact_sum is not None):
                    self.exact_sum[c] = Float32(0.0)
        tops = cute.make_rmem_tensor(self.columns, Float32)
        moved = cutlass.Boolean(False)
        for c in range_constexpr(self.columns):
            tops[c] = largest([scores[at] for at in self._scores_of(c)])
            moved = moved | (tops[c] > self.row_max[c] + SLACK)
        for zero in cutlass.range(once_if(cute.arch.vote_any_sync(moved)), unroll=1):
            self._move(tops, output, zero)

    @cute.jit
    def _move(self, tops: cute.Tensor, output: cute.Tensor | None, zero: Int32) -> None:
        factors = cute.make_rmem_tensor(self.columns, Float32)
        for c in range_constexpr(self.columns):
            top = tops[c] + zero.to(Float32)
            for k in range_constexpr(3):
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=TOKENS_APART[k]))
            seen = self.row_max[c]
            row_max = top if top > seen + SLACK else seen
            self.row_max[c] = row_max
            factors[c] = exp2(seen - finite_or_zero(row_max))
            self.row_sum[c] = self.row_sum[c] * factors[c]
            if const_expr(self.exact_sum is not None):
                self.exact_sum[c] = self.exact_sum[c] * factors[c]
        if const_expr(output is not None):
            rescale(self.products, output, factors)

    @cute.jit
    def raise_to(self, column: int, row_max: Float32) -> None:
        """Lets a column's maximum be at least so much; its sums must still be zero, or of no use."""
        self.row_max[column] = cute.arch.fmax(self.row_max[column], row_max)

    @cute.jit
    def weigh(self, scores: cute.Tensor) -> list[list[list[Uint32]]]:
        """The weights of a tile as operands B of V^T P^T, by block of tokens and of rows; adds up their sums."""
        products, dtype = self.products, self.products.dtype
        shifts = [finite_or_zero(self.row_max[c]) for c in range(self.columns)]
        weights = []
        for block_n in range_constexpr(products.blocks_n):
            of_block = []
            for block_m in range_constexpr(products.blocks_m):
                at = products.score_at(block_n, block_m)
                p = [exp2(scores[at + i] - shifts[2 * block_m + i % 2]) for i in range(4)]
                if const_expr(self.exact_sum is not None):
                    for i in range_constexpr(4):
                        self.exact_sum[2 * block_m + i % 2] = self.exact_sum[2 * block_m + i % 2] + p[i]
                operand = [transpose_8x8(pack(dtype, p[0], p[1])), transpose_8x8(pack(dtype, p[2], p[3]))]
                of_block.append(operand)
            weights.append(of_block)
        for block_m in range_constexpr(products.blocks_m):
            for block_n in range_constexpr(products.blocks_n):
                sums = sum_columns(dtype, weights[block_n][block_m])
                for i in range_constexpr(2):
                    self.row_sum[2 * block_m + i] = self.row_sum[2 * block_m + i] + sums[i]
        return weights

    @cute.jit
    def finish(self) -> None:
        """Completes the sums that each lane kept of its own tokens."""
        if const_expr(self.exact_sum is not None):
            for c in range_constexpr(self.columns):
                for k in range_constexpr(3):
                    others = cute.arch.shuffle_sync_bfly(self.exact_sum[c], offset=TOKENS_APART[k])
                    self.exact_sum[c] = self.exact_sum[c] + others
