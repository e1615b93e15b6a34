"""O in its accumulators, and on its way to global memory in 16-byte stores.

A thread's fragment holds two neighbouring columns of 8: four bytes. Sixteen-byte stores need whole chunks of 8:

    smem     fragments are written to a tile in shared memory (where Q was) and read back by rows.
    shuffle  the four lanes of a quad hold one chunk each of the same row in pieces; they transpose four chunks among
             themselves, after which each lane holds one whole chunk:

        lane      0    1    2    3                lane      0    1    2    3
        chunk 0   00   01   02   03               piece 0   00   10   20   30
        chunk 1   10   11   12   13       ->      piece 1   01   11   21   31
        chunk 2   20   21   22   23               piece 2   02   12   22   32
        chunk 3   30   31   32   33               piece 3   03   13   23   33
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32, Numeric, Uint32, range_constexpr

from cute_attn.kernels.parts.tiles import CHUNK, PrefillTiles, rows_and_columns


@dataclass(frozen=True)
class OutputAccumulator:
    """One thread's part of O between tiles of keys.

    Attributes:
        accumulators: fp32, what P V is added to; unnormalised.
        stored: None, or O rounded to 16 bits after every tile; the accumulators then hold one tile's P V alone.
            It is stored normalised, since sums over many keys would leave the range of fp16.
        dtype: of the output.
    """

    accumulators: cute.Tensor
    stored: cute.Tensor | None
    dtype: type[Numeric]

    @staticmethod
    def of(shape: cute.Shape, o_fp32: bool, dtype: type[Numeric]) -> OutputAccumulator:
        """Zeros of an accumulator shape ((2, 2), M, N)."""
        accumulators = cute.make_rmem_tensor(shape, Float32)
        accumulators.fill(0.0)
        stored = None if o_fp32 else cute.make_rmem_tensor_like(accumulators, dtype)
        if stored is not None:
            stored.fill(0.0)
        return OutputAccumulator(accumulators, stored, dtype)

    def shrink(self, factors: cute.Tensor) -> None:
        """Multiplies what was summed so far by factors (rows,); what is normalised stays."""
        if self.stored is None:
            scale_rows(self.accumulators, factors)

    def settle(self, sums_before: cute.Tensor, sums: cute.Tensor) -> None:
        """After a tile: adds it to what is stored in 16 bits, where that is asked for.

        ``sums_before`` and ``sums`` (rows,) are the row sums without and with the tile.
        """
        if self.stored is not None:
            widened = cute.make_rmem_tensor_like(self.accumulators)
            widened.store(self.stored.load().to(Float32))
            scale_rows(widened, sums_before)
            widened.store(widened.load() + self.accumulators.load())
            factors = cute.make_rmem_tensor_like(sums)
            for r in range(cute.size(sums)):
                factors[r] = reciprocal_or_zero(sums[r])
            scale_rows(widened, factors)
            self.stored.store(widened.load().to(self.dtype))
            self.accumulators.fill(0.0)

    def rounded(self, factors: cute.Tensor) -> cute.Tensor:
        """O in 16 bits; ``factors`` (rows,) normalise it."""
        if self.stored is not None:
            return self.stored
        scale_rows(self.accumulators, factors)
        result = cute.make_rmem_tensor_like(self.accumulators, self.dtype)
        result.store(self.accumulators.load().to(self.dtype))
        return result


@cute.jit
def reciprocal_or_zero(row_sum: Float32) -> Float32:
    """1 / row_sum; 0 for a row that has seen no key."""
    return Float32(0.0) if row_sum == 0.0 else cute.arch.rcp_approx(row_sum)


def scale_rows(accumulators: cute.Tensor, factors: cute.Tensor) -> None:
    rows = cute.make_tensor(accumulators.iterator, rows_and_columns(accumulators.layout))
    for r in range(cute.size(rows, mode=[0])):
        for c in range(cute.size(rows, mode=[1])):
            rows[r, c] = rows[r, c] * factors[r]


@dataclass(frozen=True)
class OutputTile:
    """Where one block's output goes.

    Attributes:
        tiles: the kernel's tiles.
        rows_left: valid rows from the tile's first.
        matrix: the tile in global memory (tile_m, tile_dv), of which only valid rows and columns may be touched.
    """

    tiles: PrefillTiles
    rows_left: Int32
    matrix: cute.Tensor

    @staticmethod
    def of(tiles: PrefillTiles, matrix: cute.Tensor, length: Int32, first_row: Int32) -> OutputTile:
        """The tile that begins at ``first_row`` of a matrix (length, head_dim_v)."""
        tile_m = tiles.config.tile_m
        tile = cute.local_tile(matrix, (tile_m, tiles.tile_dv), (first_row // tile_m, 0))
        return OutputTile(tiles, length - first_row, tile)

    @cute.jit
    def store_through_smem(self, fragments: cute.Tensor, smem: cute.Tensor, thread: Int32) -> None:
        """``fragments`` are 16-bit accumulators; ``smem`` (tile_m, tile_dv) must be free to be overwritten."""
        to_smem = self.tiles.accumulators_to_smem()
        mine = to_smem.get_slice(thread)
        cute.copy(to_smem, mine.retile(fragments), mine.partition_D(smem))
        cute.arch.sync_threads()
        copy = self.tiles.smem_to_global(self.tiles.tile_dv)
        mine = copy.get_slice(thread)
        source = mine.partition_S(smem)
        target = mine.partition_D(self.matrix)
        coordinates = mine.partition_D(cute.make_identity_tensor((self.tiles.config.tile_m, self.tiles.tile_dv)))
        chunks = cute.make_rmem_tensor_like(source)
        cute.copy(copy, source, chunks)
        for m in range_constexpr(cute.size(target, mode=[1])):
            if coordinates[0, m, 0][0] < self.rows_left:
                for k in range_constexpr(cute.size(target, mode=[2])):
                    if coordinates[0, 0, k][1] < self.tiles.head_dim_v:
                        cute.copy(copy, chunks[None, m, k], target[None, m, k])

    @cute.jit
    def store_by_shuffles(self, fragments: cute.Tensor, coordinates: cute.Tensor) -> None:
        """``fragments`` and their ``coordinates`` (rows, columns): 16-bit accumulators and where they lie."""
        pairs = cute.recast_tensor(fragments, Uint32)
        lane = cute.arch.lane_idx() % 4
        rows = cute.size(coordinates, mode=[0])
        chunks = self.tiles.tile_dv // CHUNK
        store = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Uint32, num_bits_per_copy=128)
        for r in range_constexpr(rows):
            row = coordinates[r, 0][0]
            for first in range_constexpr(0, chunks, 4):
                pieces = [pairs[r, min(first + i, chunks - 1)] for i in range(4)]
                chunk = cute.make_rmem_tensor(4, Uint32)
                for i, piece in enumerate(transpose_quad(pieces, lane)):
                    chunk[i] = piece
                if (row < self.rows_left) & ((first + lane) * CHUNK < self.tiles.head_dim_v):
                    target = cute.local_tile(self.matrix, (1, CHUNK), (row, first + lane))
                    cute.copy(store, chunk, cute.recast_tensor(cute.coalesce(target), Uint32))


@cute.jit
def transpose_quad(pieces: list[Uint32], lane: Int32) -> list[Uint32]:
    """Transposes a 4x4 matrix that stands in four registers of four lanes: exchange by 2, then by 1."""
    for distance in (2, 1):
        upper = (lane & distance) != 0
        for i in (0, 1) if distance == 2 else (0, 2):
            j = i + distance
            away = pieces[i] if upper else pieces[j]
            back = cute.arch.shuffle_sync_bfly(away, offset=distance)
            pieces[i] = back if upper else pieces[i]
            pieces[j] = pieces[j] if upper else back
    return pieces
