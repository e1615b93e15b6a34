"""Tiles on their way from global to shared memory, by 16-byte cp.async.

A tile that lies wholly inside the matrix is copied without a test. In the last tile each row is tested; rows beyond
the length, and columns beyond the head dim where that is padded, are set to zero, because 0 x NaN would reach a
result. Nothing beyond the matrix is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr


@dataclass(frozen=True)
class TileLoader:
    """One thread's share in loading tiles of a (length, head_dim) matrix into a ring of shared-memory tiles.

    Attributes:
        copy: the block's tiled copy.
        length: valid rows.
        head_dim: valid columns (static).
        shape: rows and columns of a tile (static).
        source: this thread's chunks in global memory (chunk, rows, columns, tile).
        target: the same in shared memory (chunk, rows, columns, slot).
        coordinates: (row, column) in the tile of each (chunk, rows, columns).
    """

    copy: cute.TiledCopy
    length: Int32
    head_dim: int
    shape: tuple[int, int]
    source: cute.Tensor
    target: cute.Tensor
    coordinates: cute.Tensor

    @staticmethod
    def of(copy: cute.TiledCopy, thread: Int32, matrix: cute.Tensor, length: Int32, tiles: cute.Tensor) -> TileLoader:
        """The loader of a matrix (length, head_dim) into tiles (rows, columns, slots)."""
        shape = (cute.size(tiles, mode=[0]), cute.size(tiles, mode=[1]))
        mine = copy.get_slice(thread)
        return TileLoader(
            copy, length, matrix.shape[1], shape,
            mine.partition_S(cute.local_tile(matrix, shape, (None, 0))),
            mine.partition_D(tiles),
            mine.partition_S(cute.make_identity_tensor(shape)),
        )  # fmt: skip

    @cute.jit
    def load(self, tile: Int32, slot: Int32) -> None:
        """Starts the copy of a tile that lies wholly inside the matrix; the caller commits the group."""
        for m in range_constexpr(cute.size(self.target, mode=[1])):
            for k in range_constexpr(cute.size(self.target, mode=[2])):
                self._chunk(m, k, tile, slot)

    @cute.jit
    def load_edge(self, tile: Int32, slot: Int32) -> None:
        """The same for a tile that may overhang the matrix: rows beyond the length are set to zero."""
        rows_left = self.length - tile * self.shape[0]
        for m in range_constexpr(cute.size(self.target, mode=[1])):
            if self.coordinates[0, m, 0][0] < rows_left:
                for k in range_constexpr(cute.size(self.target, mode=[2])):
                    self._chunk(m, k, tile, slot)
            else:
                self.target[None, m, None, slot].fill(0)

    @cute.jit
    def _chunk(self, m: int, k: int, tile: Int32, slot: Int32) -> None:
        step = self.shape[1] // cute.size(self.target, mode=[2])
        if const_expr((k + 1) * step <= self.head_dim):
            cute.copy(self.copy, self.source[None, m, k, tile], self.target[None, m, k, slot])
        else:
            if self.coordinates[0, 0, k][1] < self.head_dim:
                cute.copy(self.copy, self.source[None, m, k, tile], self.target[None, m, k, slot])
            else:
                self.target[None, m, k, slot].fill(0)
