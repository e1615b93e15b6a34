"""Layouts of the prefill kernel: tiles in shared memory, the tiled mma, the copies between memory and fragments.

Everything here is a plain function of a ``PrefillConfig`` and head dims, so that the kernel, the layout tools and the
tests on a CPU all look at the very same objects.

    shared memory   | Q, later O | K ring: num_stages / 2 tiles | V ring: num_stages / 2 tiles |   num_stages 2, 4
                    | Q, later O | one tile: K and V in turn                                   |   num_stages 1

A tile is row-major, one row per query or key. Rows of 16, 32 or 64 elements (the widest that divides the padded head
dim) form a swizzle atom of 8 rows: chunk c of 16 bytes in row r stands at chunk c XOR r, so that the 8 rows of one
ldmatrix matrix fall into 8 different groups of 4 banks. With padding instead, each row starts 16 bytes further round
the banks, to the same effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync, warp

from cute_attn.configs import PrefillConfig

CHUNK = 8  # elements in 16 bytes: what one cp.async or one 16-byte store moves


@dataclass(frozen=True)
class PrefillTiles:
    """The tiles of one prefill kernel.

    Attributes:
        config: tile sizes and shared-memory layout.
        head_dim: of Q and K.
        head_dim_v: of V and O.
        dtype: cutlass.Float16 or cutlass.BFloat16.
    """

    config: PrefillConfig
    head_dim: int
    head_dim_v: int
    dtype: Any

    @property
    def tile_d(self) -> int:
        """head_dim, padded to what copies and mma take."""
        return self.config.tile_dim(self.head_dim)

    @property
    def tile_dv(self) -> int:
        """head_dim_v, padded to what copies and mma take."""
        return self.config.tile_dim(self.head_dim_v)

    # Shared memory

    def smem_tile(self, rows: int, columns: int, slots: int = 1) -> Any:
        """Layout (rows, columns, slots) of row-major tiles of 16-bit elements."""
        if not self.config.swizzle:
            row = self.config.row_elements(columns)
            return cute.make_layout((rows, columns, slots), stride=(row, 1, rows * row))
        width = atom_width(columns)
        bits = width.bit_length() - CHUNK.bit_length()  # 64 -> 3, 32 -> 2, 16 -> 1
        atom = cute.make_composed_layout(
            cute.make_swizzle(bits, 3, 3), 0, cute.make_layout((8, width), stride=(width, 1))
        )
        return cute.tile_to_shape(atom, (rows, columns, slots), (0, 1, 2))

    def smem_q(self) -> Any:
        return self.smem_tile(self.config.tile_m, self.tile_d)

    def smem_k(self) -> Any:
        return self.smem_tile(self.config.tile_n, self.tile_d, self.config.ring)

    def smem_v(self) -> Any:
        return self.smem_tile(self.config.tile_n, self.tile_dv, self.config.ring)

    def smem_v_transposed(self) -> Any:
        """V's tiles seen as (head_dim_v, keys, slots): the B operand of P V."""
        keys, dims = self.config.tile_n, self.tile_dv
        view = cute.make_layout((dims, keys, self.config.ring), stride=(keys, 1, keys * dims))
        return cute.composition(self.smem_v(), view)

    def smem_o(self) -> Any:
        return self.smem_tile(self.config.tile_m, self.tile_dv)

    # Tensor cores

    def mma(self, columns: int = 16) -> cute.TiledMma:
        """m16n8k16 with fp32 accumulators; warps stand along M, each owns 16 rows of every 16 x num_warps.

        rows  0-15   warp 0      N is 16 columns wide, so that one ldmatrix.x4 feeds two mma
        rows 16-31   warp 1
        ...
        """
        warps = self.config.num_warps
        op = warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16))
        return cute.make_tiled_mma(op, (warps, 1, 1), permutation_mnk=(16 * warps, columns, 16))

    def ldmatrix_a(self) -> cute.TiledCopy:
        """Q's tile to A fragments: four 8x8 matrices at a time."""
        return cute.make_tiled_copy_A(self._ldmatrix(False), self.mma())

    def ldmatrix_b(self) -> cute.TiledCopy:
        """K's tile to B fragments."""
        return cute.make_tiled_copy_B(self._ldmatrix(False), self.mma())

    def ldmatrix_b_transposed(self) -> cute.TiledCopy:
        """V's tile to B fragments, transposed on the way."""
        return cute.make_tiled_copy_B(self._ldmatrix(True), self.mma())

    def _ldmatrix(self, transpose: bool) -> cute.CopyAtom:
        return cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose, 4), self.dtype)

    def positions(self, thread: Any, columns: int) -> Any:
        """(row, column) of each of a thread's accumulators of a (tile_m, columns) tile, as (rows, columns)."""
        mine = self.mma().get_slice(thread).partition_C(cute.make_identity_tensor((self.config.tile_m, columns)))
        return cute.make_tensor(mine.iterator, rows_and_columns(mine.layout))

    def accumulators_to_smem(self) -> cute.TiledCopy:
        """O's fragments to its tile in shared memory, two elements at a time."""
        return cute.make_tiled_copy_C(cute.make_copy_atom(CopyUniversalOp(), self.dtype), self.mma())

    # Global memory

    def global_to_smem(self, columns: int) -> cute.TiledCopy:
        """16-byte cp.async that goes past the L1 cache: neighbouring threads take neighbouring chunks of a row."""
        op = cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL)
        return self._chunks(op, columns)

    def smem_to_global(self, columns: int) -> cute.TiledCopy:
        """16-byte loads and stores by the same thread layout."""
        return self._chunks(CopyUniversalOp(), columns)

    def _chunks(self, op: Any, columns: int) -> cute.TiledCopy:
        atom = cute.make_copy_atom(op, self.dtype, num_bits_per_copy=CHUNK * self.dtype.width)
        per_row = atom_width(columns) // CHUNK
        threads = cute.make_layout((self.config.num_threads // per_row, per_row), stride=(per_row, 1))
        return cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, CHUNK)))


def atom_width(columns: int) -> int:
    """Elements in a row of the swizzle atom, and in the part of a row that one step of a copy covers."""
    return next(width for width in (64, 32, 16) if columns % width == 0)


def rows_and_columns(layout: cute.Layout) -> cute.Layout:
    """An accumulator layout ((2, 2), M, N) seen as (rows, columns).

    A thread holds two neighbouring columns of row r and the same two of row r + 8:

        ((column, row), M, N)  ->  ((row, M), (column, N))
    """
    (column, row), m, n = layout.shape
    (d_column, d_row), d_m, d_n = layout.stride
    return cute.make_layout(((row, m), (column, n)), stride=((d_row, d_m), (d_column, d_n)))


def as_a_operand(layout: cute.Layout) -> cute.Layout:
    """An accumulator layout ((2, 2), M, N) of S seen as the A fragments ((2, 2, 2), M, N / 2) of P V.

    Two neighbouring 8-column accumulators hold exactly what one thread needs of a 16x16 A operand, so P never moves
    between threads.
    """
    (column, row), m, n = layout.shape
    (d_column, d_row), d_m, d_n = layout.stride
    return cute.make_layout(((column, row, 2), m, n // 2), stride=((d_column, d_row, d_n), d_m, 2 * d_n))
