"""gemm0 of the "roles" arrangement: a warp that makes weights, P, of 64 tokens a step, and hands them to gemm1."""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from cute_attn.decode_configs import GEMM0_WARPS, TOKENS_PER_GEMM0_WARP, RolesConfig
from cute_attn.kernels.parts import mbarrier
from cute_attn.kernels.parts.cache_tiles import CHUNK_BYTES, CacheRows, TileCopier, TileLayout
from cute_attn.kernels.parts.decode_products import Products
from cute_attn.kernels.parts.decode_softmax import ColumnSoftmax, ScoreMaker, TokenBounds
from cute_attn.kernels.parts.decode_work import DecodeWork
from cute_attn.kernels.parts.instructions import store_shared_words, wait_for_all_but
from cute_attn.kernels.parts.roles import Barriers


@dataclass(frozen=True)
class WarpPlace:
    """Where a warp stands.

    Attributes:
        work: of the block.
        offset: tokens from the begin of a step to the warp's part of it; 0 for gemm1.
        steps: of the block.
        warp: in its role, for gemm1 in its group.
        lane: in the warp.
        group, groups: of gemm1: the warp's group, and how many there are (static).
    """

    work: DecodeWork
    offset: Int32
    steps: Int32
    warp: Int32
    lane: Int32
    group: Int32
    groups: int

    def token(self, step: Int32) -> Int32:
        """The first token of the warp's part of a step."""
        return self.work.first_token + step * self.work.stride + self.offset


@dataclass(frozen=True)
class Exchange:
    """Shared memory between gemm0 and gemm1.

    Attributes:
        p: address of the P tiles: words of operands B, as (warp, block of 16 tokens, block of rows, lane, 2).
        row_max, row_sum, exact_sum: (gemm0 warp, tile_m) of the tile of P of each.
        row_max_back: (gemm0 warp, tile_m) of the gemm1 group that read the tile before.
        barriers: between the two.
    """

    p: Int32
    row_max: cute.Tensor
    row_sum: cute.Tensor
    exact_sum: cute.Tensor
    row_max_back: cute.Tensor
    barriers: Barriers

    @staticmethod
    def of(config: RolesConfig, memory: cute.Pointer, barriers: Barriers) -> "Exchange":
        """In ``memory``, which has room for the P tiles and four tensors of a float a row."""
        floats = cute.recast_ptr(memory + config.p_bytes, dtype=Float32)
        layout = cute.make_layout((GEMM0_WARPS, config.tile_m), stride=(config.tile_m, 1))
        row_max, row_sum, exact_sum, back = (
            cute.make_tensor(floats + i * GEMM0_WARPS * config.tile_m, layout) for i in range(4)
        )
        return Exchange(Int32(memory.toint()), row_max, row_sum, exact_sum, back, barriers)

    def p_at(self, config: RolesConfig, warp: Int32, block_n: Int32 | int, block_m: int, lane: Int32) -> Int32:
        """Address of a lane's two words of P."""
        blocks_m, blocks_n = config.tile_m // 8, TOKENS_PER_GEMM0_WARP // 16
        return self.p + (((warp * blocks_n + block_n) * blocks_m + block_m) * 32 + lane) * 8


@dataclass(frozen=True)
class KeyParts:
    """K's way to a gemm0 warp: parts of the head dim, through a ring of buffers.

    Attributes:
        copiers: of each part (static list).
        products: of each part.
        first_blocks: the block of 16 dims at which each begins.
        buffers: in the ring.
        ring: its address.
    """

    copiers: list[TileCopier]
    products: list[Products]
    first_blocks: list[int]
    buffers: int
    ring: Int32

    @staticmethod
    def of(config: RolesConfig, products: Products, rows: CacheRows, ring: Int32, lane: Int32) -> "KeyParts":
        problem = products.problem
        chunks = problem.row_bytes // CHUNK_BYTES
        at_once = min(config.k_part_bytes // CHUNK_BYTES, chunks)
        copiers, of_parts, first_blocks = [], [], []
        for first in range(0, chunks, at_once):
            layout = TileLayout(TOKENS_PER_GEMM0_WARP, min(at_once, chunks - first))
            shifted = replace(rows, base=rows.base + first * CHUNK_BYTES)
            copiers.append(TileCopier.of(layout, shifted, lane))
            of_parts.append(replace(products, layout=layout))
            first_blocks.append(first // problem.cache_bytes)
        return KeyParts(copiers, of_parts, first_blocks, config.k_buffers, ring)

    @property
    def count(self) -> int:
        return len(self.copiers)

    def buffer(self, number: Int32) -> Int32:
        """Address of the buffer of a part, by its number among all parts of all steps."""
        size = TOKENS_PER_GEMM0_WARP * self.copiers[0].layout.row_bytes
        return self.ring + number % self.buffers * size


@cute.jit
def run_gemm0(config: RolesConfig, keys: KeyParts, maker: ScoreMaker, exchange: Exchange, place: WarpPlace) -> None:
    """All steps of a gemm0 warp."""
    products, bounds = keys.products[0], maker.bounds
    warp, lane = place.warp, place.lane
    count, ahead = keys.count, keys.buffers - 1
    softmax = ColumnSoftmax.of(products, products.problem.return_lse)
    p_full, p_empty = exchange.barriers.at("p_full", warp), exchange.barriers.at("p_empty", warp)

    # Parts are numbered through all steps; part n is loaded while part n - ahead is multiplied.
    for n in range_constexpr(ahead):
        _load_part(keys, Int32(n), n % count, place, bounds)
    for step in cutlass.range(place.steps, unroll=1):
        token = place.token(step)
        scores = products.make_scores()
        scores.fill(0.0)
        for part in range_constexpr(count):
            number = step * count + part
            wait_for_all_but(ahead - 1)
            _load_part(keys, number + ahead, (part + ahead) % count, place, bounds)
            first_block = keys.first_blocks[part]
            keys.products[part].multiply_keys(scores, maker.queries.words, keys.buffer(number), lane, first_block)
        maker.scale.apply(products, scores)
        if not bounds.is_full(token, TOKENS_PER_GEMM0_WARP):
            bounds.hide(products, scores, token, lane)
        if const_expr(config.row_max == "with_p"):
            # Known sooner, gemm1's maximum is used sooner: the wait for P's buffer comes before the softmax.
            mbarrier.wait(p_empty, step + 1)
            for c in range_constexpr(softmax.columns):
                softmax.raise_to(c, exchange.row_max_back[warp, _row(c, lane)])
        softmax.advance(scores, None)
        weights = softmax.weigh(scores)
        softmax.finish()
        if const_expr(config.row_max == "none"):
            mbarrier.wait(p_empty, step + 1)
        _hand_over(config, exchange, softmax, weights, warp, lane)
        cute.arch.sync_warp()
        if lane == 0:
            mbarrier.arrive(p_full)
    cute.arch.cp_async_wait_group(0)


def _row(column: int, lane: Int32) -> Int32:
    """The row of a lane's column of S^T."""
    return 8 * (column // 2) + lane % 4 * 2 + column % 2


@cute.jit
def _load_part(keys: KeyParts, number: Int32, part: int, place: WarpPlace, bounds: TokenBounds) -> None:
    """Starts the copy of a part, by its number among those of all steps, if there is such; closes its group."""
    copier = keys.copiers[part]
    step = number // keys.count
    token = place.token(step)
    pages = copier.make_pages()
    if step < place.steps:
        copier.fetch_pages(token, pages)
        copier.copy(token, pages, keys.buffer(number), bounds.work.begin, bounds.work.end)
    cute.arch.cp_async_commit_group()


@cute.jit
def _hand_over(
    config: RolesConfig, exchange: Exchange, softmax: ColumnSoftmax, weights: list, warp: Int32, lane: Int32
) -> None:
    """P and what is known of its rows, into shared memory."""
    for block_n in range_constexpr(len(weights)):
        for block_m in range_constexpr(len(weights[block_n])):
            store_shared_words(exchange.p_at(config, warp, block_n, block_m, lane), weights[block_n][block_m])
    row_max, row_sum, exact_sum = exchange.row_max, exchange.row_sum, exchange.exact_sum
    if lane < 4:
        for c in range_constexpr(softmax.columns):
            row_max[warp, _row(c, lane)] = softmax.row_max[c]
            row_sum[warp, _row(c, lane)] = softmax.row_sum[c]
            if const_expr(softmax.exact_sum is not None):
                exact_sum[warp, _row(c, lane)] = softmax.exact_sum[c]
