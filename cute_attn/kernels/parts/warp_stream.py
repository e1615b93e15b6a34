"""A warp's stream of tiles of K and V through a ring of its own in shared memory.

Tiles of one step, K and V, share a stage of the ring; each is a cp.async group of the warp. With 3 stages:

    step 0     | compute K0 V0 |  in flight: K1 V1, K2 V2
    step 1     | compute K1 V1 |  in flight: K2 V2, K3 V3 (where tile 0 was)
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, range_constexpr

from cute_attn.decode_configs import StreamsConfig
from cute_attn.kernels.parts.cache_tiles import TileCopier
from cute_attn.kernels.parts.decode_work import DecodeWork
from cute_attn.kernels.parts.instructions import wait_for_all_but


@dataclass(frozen=True)
class FirstPages:
    """The copiers of a warp's tiles, and page indices of K and of V for as many steps as the ring has stages.

    Those of the last step are later overwritten by those of the next step that will be loaded.

    Attributes:
        k, v: this lane's share of the copies.
        of_k, of_v: registers, by stage (static lists).
    """

    k: TileCopier
    v: TileCopier
    of_k: list[cute.Tensor]
    of_v: list[cute.Tensor]

    @staticmethod
    def of(k: TileCopier, v: TileCopier, config: StreamsConfig) -> FirstPages:
        of_k, of_v = ([copier.make_pages() for _ in range(config.num_stages)] for copier in (k, v))
        return FirstPages(k, v, of_k, of_v)

    @cute.jit
    def fetch(self, first_token: Int32, stride: Int32) -> None:
        """Starts loading the indices of the steps that begin at ``first_token``, and at strides from there."""
        for stage in range_constexpr(len(self.of_k)):
            self.fetch_step(first_token + stage * stride, stage)

    def fetch_step(self, token: Int32, stage: int) -> None:
        self.k.fetch_pages(token, self.of_k[stage])
        self.v.fetch_pages(token, self.of_v[stage])


@dataclass(frozen=True)
class WarpStream:
    """Loads a warp's tiles.

    Attributes:
        config: stages of the ring.
        pages: copiers and page indices.
        ring: address of the ring.
        work: of the block.
        offset: tokens from the begin of a step to the warp's tile.
    """

    config: StreamsConfig
    pages: FirstPages
    ring: Int32
    work: DecodeWork
    offset: Int32

    @property
    def ahead(self) -> int:
        """Steps that are in flight while one is computed."""
        return self.config.num_stages - 1

    @property
    def first_token(self) -> Int32:
        return self.work.first_token + self.offset

    @property
    def stride(self) -> Int32:
        """Tokens from one tile of the warp to its next."""
        return self.work.stride

    @property
    def end(self) -> Int32:
        return self.work.end

    def _stage(self, slot: Int32 | int) -> Int32:
        return self.ring + slot * (2 * self.pages.k.layout.bytes)

    @cute.jit
    def start(self) -> None:
        """Starts the loads of the first steps."""
        for step in range_constexpr(self.ahead):
            self._load(self.first_token + step * self.stride, Int32(step), step)

    @cute.jit
    def next_keys(self, token: Int32, slot: Int32) -> Int32:
        """Waits for the keys of the tile that begins at ``token``, in stage ``slot``, and starts a later step's loads.

        All lanes are then done with the tile before, whose stage that step takes. Returns the address of the keys;
        the values follow them.
        """
        wait_for_all_but(2 * self.ahead - 1)
        free = slot - 1 if slot > 0 else Int32(self.ahead)
        later = token + self.ahead * self.stride
        self._load(later, free, self.ahead)
        self.pages.fetch_step(later + self.stride, self.ahead)
        return self._stage(slot)

    def wait_for_values(self) -> None:
        """The values of the tile whose keys ``next_keys`` returned have landed."""
        wait_for_all_but(2 * self.ahead)

    @cute.jit
    def _load(self, token: Int32, slot: Int32, stage: int) -> None:
        """A group each for K and V, empty where the block has no such step."""
        pages, shared = self.pages, self._stage(slot)
        if token < self.end:
            pages.k.copy(token, pages.of_k[stage], shared, self.work.begin, self.work.end)
        cute.arch.cp_async_commit_group()
        if token < self.end:
            pages.v.copy(token, pages.of_v[stage], shared + pages.v.layout.bytes, self.work.begin, self.work.end)
        cute.arch.cp_async_commit_group()
