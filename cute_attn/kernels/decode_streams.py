"""The "streams" arrangement of decode: each warp streams tiles of its own, with a softmax and an O of its own.

There is no barrier between warps before the end, so that nothing keeps the memory waiting:

    tokens    | tile 0 | tile 1 | tile 2 | tile 3 | tile 4 | tile 5 | ...
    warp          0        1        2        3        0        1              of 4

A warp's ring is in ``parts.warp_stream``.
"""

import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_attn.decode_configs import WARP
from cute_attn.decode_problem import DecodeArguments
from cute_attn.kernels.parts.cache_tiles import CacheRows, TileCopier
from cute_attn.kernels.parts.decode_output import DecodeOutput, RowStats
from cute_attn.kernels.parts.decode_products import Products, load_queries
from cute_attn.kernels.parts.decode_softmax import ColumnSoftmax, Scales, ScoreMaker, ScoreScale, TokenBounds
from cute_attn.kernels.parts.decode_work import DecodePlace, decode_work, first_token_of, stride_of
from cute_attn.kernels.parts.warp_stream import FirstPages, WarpStream


@cute.jit
def attend_by_streams(
    kernel: tuple, arguments: DecodeArguments, scales: Scales, place: DecodePlace, memory: tuple, length: Int32
) -> None:
    """One block. What does not depend on the length is under way before that is known.

    Args:
        kernel: (products of a warp's tiles, config).
        memory: (of tiles, a flag).
        length: of the sequence, as it stands in memory.
    """
    (products, config), problem = kernel, kernel[0].problem
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = thread // WARP, thread % WARP
    layout = products.layout
    rows_k = CacheRows.of(problem, arguments.k, arguments.k_page_table, place.batch, place.head_kv)
    rows_v = CacheRows.of(problem, arguments.v, arguments.v_page_table, place.batch, place.head_kv)
    copy_k, copy_v = TileCopier.of(layout, rows_k, lane), TileCopier.of(layout, rows_v, lane)
    pages = FirstPages.of(copy_k, copy_v, config)
    offset = warp * config.tile_n
    if const_expr(not problem.bounded_left):
        pages.fetch(first_token_of(arguments, config, place, Int32(0)) + offset, stride_of(arguments, config))
    queries = load_queries(products, arguments.q, place, lane)
    scale = ScoreScale(scales, arguments.softcap if problem.softcap else None, queries.factors)

    work = decode_work(arguments, problem, config, place, length)
    if work.has_part:
        if const_expr(problem.bounded_left):
            pages.fetch(work.first_token + offset, work.stride)
        ring = Int32(memory[0].toint()) + warp * (config.num_stages * 2 * layout.bytes)
        stream = WarpStream(config, pages, ring, work, offset)
        maker = ScoreMaker(queries, scale, TokenBounds.of(work, problem, arguments))
        softmax, output = run_stream(stream, products, maker, lane)
        target = DecodeOutput.of((problem, config), arguments, scales, work, memory)
        cute.arch.sync_threads()  # all warps are done with their rings
        target.put(products, output, warp, Int32(0), lane)
        target.put_stats(RowStats(softmax.row_max, softmax.row_sum, softmax.exact_sum), warp, lane)
        target.store(thread)


@cute.jit
def run_stream(
    stream: WarpStream, products: Products, maker: ScoreMaker, lane: Int32
) -> tuple[ColumnSoftmax, cute.Tensor]:
    """A warp's main loop; returns what it knows of its columns, and O^T."""
    config, queries, bounds = stream.config, maker.queries, maker.bounds
    softmax = ColumnSoftmax.of(products, products.problem.return_lse)
    output = products.make_output()
    output.fill(0.0)
    stream.start()
    queries.complete(products, lane)
    token = stream.first_token
    slot = Int32(0)
    while token < stream.end:
        tile_k = stream.next_keys(token, slot)
        scores = products.make_scores()
        scores.fill(0.0)
        products.multiply_keys(scores, queries.words, tile_k, lane)
        maker.scale.apply(products, scores)
        if not bounds.is_full(token, config.tile_n):
            bounds.hide(products, scores, token, lane)
        softmax.advance(scores, output)
        weights = softmax.weigh(scores)
        stream.wait_for_values()
        products.multiply_values(output, weights, tile_k + products.layout.bytes, lane)
        token = token + stream.stride
        slot = slot + 1 if slot < config.num_stages - 1 else Int32(0)
    softmax.finish()
    cute.arch.cp_async_wait_group(0)
    return softmax, output
