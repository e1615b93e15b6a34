"""The prefill kernel's tiles on a CPU: every copy, fragment and shared-memory wavefront, over the kernel's own layouts.

Elements carry labels or random numbers through the very steps that the kernel takes: 16-byte copies into shared
memory, ldmatrix, mma, the accumulators of S as the A operand of P V, and O's way out.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest

from cute_attn.configs import SEED_CONFIGS, SEED_TILES, TABLE, PrefillConfig
from cute_attn.kernels.parts.mask import column_distance
from cute_attn.kernels.parts.tiles import CHUNK, PrefillTiles, as_a_operand, rows_and_columns
from tests import tile_model
from tests.tile_model import ELEMENT_BYTES, LANES, Array

CHUNK_BYTES = CHUNK * ELEMENT_BYTES
SECTOR_BYTES = 32  # the unit of global memory traffic


class Case(NamedTuple):
    """A config and the head dims of q, k and of v."""

    config: PrefillConfig
    head_dim: int
    head_dim_v: int


class Block:
    """Coordinates and offsets of one case, read off the kernel's layouts once."""

    def __init__(self, case: Case):
        self.case = case
        self.config = case.config
        self.tiles = PrefillTiles(case.config, case.head_dim, case.head_dim_v, cutlass.Float16)
        self.tile_m, self.tile_n = case.config.tile_m, case.config.tile_n
        self.tile_d, self.tile_dv = self.tiles.tile_d, self.tiles.tile_dv
        self.smem_q = tile_model.offsets(self.tiles.smem_q())
        self.smem_k = tile_model.offsets(self.tiles.smem_k())
        self.smem_v = tile_model.offsets(self.tiles.smem_v())
        self.smem_o = tile_model.offsets(self.tiles.smem_o())
        self.smem_v_transposed = tile_model.offsets(self.tiles.smem_v_transposed())
        self.partitions: dict[tuple[str, str, tuple[int, int]], Array] = {}

    @cached_property
    def loads(self) -> dict[str, tuple[Array, Array, Array]]:
        """For q, k, v: where each thread's chunks come from, where they go, and the tile's offsets."""
        return {
            name: (
                self.partition(self.tiles.global_to_smem(columns), "partition_S", (rows, columns)),
                self.partition(self.tiles.global_to_smem(columns), "partition_D", (rows, columns)),
                tile,
            )
            for name, rows, columns, tile in (
                ("q", self.tile_m, self.tile_d, self.smem_q),
                ("k", self.tile_n, self.tile_d, self.smem_k),
                ("v", self.tile_n, self.tile_dv, self.smem_v),
            )
        }

    def partition(self, tiled: Any, method: str, shape: tuple[int, int]) -> Array:
        """(thread, value, modes..., coordinate) of every thread's part of a tile."""
        key = (str(tiled), method, shape)
        if key not in self.partitions:
            tile = cute.make_identity_tensor(shape)
            parts = [getattr(tiled.get_slice(t), method)(tile) for t in range(self.config.num_threads)]
            self.partitions[key] = tile_model.coordinates(parts)
        return self.partitions[key]

    def fragment(self, operand: str, shape: tuple[int, int]) -> Any:
        """A register tensor for one operand of the mma."""
        partition_shape = getattr(self.tiles.mma(), f"partition_shape_{operand}")(shape)
        return cute.make_rmem_tensor(partition_shape, cutlass.Float16)

    def fetched(self, copy: Any, operand: str, smem: Array, contents: Array, transpose: bool) -> tuple[Array, Array]:
        """An operand as ldmatrix brings it into registers.

        Args:
            smem: element offsets of the tile as the mma sees it, (rows, contraction).
            contents: shared memory.

        Returns:
            The fragments' contents (warp, lane, value, rows, steps), and the byte addresses of every ldmatrix
            (access, lane).
        """
        source = self.partition(copy, "partition_S", smem.shape)[:, 0]  # the first element of each lane's row
        rows = smem[source[..., 0], source[..., 1]]  # (thread, rows, steps)
        rows = np.moveaxis(rows.reshape(-1, LANES, *rows.shape[1:]), 1, -1)  # (warp, rows, steps, lane)
        registers = tile_model.ldmatrix(contents, rows, transpose)  # (warp, rows, steps, lane, 8)
        fragment = self.fragment(operand, smem.shape)
        order = tile_model.offsets(copy.get_slice(0).retile(fragment).layout)  # (8, rows, steps) -> register
        flat = np.empty((rows.shape[0], LANES, cute.size(fragment)), contents.dtype)
        flat[..., order] = np.moveaxis(registers, (1, 2, 3, 4), (3, 4, 1, 2))
        fragments = flat[..., tile_model.offsets(fragment.layout)]
        return fragments, rows.reshape(-1, LANES) * ELEMENT_BYTES

    def operand_q(self, contents: Array) -> tuple[Array, Array]:
        return self.fetched(self.tiles.ldmatrix_a(), "A", self.smem_q[..., 0], contents, transpose=False)

    def operand_k(self, contents: Array, stage: int = 0) -> tuple[Array, Array]:
        return self.fetched(self.tiles.ldmatrix_b(), "B", self.smem_k[..., stage], contents, transpose=False)

    def operand_v(self, contents: Array, stage: int = 0) -> tuple[Array, Array]:
        tile = self.smem_v_transposed[..., stage]
        return self.fetched(self.tiles.ldmatrix_b_transposed(), "B", tile, contents, transpose=True)

    def accumulator_coordinates(self, shape: tuple[int, int]) -> Array:
        """(warp, lane, value, rows, columns, coordinate) of the accumulators."""
        parts = self.partition(self.tiles.mma(), "partition_C", shape)
        return parts.reshape(-1, LANES, *parts.shape[1:])

    def by_rows(self, mma: Any, columns: int) -> Array:
        """(thread, rows, columns, coordinate) of a (tile_m, columns) tile's accumulators, as the softmax reads them."""
        at = self.partition(mma, "partition_C", (self.tile_m, columns))
        layout = cute.make_rmem_tensor(mma.partition_shape_C((self.tile_m, columns)), cutlass.Float32).layout
        registers = np.empty((at.shape[0], np.prod(at.shape[1:-1]), 2), dtype=np.int64)
        registers[:, tile_model.offsets(layout)] = at
        return registers[:, tile_model.offsets(rows_and_columns(layout))]


def product(a: Array, b: Array) -> Array:
    """Accumulators (warp, lane, 4, rows, columns) of one tile, by the hardware's definition of mma.m16n8k16."""
    a_matrices = tile_model.mma_a(np.moveaxis(a, (3, 4), (1, 2)))  # (warp, rows, steps, 16, 16)
    b_matrices = tile_model.mma_b(np.moveaxis(b, (3, 4), (1, 2)))  # (warp, columns, steps, 8, 16)
    c_matrices = np.einsum("wmkij,wnklj->wmnil", a_matrices, b_matrices, optimize=True)
    return np.moveaxis(tile_model.accumulators(c_matrices), (1, 2), (3, 4))


def gathered(accumulators: Array, coordinates: Array, shape: tuple[int, int]) -> Array:
    """The matrix that the accumulators hold; each element must have exactly one owner."""
    rows, columns = coordinates[..., 0].ravel(), coordinates[..., 1].ravel()
    assert (np.bincount(rows * shape[1] + columns, minlength=shape[0] * shape[1]) == 1).all()
    matrix = np.empty(shape)
    matrix[rows, columns] = accumulators.ravel()
    return matrix


def in_shared_memory(tile: Array, matrix: Array) -> Array:
    """Shared memory that holds a matrix in a tile, and NaN elsewhere."""
    memory = np.full(int(tile.max()) + 1, np.nan)
    memory[tile] = matrix
    return memory


SHIPPED = [
    Case(config, head_dim, head_dim)
    for config in dict.fromkeys(row.config for row in TABLE)
    for head_dim in (32, 64, 72, 96, 128, 192, 256)
    if any(row.config == config and head_dim <= row.head_dim for row in TABLE)
]
SEED = [Case(SEED_CONFIGS[f"seed_{m}x{n}_2stage"], d, d) for m, n in SEED_TILES for d in (32, 64, 96, 128, 256)]
OTHER = [
    Case(PrefillConfig(), 128, 64),
    Case(PrefillConfig(), 64, 128),
    Case(PrefillConfig(swizzle=False), 192, 128),
    Case(PrefillConfig(swizzle=False), 80, 48),
    Case(PrefillConfig(64, 48, 4), 80, 80),
    Case(PrefillConfig(64, 16, 4, 4), 64, 64),
    Case(PrefillConfig(128, 32, 8), 96, 32),
    Case(PrefillConfig(128, 96, 8, 4), 80, 128),
    Case(PrefillConfig(128, 112, 4, 1), 48, 16),
    Case(PrefillConfig(256, 96, 8), 64, 64),
    Case(PrefillConfig(256, 256, 8, 1), 8, 8),
]


def case_id(case: Case) -> str:
    return f"{case.config.name}-d{case.head_dim}v{case.head_dim_v}"


@pytest.fixture(scope="module", params=SHIPPED + SEED + OTHER, ids=case_id)
def block(request: pytest.FixtureRequest) -> Iterator[Block]:
    with tile_model.layouts_on_host():
        yield Block(request.param)


class TestSharedMemory:
    def test_tiles_are_injective_and_fit_their_regions(self, block: Block) -> None:
        q_region, k_ring, v_ring = block.config.smem_elements(block.case.head_dim, block.case.head_dim_v)
        regions = (q_region, k_ring, k_ring if block.config.share_kv else v_ring)
        for tile, region in zip((block.smem_q, block.smem_k, block.smem_v), regions, strict=True):
            assert np.unique(tile).size == tile.size
            assert tile.min() == 0
            assert tile.max() < region
        if block.config.o_store == "smem":
            assert np.unique(block.smem_o).size == block.smem_o.size
            assert block.smem_o.max() < q_region

    def test_swizzle_permutes_the_tile(self, block: Block) -> None:
        """Nothing is lost: a swizzled tile fills its region without a gap, a padded one leaves a chunk a row."""
        gap = 0 if block.config.swizzle else CHUNK
        for tile in (block.smem_q, block.smem_k, block.smem_v):
            rows, columns, stages = tile.shape
            assert tile.max() + 1 + gap == rows * (columns + gap) * stages

    def test_chunks_stay_whole_and_aligned(self, block: Block) -> None:
        for tile in (block.smem_q, block.smem_k, block.smem_v, block.smem_o):
            chunks = tile.swapaxes(1, 2).reshape(-1, CHUNK)
            assert (chunks[:, 0] % CHUNK == 0).all()
            assert (np.diff(chunks, axis=1) == 1).all()

    def test_transposed_view_of_v(self, block: Block) -> None:
        assert (block.smem_v_transposed == block.smem_v.swapaxes(0, 1)).all()


class TestLoads:
    def test_every_element_is_copied_once_in_whole_chunks(self, block: Block) -> None:
        for source, target, tile in block.loads.values():
            assert (source == target).all()
            rows, columns, _ = tile.shape
            flat = source[..., 0] * columns + source[..., 1]
            assert (np.bincount(flat.ravel(), minlength=rows * columns) == 1).all()
            assert (np.diff(flat, axis=1) == 1).all()
            assert (flat[:, 0] % CHUNK == 0).all()

    def test_global_reads_use_whole_sectors(self, block: Block) -> None:
        for source, _, tile in block.loads.values():
            columns = tile.shape[1]
            chunks = (source[:, 0, ..., 0] * columns + source[:, 0, ..., 1]) * ELEMENT_BYTES
            warps = np.moveaxis(chunks.reshape(-1, LANES, *chunks.shape[1:]), 1, -1).reshape(-1, LANES)
            sectors = [np.unique(warp // SECTOR_BYTES).size for warp in warps]
            assert set(sectors) == {LANES * CHUNK_BYTES // SECTOR_BYTES}

    def test_shared_memory_writes(self, block: Block) -> None:
        """Swizzled tiles are written without excess. Padded ones have it where a copy covers under 64 columns: then 8
        lanes write two or four rows, whose padding lets them meet in one group of banks."""
        for _, target, tile in block.loads.values():
            rows, columns, _ = tile.shape
            offsets = tile[target[:, 0, ..., 0], target[:, 0, ..., 1], 0]
            warps = np.moveaxis(offsets.reshape(-1, LANES, *offsets.shape[1:]), 1, -1).reshape(-1, LANES)
            count, ideal = tile_model.wavefronts(warps * ELEMENT_BYTES, CHUNK_BYTES)
            assert ideal == rows * columns // (8 * CHUNK)
            assert count - ideal == (0 if block.config.swizzle else padded_excess(columns) * ideal)


def padded_excess(columns: int) -> int:
    """Excess wavefronts of each 8 lanes that write a padded tile."""
    return 0 if columns % 64 == 0 else 1


class TestFragments:
    def test_scores_equal_numpy(self, block: Block) -> None:
        rng = np.random.default_rng(0)
        q, k = rng.standard_normal((block.tile_m, block.tile_d)), rng.standard_normal((block.tile_n, block.tile_d))
        stage = block.config.ring - 1
        a, _ = block.operand_q(in_shared_memory(block.smem_q[..., 0], q))
        b, _ = block.operand_k(in_shared_memory(block.smem_k[..., stage], k), stage)
        shape = (block.tile_m, block.tile_n)
        scores = gathered(product(a, b), block.accumulator_coordinates(shape), shape)
        np.testing.assert_allclose(scores, q @ k.T, rtol=0, atol=1e-12)

    def test_output_equals_numpy(self, block: Block) -> None:
        """P is the accumulators of S, seen as A fragments without moving between lanes."""
        rng = np.random.default_rng(1)
        p, v = rng.standard_normal((block.tile_m, block.tile_n)), rng.standard_normal((block.tile_n, block.tile_dv))
        at = block.accumulator_coordinates(p.shape)
        layout = block.fragment("C", p.shape).layout
        registers = np.empty((*at.shape[:2], p.size // (at.shape[0] * LANES)))
        registers[..., tile_model.offsets(layout)] = p[at[..., 0], at[..., 1]]
        a = registers[..., tile_model.offsets(as_a_operand(layout))]
        stage = block.config.ring - 1
        b, _ = block.operand_v(in_shared_memory(block.smem_v[..., stage], v), stage)
        shape = (block.tile_m, block.tile_dv)
        out = gathered(product(a, b), block.accumulator_coordinates(shape), shape)
        np.testing.assert_allclose(out, p @ v, rtol=0, atol=1e-12)

    def test_ldmatrix_reads_without_excess(self, block: Block) -> None:
        for operand, tile in (
            (block.operand_q, block.smem_q),
            (block.operand_k, block.smem_k),
            (block.operand_v, block.smem_v),
        ):
            _, addresses = operand(np.zeros(int(tile.max()) + 1))
            count, ideal = tile_model.wavefronts(addresses, CHUNK_BYTES)
            assert count == ideal

    def test_rows_and_columns_of_accumulators(self, block: Block) -> None:
        """The mask relies on it: a thread's columns lie at the same static distances in each of its rows."""
        seen = block.by_rows(block.tiles.mma(), block.tile_n)
        assert (seen[..., 0] == seen[:, :, :1, 0]).all()
        distances = [column_distance(c) for c in range(seen.shape[2])]
        assert (seen[..., 1] - seen[:, :, :1, 1] == distances).all()
        assert (seen[:, :, 0, 1] == seen[:, :1, 0, 1]).all()

    def test_row_sums_stand_beside_the_scores(self, block: Block) -> None:
        """The product with 8 columns of ones takes the fragments of P, and leaves each sum with its row's owners."""
        scores, sums = block.tiles.mma(), block.tiles.mma(columns=8)
        assert (block.by_rows(sums, 8)[:, :, 0, 0] == block.by_rows(scores, block.tile_n)[:, :, 0, 0]).all()
        of_p = [block.partition(mma, "partition_A", (block.tile_m, block.tile_n)) for mma in (sums, scores)]
        assert (of_p[0] == of_p[1]).all()


class TestOutput:
    def test_staging_holds_the_output(self, block: Block) -> None:
        """O's fragments through shared memory and out by rows: each element once, in whole chunks, without excess."""
        shape = (block.tile_m, block.tile_dv)
        copy = block.tiles.accumulators_to_smem()
        at = block.partition(copy, "partition_D", shape)
        order = tile_model.offsets(copy.get_slice(0).retile(block.fragment("C", shape)).layout)
        labels = np.empty((at.shape[0], order.size, 2), dtype=np.int64)
        labels[:, order] = at
        accumulators = block.accumulator_coordinates(shape)
        registers = tile_model.offsets(block.fragment("C", shape).layout)
        assert (labels[:, registers].reshape(accumulators.shape) == accumulators).all()

        back = block.partition(block.tiles.smem_to_global(block.tile_dv), "partition_S", shape)
        flat = back[..., 0] * block.tile_dv + back[..., 1]
        assert (np.bincount(flat.ravel(), minlength=shape[0] * shape[1]) == 1).all()
        assert (np.diff(flat, axis=1) == 1).all()
        assert (flat[:, 0] % CHUNK == 0).all()

    def test_staging_wavefronts(self, block: Block) -> None:
        shape = (block.tile_m, block.tile_dv)
        tile = block.smem_o[..., 0]
        at = block.accumulator_coordinates(shape)[:, :, ::2]  # pairs of neighbouring columns, 4 bytes
        pairs = np.moveaxis(tile[at[..., 0], at[..., 1]], 1, -1).reshape(-1, LANES)
        count, ideal = tile_model.wavefronts(pairs * ELEMENT_BYTES, 4)
        assert count == ideal

        back = block.partition(block.tiles.smem_to_global(block.tile_dv), "partition_S", shape)[:, 0]
        chunks = tile[back[..., 0], back[..., 1]]
        warps = np.moveaxis(chunks.reshape(-1, LANES, *chunks.shape[1:]), 1, -1).reshape(-1, LANES)
        count, ideal = tile_model.wavefronts(warps * ELEMENT_BYTES, CHUNK_BYTES)
        assert count - ideal == (0 if block.config.swizzle else padded_excess(block.tile_dv) * ideal)
