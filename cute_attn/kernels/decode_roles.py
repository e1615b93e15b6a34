"""The "roles" arrangement of decode: four warps multiply by K, four by V, with mbarriers between them.

It is the arrangement of the kernel that this work started from (see the README); the code is independent of it. Roles
and barriers are declared in ``parts.roles``, and each role has a file of its own.
"""

from dataclasses import replace

import cutlass.cute as cute
from cutlass import Float32, Int32, range_constexpr

from cute_attn.decode_configs import GEMM0_WARPS, TOKENS_PER_GEMM0_WARP, WARP, RolesConfig
from cute_attn.decode_problem import DecodeArguments
from cute_attn.kernels.parts import mbarrier
from cute_attn.kernels.parts.cache_tiles import CHUNK_BYTES, CacheRows, TileCopier, TileLayout
from cute_attn.kernels.parts.decode_gemm0 import Exchange, KeyParts, WarpPlace, run_gemm0
from cute_attn.kernels.parts.decode_gemm1 import ValueTiles, run_gemm1
from cute_attn.kernels.parts.decode_output import DecodeOutput
from cute_attn.kernels.parts.decode_products import Products, load_queries
from cute_attn.kernels.parts.decode_softmax import Scales, ScoreMaker, ScoreScale, TokenBounds
from cute_attn.kernels.parts.decode_work import DecodeWork
from cute_attn.kernels.parts.roles import RINGS_READ, Barriers, edges

FLAG_BYTES = 16  # at the begin of the barriers' memory


@cute.jit
def attend_by_roles(kernel: tuple, arguments: DecodeArguments, scales: Scales, work: DecodeWork, memory: tuple) -> None:
    """One block.

    Args:
        kernel: (products with any layout, config).
        memory: (of tiles, of what is kept to the end, the flag in the latter).
    """
    (products, config), (tiles, kept, flag) = kernel, memory
    problem = products.problem
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = thread // WARP, thread % WARP
    barriers = Barriers(edges(config, problem), Int32(kept.toint()) + FLAG_BYTES)
    exchange = Exchange.of(config, kept + (config.kept_bytes(problem) - exchange_bytes(config)), barriers)
    _begin(config, barriers, exchange, thread)

    steps = max(cute.ceil_div(work.end - work.first_token, work.stride), 0)
    block = work.place
    rows_k = CacheRows.of(problem, arguments.k, arguments.k_page_table, block.batch, block.head_kv)
    rows_v = CacheRows.of(problem, arguments.v, arguments.v_page_table, block.batch, block.head_kv)
    target = DecodeOutput.of((problem, config), arguments, scales, work, (tiles, flag))
    ring = Int32(tiles.toint())
    if warp < GEMM0_WARPS:
        whole = replace(products, layout=TileLayout.of(problem, TOKENS_PER_GEMM0_WARP))
        keys = KeyParts.of(config, products, rows_k, ring + warp * config.k_bytes(problem), lane)
        queries = load_queries(whole, arguments.q, block, lane)
        queries.complete(whole, lane)
        scale = ScoreScale(scales, arguments.softcap if problem.softcap else None, queries.factors)
        maker = ScoreMaker(queries, scale, TokenBounds.of(work, problem, arguments))
        place = WarpPlace(work, warp * TOKENS_PER_GEMM0_WARP, steps, warp, lane, Int32(0), 1)
        run_gemm0(config, keys, maker, exchange, place)
        cute.arch.barrier_arrive(barrier_id=RINGS_READ, number_of_threads=config.num_threads)
    else:
        in_group = config.warps_per_group(problem)
        number = warp - GEMM0_WARPS
        place = WarpPlace(work, Int32(0), steps, number % in_group, lane, number // in_group, config.groups(problem))
        values = _values(config, products, rows_v, ring + GEMM0_WARPS * config.k_bytes(problem), place)
        output = values.products.make_output()
        stats = run_gemm1(config, values, exchange, place, output)
        cute.arch.barrier(barrier_id=RINGS_READ, number_of_threads=config.num_threads)  # results take their place
        first_dim = place.warp * (problem.head_dim // in_group)
        target.put(values.products, output, place.group, first_dim, lane)
        if place.warp == 0:
            target.put_stats(stats, place.group, lane)
    target.store(thread)


def exchange_bytes(config: RolesConfig) -> int:
    return config.p_bytes + 4 * GEMM0_WARPS * config.tile_m * 4


@cute.jit
def _begin(config: RolesConfig, barriers: Barriers, exchange: Exchange, thread: Int32) -> None:
    """Barriers, and the row max that gemm1 has seen, before anything uses them."""
    if thread == 0:
        for edge in barriers.edges:
            for i in range_constexpr(edge.count):
                mbarrier.init(barriers.at(edge.name, i), edge.arrivals)
    back = exchange.row_max_back
    if thread < GEMM0_WARPS * config.tile_m:
        back[thread // config.tile_m, thread % config.tile_m] = -Float32.inf
    cute.arch.sync_threads()


def _values(config: RolesConfig, products: Products, rows: CacheRows, rings: Int32, place: WarpPlace) -> ValueTiles:
    """How a gemm1 warp loads and reads V: rows of the whole head dim for a group, or of its own part of it."""
    problem = products.problem
    in_group = config.warps_per_group(problem)
    chunks = problem.row_bytes // CHUNK_BYTES // in_group  # of the warp's part of the head dim
    ring = rings + place.group * config.v_bytes(problem)
    if config.group_loads_v(problem):
        whole = TileLayout.of(problem, config.v_tile)
        mine = replace(whole, tokens=config.v_tile // in_group)
        row = place.warp * mine.tokens
        return ValueTiles(
            config=config,
            copier=TileCopier.of(mine, rows, place.lane),
            products=replace(products, layout=whole, parts=in_group, part=place.warp),
            ring=ring,
            buffer_bytes=whole.bytes,
            copied_row=row,
            copied=row * whole.row_bytes,
            by_group=True,
        )
    part = TileLayout(config.v_tile, chunks)
    shifted = replace(rows, base=rows.base + place.warp * (chunks * CHUNK_BYTES))
    return ValueTiles(
        config=config,
        copier=TileCopier.of(part, shifted, place.lane),
        products=replace(products, layout=part),
        ring=ring + place.warp * (config.v_buffers * part.bytes),
        buffer_bytes=part.bytes,
        copied_row=Int32(0),
        copied=Int32(0),
        by_group=False,
    )
