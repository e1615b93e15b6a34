"""From the results of warps to the block's, from the blocks' to the sequence's, and to out.

A result is rows of O, unnormalised, and of each row a maximum m (in log2) and the sum l of its weights. Results of
disjoint sets of tokens merge exactly, empty ones (m = -inf) included:

    m = max m_i      l = sum 2^(m_i - m) l_i      O = sum 2^(m_i - m) O_i

Blocks that share a sequence leave their results in global memory and count themselves. The last one to come finds all
others there, merges them in the order of their parts, whoever it is, and leaves the counter at zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from cute_attn.decode_configs import MMA_ROWS, PARTIAL_STATS, DecodeConfig
from cute_attn.decode_problem import DecodeArguments, DecodeProblem
from cute_attn.kernels.parts.decode_products import Products
from cute_attn.kernels.parts.decode_softmax import LOG2_E, Scales
from cute_attn.kernels.parts.decode_work import DecodeWork
from cute_attn.kernels.parts.instructions import (
    count_up_and_wrap,
    load_floats_of_other_blocks,
    pack,
    quotient,
    store_floats,
    store_words,
)
from cute_attn.kernels.parts.softmax import exp2, finite_or_zero

LN2 = math.log(2.0)
QUAD = 4  # dims that a thread merges at once: 16 bytes of fp32
AT_ONCE = 8  # partial results whose loads are under way together


@dataclass(frozen=True)
class RowStats:
    """What a warp knows of the rows of its lanes' columns of S^T: (2 blocks_m,) tensors.

    Attributes:
        row_max: what the weights are relative to.
        row_sum: of the rounded weights.
        exact_sum: of the weights before rounding; None where no log-sum-exp is wanted.
    """

    row_max: cute.Tensor
    row_sum: cute.Tensor
    exact_sum: cute.Tensor | None


@dataclass(frozen=True)
class RowPart:
    """Four dims of a row of a result, as mutable registers.

    Attributes:
        row_max, row_sum, exact_sum: (1,) each; ``exact_sum`` is that of the weights before rounding.
        o: (4,) of O.
    """

    row_max: cute.Tensor
    row_sum: cute.Tensor
    exact_sum: cute.Tensor
    o: cute.Tensor

    @staticmethod
    def empty() -> RowPart:
        """The result over no tokens."""
        row_max, row_sum, exact_sum = (cute.make_rmem_tensor(1, Float32) for _ in range(3))
        o = cute.make_rmem_tensor(QUAD, Float32)
        row_max.fill(-Float32.inf)
        for zeros in (row_sum, exact_sum, o):
            zeros.fill(0.0)
        return RowPart(row_max, row_sum, exact_sum, o)

    @cute.jit
    def add(self, others: list) -> None:
        """Merges in other results, each as (row_max, row_sum, exact_sum, four of O)."""
        row_max = self.row_max[0]
        for k in range_constexpr(len(others)):
            row_max = cute.arch.fmax(row_max, others[k][0])
        shift = finite_or_zero(row_max)
        shrink = exp2(self.row_max[0] - shift)
        self.row_max[0] = row_max
        for sums in (self.row_sum, self.exact_sum, self.o):
            for i in range_constexpr(cute.size(sums)):
                sums[i] = sums[i] * shrink
        for k in range_constexpr(len(others)):
            weight = exp2(others[k][0] - shift)
            self.row_sum[0] = self.row_sum[0] + weight * others[k][1]
            self.exact_sum[0] = self.exact_sum[0] + weight * others[k][2]
            for i in range_constexpr(QUAD):
                self.o[i] = self.o[i] + weight * others[k][3][i]


@dataclass(frozen=True)
class DecodeOutput:
    """What happens to a block's results.

    Attributes:
        problem, config: of the kernel.
        arguments: of the launch.
        scales: of V's elements.
        work: of the block.
        o: shared memory (results, tile_m, head_dim) for O.
        stats: shared memory (results, tile_m, 4) for what is known of each row.
        flag: shared memory (1,), int32.
    """

    problem: DecodeProblem
    config: DecodeConfig
    arguments: DecodeArguments
    scales: Scales
    work: DecodeWork
    o: cute.Tensor
    stats: cute.Tensor
    flag: cute.Tensor

    @staticmethod
    def of(
        kernel: tuple[DecodeProblem, DecodeConfig],
        arguments: DecodeArguments,
        scales: Scales,
        work: DecodeWork,
        memory: tuple[cute.Pointer, cute.Tensor],
    ) -> DecodeOutput:
        """With ``memory``: of a block's tiles, which are done with by then, and of its flag."""
        (problem, config), (tiles, flag) = kernel, memory
        results, rows, dims = config.results(problem), config.tile_m, problem.head_dim
        row = dims + QUAD  # the padding keeps the warps' stores free of bank conflicts
        floats = cute.recast_ptr(tiles, dtype=Float32)
        o = cute.make_tensor(floats, cute.make_layout((results, rows, dims), stride=(rows * row, row, 1)))
        stats_layout = cute.make_layout((results, rows, PARTIAL_STATS), stride=(rows * PARTIAL_STATS, PARTIAL_STATS, 1))
        stats = cute.make_tensor(floats + results * rows * row, stats_layout)
        return DecodeOutput(problem, config, arguments, scales, work, o, stats, flag)

    @cute.jit
    def put(self, products: Products, output: cute.Tensor, number: Int32, first_dim: Int32, lane: Int32) -> None:
        """A warp's O^T, dims from ``first_dim`` on, into shared memory as one of the results or a part of it."""
        for block_m in range_constexpr(products.blocks_m):
            for i in range_constexpr(2):
                row = MMA_ROWS * block_m + lane % 4 * 2 + i
                for block_d in range_constexpr(products.blocks_d):
                    for element in range_constexpr(2):
                        dim = first_dim + products.dim_of(block_d, element, lane)
                        self.o[number, row, dim] = output[products.output_at(block_d, block_m) + 2 * element + i]

    @cute.jit
    def put_stats(self, columns: RowStats, number: Int32, lane: Int32) -> None:
        """What a warp knows of its columns' rows, the same in lanes of the same columns."""
        stats = self.stats
        if lane < 4:
            for c in range_constexpr(cute.size(columns.row_max)):
                row = MMA_ROWS * (c // 2) + lane * 2 + c % 2
                exact = Float32(0.0) if const_expr(columns.exact_sum is None) else columns.exact_sum[c]
                known = (columns.row_max[c], columns.row_sum[c], exact, Float32(0.0))
                for k in range_constexpr(PARTIAL_STATS):
                    stats[number, row, k] = known[k]

    @cute.jit
    def store(self, thread: Int32) -> None:
        """The block's result to out, or to the other blocks; the last of these stores the sequence's."""
        cute.arch.sync_threads()
        flag, place = self.flag, self.work.place
        parts = self.work.parts(self.arguments, self.config)
        quads = self.problem.head_dim // QUAD
        rows = min(place.rows - place.first_row, self.config.tile_m)
        for item in cutlass.range(thread, rows * quads, self.config.num_threads, unroll=1):
            row = quotient(item, quads)
            quad = item - row * quads
            part = RowPart.empty()
            part.add([self._of_result(i, row, quad) for i in range(self.config.results(self.problem))])
            if parts == 1:
                self._finish(part, row, quad)
            else:
                self._leave(part, row, quad)
        if parts > 1:
            cute.arch.sync_threads()
            if thread == 0:
                tile = Int64(self._tile())
                semaphore = self.arguments.semaphores.iterator.toint() + tile * 4
                flag[0] = count_up_and_wrap(semaphore, parts - 1)
            cute.arch.sync_threads()
            if flag[0] == parts - 1:
                for item in cutlass.range(thread, rows * quads, self.config.num_threads, unroll=1):
                    row = quotient(item, quads)
                    quad = item - row * quads
                    self._finish(self._of_all_parts(parts, row, quad), row, quad)

    def _of_result(self, number: int, row: Int32, quad: Int32) -> tuple:
        o = [self.o[number, row, QUAD * quad + i] for i in range(QUAD)]
        exact = self.stats[number, row, 2] if self.problem.return_lse else Float32(0.0)
        return self.stats[number, row, 0], self.stats[number, row, 1], exact, o

    def _tile(self) -> Int32:
        """The number of the block's rows among those of all blocks."""
        column, batch, _ = cute.arch.block_idx()
        return batch * cute.arch.grid_dim()[0] + column

    def _place(self, part: Int32, row: Int32) -> Int64:
        """Address of a row in a part's result in global memory: its O, and then what is known of it."""
        splits = cute.arch.grid_dim()[2]
        number = (Int64(self._tile()) * splits + part) * self.config.tile_m + row
        return self.arguments.partials.iterator.toint() + number * ((self.problem.head_dim + PARTIAL_STATS) * 4)

    @cute.jit
    def _leave(self, part: RowPart, row: Int32, quad: Int32) -> None:
        place = self._place(self.work.place.split, row)
        store_floats(place + quad * (QUAD * 4), [part.o[i] for i in range(QUAD)])
        if quad == 0:
            known = [part.row_max[0], part.row_sum[0], part.exact_sum[0], Float32(0.0)]
            store_floats(place + self.problem.head_dim * 4, known)

    @cute.jit
    def _of_all_parts(self, parts: Int32, row: Int32, quad: Int32) -> RowPart:
        total = RowPart.empty()
        for first in cutlass.range(0, parts, AT_ONCE, unroll=1):
            loaded = []
            for k in range_constexpr(AT_ONCE):
                place = self._place(min(first + k, parts - 1), row)
                row_max, row_sum, exact_sum, _ = load_floats_of_other_blocks(place + self.problem.head_dim * 4)
                o = load_floats_of_other_blocks(place + quad * (QUAD * 4))
                # What is loaded again beyond the last part counts for nothing; 0 x inf would.
                row_max = row_max if first + k < parts else -Float32.inf
                dims = [x if first + k < parts else Float32(0.0) for x in o]
                loaded.append((row_max, row_sum, exact_sum, dims))
            total.add(loaded)
        return total

    @cute.jit
    def _finish(self, part: RowPart, row: Int32, quad: Int32) -> None:
        """Four dims of a row of out, and with the first its log-sum-exp."""
        place, arguments, lse = self.work.place, self.arguments, self.arguments.lse
        row = place.first_row + row
        token, head = place.token_of(row), place.head_of(row)
        if const_expr(self.problem.sinks):
            # One more token, whose value is zero.
            sink = arguments.sinks[head] * LOG2_E
            part.add([(sink, Float32(1.0), Float32(1.0), [Float32(0.0)] * QUAD)])
        row_sum = part.row_sum[0]
        factor = Float32(0.0) if row_sum == 0.0 else self.scales.of_values * cute.arch.rcp_approx(row_sum)
        o = [part.o[i] * factor for i in range(QUAD)]
        out = arguments.out
        target = out.iterator.toint() + 2 * (
            Int64(place.batch) * out.stride[0] + Int64(token) * out.stride[1] + Int64(head) * out.stride[2]
        )
        dtype = self.problem.dtype
        store_words(target + quad * (QUAD * 2), [pack(dtype, o[0], o[1]), pack(dtype, o[2], o[3])])
        if const_expr(self.problem.return_lse):
            if quad == 0:
                natural = (part.row_max[0] + cute.math.log2(part.exact_sum[0])) * LN2
                lse[place.batch, token, head] = -Float32.inf if row_sum == 0.0 else natural
