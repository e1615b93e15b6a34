"""The two products of decode on tensor cores: the cache is the wide operand, and the queries are 8 columns.

    S^T (tokens, rows) = K (tokens, head_dim) Q^T          O^T (head_dim, rows) += V^T (head_dim, tokens) P^T

One mma takes 16 tokens x 16 of the head dim of K, or the same of V transposed, as its operand A, and 8 rows as B: a
head group of up to 8 is padded to 8, not to 16. Which lane (4 g + j) holds what:

    S^T, O^T    tokens, or dims, g and g + 8;  rows 2 j and 2 j + 1         (accumulators)
    Q^T, P^T    dims, or tokens, 2 j, 2 j + 1, 2 j + 8, 2 j + 9;  row g      (operand B)

so P^T as accumulators becomes P^T as operand B by one transpose of each 8x8 matrix (movmatrix).

An 8-bit cache takes the same path with half the bytes: ldmatrix then gives a lane 4 neighbouring dims of a token of K
(2 j stands for 4 j, 4 j + 1 and 2 j + 8 for 4 j + 2, 4 j + 3, in K and in Q), and of V, transposed, 2 neighbouring dims
of two tokens (g stands for dim 2 g, and g + 8 for 2 g + 1). No lane has to give bytes to another.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from cute_attn.decode_configs import MMA_ROWS, MMA_TOKENS
from cute_attn.decode_problem import DecodeProblem
from cute_attn.kernels.parts.cache_tiles import TileLayout
from cute_attn.kernels.parts.convert import ALTERNATING, NEIGHBOURS, to_fp16
from cute_attn.kernels.parts.decode_work import DecodePlace
from cute_attn.kernels.parts.instructions import ldmatrix, load_words, mma, pack, unpack

ACCUMULATORS = 4  # of a lane, of one mma
MMA_DIMS = 16


@dataclass(frozen=True)
class Products:
    """Static facts of the two products of a warp with tiles of one layout.

    Attributes:
        problem: dtypes.
        tile_m: rows, 8 a column block.
        layout: of a tile of K or V in shared memory: the whole head dim, or a part of it.
        capability: of the architecture.
        parts: of the layout's head dim, each multiplied by another warp.
        part: that of this warp.
    """

    problem: DecodeProblem
    tile_m: int
    layout: TileLayout
    capability: int
    parts: int = 1
    part: Int32 | int = 0

    @property
    def dtype(self) -> str:
        """What is multiplied: an 8-bit cache becomes fp16, whatever q is."""
        return "float16" if self.problem.quantised else self.problem.dtype

    @property
    def blocks_m(self) -> int:
        """Blocks of 8 rows."""
        return self.tile_m // MMA_ROWS

    @property
    def blocks_n(self) -> int:
        """Blocks of 16 tokens."""
        return self.layout.tokens // MMA_TOKENS

    @property
    def blocks_d(self) -> int:
        """Blocks of 16 of the head dim, or of the part of it."""
        return self.layout.row_bytes // (MMA_DIMS * self.problem.cache_bytes) // self.parts

    def make_scores(self) -> cute.Tensor:
        """Accumulators of S^T: (4, blocks_m, blocks_n) flat."""
        return cute.make_rmem_tensor(ACCUMULATORS * self.blocks_m * self.blocks_n, Float32)

    def make_output(self) -> cute.Tensor:
        """Accumulators of O^T: (4, blocks_m, blocks_d) flat."""
        return cute.make_rmem_tensor(ACCUMULATORS * self.blocks_m * self.blocks_d, Float32)

    def score_at(self, block_n: int, block_m: int) -> int:
        """Where the 4 accumulators of a block begin."""
        return ACCUMULATORS * (block_n * self.blocks_m + block_m)

    def output_at(self, block_d: int, block_m: int) -> int:
        """Where the 4 accumulators of a block begin."""
        return ACCUMULATORS * (block_d * self.blocks_m + block_m)

    def dim_of(self, block_d: int, element: int, lane: Int32) -> Int32:
        """The dim of O of a lane's accumulators ``element`` (0: the first two, 1: the others) of a block."""
        if self.problem.quantised:
            return MMA_DIMS * block_d + 2 * (lane // 4) + element
        return MMA_DIMS * block_d + lane // 4 + 8 * element

    # Operands A, from shared memory

    def keys(self, tile: Int32, block_n: int, block_d: int, lane: Int32) -> list[list[Uint32]]:
        """K's operands for 16 tokens and the 16 dims of block_d; 8-bit: and of block_d + 1, if there is one."""
        layout = self.layout
        row = MMA_TOKENS * block_n + lane % 16
        if not self.problem.quantised:
            return [ldmatrix(tile + layout.offset(row, 2 * block_d + lane // 16))]
        both = block_d + 1 < self.blocks_d
        chunk = block_d + lane // 16 if both else Int32(block_d)
        words = ldmatrix(tile + layout.offset(row, chunk), 4 if both else 2)
        operands = []
        for i in range(0, len(words), 2):
            (a0, a2), (a1, a3) = (self._converted(word, NEIGHBOURS) for word in words[i : i + 2])
            operands.append([a0, a1, a2, a3])
        return operands

    def values(self, tile: Int32, block_n: int, block_d: int, lane: Int32) -> list[list[Uint32]]:
        """V^T's operands for 16 tokens and the 16 dims of block_d; 8-bit: and of block_d + 1, if there is one."""
        layout = self.layout
        first = self.part * (layout.chunks // self.parts)
        if not self.problem.quantised:
            row = MMA_TOKENS * block_n + lane % 8 + lane // 16 * 8
            return [ldmatrix(tile + layout.offset(row, first + 2 * block_d + lane // 8 % 2), transpose=True)]
        both = block_d + 1 < self.blocks_d
        row = MMA_TOKENS * block_n + lane % 16
        chunk = first + (block_d + lane // 16 if both else Int32(block_d))
        words = ldmatrix(tile + layout.offset(row, chunk), 4 if both else 2, transpose=True)
        operands = []
        for i in range(0, len(words), 2):
            (a0, a1), (a2, a3) = (self._converted(word, ALTERNATING) for word in words[i : i + 2])
            operands.append([a0, a1, a2, a3])
        return operands

    def _converted(self, word: Uint32, pairs: tuple) -> list[Uint32]:
        return to_fp16(word, self.problem.cache_dtype, pairs, self.capability)

    @property
    def blocks_at_once(self) -> int:
        """Blocks of the head dim that one ldmatrix feeds."""
        return 2 if self.problem.quantised else 1

    # Products

    def multiply_keys(
        self, scores: cute.Tensor, queries: cute.Tensor, tile: Int32, lane: Int32, begin: int = 0
    ) -> None:
        """scores += K Q^T for the tile of keys at an address in shared memory; its dims begin at a block of Q's."""
        for block_d in range(0, self.blocks_d, self.blocks_at_once):
            for block_n in range(self.blocks_n):
                for i, a in enumerate(self.keys(tile, block_n, block_d, lane)):
                    for block_m in range(self.blocks_m):
                        at = 2 * ((begin + block_d + i) * self.blocks_m + block_m)
                        mma(self.dtype, scores, self.score_at(block_n, block_m), a, [queries[at], queries[at + 1]])

    def multiply_values(self, output: cute.Tensor, weights: list[list[list[Uint32]]], tile: Int32, lane: Int32) -> None:
        """output += V^T P^T for the tile of values at an address; ``weights[block_n][block_m]`` are operands B."""
        for block_n in range(self.blocks_n):
            for block_d in range(0, self.blocks_d, self.blocks_at_once):
                for i, a in enumerate(self.values(tile, block_n, block_d, lane)):
                    for block_m in range(self.blocks_m):
                        mma(self.dtype, output, self.output_at(block_d + i, block_m), a, weights[block_n][block_m])


@dataclass(frozen=True)
class Queries:
    """A lane's part of Q^T as operands B, and what its rows were divided by.

    bf16 queries for an 8-bit cache become fp16 after division by a power of two, a row's own, that brings its largest
    element to between 2^13 and 2^14. What then lies below fp16's normal numbers is less than 2^-27 of the largest.

    Attributes:
        words: (2, blocks_m, blocks_d) flat.
        factors: None, or (2 blocks_m,) by the lane's columns of S^T: what the scores must be multiplied by.
    """

    words: cute.Tensor
    factors: cute.Tensor | None

    def complete(self, products: Products, lane: Int32) -> None:
        """Waits for the loads, and converts what they brought."""
        if self.factors is not None:
            _to_fp16(products, self, lane)


@cute.jit
def load_queries(products: Products, q: cute.Tensor, place: DecodePlace, lane: Int32) -> Queries:
    """Starts loading the rows of a block; rows beyond the last are zeros. ``complete`` makes them ready for use."""
    problem = products.problem
    words = cute.make_rmem_tensor(2 * products.blocks_m * products.blocks_d, Uint32)
    words.fill(0)
    group_lane = lane % 4
    for block_m in range_constexpr(products.blocks_m):
        row = place.first_row + block_m * MMA_ROWS + lane // 4
        if row < place.rows:
            start = (
                q.iterator.toint()
                + (Int64(place.batch) * q.stride[0] + Int64(place.token_of(row)) * q.stride[1]
                   + Int64(place.head_of(row)) * q.stride[2]) * 2
            )  # fmt: skip
            for block_d in range_constexpr(products.blocks_d):
                at = 2 * (block_d * products.blocks_m + block_m)
                if const_expr(problem.quantised):
                    pair = load_words(start + (block_d * 32 + group_lane * 8), 2)
                    words[at], words[at + 1] = pair[0], pair[1]
                else:
                    words[at] = load_words(start + (block_d * 32 + group_lane * 4), 1)[0]
                    words[at + 1] = load_words(start + (block_d * 32 + 16 + group_lane * 4), 1)[0]
    with_factors = problem.quantised and problem.dtype == "bfloat16"
    return Queries(words, cute.make_rmem_tensor(2 * products.blocks_m, Float32) if const_expr(with_factors) else None)


@cute.jit
def _to_fp16(products: Products, queries: Queries, lane: Int32) -> None:
    words, factors = queries.words, queries.factors
    for block_m in range_constexpr(products.blocks_m):
        places = [
            2 * (block_d * products.blocks_m + block_m) + i for block_d in range(products.blocks_d) for i in range(2)
        ]
        # The largest magnitude, compared as integers: its exponent field is all that is wanted.
        largest = Uint32(0)
        for k in range_constexpr(len(places)):
            place = places[k]
            word = words[place] & 0x7FFF7FFF
            largest = max(largest, max(word & 0xFFFF, word >> 16))
        for k in range_constexpr(2):
            largest = max(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << k))
        # bf16's exponent field e stands for 2^(e - 127). Times 2^(140 - e) the largest is from 2^13 to 2^14; the
        # bounds keep the factor and its inverse normal.
        exponent = min(max(Int32(largest >> 7), 14), 254)
        up = _power_of_two(140 - exponent)
        down = _power_of_two(exponent - 140)
        for k in range_constexpr(len(places)):
            place = places[k]
            low, high = unpack("bfloat16", words[place])
            words[place] = pack("float16", low * up, high * up)
        for i in range_constexpr(2):
            factors[2 * block_m + i] = cute.arch.shuffle_sync(down, (lane % 4 * 2 + i) * 4)


def _power_of_two(exponent: Int32) -> Float32:
    return cute.arch.inline_ptx(
        "{ .reg .b32 t; add.s32 t, {$r0}, 127; shl.b32 t, t, 23; mov.b32 {$w0}, t; }",
        write_only_types=[Float32],
        read_only_args=[exponent],
    )
