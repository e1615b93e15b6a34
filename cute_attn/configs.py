"""The prefill kernel's tilings: what can be chosen, which fits where, and the one table of tuned defaults."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from cute_attn.arch import Arch
from cute_attn.errors import argument_error

ELEMENT_BYTES = 2  # fp16 and bf16
SMEM_ALIGNMENT = 1024  # bytes: one swizzle atom of 8 rows of 128; addresses then take fewer registers
PADDING = 8  # elements: one 16-byte chunk, which moves each row to other banks


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class PrefillConfig:
    """How the prefill kernel cuts attention into tiles.

    Attributes:
        tile_m: query rows per block.
        tile_n: keys per step of the main loop.
        num_warps: warps per block; each owns whole query rows, and all read every key.
        num_stages: K/V tile buffers in shared memory. 1: K and V take turns in one buffer. 2: one for K and one for V,
            so that V loads under Q K^T and the next K under softmax and P V. 4: two of each.
        swizzle: XOR-swizzled rows of shared memory; False pads each row by 8 elements instead.
        q_in_regs: Q's fragments are read from shared memory once and stay in registers.
        o_fp32: between tiles O stays in fp32 (in the accumulators); False rounds it to 16 bits after every tile.
        o_store: how O's fragments become 16-byte stores: "smem" (through shared memory) or "shuffle" (between lanes).
    """

    tile_m: int = 128
    tile_n: int = 64
    num_warps: int = 4
    num_stages: int = 2
    swizzle: bool = True
    q_in_regs: bool = False
    o_fp32: bool = True
    o_store: str = "smem"

    def __post_init__(self) -> None:
        if self.num_warps not in (4, 8):
            raise ValueError(f"num_warps must be 4 or 8, got {self.num_warps}")
        rows = 16 * self.num_warps
        if self.tile_m not in (rows, 2 * rows):
            raise ValueError(f"tile_m must be {rows} or {2 * rows} with {self.num_warps} warps, got {self.tile_m}")
        step = 4 * self.num_warps  # key rows that the block's threads copy at once, 8 chunks of 16 bytes in each
        if self.tile_n % step or not step <= self.tile_n <= 256:
            raise ValueError(
                f"tile_n must be a multiple of {step} from {step} to 256 with {self.num_warps} warps, got {self.tile_n}"
            )
        if self.num_stages not in (1, 2, 4):
            raise ValueError(f"num_stages must be 1, 2 or 4, got {self.num_stages}")
        if self.o_store not in ("smem", "shuffle"):
            raise ValueError(f"o_store must be 'smem' or 'shuffle', got {self.o_store!r}")

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    @property
    def share_kv(self) -> bool:
        """K and V take turns in one buffer."""
        return self.num_stages == 1

    @property
    def ring(self) -> int:
        """Tiles in the K ring, and in the V ring."""
        return max(1, self.num_stages // 2)

    @property
    def name(self) -> str:
        """Says every field; ``parse_config`` reads it back."""
        return "_".join((
            f"{self.tile_m}x{self.tile_n}",
            f"w{self.num_warps}",
            f"s{self.num_stages}",
            "swizzle" if self.swizzle else "pad",
            "qreg" if self.q_in_regs else "qsmem",
            "o32" if self.o_fp32 else "o16",
            self.o_store,
        ))  # fmt: skip

    @property
    def head_dim_multiple(self) -> int:
        """Head dims are padded in shared memory to a multiple of this.

        A 16-byte cp.async moves 8 elements of a row. The block's threads stand as rows x (multiple / 8) chunks, and
        their rows must divide tile_n (they always divide tile_m).
        """
        return next(m for m in (16, 32, 64) if self.tile_n % (self.num_threads // (m // 8)) == 0)

    def tile_dim(self, head_dim: int) -> int:
        """The head dim as tiles hold it."""
        return round_up(head_dim, self.head_dim_multiple)

    def row_elements(self, head_dim: int) -> int:
        """Elements from one row of a shared-memory tile to the next, padding included."""
        return self.tile_dim(head_dim) + (0 if self.swizzle else PADDING)

    def smem_elements(self, head_dim: int, head_dim_v: int) -> tuple[int, int, int]:
        """Elements of the Q region (which O reuses on its way out), of the K ring and of the V ring.

        With one stage K and V share the K ring's one buffer and the V ring is 0.
        """
        q, out = self.tile_m * self.row_elements(head_dim), self.tile_m * self.row_elements(head_dim_v)
        k, v = self.tile_n * self.row_elements(head_dim), self.tile_n * self.row_elements(head_dim_v)
        q_region = max(q, out) if self.o_store == "smem" else q
        return (q_region, max(k, v), 0) if self.share_kv else (q_region, k * self.ring, v * self.ring)

    def smem_bytes(self, head_dim: int, head_dim_v: int) -> int:
        """Shared memory of one block."""
        *regions, last = (n * ELEMENT_BYTES for n in self.smem_elements(head_dim, head_dim_v) if n)
        return sum(round_up(region, SMEM_ALIGNMENT) for region in regions) + last

    def check_fits(self, arch: Arch, head_dim: int, head_dim_v: int) -> None:
        """Raises ValueError if a block would need more shared memory than the architecture has."""
        need = self.smem_bytes(head_dim, head_dim_v)
        if need > arch.smem_bytes:
            raise argument_error(
                "config",
                f"{self.name}'s need of shared memory at head_dim {head_dim} (v: {head_dim_v})",
                f"{need} bytes",
                f"{arch.smem_bytes} bytes on {arch.gpu_arch}: choose smaller tiles or fewer stages",
            )


_NAME = re.compile(r"(\d+)x(\d+)_w(\d+)_s(\d+)_(swizzle|pad)_(qreg|qsmem)_(o32|o16)_(smem|shuffle)")

# The tilings of the CUDA kernel this work started from: rows padded, 16 query rows a warp, O stored by shuffles. Its
# default tile is 128x64 below head dim 128 and 128x32 from there; 64x64 and 64x32 are its choice for smaller GPUs.
SEED_TILES = ((64, 64), (64, 32), (128, 64), (128, 32), (128, 128))
SEED_CONFIGS: dict[str, PrefillConfig] = {
    f"seed_{m}x{n}_{stages}stage": PrefillConfig(m, n, m // 16, stages, swizzle=False, o_store="shuffle")
    for m, n in SEED_TILES
    for stages in (1, 2)
}


def parse_config(name: str, head_dim: int) -> PrefillConfig:
    """The config of a seed tiling's name ("seed_64x64_1stage") or of ``PrefillConfig.name``.

    The seed keeps Q in registers below head dim 64, so its tilings depend on ``head_dim``.

    Raises:
        ValueError: the name is neither.
    """
    if name in SEED_CONFIGS:
        return replace(SEED_CONFIGS[name], q_in_regs=head_dim < 64)
    match = _NAME.fullmatch(name)
    if match is None:
        allowed = f"{', '.join(SEED_CONFIGS)}, a PrefillConfig, or its name such as {PrefillConfig().name!r}"
        raise argument_error("config", "it", repr(name), allowed)
    tile_m, tile_n, warps, stages, rows, q, o, store = match.groups()
    return PrefillConfig(
        int(tile_m), int(tile_n), int(warps), int(stages), rows == "swizzle", q == "qreg", o == "o32", store
    )


@dataclass(frozen=True)
class _Row:
    """One row of the table: ``config`` serves head dims up to ``head_dim`` on ``archs``, because of ``reason``."""

    archs: tuple[int, ...]
    head_dim: int
    config: PrefillConfig
    reason: str


_AMPERE = (80, 87)  # 163 KB of shared memory
_HOPPER = (90,)  # 227 KB
_BLACKWELL = (100, 103, 110)  # 227 KB
_SMALL = (86, 89, 120, 121)  # 99 KB

# Rows are tried from the top. "H200:" rows were measured there (TFLOP/s at 16384 tokens in all, length 4096, full /
# causal); the other rows are the largest tiles that compile without a spill and fit the shared memory, not measured.
TABLE: tuple[_Row, ...] = (
    _Row(
        _HOPPER,
        64,
        PrefillConfig(128, 128, 4, 2),
        "H200: 343 / 326; 64 keys a tile 315 / 298, as every tile costs a softmax's latencies anew; 4 stages 348 / 334 "
        "but spills in bf16 with a log-sum-exp",
    ),
    _Row(
        _HOPPER,
        128,
        PrefillConfig(128, 64, 4, 2),
        "H200: 377 / 360; 4 stages 387 / 376 but spills when causal; 48 keys a tile is slower, 128 does not fit",
    ),
    _Row(
        _HOPPER,
        256,
        PrefillConfig(128, 64, 8, 2, q_in_regs=True),
        "H200: 347 / 338; with Q in shared memory 310 / 311, as ldmatrix of 16 rows a warp fills the shared memory's "
        "bandwidth; 64x64 with 4 warps 324 / 307",
    ),
    _Row(_AMPERE, 64, PrefillConfig(128, 128, 4, 2), "two blocks a multiprocessor"),
    _Row(_AMPERE, 96, PrefillConfig(128, 64, 4, 2), "40 to 72 KB: two blocks a multiprocessor"),
    _Row(_AMPERE, 128, PrefillConfig(128, 32, 4, 2), "48 keys a tile spill with a window and a log-sum-exp"),
    _Row(_AMPERE, 256, PrefillConfig(128, 64, 8, 2, q_in_regs=True), "as on Hopper; 128 KB: one block of 8 warps"),
    _Row(_BLACKWELL, 64, PrefillConfig(128, 64, 4, 2), "128 keys a tile spill on sm_100a"),
    _Row(_BLACKWELL, 128, PrefillConfig(64, 64, 4, 2), "128 query rows a block spill on sm_100a"),
    _Row(_BLACKWELL, 256, PrefillConfig(64, 64, 4, 2), "two blocks a multiprocessor"),
    _Row(_SMALL, 64, PrefillConfig(128, 128, 4, 2), "48 KB: two blocks a multiprocessor"),
    _Row(_SMALL, 128, PrefillConfig(128, 32, 4, 2), "48 KB: two blocks a multiprocessor"),
    _Row(_SMALL, 256, PrefillConfig(64, 64, 4, 2), "96 KB of 99"),
)


def default_config(arch: Arch, head_dim: int, head_dim_v: int) -> PrefillConfig:
    """The tuned config for an architecture and the larger of the two head dims.

    Raises:
        ValueError: a head dim is above 256.
    """
    widest = max(head_dim, head_dim_v)
    for row in TABLE:
        if arch.capability in row.archs and widest <= row.head_dim:
            return row.config
    raise ValueError(f"head_dim must be at most 256, got {widest}")
