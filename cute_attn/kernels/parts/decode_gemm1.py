"""gemm1 of the "roles" arrangement: warps that multiply the weights of gemm0 by V.

A group of warps reads tiles of V of its own and splits their head dim. With 2 groups, head dim 128 and tiles of 64:

    tokens of a step   |  0-63  | 64-127 | 128-191 | 192-255 |
    gemm0 warp             0        1         2         3
    gemm1 group            0        1         0         1        (warps 4, 5: dims 0-63, 64-127; warps 6, 7: the same)

Each group has maxima and sums of its own; the groups' results are merged at the end.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr

from cute_attn.decode_configs import GEMM0_WARPS, TOKENS_PER_GEMM0_WARP, RolesConfig
from cute_attn.kernels.parts import mbarrier
from cute_attn.kernels.parts.cache_tiles import TileCopier
from cute_attn.kernels.parts.decode_gemm0 import Exchange, WarpPlace
from cute_attn.kernels.parts.decode_output import RowStats
from cute_attn.kernels.parts.decode_products import Products
from cute_attn.kernels.parts.decode_softmax import rescale
from cute_attn.kernels.parts.instructions import load_shared_words, pack, unpack, wait_for_all_but
from cute_attn.kernels.parts.rare import once_if
from cute_attn.kernels.parts.softmax import exp2, finite_or_zero


@dataclass(frozen=True)
class ValueTiles:
    """V's way to a gemm1 warp.

    Attributes:
        config: tiles and buffers.
        copier: of the part of a tile that this warp copies.
        products: with the part of a tile that it multiplies.
        ring: address of the buffers of the warp, or of its group.
        buffer_bytes: of one of them.
        copied_row: the tile's row at which what this warp copies begins.
        copied: offset in a buffer of what this warp copies.
        by_group: the warps of the group load together.
    """

    config: RolesConfig
    copier: TileCopier
    products: Products
    ring: Int32
    buffer_bytes: int
    copied_row: Int32
    copied: Int32
    by_group: bool

    def buffer(self, number: Int32) -> Int32:
        return self.ring + number % self.config.v_buffers * self.buffer_bytes


@cute.jit
def run_gemm1(
    config: RolesConfig, values: ValueTiles, exchange: Exchange, place: WarpPlace, output: cute.Tensor
) -> RowStats:
    """All tiles of a gemm1 warp, into ``output``; returns what is known of its columns."""
    products, lane = values.products, place.lane
    columns, blocks_m = 2 * products.blocks_m, products.blocks_m
    with_lse = products.problem.return_lse
    row_max, row_sum, exact_sum = (cute.make_rmem_tensor(columns, Float32) for _ in range(3))
    row_max.fill(-Float32.inf)
    row_sum.fill(0.0)
    exact_sum.fill(0.0)
    operand_max = cute.make_rmem_tensor(blocks_m, Float32)  # row_max of the rows of the lane's operand P
    operand_max.fill(-Float32.inf)
    output.fill(0.0)

    tiles_per_step = GEMM0_WARPS * TOKENS_PER_GEMM0_WARP // config.v_tile // place.groups
    tiles = place.steps * tiles_per_step
    ahead = config.v_buffers - 1
    for n in range_constexpr(ahead):
        _load_tile(values, exchange, place, Int32(n), tiles, tiles_per_step)
    for n in cutlass.range(tiles, unroll=1):
        step = n // tiles_per_step
        in_step = n % tiles_per_step * place.groups + place.group  # the tile's number in its step
        source = in_step * config.v_tile // TOKENS_PER_GEMM0_WARP  # the gemm0 warp that made its P
        first_block = in_step * config.v_tile % TOKENS_PER_GEMM0_WARP // 16
        if const_expr(not values.by_group):
            # Other lanes are done with the buffer that is filled next.
            cute.arch.sync_warp()
        _load_tile(values, exchange, place, n + ahead, tiles, tiles_per_step)

        mbarrier.wait(exchange.barriers.at("p_full", source), step)
        weights = []
        for block_n in range_constexpr(products.blocks_n):
            of_block = []
            for block_m in range_constexpr(blocks_m):
                of_block.append(load_shared_words(exchange.p_at(config, source, first_block + block_n, block_m, lane)))
            weights.append(of_block)
        # With two tiles of V to a tile of P, the first takes the sums.
        counts = Float32(1.0) if first_block == 0 else Float32(0.0)
        moved = cutlass.Boolean(False)
        lower = cutlass.Boolean(False)
        factors = cute.make_rmem_tensor(columns, Float32)
        for c in range_constexpr(columns):
            row = 8 * (c // 2) + lane % 4 * 2 + c % 2
            tile_max = exchange.row_max[source, row]
            seen = row_max[c]
            row_max[c] = cute.arch.fmax(seen, tile_max)
            shift = finite_or_zero(row_max[c])
            factors[c] = exp2(seen - shift)
            tile_factor = exp2(tile_max - shift) * counts
            row_sum[c] = row_sum[c] * factors[c] + exchange.row_sum[source, row] * tile_factor
            if const_expr(with_lse):
                exact_sum[c] = exact_sum[c] * factors[c] + exchange.exact_sum[source, row] * tile_factor
            moved = moved | (row_max[c] > seen)
        operand_factors = cute.make_rmem_tensor(blocks_m, Float32)
        for block_m in range_constexpr(blocks_m):
            tile_max = exchange.row_max[source, 8 * block_m + lane // 4]
            operand_max[block_m] = cute.arch.fmax(operand_max[block_m], tile_max)
            operand_factors[block_m] = exp2(tile_max - finite_or_zero(operand_max[block_m]))
            lower = lower | (operand_max[block_m] > tile_max)
        if const_expr(config.row_max == "with_p"):
            back = exchange.row_max_back
            if (place.warp == 0) & (first_block == 0) & (lane < 4):
                for c in range_constexpr(columns):
                    back[source, 8 * (c // 2) + lane * 2 + c % 2] = row_max[c]
        cute.arch.sync_warp()
        if lane == 0:
            mbarrier.arrive(exchange.barriers.at("p_empty", source))

        for _ in cutlass.range(once_if(cute.arch.vote_any_sync(moved)), unroll=1):
            rescale(products, output, factors)
        words = cute.make_rmem_tensor(2 * blocks_m * products.blocks_n, Uint32)
        for block_n in range_constexpr(products.blocks_n):
            for block_m in range_constexpr(blocks_m):
                for i in range_constexpr(2):
                    words[2 * (block_n * blocks_m + block_m) + i] = weights[block_n][block_m][i]
        for _ in cutlass.range(once_if(cute.arch.vote_any_sync(lower)), unroll=1):
            _shrink(products, words, operand_factors)
        if const_expr(values.by_group):
            buffer_number = place.group * config.v_buffers + n % config.v_buffers
            mbarrier.wait(exchange.barriers.at("v_full", buffer_number), n // config.v_buffers)
        else:
            wait_for_all_but(ahead)
        operands = [
            [[words[2 * (k * blocks_m + m) + i] for i in range(2)] for m in range(blocks_m)]
            for k in range(products.blocks_n)
        ]
        products.multiply_values(output, operands, values.buffer(n), lane)
        if const_expr(values.by_group):
            cute.arch.sync_warp()
            if lane == 0:
                mbarrier.arrive(exchange.barriers.at("v_empty", place.group * config.v_buffers + n % config.v_buffers))
    cute.arch.cp_async_wait_group(0)
    return RowStats(row_max, row_sum, exact_sum if with_lse else None)


@cute.jit
def _shrink(products: Products, words: cute.Tensor, factors: cute.Tensor) -> None:
    """P of a tile whose maximum lies below the group's, relative to that one. Rare once maxima have settled."""
    for block_n in range_constexpr(products.blocks_n):
        for block_m in range_constexpr(products.blocks_m):
            for i in range_constexpr(2):
                at = 2 * (block_n * products.blocks_m + block_m) + i
                low, high = unpack(products.dtype, words[at])
                words[at] = pack(products.dtype, low * factors[block_m], high * factors[block_m])


@cute.jit
def _load_tile(
    values: ValueTiles, exchange: Exchange, place: WarpPlace, n: Int32, tiles: Int32, tiles_per_step: int
) -> None:
    """Starts the copy of a tile of V, if there is one of that number."""
    config = values.config
    in_step = n % tiles_per_step * place.groups + place.group
    token = place.token(n // tiles_per_step) + in_step * config.v_tile + values.copied_row
    pages = values.copier.make_pages()
    buffer_number = place.group * config.v_buffers + n % config.v_buffers
    if n < tiles:
        values.copier.fetch_pages(token, pages)
        if const_expr(values.by_group):
            # Before the first round all buffers are free, which a wait for the phase before the first says.
            mbarrier.wait(exchange.barriers.at("v_empty", buffer_number), n // config.v_buffers + 1)
        values.copier.copy(token, pages, values.buffer(n) + values.copied, place.work.begin, place.work.end)
        if const_expr(values.by_group):
            mbarrier.arrive_when_copied(exchange.barriers.at("v_full", buffer_number))
    if const_expr(not values.by_group):
        cute.arch.cp_async_commit_group()
