"""K and V's way through shared memory: what is in flight when, and which barrier each use waits for.

Tiles of keys are visited from the last (``end - 1``) to the first (``begin``). ``num_stages`` buffers:

    1   K and V take turns in one buffer: V loads under the softmax, the next K after P V has read V.

            | K0 wait | S0 | V0 loads, softmax | V0 wait | PV0 | K1 loads and wait | S1 | ...

    2   one buffer for K, one for V: V loads under S = Q K^T, the next K under softmax and P V.

            | S0            | softmax, PV0 | S1            | ...
            | V0 loads      | K1 loads     | V1 loads      | ...

    4   two of each: both load a whole tile ahead, and one barrier a tile is enough.

            | S0, softmax, PV0      | S1, softmax, PV1      | ...
            | K1, V1 load           | K2, V2 load           | ...
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_attn.configs import PrefillConfig
from cute_attn.kernels.parts.load import TileLoader


@dataclass(frozen=True)
class KeyValuePipeline:
    """Loads the tiles of one block's keys and values, and says when they have landed.

    Attributes:
        config: how many buffers there are.
        k, v: this thread's share of the loads.
        begin: number of the first visible tile.
        end: one beyond the last.
    """

    config: PrefillConfig
    k: TileLoader
    v: TileLoader
    begin: Int32
    end: Int32

    @cute.jit
    def start(self) -> None:
        """Starts the last tile's loads, K in one group with whatever was issued before.

        Only the last tile can overhang the sequence, so all later loads are of whole tiles.
        """
        if self.end > self.begin:
            self.k.load_edge(self.end - 1, 0)
        cute.arch.cp_async_commit_group()
        if const_expr(not self.config.share_kv):
            if self.end > self.begin:
                self.v.load_edge(self.end - 1, 0)
            cute.arch.cp_async_commit_group()

    def wait_for_start(self) -> None:
        """What was issued before ``start`` has landed, and K with it."""
        wait_for_all_but(0 if self.config.share_kv else 1)

    @cute.jit
    def before_scores(self, tile: Int32, slot: Int32) -> None:
        """K's tile has landed, and all warps are done with the tile before."""
        wait_for_all_but(0)
        if const_expr(self.config.num_stages == 4):
            if tile > self.begin:
                self.k.load(tile - 1, 1 - slot)
                self.v.load(tile - 1, 1 - slot)
            cute.arch.cp_async_commit_group()
        elif const_expr(self.config.num_stages == 2):
            if tile < self.end - 1:
                self.v.load(tile, 0)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def after_scores(self, tile: Int32) -> None:
        """All warps are done with K's tile: its buffer takes what comes next."""
        if const_expr(self.config.num_stages == 2):
            wait_for_all_but(0)
            self._load_next_k(tile)
        elif const_expr(self.config.share_kv):
            cute.arch.sync_threads()
            self.v.load_edge(tile, 0)
            cute.arch.cp_async_commit_group()

    def before_output(self) -> None:
        """V's tile has landed; with buffers of its own it has since ``before_scores`` or ``after_scores``."""
        if self.config.share_kv:
            wait_for_all_but(0)

    @cute.jit
    def after_output(self, tile: Int32) -> None:
        """V's tile has been read."""
        if const_expr(self.config.share_kv):
            cute.arch.sync_threads()
            self._load_next_k(tile)

    @cute.jit
    def _load_next_k(self, tile: Int32) -> None:
        if tile > self.begin:
            self.k.load(tile - 1, 0)
        cute.arch.cp_async_commit_group()


def wait_for_all_but(groups: int) -> None:
    """All but the newest ``groups`` groups of copies have landed, of every thread in the block."""
    cute.arch.cp_async_wait_group(groups)
    cute.arch.sync_threads()
