"""FlashAttention forward on mma.sync, for every architecture from sm_80.

One block computes tile_m query rows of one head. Q is read once; tiles of K and V pass through shared memory from the
last visible key to the first; S = Q K^T, its softmax and O = P V stay in registers.

    warp     rows of Q, S, P, O             K, V: read by all warps
      0      |  0-15   |  64-79  |
      1      | 16-31   |  80-95  |          4 warps, tile_m 128: each warp owns 2 x 16 rows
      2      | 32-47   |  96-111 |
      3      | 48-63   | 112-127 |

Algorithm: FlashAttention-2, arXiv 2307.08691, algorithm 1. Splitting Q over warps and letting K and V share one buffer
is the scheme of the kernel that this work started from (see the README); the code is independent of it.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from cute_attn.configs import SMEM_ALIGNMENT, PrefillConfig
from cute_attn.kernels.parts.gemm import Operand, gemm_output, gemm_scores
from cute_attn.kernels.parts.load import TileLoader
from cute_attn.kernels.parts.mask import KeyBounds
from cute_attn.kernels.parts.modes import heads_before_length
from cute_attn.kernels.parts.output import OutputAccumulator, OutputTile
from cute_attn.kernels.parts.pipeline import KeyValuePipeline
from cute_attn.kernels.parts.rare import fresh, once_if
from cute_attn.kernels.parts.schedule import Work, dense_work, heads_per_group, packed_work
from cute_attn.kernels.parts.softmax import OnlineSoftmax
from cute_attn.kernels.parts.tiles import PrefillTiles, rows_and_columns
from cute_attn.problem import PrefillProblem

DTYPES = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}


class KernelArguments(NamedTuple):
    """What every block is given: ``PrefillArguments``, heads second, and the grid's shape for ``schedule``."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor | None
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    scale_log2: Float32
    window_left: Int32
    window_right: Int32
    num_tiles: Int32
    group: Int32


class SharedTiles(NamedTuple):
    """The block's tiles in shared memory: (rows, columns, slots); ``o`` lies where ``q`` was."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    v_transposed: cute.Tensor
    o: cute.Tensor


class PrefillKernel:
    """The prefill kernel of one problem and config; call it under ``cute.compile``."""

    def __init__(self, problem: PrefillProblem, config: PrefillConfig):
        self.problem = problem
        self.config = config
        self.tiles = PrefillTiles(config, problem.head_dim, problem.head_dim_v, DTYPES[problem.dtype])

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        scale_log2: Float32,
        window_left: Int32,
        window_right: Int32,
        heads_second: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launches the kernel; the arguments are those of ``PrefillArguments``."""
        tile_m = self.config.tile_m
        if const_expr(self.problem.varlen):
            heads = q.shape[1]
            num_tiles = q.shape[0] // tile_m + cute.size(cu_seqlens_q) - 1
            group = Int32(1)
        else:
            q, k, v, out = (heads_before_length(x, heads_second) for x in (q, k, v, out))
            heads = q.shape[0] * q.shape[1]
            num_tiles = cute.ceil_div(q.shape[2], tile_m)
            group = Int32(1)
            if const_expr(self.problem.bounded_right):
                group = heads_per_group(heads, k.shape[2], 2 * (self.problem.head_dim + self.problem.head_dim_v))
        arguments = KernelArguments(
            q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, scale_log2, window_left, window_right, num_tiles, group
        )
        self.kernel(arguments).launch(
            grid=(num_tiles * heads, 1, 1), block=(self.config.num_threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, arguments: KernelArguments) -> None:
        """One block: tile_m query rows over all the keys that they see."""
        block, _, _ = cute.arch.block_idx()
        shared = self.allocate()
        work = self.work(arguments, block)
        bounds = KeyBounds(
            self.config,
            self.problem,
            work.tile * self.config.tile_m,
            work.q_len,
            work.k_len,
            arguments.window_left,
            arguments.window_right,
        )
        if work.tile >= 0:
            self.attend(arguments, work, bounds, shared)

    @cute.jit
    def work(self, arguments: KernelArguments, block: Int32) -> Work:
        """What a block has to compute."""
        if const_expr(self.problem.varlen):
            cu_seqlens = (arguments.cu_seqlens_q, arguments.cu_seqlens_k)
            totals = (arguments.q.shape[0], arguments.k.shape[0])
            return packed_work(block, arguments.num_tiles, cu_seqlens, totals, self.config.tile_m)
        lengths = (arguments.q.shape[2], arguments.k.shape[2])
        return dense_work(block, arguments.num_tiles, arguments.group, arguments.q.shape[:2], lengths)

    def rows(self, tensor: cute.Tensor, work: Work, head: Int32, start: Int32) -> cute.Tensor:
        """One head of one sequence: (length, head_dim), or (length,) of the log-sum-exps."""
        if self.problem.varlen:
            matrix = tensor[None, head, None] if cute.rank(tensor) == 3 else tensor[head, None]
            return cute.domain_offset((start, 0)[: cute.rank(matrix)], matrix)
        return tensor[work.batch, head, None, None] if cute.rank(tensor) == 4 else tensor[work.batch, head, None]

    @cute.jit
    def allocate(self) -> SharedTiles:
        """Shared memory of the block, as ``tiles`` lays it out."""
        tiles, config = self.tiles, self.config
        q_region, k_ring, v_ring = config.smem_elements(self.problem.head_dim, self.problem.head_dim_v)
        smem = cutlass.memory.SmemAllocator()
        q = smem.allocate_array(tiles.dtype, q_region, byte_alignment=SMEM_ALIGNMENT)
        k = smem.allocate_array(tiles.dtype, k_ring, byte_alignment=SMEM_ALIGNMENT)
        v = k if config.share_kv else smem.allocate_array(tiles.dtype, v_ring, byte_alignment=SMEM_ALIGNMENT)
        return SharedTiles(
            cute.make_tensor(q, tiles.smem_q()),
            cute.make_tensor(k, tiles.smem_k()),
            cute.make_tensor(v, tiles.smem_v()),
            cute.make_tensor(v, tiles.smem_v_transposed()),
            cute.make_tensor(q, tiles.smem_o()),
        )

    @cute.jit
    def attend(self, arguments: KernelArguments, work: Work, bounds: KeyBounds, shared: SharedTiles) -> None:
        """The block's main loop, from the last visible tile of keys to the first."""
        tiles, config = self.tiles, self.config
        thread, _, _ = cute.arch.thread_idx()
        mma = tiles.mma()
        mine = mma.get_slice(thread)

        copy_qk, copy_v = tiles.global_to_smem(tiles.tile_d), tiles.global_to_smem(tiles.tile_dv)
        kv_head = work.head // (arguments.q.shape[1] // arguments.k.shape[1])
        matrix_q = self.rows(arguments.q, work, work.head, work.q_start)
        matrix_k = self.rows(arguments.k, work, kv_head, work.k_start)
        matrix_v = self.rows(arguments.v, work, kv_head, work.k_start)
        load_q = TileLoader.of(copy_qk, thread, matrix_q, work.q_len, shared.q)
        load_k = TileLoader.of(copy_qk, thread, matrix_k, work.k_len, shared.k)
        load_v = TileLoader.of(copy_v, thread, matrix_v, work.k_len, shared.v)
        begin, full_begin, full_end, end = bounds.tiles()
        pipeline = KeyValuePipeline(config, load_k, load_v, begin, end)

        q = Operand.of(
            tiles.ldmatrix_a(), thread, shared.q, mine.make_fragment_A(mine.partition_A(shared.q[None, None, 0]))
        )
        k = Operand.of(
            tiles.ldmatrix_b(), thread, shared.k, mine.make_fragment_B(mine.partition_B(shared.k[None, None, 0]))
        )
        v = Operand.of(tiles.ldmatrix_b_transposed(), thread, shared.v_transposed,
                       mine.make_fragment_B(mine.partition_B(shared.v_transposed[None, None, 0])))  # fmt: skip

        scores_shape = mine.partition_shape_C((config.tile_m, config.tile_n))
        softmax = OnlineSoftmax.of(tiles, thread, arguments.scale_log2, self.problem.return_lse)
        output = OutputAccumulator.of(
            mine.partition_shape_C((config.tile_m, tiles.tile_dv)), config.o_fp32, tiles.dtype
        )

        load_q.load_edge(work.tile, 0)
        pipeline.start()
        if const_expr(config.q_in_regs):
            pipeline.wait_for_start()
            for step in range_constexpr(q.steps):
                q.fetch(step, 0)

        for i in cutlass.range(end - begin):
            tile = end - 1 - i
            slot = i % config.ring

            pipeline.before_scores(tile, slot)
            scores = cute.make_rmem_tensor(scores_shape, Float32)
            scores.fill(0.0)
            gemm_scores(mma, scores, q, k, slot, config.q_in_regs)
            pipeline.after_scores(tile)

            score_rows = cute.make_tensor(scores.iterator, rows_and_columns(scores.layout))
            for zero in cutlass.range(once_if((tile >= full_end) | (tile < full_begin)), unroll=1):
                bounds.hide(score_rows, tiles.positions(thread + zero, config.tile_n), tile * config.tile_n + zero)
            seen, times = softmax.advance(score_rows)
            for zero in cutlass.range(times, unroll=1):
                output.shrink(softmax.shrink(seen, zero))

            pipeline.before_output()
            sums_before = cute.make_rmem_tensor_like(softmax.row_sum)
            sums_before.store(softmax.row_sum.load())
            gemm_output(mma, output.accumulators, scores, v, slot, softmax)
            output.settle(sums_before, softmax.row_sum)
            pipeline.after_output(tile)

        cute.arch.cp_async_wait_group(0)
        self.store(arguments, shared, softmax, output)

    @cute.jit
    def store(
        self, arguments: KernelArguments, shared: SharedTiles, softmax: OnlineSoftmax, output: OutputAccumulator
    ) -> None:
        """The block's results. Where they go is computed anew here, not kept in registers through the main loop."""
        tiles, config = self.tiles, self.config
        thread, block = fresh(cute.arch.thread_idx()[0]), fresh(cute.arch.block_idx()[0])
        work = self.work(arguments, block)
        first_row = work.tile * config.tile_m
        positions = tiles.positions(thread, tiles.tile_dv)
        lse = None if const_expr(arguments.lse is None) else cute.make_rmem_tensor(softmax.rows, Float32)
        rounded = output.rounded(softmax.finish(lse))
        target = OutputTile.of(tiles, self.rows(arguments.out, work, work.head, work.q_start), work.q_len, first_row)
        if const_expr(config.o_store == "smem"):
            cute.arch.sync_threads()  # every warp has read its last of Q
            target.store_through_smem(rounded, shared.o[None, None, 0], thread)
        else:
            target.store_by_shuffles(cute.make_tensor(rounded.iterator, rows_and_columns(rounded.layout)), positions)
        if const_expr(lse is not None):
            lse_rows = self.rows(arguments.lse, work, work.head, work.q_start)
            for r in range_constexpr(softmax.rows):
                row = first_row + positions[r, 0][0]
                if (row < work.q_len) & (positions[0, 0][1] == 0):
                    lse_rows[row] = lse[r]
