"""The decode kernel's configs: what can be chosen, which fits where, and the one table of tuned defaults."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cute_attn.arch import Arch
from cute_attn.configs import round_up
from cute_attn.decode_problem import DecodeProblem
from cute_attn.errors import argument_error

MMA_ROWS = 8  # query rows of one mma: its N side
MMA_TOKENS = 16  # cache tokens of one mma: M of Q K^T, K of P V
PARTIAL_STATS = 4  # float32 a row of a partial result: maximum, sum, sum before rounding, and one unused for alignment
BARRIER_BYTES = 1024  # of shared memory, set apart for barriers and flags
WARP = 32


@dataclass(frozen=True)
class DecodeConfig:
    """How the decode kernel cuts its work: the "streams" arrangement.

    Every warp streams tiles of the cache of its own, keys and values, through a ring of its own in shared memory, with
    no barrier between warps before the end.

    Attributes:
        tile_m: query rows (query heads of one head of the cache x query tokens) of a block: 8, 16 or 32.
        tile_n: cache tokens of a warp's step, a multiple of 16.
        num_warps: warps of a block.
        num_stages: steps of K and V in a warp's ring.
        blocks_per_multiprocessor: that run at one time, where shared memory allows.
    """

    tile_m: int = 8
    tile_n: int = 16
    num_warps: int = 4
    num_stages: int = 3
    blocks_per_multiprocessor: int = 2

    def __post_init__(self) -> None:
        if self.tile_m not in (8, 16, 32):
            raise ValueError(f"tile_m must be 8, 16 or 32, got {self.tile_m}")
        if self.tile_n not in (16, 32, 64):
            raise ValueError(f"tile_n must be 16, 32 or 64, got {self.tile_n}")
        if self.num_warps not in (1, 2, 4, 8):
            raise ValueError(f"num_warps must be 1, 2, 4 or 8, got {self.num_warps}")
        if not 2 <= self.num_stages <= 8:
            raise ValueError(f"num_stages must be from 2 to 8, got {self.num_stages}")
        if not 1 <= self.blocks_per_multiprocessor <= 8:
            raise ValueError(f"blocks_per_multiprocessor must be from 1 to 8, got {self.blocks_per_multiprocessor}")

    @property
    def name(self) -> str:
        """Says every field; ``parse_decode_config`` reads it back."""
        return f"{self.tile_m}x{self.tile_n}_w{self.num_warps}_s{self.num_stages}_b{self.blocks_per_multiprocessor}"

    @property
    def num_threads(self) -> int:
        return WARP * self.num_warps

    @property
    def tile_tokens(self) -> int:
        """Tokens of a block's step; blocks share a sequence in whole steps."""
        return self.tile_n * self.num_warps

    def partial_elements(self, head_dim: int) -> int:
        """float32 numbers of one block's partial result: its rows of O, and what is known of each row."""
        return self.tile_m * (head_dim + PARTIAL_STATS)

    def tile_bytes(self, problem: DecodeProblem) -> int:
        """One step's keys, or values, of a warp."""
        return self.tile_n * problem.head_dim * problem.cache_bytes

    def smem_bytes(self, problem: DecodeProblem) -> int:
        """Shared memory of a block: the warps' rings, in whose place their results are merged at the end."""
        rings = self.num_warps * self.num_stages * 2 * self.tile_bytes(problem)
        merging = self.num_warps * self.tile_m * (problem.head_dim + 2 * PARTIAL_STATS) * 4
        return round_up(max(rings, merging), 128) + BARRIER_BYTES

    def check_fits(self, arch: Arch, problem: DecodeProblem) -> None:
        """Raises ValueError if a block would need more shared memory than the architecture has."""
        need = self.smem_bytes(problem)
        if need > arch.smem_bytes:
            raise argument_error(
                "config",
                f"{self.name}'s need of shared memory at head_dim {problem.head_dim}",
                f"{need} bytes",
                f"{arch.smem_bytes} bytes on {arch.gpu_arch}: choose fewer warps or stages",
            )


_NAME = re.compile(r"(\d+)x(\d+)_w(\d+)_s(\d+)_b(\d+)")


def parse_decode_config(name: str) -> DecodeConfig:
    """The config of ``DecodeConfig.name``.

    Raises:
        ValueError: it is none.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise argument_error("config", "it", repr(name), f"a DecodeConfig's name such as {DecodeConfig().name!r}")
    return DecodeConfig(*map(int, match.groups()))


def default_decode_config(arch: Arch, problem: DecodeProblem, rows: int) -> DecodeConfig:
    """The tuned config for an architecture, a problem and a number of query rows a head of the cache.

    Args:
        rows: query heads of one head of the cache x query tokens of a sequence.
    """
    tile_m = next((m for m in (8, 16, 32) if rows <= m), 32)
    tile_n = 32 if problem.quantised else 16
    for warps, stages, blocks in ((4, 3, 2), (4, 3, 1), (4, 2, 1), (2, 3, 1), (2, 2, 1)):
        config = DecodeConfig(tile_m, tile_n, warps, stages, blocks)
        if blocks * config.smem_bytes(problem) <= arch.smem_bytes:
            return config
    raise ValueError(f"no decode config fits {arch.gpu_arch} at head_dim {problem.head_dim}")
