"""A Hopper GEMM: TMA, a pipeline of mbarriers, and wgmma. (No ``from __future__``: the DSL reads this.)

warp 4          producer    tiles of A and B by TMA  --- full[stage] --->  consumers
warps 0 to 3    consumers   C += A B^T by wgmma      --- empty[stage] -->  producer
"""

from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.cute.nvgpu.warpgroup import (
    Field,
    MmaF16BF16Op,
    OperandSource,
    SmemLayoutAtomKind,
    commit_group,
    fence,
    make_smem_layout_atom,
    wait_group,
)
from cutlass.cute.runtime import make_fake_tensor

TILE = 64  # rows of A and of B, and columns of both at a time
STAGES = 2
CONSUMERS = 128
STAGE_BYTES = 2 * TILE * TILE * 2


@cute.jit
def gemm(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor) -> None:
    atom = make_smem_layout_atom(SmemLayoutAtomKind.K_SW128, cutlass.Float16)
    layout = cute.tile_to_shape(atom, (TILE, TILE, STAGES), (0, 1, 2))
    one = cute.select(layout, mode=[0, 1])
    op = cpasync.CopyBulkTensorTileG2SOp()
    copies = [cpasync.make_tiled_tma_atom(op, x, one, (TILE, TILE)) for x in (a, b)]
    shape = (64, TILE, 16)
    instruction = MmaF16BF16Op(
        cutlass.Float16, cutlass.Float32, shape, OperandSource.SMEM, OperandMajorMode.K, OperandMajorMode.K
    )
    mma = cute.make_tiled_mma(cute.make_mma_atom(instruction))
    grid = (cute.ceil_div(a.shape[0], TILE), cute.ceil_div(b.shape[0], TILE), 1)
    kernel(copies[0][0], copies[0][1], copies[1][0], copies[1][1], c, mma, layout).launch(
        grid=grid, block=(CONSUMERS + 32, 1, 1)
    )


@cute.kernel
def kernel(
    load_a: cute.CopyAtom,
    a: cute.Tensor,
    load_b: cute.CopyAtom,
    b: cute.Tensor,
    c: cute.Tensor,
    mma: cute.TiledMma,
    layout: cute.ComposedLayout,
) -> None:
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    row, column, _ = cute.arch.block_idx()
    smem = cutlass.memory.SmemAllocator()
    tiles = [smem.allocate_tensor(cutlass.Float16, layout.outer, 1024, layout.inner) for _ in range(2)]
    full, empty = smem.allocate_array(cutlass.Int64, STAGES), smem.allocate_array(cutlass.Int64, STAGES)
    if thread == 0:
        for stage in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, CONSUMERS)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    steps = cute.ceil_div(a.shape[1], TILE)
    if warp == CONSUMERS // 32:
        parts = [
            cpasync.tma_partition(
                load,
                0,
                cute.make_layout(1),
                cute.group_modes(tile, 0, 2),
                cute.group_modes(cute.local_tile(source, (TILE, TILE), (place, None)), 0, 2),
            )
            for load, tile, source, place in ((load_a, tiles[0], a, row), (load_b, tiles[1], b, column))
        ]
        for step in cutlass.range(steps, unroll=1):
            stage, turn = step % STAGES, step // STAGES
            if turn > 0:
                cute.arch.mbarrier_wait(empty + stage, (turn - 1) % 2)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, STAGE_BYTES)
            cute.copy(load_a, parts[0][1][None, step], parts[0][0][None, stage], tma_bar_ptr=full + stage)
            cute.copy(load_b, parts[1][1][None, step], parts[1][0][None, stage], tma_bar_ptr=full + stage)
    else:
        part = mma.get_slice(thread)
        fragment_a = mma.make_fragment_A(part.partition_A(tiles[0]))
        fragment_b = mma.make_fragment_B(part.partition_B(tiles[1]))
        result = part.partition_C(cute.local_tile(c, (TILE, TILE), (row, column)))
        total = cute.make_rmem_tensor(result.shape, cutlass.Float32)
        mma.set(Field.ACCUMULATE, False)
        for step in cutlass.range(steps, unroll=1):
            stage = step % STAGES
            cute.arch.mbarrier_wait(full + stage, step // STAGES % 2)
            fence()
            for block in cutlass.range_constexpr(TILE // 16):
                operands = fragment_a[None, None, block, stage], fragment_b[None, None, block, stage]
                cute.gemm(mma, total, operands[0], operands[1], total)
                mma.set(Field.ACCUMULATE, True)
            commit_group()
            wait_group(0)
            cute.arch.mbarrier_arrive(empty + stage)
        for i in cutlass.range(cute.size(total), unroll_full=True):
            result[i] = total[i]


def compile_gemm(folder: Path) -> Any:
    def matrix(dtype: Any, align: int, divisibility: int) -> Any:
        shape = (cute.sym_int32(), cute.sym_int32())
        stride = (cute.sym_int64(divisibility=divisibility), 1)
        return make_fake_tensor(dtype, shape, stride=stride, assumed_align=align)

    inputs = matrix(cutlass.Float16, 16, 8), matrix(cutlass.Float16, 16, 8)
    return cute.compile(
        gemm, *inputs, matrix(cutlass.Float32, 4, 1), options=f"--gpu-arch sm_90a --keep-ptx --dump-dir {folder}"
    )
