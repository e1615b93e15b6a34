"""A kernel with wgmma over tiles of many layouts. (No ``from __future__ import annotations``: the DSL reads this.)"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.nvgpu.warpgroup import (
    Field,
    MmaF8Op,
    MmaF16BF16Op,
    MmaI8Op,
    OperandSource,
    SmemLayoutAtomKind,
    commit_group,
    fence,
    make_smem_layout_atom,
    wait_group,
)
from cutlass.cute.runtime import make_fake_compact_tensor


@dataclass(frozen=True)
class Case:
    """A product of an m x k tile by an n x k tile, whose layouts have these names in the DSL; "" for registers."""

    m: int
    n: int
    k: int
    a: str
    b: str
    kind: str = "f16"

    @property
    def a_layout(self) -> str:
        return self.a or "K_SW128"

    @property
    def k_of_instruction(self) -> int:
        return 16 if self.kind == "f16" else 32


@dataclass(frozen=True)
class TileLayout:
    """Of a tile in shared memory: shape and stride as the DSL gives them, in elements."""

    shape: Any
    stride: Any
    swizzle_bits: int


class ManyProducts:
    """``layouts`` has those of A and B of each case, in order, once the kernel is compiled."""

    def __init__(self, cases: list[Case]) -> None:
        self.cases = cases
        self.layouts: list[tuple[TileLayout, TileLayout]] = []

    @cute.jit
    def __call__(self, out: cute.Tensor) -> None:
        self.kernel(out).launch(grid=(1, 1, 1), block=(128, 1, 1))

    @cute.kernel
    def kernel(self, out: cute.Tensor) -> None:
        thread = cute.arch.thread_idx()[0]
        smem = cutlass.memory.SmemAllocator()
        for i in cutlass.range_constexpr(len(self.cases)):
            case = self.cases[i]
            mma = tiled_mma(case)
            layouts = tile_layout(case.a_layout, case.m, case), tile_layout(case.b, case.n, case)
            self.layouts.append((described(layouts[0]), described(layouts[1])))
            tiles = [smem.allocate_tensor(dtype(case), layout.outer, 1024, layout.inner) for layout in layouts]
            part = mma.get_slice(thread)
            a, b = part.partition_A(tiles[0]), mma.make_fragment_B(part.partition_B(tiles[1]))
            a = a_fragment(mma, a, case)
            result = part.partition_C(cute.local_tile(out, (case.m, case.n), (0, i)))
            total = cute.make_rmem_tensor(result.shape, total_dtype(case))
            fence()
            mma.set(Field.ACCUMULATE, False)
            for block in cutlass.range_constexpr(case.k // case.k_of_instruction):
                cute.gemm(mma, total, a[None, None, block], b[None, None, block], total)
                mma.set(Field.ACCUMULATE, True)
            commit_group()
            wait_group(0)
            for j in cutlass.range(cute.size(total), unroll_full=True):
                result[j] = total[j].to(cutlass.Float32)


def dtype(case: Case) -> Any:
    return {"f16": cutlass.Float16, "e4m3": cutlass.Float8E4M3FN, "s8": cutlass.Int8}[case.kind]


def total_dtype(case: Case) -> Any:
    return cutlass.Int32 if case.kind == "s8" else cutlass.Float32


def a_fragment(mma: Any, tile: Any, case: Case) -> Any:
    """Descriptors of the tile, or registers that hold ones."""
    if case.a:
        return mma.make_fragment_A(tile)
    fragment = mma.make_fragment_A(tile.shape)
    fragment.fill(1)
    return fragment


def tiled_mma(case: Case, warpgroups: int = 1) -> Any:
    shape = (64, case.n, case.k_of_instruction)
    source = OperandSource.SMEM if case.a else OperandSource.RMEM
    majors = [OperandMajorMode.MN if name.startswith("MN") else OperandMajorMode.K for name in (case.a, case.b)]
    if case.kind == "f16":
        op = MmaF16BF16Op(cutlass.Float16, cutlass.Float32, shape, source, *majors)
    elif case.kind == "s8":
        op = MmaI8Op(cutlass.Int8, cutlass.Int8, cutlass.Int32, shape, source, *majors)
    else:
        op = MmaF8Op(dtype(case), dtype(case), cutlass.Float32, shape, source, *majors)
    return cute.make_tiled_mma(cute.make_mma_atom(op), (warpgroups, 1, 1))


def tile_layout(name: str, rows: int, case: Case) -> Any:
    order = (1, 0) if name.startswith("MN") else (0, 1)
    atom = make_smem_layout_atom(SmemLayoutAtomKind[name], dtype(case))
    return cute.tile_to_shape(atom, (rows, case.k), order)


def described(layout: Any) -> TileLayout:
    return TileLayout(layout.outer.shape, layout.outer.stride, layout.inner.num_bits)


def compile_products(cases: list[Case], folder: Path) -> tuple[str, list[tuple[TileLayout, TileLayout]]]:
    """The PTX for Hopper, and the layouts of A and B of each case."""
    products = ManyProducts(cases)
    columns = len(cases) * max(case.n for case in cases)
    out = make_fake_compact_tensor(cutlass.Float32, (128, columns), stride_order=(1, 0), assumed_align=16)
    compiled = cute.compile(products, out, options=f"--gpu-arch sm_90a --keep-ptx --dump-dir {folder}")
    return compiled.__ptx__, products.layouts
