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

from cute_attn.configs import PrefillConfig
from cute_attn.kernels.parts.gemm import Operand, gemm_output, gemm_scores
from cute_attn.kernels.parts.load import TileLoader
from cute_attn.kernels.parts.mask import KeyBounds
from cute_attn.kernels.parts.modes import heads_before_length
from cute_attn.kernels.parts.output import OutputAccumulator, OutputTile
from cute_attn.kernels.parts.rare import fresh, once_if
from cute_attn.kernels.parts.schedule import Work, dense_work, heads_per_group, packed_work
from cute_attn.kernels.parts.softmax import OnlineSoftmax
from cute_attn.kernels.parts.tiles import PrefillTiles, rows_and_columns
from cute_attn.problem import PrefillProblem

DTYPES = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}


class Inputs(NamedTuple):
    """What every block is given: tensors as in ``PrefillArguments``, and the grid's shape for ``schedule``."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor | None
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    num_tiles: Int32
    group: Int32


class SharedTiles(NamedTuple):
    """The block's tiles in shared memory: (rows, columns, stages); ``o`` lies where ``q`` was."""

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
    def __call__(self, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, scale_log2: Float32, window_left: Int32,
                 window_right: Int32, heads_second: Int32, stream: cuda.CUstream):  # fmt: skip
        """Launches the kernel; the arguments are those of ``PrefillArguments``."""
        tile_m = self.config.tile_m
        if const_expr(self.problem.varlen):
            heads = q.shape[1]
            num_tiles = q.shape[0] // tile_m + cu_seqlens_q.shape[0] - 1
            group = Int32(1)
        else:
            q, k, v, out = (heads_before_length(x, heads_second) for x in (q, k, v, out))
            heads = q.shape[0] * q.shape[1]
            num_tiles = cute.ceil_div(q.shape[2], tile_m)
            group = Int32(1)
            if const_expr(self.problem.bounded_right):
                group = heads_per_group(heads, k.shape[2], 2 * (self.problem.head_dim + self.problem.head_dim_v))
        inputs = Inputs(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, num_tiles, group)
        self.kernel(inputs, scale_log2, window_left, window_right).launch(
            grid=(num_tiles * heads, 1, 1), block=(self.config.num_threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, inputs: Inputs, scale_log2: Float32, window_left: Int32, window_right: Int32) -> None:
        """One block: tile_m query rows over all the keys that they see."""
        block, _, _ = cute.arch.block_idx()
        shared = self.allocate()
        work = self.work(inputs, block)
        bounds = KeyBounds(
            self.config, self.problem, work.tile * self.config.tile_m, work.q_len, work.k_len, window_left, window_right
        )
        if work.tile >= 0:
            self.attend(inputs, work, bounds, shared, scale_log2)

    @cute.jit
    def work(self, inputs: Inputs, block: Int32) -> Work:
        """What a block has to compute."""
        if const_expr(self.problem.varlen):
            cu_seqlens = (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
            totals = (inputs.q.shape[0], inputs.k.shape[0])
            return packed_work(block, inputs.num_tiles, cu_seqlens, totals, self.config.tile_m)
        lengths = (inputs.q.shape[2], inputs.k.shape[2])
        return dense_work(block, inputs.num_tiles, inputs.group, inputs.q.shape[:2], lengths)

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
        q = smem.allocate_array(tiles.dtype, q_region, byte_alignment=1024)
        k = smem.allocate_array(tiles.dtype, k_ring, byte_alignment=1024)
        v = k if config.share_kv else smem.allocate_array(tiles.dtype, v_ring, byte_alignment=1024)
        return SharedTiles(
            cute.make_tensor(q, tiles.smem_q()),
            cute.make_tensor(k, tiles.smem_k()),
            cute.make_tensor(v, tiles.smem_v()),
            cute.make_tensor(v, tiles.smem_v_transposed()),
            cute.make_tensor(q, tiles.smem_o()),
        )

    @cute.jit
    def attend(self, inputs: Inputs, work: Work, bounds: KeyBounds, shared: SharedTiles, scale_log2: Float32) -> None:
        """The block's main loop, from the last visible tile of keys to the first."""
        tiles, config = self.tiles, self.config
        thread, _, _ = cute.arch.thread_idx()
        mma = tiles.mma()
        mine = mma.get_slice(thread)

        copy_qk, copy_v = tiles.global_to_smem(tiles.tile_d), tiles.global_to_smem(tiles.tile_dv)
        kv_head = work.head // (inputs.q.shape[1] // inputs.k.shape[1])
        matrix_q = self.rows(inputs.q, work, work.head, work.q_start)
        matrix_k = self.rows(inputs.k, work, kv_head, work.k_start)
        matrix_v = self.rows(inputs.v, work, kv_head, work.k_start)
        load_q = TileLoader.of(copy_qk, thread, matrix_q, work.q_len, shared.q)
        load_k = TileLoader.of(copy_qk, thread, matrix_k, work.k_len, shared.k)
        load_v = TileLoader.of(copy_v, thread, matrix_v, work.k_len, shared.v)
        q = Operand.of(
            tiles.ldmatrix_a(), thread, shared.q, mine.make_fragment_A(mine.partition_A(shared.q[None, None, 0]))
        )
        k = Operand.of(
            tiles.ldmatrix_b(), thread, shared.k, mine.make_fragment_B(mine.partition_B(shared.k[None, None, 0]))
        )
        v = Operand.of(tiles.ldmatrix_b_transposed(), thread, shared.v_transposed,
                       mine.make_fragment_B(mine.partition_B(shared.v_transposed[None, None, 0])))  # fmt: skip

        scores_shape = mine.partition_shape_C((config.tile_m, config.tile_n))
        softmax = OnlineSoftmax.of(tiles, thread, scale_log2, self.problem.return_lse)
        output = OutputAccumulator.of(
            mine.partition_shape_C((config.tile_m, tiles.tile_dv)), config.o_fp32, tiles.dtype
        )
        begin, full_begin, full_end, end = bounds.tiles()

        # Only the last tile of keys can overhang the sequence, and it is loaded here; the loop loads whole tiles.
        load_q.load_edge(work.tile, 0)
        if end > begin:
            load_k.load_edge(end - 1, 0)
        cute.arch.cp_async_commit_group()
        if const_expr(not config.share_kv):
            if end > begin:
                load_v.load_edge(end - 1, 0)
            cute.arch.cp_async_commit_group()
        if const_expr(config.q_in_regs):
            cute.arch.cp_async_wait_group(0 if config.share_kv else 1)
            cute.arch.sync_threads()
            for step in range_constexpr(q.steps):
                q.fetch(step, 0)

        for i in cutlass.range(end - begin):
            tile = end - 1 - i
            stage = i % config.ring

            # K has landed (and V, but where they share a tile); all warps are done with the tiles before
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if const_expr(config.num_stages == 4):
                if tile > begin:
                    load_k.load(tile - 1, 1 - stage)
                    load_v.load(tile - 1, 1 - stage)
                cute.arch.cp_async_commit_group()
            elif const_expr(config.num_stages == 2):
                if i > 0:
                    load_v.load(tile, 0)
                cute.arch.cp_async_commit_group()
            scores = cute.make_rmem_tensor(scores_shape, Float32)
            scores.fill(0.0)
            gemm_scores(mma, scores, q, k, stage, config.q_in_regs)

            # K's tile is free: the next K, or V where they share it, comes in under the softmax
            if const_expr(config.num_stages == 2):
                cute.arch.cp_async_wait_group(0)
                cute.arch.sync_threads()
                if tile > begin:
                    load_k.load(tile - 1, 0)
                cute.arch.cp_async_commit_group()
            elif const_expr(config.share_kv):
                cute.arch.sync_threads()
                load_v.load_edge(tile, 0)
                cute.arch.cp_async_commit_group()

            score_rows = cute.make_tensor(scores.iterator, rows_and_columns(scores.layout))
            for zero in cutlass.range(once_if((tile >= full_end) | (tile < full_begin)), unroll=1):
                bounds.hide(score_rows, tiles.positions(thread + zero, config.tile_n), tile * config.tile_n + zero)
            seen, times = softmax.advance(score_rows)
            for zero in cutlass.range(times, unroll=1):
                output.shrink(softmax.shrink(seen, zero))
            if const_expr(config.share_kv):
                cute.arch.cp_async_wait_group(0)
                cute.arch.sync_threads()
            gemm_output(mma, output.accumulators, scores, v, stage, softmax)
            output.settle()
            if const_expr(config.share_kv):
                cute.arch.sync_threads()
                if tile > begin:
                    load_k.load(tile - 1, 0)
                cute.arch.cp_async_commit_group()

        cute.arch.cp_async_wait_group(0)
        self.store(inputs, shared, softmax, output)

    @cute.jit
    def store(self, inputs: Inputs, shared: SharedTiles, softmax: OnlineSoftmax, output: OutputAccumulator) -> None:
        """The block's results. Where they go is computed anew here, not kept in registers through the main loop."""
        tiles, config = self.tiles, self.config
        thread, block = fresh(cute.arch.thread_idx()[0]), fresh(cute.arch.block_idx()[0])
        work = self.work(inputs, block)
        first_row = work.tile * config.tile_m
        positions = tiles.positions(thread, tiles.tile_dv)
        lse = None if const_expr(inputs.lse is None) else cute.make_rmem_tensor(softmax.rows, Float32)
        rounded = output.rounded(softmax.finish(lse))
        target = OutputTile.of(tiles, self.rows(inputs.out, work, work.head, work.q_start), work.q_len, first_row)
        if const_expr(config.o_store == "smem"):
            cute.arch.sync_threads()  # every warp has read its last of Q
            target.store_through_smem(rounded, shared.o[None, None, 0], thread)
        else:
            target.store_by_shuffles(cute.make_tensor(rounded.iterator, rows_and_columns(rounded.layout)), positions)
        if const_expr(lse is not None):
            lse_rows = self.rows(inputs.lse, work, work.head, work.q_start)
            for r in range_constexpr(softmax.rows):
                row = first_row + positions[r, 0][0]
                if (row < work.q_len) & (positions[0, 0][1] == 0):
                    lse_rows[row] = lse[r]
