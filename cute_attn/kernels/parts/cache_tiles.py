"""Tiles of the cache: how they lie in shared memory, and their way there from pages or from one piece.

A tile is row-major, one row per token, in chunks of 16 bytes. Chunk c of row r stands at chunk c XOR s(r), where s
makes the 8 rows that ldmatrix reads at once fall into 8 different groups of 4 banks, for every length of rows:

    chunks in a row      odd    2, 6, 10, ...    4, 12, ...     multiples of 8
    s(r)                  0      (r / 4) % 2     (r / 2) % 4         r % 8

One warp copies a tile. Its lanes stand as rows x chunks; a row's chunks lie on as many lanes as the next power of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr, range_constexpr

from cute_attn.decode_configs import WARP
from cute_attn.decode_problem import DecodeProblem
from cute_attn.kernels.parts.instructions import copy_16_bytes, copy_16_whole_bytes, quotient

CHUNK_BYTES = 16
BANK_GROUPS = 8  # of 16 bytes: what all 32 banks deliver at once


@dataclass(frozen=True)
class TileLayout:
    """How a tile of (tokens, head_dim) lies in shared memory.

    Attributes:
        tokens: rows.
        chunks: of 16 bytes in a row.
    """

    tokens: int
    chunks: int

    @staticmethod
    def of(problem: DecodeProblem, tokens: int) -> TileLayout:
        return TileLayout(tokens, problem.head_dim * problem.cache_bytes // CHUNK_BYTES)

    @property
    def row_bytes(self) -> int:
        return self.chunks * CHUNK_BYTES

    @property
    def bytes(self) -> int:
        return self.tokens * self.row_bytes

    def moved(self, row: Any) -> Any:
        """s(row): what a row's chunk numbers are XORed with."""
        period = math.gcd(self.chunks, BANK_GROUPS)
        return (row // (BANK_GROUPS // period)) % period

    def offset(self, row: Any, chunk: Any) -> Any:
        """Bytes from the tile's begin to a chunk."""
        return row * self.row_bytes + (chunk ^ self.moved(row)) * CHUNK_BYTES

    @property
    def lanes_per_row(self) -> int:
        return 1 << (self.chunks - 1).bit_length()

    @property
    def rows_at_once(self) -> int:
        """Rows that a warp copies with one instruction."""
        return min(WARP // self.lanes_per_row, self.tokens)


@dataclass(frozen=True)
class CacheRows:
    """One head of one sequence's keys or values in global memory.

    Attributes:
        base: address of its first token, or of the first page's first token.
        token_stride, page_stride: in bytes.
        table: (max_pages,) page indices, or None.
        page_size: tokens of a page; 0 without pages.
    """

    base: Int64
    token_stride: Int64
    page_stride: Int64
    table: cute.Tensor | None
    page_size: int

    @staticmethod
    def of(
        problem: DecodeProblem, cache: cute.Tensor, table: cute.Tensor | None, batch: Int32, head: Int32
    ) -> CacheRows:
        bytes_per_element = problem.cache_bytes
        first, token, heads, _ = (Int64(stride) * bytes_per_element for stride in (*cache.stride[:3], 1))
        base = cache.iterator.toint() + Int64(head) * heads
        if problem.page_size:
            return CacheRows(base, token, first, table[batch, None], problem.page_size)
        return CacheRows(base + Int64(batch) * first, token, first, None, 0)


@dataclass(frozen=True)
class TileCopier:
    """One lane's share in copying tiles of keys or values.

    Attributes:
        layout: of a tile.
        rows: where the tokens are.
        lane_row: the lane's row of those copied at once.
        lane_chunk: its chunk of the row; beyond the last for lanes without work.
    """

    layout: TileLayout
    rows: CacheRows
    lane_row: Int32
    lane_chunk: Int32

    @staticmethod
    def of(layout: TileLayout, rows: CacheRows, lane: Int32) -> TileCopier:
        return TileCopier(layout, rows, lane // layout.lanes_per_row, lane % layout.lanes_per_row)

    @property
    def span(self) -> int:
        """Rows of the tile for which a lane needs one page index."""
        same_page = math.gcd(self.rows.page_size, self.layout.tokens)
        return max(same_page, self.layout.rows_at_once)

    @property
    def page_count(self) -> int:
        """Page indices that a lane needs for a tile; one unused without pages."""
        return self.layout.tokens // self.span if self.rows.page_size else 1

    def make_pages(self) -> cute.Tensor:
        """Registers for the page indices of a tile.

        They are unsigned, as the compiler would extend a sign as soon as it is loaded: before the queries' loads, which
        would then start a latency of the memory later.
        """
        pages = cute.make_rmem_tensor(self.page_count, Uint32)
        pages.fill(0)
        return pages

    @cute.jit
    def fetch_pages(self, first_token: Int32, pages: cute.Tensor) -> None:
        """Reads the page indices of the tile that begins at a token, which may lie anywhere beyond the end."""
        table = self.rows.table
        if const_expr(self.rows.page_size):
            assert table is not None
            for i in range_constexpr(self.page_count):
                token = first_token + i * self.span + self.lane_row
                last = table.shape[0] - 1
                pages[i] = Uint32(table[min(quotient(token, self.rows.page_size), last)])

    @cute.jit
    def copy(self, first_token: Int32, pages: cute.Tensor, target: Int32, begin: Int32, end: Int32) -> None:
        """Starts the copy of a tile to an address in shared memory; tokens outside of begin..end become zeros.

        Nothing is read for those, whatever their page index holds.
        """
        idle_lanes = self.layout.lanes_per_row != self.layout.chunks
        idle_rows = self.layout.lanes_per_row * self.layout.rows_at_once < WARP
        if const_expr(idle_lanes or idle_rows):
            if (self.lane_chunk < self.layout.chunks) & (self.lane_row < self.layout.rows_at_once):
                self._copy(first_token, pages, target, begin, end)
        else:
            self._copy(first_token, pages, target, begin, end)

    @cute.jit
    def _copy(self, first_token: Int32, pages: cute.Tensor, target: Int32, begin: Int32, end: Int32) -> None:
        if (first_token >= begin) & (first_token + self.layout.tokens <= end):
            for _row, shared, source in self._places(first_token, pages, target):
                copy_16_whole_bytes(shared, source)
        else:
            for row, shared, source in self._places(first_token, pages, target):
                token = first_token + row + self.lane_row
                size = Int32(CHUNK_BYTES) if (token >= begin) & (token < end) else Int32(0)
                copy_16_bytes(shared, source, size)

    def _places(self, first_token: Int32, pages: cute.Tensor, target: Int32) -> list[tuple[int, Int32, Int64]]:
        """(row, shared address, global address) of each of the lane's chunks."""
        at_once = self.layout.rows_at_once
        places = []
        source = Int64(0)
        for row in range(0, self.layout.tokens, at_once):
            if row % self.span == 0:
                source = self._address(first_token + row, pages[row // self.span])
            else:
                source = source + self.rows.token_stride * at_once
            shared = target + self.layout.offset(row + self.lane_row, self.lane_chunk)
            places.append((row, shared, source))
        return places

    def _address(self, token: Int32, page: Uint32) -> Int64:
        """Of the lane's chunk of the row that begins at a token, in a page."""
        token = token + self.lane_row
        base = self.rows.base + self.lane_chunk * CHUNK_BYTES
        if self.rows.page_size:
            base = base + Int64(page) * self.rows.page_stride
            token = token - quotient(token, self.rows.page_size) * self.rows.page_size
        return base + Int64(token) * self.rows.token_stride
