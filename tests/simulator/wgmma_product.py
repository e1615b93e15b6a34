"""A kernel whose CTAs multiply tiles with wgmma, a group of products for each step along k.

(No ``from __future__ import annotations``: the DSL reads this.)
"""

from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu.warpgroup import Field, commit_group, fence, wait_group
from cutlass.cute.runtime import make_fake_compact_tensor

from tests.simulator.wgmma_kernel import Case, dtype, tile_layout, tiled_mma, total_dtype

CTAS = 3


class Product:
    """Of each CTA's a (m, k) and b (n, k) in global memory. Its warpgroups share the rows of a."""

    def __init__(self, case: Case, warpgroups: int) -> None:
        self.case = case
        self.warpgroups = warpgroups
        self.threads = 128 * warpgroups

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor) -> None:
        self.kernel(a, b, out).launch(grid=(CTAS, 1, 1), block=(self.threads, 1, 1))

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor) -> None:
        case = self.case
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        mma = tiled_mma(case, self.warpgroups)
        smem = cutlass.memory.SmemAllocator()
        layouts = tile_layout(case.a_layout, case.m, case), tile_layout(case.b, case.n, case)
        tiles = [smem.allocate_tensor(dtype(case), layout.outer, 1024, layout.inner) for layout in layouts]
        for i in cutlass.range(thread, case.m * case.k, self.threads):
            tiles[0][i // case.k, i % case.k] = a[cta, i // case.k, i % case.k]
        for i in cutlass.range(thread, case.n * case.k, self.threads):
            tiles[1][i // case.k, i % case.k] = b[cta, i // case.k, i % case.k]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        part = mma.get_slice(thread)
        part_a = part.partition_A(tiles[0])
        a_operand, b_operand = mma.make_fragment_A(part_a), mma.make_fragment_B(part.partition_B(tiles[1]))
        if cutlass.const_expr(not case.a):
            a_operand = mma.make_fragment_A(part_a.shape)
            for j in cutlass.range(cute.size(a_operand), unroll_full=True):
                a_operand[j] = part_a[j]
        result = part.partition_C(out[cta, None, None])
        total = cute.make_rmem_tensor(result.shape, total_dtype(case))
        mma.set(Field.ACCUMULATE, False)
        fence()
        for block in cutlass.range_constexpr(case.k // case.k_of_instruction):
            cute.gemm(mma, total, a_operand[None, None, block], b_operand[None, None, block], total)
            mma.set(Field.ACCUMULATE, True)
            commit_group()
            wait_group(1)
        wait_group(0)
        for j in cutlass.range(cute.size(total), unroll_full=True):
            result[j] = total[j].to(cutlass.Float32)


def compile_product(case: Case, warpgroups: int, folder: Path) -> Any:
    """A function of a (CTAS, m, k), b (CTAS, n, k) and out (CTAS, m, n), of f32."""
    kinds = dtype(case), dtype(case), cutlass.Float32
    shapes = (CTAS, case.m, case.k), (CTAS, case.n, case.k), (CTAS, case.m, case.n)
    tensors = [
        make_fake_compact_tensor(kind, shape, stride_order=(2, 1, 0), assumed_align=16)
        for kind, shape in zip(kinds, shapes, strict=True)
    ]
    options = f"--enable-tvm-ffi --gpu-arch sm_90a --keep-ptx --dump-dir {folder}"
    return cute.compile(Product(case, warpgroups), *tensors, options=options)
