"""The decode kernel's configs: what can be chosen, which fits where, and the one table of tuned defaults."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from cute_attn.arch import Arch
from cute_attn.configs import round_up
from cute_attn.decode_problem import DecodeProblem
from cute_attn.errors import argument_error

MMA_ROWS = 8  # query rows of one mma: its N side
MMA_TOKENS = 16  # cache tokens of one mma: M of Q K^T, K of P V
PARTIAL_STATS = 4  # float32 a row of a partial result: maximum, sum, sum before rounding, and one unused for alignment
BARRIER_BYTES = 1024  # of shared memory, set apart for barriers and flags
WARP = 32


GEMM0_WARPS = GEMM1_WARPS = 4  # of the roles arrangement
TOKENS_PER_GEMM0_WARP = 64
DIMS_PER_GEMM1_WARP = 64  # at most, where the head dim divides so
MAX_OUTPUT_REGISTERS = 128  # of a thread, for its part of O


@dataclass(frozen=True)
class DecodeConfig:
    """How the decode kernel cuts its work, in one of two arrangements: ``StreamsConfig`` or ``RolesConfig``.

    Attributes:
        tile_m: query rows (query heads of one head of the cache x query tokens) of a block: 8, 16 or 32.
        blocks_per_multiprocessor: that run at one time, where shared memory allows.
    """

    tile_m: int = 8
    blocks_per_multiprocessor: int = 1

    def __post_init__(self) -> None:
        _check_one_of("tile_m", self.tile_m, (8, 16, 32))
        _check_one_of("blocks_per_multiprocessor", self.blocks_per_multiprocessor, tuple(range(1, 9)))

    @property
    def name(self) -> str:
        """Says every field; ``parse_decode_config`` reads it back."""
        raise NotImplementedError

    @property
    def num_threads(self) -> int:
        raise NotImplementedError

    @property
    def tile_tokens(self) -> int:
        """Tokens of a block's step; blocks share a sequence in whole steps."""
        raise NotImplementedError

    def results(self, problem: DecodeProblem) -> int:
        """Results of a block, each over other tokens, that are merged at its end."""
        raise NotImplementedError

    def ring_bytes(self, problem: DecodeProblem) -> int:
        """Shared memory for tiles of the cache, in whose place the results are merged at the end."""
        raise NotImplementedError

    def kept_bytes(self, problem: DecodeProblem) -> int:
        """Other shared memory."""
        return BARRIER_BYTES

    def partial_elements(self, head_dim: int) -> int:
        """float32 numbers of one block's partial result: its rows of O, and what is known of each row."""
        return self.tile_m * (head_dim + PARTIAL_STATS)

    def memory_bytes(self, problem: DecodeProblem) -> int:
        """Shared memory for tiles of the cache, and at the end for the results."""
        merging = self.results(problem) * self.tile_m * (problem.head_dim + 2 * PARTIAL_STATS) * 4
        return round_up(max(self.ring_bytes(problem), merging), 128)

    def smem_bytes(self, problem: DecodeProblem) -> int:
        """Shared memory of a block."""
        return self.memory_bytes(problem) + self.kept_bytes(problem)

    def check_fits(self, arch: Arch, problem: DecodeProblem) -> None:
        """Raises ValueError if a block would need more shared memory than the architecture has."""
        need = self.smem_bytes(problem)
        if need > arch.smem_bytes:
            raise argument_error(
                "config",
                f"{self.name}'s need of shared memory at head_dim {problem.head_dim}",
                f"{need} bytes",
                f"{arch.smem_bytes} bytes on {arch.gpu_arch}: choose smaller tiles, or fewer warps or buffers",
            )

    def fits(self, arch: Arch, problem: DecodeProblem) -> bool:
        """Whether ``check_fits`` finds nothing."""
        try:
            self.check_fits(arch, problem)
        except ValueError:
            return False
        return True


@dataclass(frozen=True)
class StreamsConfig(DecodeConfig):
    """Every warp streams tiles of its own through a ring of its own, with no barrier between warps before the end.

    Attributes:
        tile_n: cache tokens of a warp's step: 16, 32 or 64.
        num_warps: warps of a block.
        num_stages: steps of K and V in a warp's ring.
    """

    tile_n: int = 16
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_one_of("tile_n", self.tile_n, (16, 32, 64))
        _check_one_of("num_warps", self.num_warps, (1, 2, 4, 8))
        _check_one_of("num_stages", self.num_stages, tuple(range(2, 9)))

    @property
    def name(self) -> str:
        """Says every field; ``parse_decode_config`` reads it back."""
        shape = f"{self.tile_m}x{self.tile_n}_w{self.num_warps}_s{self.num_stages}"
        return f"streams_{shape}_b{self.blocks_per_multiprocessor}"

    @property
    def num_threads(self) -> int:
        return WARP * self.num_warps

    @property
    def tile_tokens(self) -> int:
        """Tokens of a block's step; blocks share a sequence in whole steps."""
        return self.tile_n * self.num_warps

    def results(self, problem: DecodeProblem) -> int:
        """One a warp."""
        return self.num_warps

    def ring_bytes(self, problem: DecodeProblem) -> int:
        """The warps' rings of K and V."""
        return self.num_warps * self.num_stages * 2 * self.tile_n * problem.row_bytes


@dataclass(frozen=True)
class RolesConfig(DecodeConfig):
    """Four warps multiply by K, 64 tokens each, and four by V: see ``kernels.parts.roles``.

    Attributes:
        k_part_bytes: of the head dim of K that a gemm0 warp loads at a time: 64 or 128.
        k_buffers: such parts in a gemm0 warp's ring.
        v_tile: tokens of V that a gemm1 group loads at a time: 32 or 64.
        v_buffers: such tiles in its ring.
        v_by_group: the warps of a gemm1 group load V together; else each loads its own part of the head dim.
        row_max: how the row max of gemm1 goes back to gemm0: "none" (each gemm0 warp goes by what it saw itself) or
            "with_p" (protected by the barrier that gives the buffer of P back).
    """

    k_part_bytes: int = 128
    k_buffers: int = 2
    v_tile: int = 64
    v_buffers: int = 2
    v_by_group: bool = True
    row_max: str = "with_p"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_one_of("k_part_bytes", self.k_part_bytes, (64, 128))
        _check_one_of("k_buffers", self.k_buffers, (2, 3, 4))
        _check_one_of("v_tile", self.v_tile, (32, 64))
        _check_one_of("v_buffers", self.v_buffers, (2, 3, 4))
        _check_one_of("row_max", self.row_max, ("none", "with_p"))

    @property
    def name(self) -> str:
        """Says every field; ``parse_decode_config`` reads it back."""
        k, v = f"k{self.k_part_bytes}x{self.k_buffers}", f"v{self.v_tile}x{self.v_buffers}"
        v_by = "group" if self.v_by_group else "warp"
        back = self.row_max.replace("_", "")
        return f"roles_{self.tile_m}_{k}_{v}_{v_by}_{back}_b{self.blocks_per_multiprocessor}"

    @property
    def num_threads(self) -> int:
        return WARP * (GEMM0_WARPS + GEMM1_WARPS)

    @property
    def tile_tokens(self) -> int:
        """Tokens of a block's step; blocks share a sequence in whole steps."""
        return GEMM0_WARPS * TOKENS_PER_GEMM0_WARP

    def warps_per_group(self, problem: DecodeProblem) -> int:
        """gemm1 warps that read the same tokens, and split the head dim."""
        blocks = problem.head_dim // MMA_TOKENS
        dividing = [n for n in (1, 2, 4) if blocks % n == 0]
        return next((n for n in dividing if problem.head_dim // n <= DIMS_PER_GEMM1_WARP), dividing[-1])

    def groups(self, problem: DecodeProblem) -> int:
        """gemm1 groups, each with tokens of its own."""
        return GEMM1_WARPS // self.warps_per_group(problem)

    def output_registers(self, problem: DecodeProblem) -> int:
        """Registers that O takes of a gemm1 thread."""
        return self.tile_m * problem.head_dim // self.warps_per_group(problem) // WARP

    def group_loads_v(self, problem: DecodeProblem) -> bool:
        """Whether several warps load a tile of V together."""
        return self.v_by_group and self.warps_per_group(problem) > 1

    def results(self, problem: DecodeProblem) -> int:
        """One a gemm1 group."""
        return self.groups(problem)

    def k_bytes(self, problem: DecodeProblem) -> int:
        """A gemm0 warp's ring."""
        return self.k_buffers * TOKENS_PER_GEMM0_WARP * min(self.k_part_bytes, problem.row_bytes)

    def v_bytes(self, problem: DecodeProblem) -> int:
        """A gemm1 group's ring."""
        return self.v_buffers * self.v_tile * problem.row_bytes

    def ring_bytes(self, problem: DecodeProblem) -> int:
        """The rings of K and of V."""
        return GEMM0_WARPS * self.k_bytes(problem) + self.groups(problem) * self.v_bytes(problem)

    @property
    def p_bytes(self) -> int:
        """The P tiles of the gemm0 warps."""
        return GEMM0_WARPS * TOKENS_PER_GEMM0_WARP * self.tile_m * 2

    def kept_bytes(self, problem: DecodeProblem) -> int:
        """P tiles, the row max and sums with each and the row max back, and barriers."""
        return self.p_bytes + 4 * GEMM0_WARPS * self.tile_m * 4 + BARRIER_BYTES

    def check_fits(self, arch: Arch, problem: DecodeProblem) -> None:
        """Raises ValueError if a block needs more shared memory than there is, or a thread too many registers."""
        super().check_fits(arch, problem)
        registers = self.output_registers(problem)
        if registers > MAX_OUTPUT_REGISTERS:
            what = f"{self.name}'s need of registers for O at head_dim {problem.head_dim}"
            raise argument_error("config", what, registers, f"{MAX_OUTPUT_REGISTERS}: choose a smaller tile_m")


def _check_one_of(field: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        *most, last = map(str, allowed)
        raise ValueError(f"{field} must be {', '.join(most)} or {last}, got {value!r}")


_STREAMS = re.compile(r"streams_(\d+)x(\d+)_w(\d+)_s(\d+)_b(\d+)")
_ROLES = re.compile(r"roles_(\d+)_k(\d+)x(\d+)_v(\d+)x(\d+)_(group|warp)_(none|withp)_b(\d+)")


def parse_decode_config(name: str) -> DecodeConfig:
    """The config of ``DecodeConfig.name``.

    Raises:
        ValueError: it is none.
    """
    match = _STREAMS.fullmatch(name)
    if match is not None:
        tile_m, tile_n, warps, stages, blocks = map(int, match.groups())
        return StreamsConfig(tile_m, blocks, tile_n, warps, stages)
    match = _ROLES.fullmatch(name)
    if match is not None:
        *numbers, v_by, back, blocks_text = match.groups()
        tile_m, k_part, k_buffers, v_tile, v_buffers = map(int, numbers)
        row_max = "with_p" if back == "withp" else back
        return RolesConfig(tile_m, int(blocks_text), k_part, k_buffers, v_tile, v_buffers, v_by == "group", row_max)
    allowed = f"a StreamsConfig, a RolesConfig, or its name such as {StreamsConfig().name!r}"
    raise argument_error("config", "it", repr(name), allowed)


def seed_config(arch: Arch, problem: DecodeProblem, rows: int) -> RolesConfig:
    """The tiling of the CUDA kernel that this work started from.

    It takes 128-byte parts of K and 64 tokens of V, or 64 and 32 on the smaller GPUs, and pads rows to 16 or 32. Where
    that does not fit, the smaller tiles or fewer rows do; a head dim that no two warps can split, such as 240, may fit
    nowhere.

    Raises:
        ValueError: none fits.
    """
    large, small = RolesConfig(16, k_part_bytes=128, v_tile=64), RolesConfig(16, k_part_bytes=64, v_tile=32)
    tiles = (small,) if arch.capability in _SMALL else (large, small)
    tile_ms = (16,) if rows <= 16 else (32, 16)
    choices = [replace(config, tile_m=tile_m) for tile_m in tile_ms for config in tiles]
    fitting = (config for config in choices if config.fits(arch, problem))
    config = next(fitting, choices[-1])
    config.check_fits(arch, problem)
    return config


@dataclass(frozen=True)
class _Row:
    """One row of the table.

    ``config``, but for tile_m, serves on ``archs`` where a token's keys of one head take up to ``row_bytes`` and O up
    to ``elements`` (tile_m x head_dim), because of ``reason``.
    """

    archs: tuple[int, ...]
    row_bytes: int
    elements: int
    config: StreamsConfig
    reason: str


_HOPPER = (90,)  # 227 KB of shared memory
_BLACKWELL = (100, 103, 110)  # 227 KB
_AMPERE = (80, 87)  # 163 KB
_SMALL = (86, 89, 120, 121)  # 99 KB
_LARGE = (*_HOPPER, *_BLACKWELL)

MAX_ELEMENTS = 2048  # of O a warp: 64 registers a thread, and half as many for Q


def _streams(tile_n: int, warps: int, stages: int, blocks: int) -> StreamsConfig:
    return StreamsConfig(8, blocks, tile_n, warps, stages)


# Rows are tried from the top. "H200:" rows were measured there, in microseconds at (batch, length); the other rows keep
# as many bytes in flight as shared memory allows with registers to spare, not measured.
TABLE: tuple[_Row, ...] = (
    _Row(_LARGE, 64, 1024, _streams(32, 4, 3, 4), "48 KB a block, as at 128 bytes"),
    _Row(
        _LARGE,
        128,
        1024,
        _streams(16, 4, 3, 4),
        "H200, int8 and fp8, d 128: 5.0 at (1, 512), 137 at (32, 8192), 507 at (128, 8192); 32 tokens with 2 blocks "
        "5.4, 137.5, 510, as small work waits for longer tiles",
    ),
    _Row(
        _LARGE,
        256,
        1024,
        _streams(16, 4, 2, 3),
        "H200, bf16, d 128: 4.4 at (1, 512), 251 at (32, 8192), 959 at (128, 8192); 3 stages and 2 blocks 4.6, 252.5, "
        "964; 8 warps 5.3, 255, 956; 32 tokens 4.8, 253, 957",
    ),
    _Row(_LARGE, 128, 2048, _streams(32, 4, 3, 2), "16 rows take 200 registers: two blocks, with longer tiles"),
    _Row(_LARGE, 256, 2048, _streams(16, 4, 3, 2), "the same"),
    _Row(_LARGE, 512, 2048, _streams(16, 4, 3, 1), "192 KB: one block"),
    _Row(_AMPERE, 64, 1024, _streams(32, 4, 3, 3), "48 KB: three blocks"),
    _Row(_AMPERE, 128, 1024, _streams(16, 4, 3, 3), "48 KB: three blocks"),
    _Row(_AMPERE, 128, 2048, _streams(16, 4, 3, 2), "16 rows take 200 registers: two blocks"),
    _Row(_AMPERE, 256, 2048, _streams(16, 4, 2, 2), "64 KB: two blocks"),
    _Row(_AMPERE, 512, 2048, _streams(16, 4, 2, 1), "128 KB: one block"),
    _Row(_SMALL, 64, 1024, _streams(32, 4, 3, 2), "48 KB: two blocks"),
    _Row(_SMALL, 128, 2048, _streams(16, 4, 3, 2), "48 KB: two blocks"),
    _Row(_SMALL, 256, 2048, _streams(16, 4, 3, 1), "96 KB of 99"),
    _Row(_SMALL, 512, 2048, _streams(16, 2, 3, 1), "96 KB of 99, with two warps"),
)


def default_decode_config(arch: Arch, problem: DecodeProblem, rows: int) -> StreamsConfig:
    """The tuned config for an architecture, a problem and a number of query rows a head of the cache.

    Rows beyond a tile's are tiles of their own, whose blocks read the cache from the L2.

    Args:
        rows: query heads of one head of the cache x query tokens of a sequence.
    """
    fitting = [m for m in (8, 16, 32) if m * problem.head_dim <= MAX_ELEMENTS]
    tile_m = next((m for m in fitting if rows <= m), fitting[-1])
    for row in TABLE:
        fits = problem.row_bytes <= row.row_bytes and tile_m * problem.head_dim <= row.elements
        if arch.capability in row.archs and fits:
            return replace(row.config, tile_m=tile_m)
    raise ValueError(f"head_dim must be at most 256, got {problem.head_dim}")
