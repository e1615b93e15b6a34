"""Decode attention: a few queries of each sequence over a long cache, at the memory's speed, on every GPU from sm_80.

The cache's tokens are the wide side of the tensor cores' products, and the query rows that share a head of the cache
their 8 (16, 32) columns, so that the cache is read once and next to nothing is padded (see ``parts.decode_products``).

Arrangement "streams". Each warp streams tiles of its own, and has a softmax of its own; there is no barrier between
warps before the end, so that nothing keeps the memory waiting:

    tokens    | tile 0 | tile 1 | tile 2 | tile 3 | tile 4 | tile 5 | ...
    warp          0        1        2        3        0        1              of 4

    a warp's ring of 3 stages, K and V each (cp.async groups of one warp, waited for by that warp alone):

        step 0     | compute K0 V0 |  in flight: K1 V1, K2 V2
        step 1     | compute K1 V1 |  in flight: K2 V2, K3 V3 (where tile 0 was)

At the end the warps' results are merged in shared memory, and those of blocks that share a sequence in global memory
(see ``parts.decode_output``): "flash decoding", https://pytorch.org/blog/flash-decoding/.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from cute_attn.arch import Arch
from cute_attn.decode_configs import BARRIER_BYTES, WARP, DecodeConfig
from cute_attn.decode_problem import DecodeArguments, DecodeProblem
from cute_attn.kernels.parts.cache_tiles import CacheRows, TileCopier
from cute_attn.kernels.parts.decode_output import DecodeOutput
from cute_attn.kernels.parts.decode_products import Products, load_queries
from cute_attn.kernels.parts.decode_softmax import ColumnSoftmax, ScoreScale, TokenBounds
from cute_attn.kernels.parts.decode_work import DecodeWork, decode_work


class DecodeKernel:
    """The decode kernel of one problem and config; call it under ``cute.compile``."""

    def __init__(self, problem: DecodeProblem, config: DecodeConfig, arch: Arch):
        self.problem = problem
        self.config = config
        self.products = Products(problem, config.tile_m, config.tile_n, arch.capability)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        lengths: cute.Tensor,
        k_page_table: cute.Tensor | None,
        v_page_table: cute.Tensor | None,
        sinks: cute.Tensor | None,
        k_scale: cute.Tensor | None,
        v_scale: cute.Tensor | None,
        partials: cute.Tensor,
        semaphores: cute.Tensor,
        scale_log2: Float32,
        v_factor: Float32,
        softcap: Float32,
        window: Int32,
        num_splits: Int32,
        split_size: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launches the kernel; the arguments are those of ``DecodeArguments``."""
        arguments = DecodeArguments(
            q, k, v, out, lse, lengths, k_page_table, v_page_table, sinks, k_scale, v_scale, partials, semaphores,
            scale_log2, v_factor, softcap, window, num_splits, split_size,
        )  # fmt: skip
        heads_kv = k.shape[2]
        rows = q.shape[2] // heads_kv * q.shape[1]
        row_tiles = cute.ceil_div(rows, self.config.tile_m)
        self.kernel(arguments).launch(
            grid=(row_tiles * heads_kv, q.shape[0], num_splits),
            block=(self.config.num_threads, 1, 1),
            min_blocks_per_mp=self.config.blocks_per_multiprocessor,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, arguments: DecodeArguments) -> None:
        """One block: a tile of rows over its part of their sequence."""
        work = decode_work(arguments, self.problem, self.config)
        smem = cutlass.memory.SmemAllocator()
        memory = smem.allocate_array(
            cutlass.Uint8, self.config.smem_bytes(self.problem) - BARRIER_BYTES, byte_alignment=128
        )
        flag = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=16)
        if work.has_part:
            self.attend(arguments, work, memory, flag)

    @cute.jit
    def attend(self, arguments: DecodeArguments, work: DecodeWork, memory: cute.Pointer, flag: cute.Tensor) -> None:
        """The warp's stream, and what the block makes of its warps' results."""
        problem, config, products = self.problem, self.config, self.products
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread // WARP, thread % WARP
        layout = products.layout
        rows_k = CacheRows.of(problem, arguments.k, arguments.k_page_table, work.batch, work.head_kv)
        rows_v = CacheRows.of(problem, arguments.v, arguments.v_page_table, work.batch, work.head_kv)
        copy_k, copy_v = TileCopier.of(layout, rows_k, lane), TileCopier.of(layout, rows_v, lane)
        stage_bytes = 2 * layout.bytes
        ring = Int32(memory.toint()) + warp * (config.num_stages * stage_bytes)

        # The warp's tiles begin at ``token``, ``token + step``, ...
        step = config.tile_tokens
        first = work.begin // config.tile_n * config.tile_n + warp * config.tile_n
        tiles = max(cute.ceil_div(work.end - first, step), 0)
        pages_k = cute.make_rmem_tensor(copy_k.page_count, Int32)
        pages_v = cute.make_rmem_tensor(copy_v.page_count, Int32)
        pages_k.fill(0)
        pages_v.fill(0)
        for stage in range_constexpr(config.num_stages - 1):
            token = first + stage * step
            copy_k.fetch_pages(token, pages_k)
            copy_v.fetch_pages(token, pages_v)
            if stage < tiles:
                copy_k.copy(token, pages_k, ring + stage * stage_bytes, work.begin, work.end)
            cute.arch.cp_async_commit_group()
            if stage < tiles:
                copy_v.copy(token, pages_v, ring + stage * stage_bytes + layout.bytes, work.begin, work.end)
            cute.arch.cp_async_commit_group()
        ahead = config.num_stages - 1
        copy_k.fetch_pages(first + ahead * step, pages_k)
        copy_v.fetch_pages(first + ahead * step, pages_v)

        queries = load_queries(products, arguments.q, work, lane)
        scale_log2 = arguments.scale_log2
        if const_expr(problem.quantised):
            scale_log2 = scale_log2 * arguments.k_scale[0]
        scale = ScoreScale(scale_log2, arguments.softcap if problem.softcap else None, queries.factors)
        bounds = TokenBounds(work, problem.bounded_left, arguments.window)
        softmax = ColumnSoftmax.of(products, problem.return_lse)
        output = products.make_output()
        output.fill(0.0)

        slot = Int32(0)
        free_slot = Int32(ahead)
        for i in cutlass.range(tiles, unroll=1):
            token = first + i * step
            tile_k = ring + slot * stage_bytes
            wait_for_all_but(2 * ahead - 1)
            target = ring + free_slot * stage_bytes
            if i + ahead < tiles:
                copy_k.copy(token + ahead * step, pages_k, target, work.begin, work.end)
            cute.arch.cp_async_commit_group()
            if i + ahead < tiles:
                copy_v.copy(token + ahead * step, pages_v, target + layout.bytes, work.begin, work.end)
            cute.arch.cp_async_commit_group()
            copy_k.fetch_pages(token + (ahead + 1) * step, pages_k)
            copy_v.fetch_pages(token + (ahead + 1) * step, pages_v)

            scores = products.make_scores()
            products.multiply_keys(scores, queries.words, tile_k, lane)
            scale.apply(products, scores)
            if not bounds.is_full(token, config.tile_n):
                bounds.hide(products, scores, token, lane)
            softmax.advance(scores, output)
            weights = softmax.weigh(scores)
            wait_for_all_but(2 * ahead)
            products.multiply_values(output, weights, tile_k + layout.bytes, lane)
            free_slot = slot
            slot = slot + 1 if slot < ahead else Int32(0)

        softmax.finish()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()  # all warps are done with their rings
        target = DecodeOutput.of(problem, config, arguments, work, memory, flag)
        target.put_warp(products, softmax, output, warp, lane)
        target.store(thread)


def wait_for_all_but(groups: int) -> None:
    """All but the newest ``groups`` groups of copies have landed, of every lane of the warp."""
    cute.arch.cp_async_wait_group(groups)
    cute.arch.sync_warp()
