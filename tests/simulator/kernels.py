"""Small kernels of the DSL, and their compilation. (No ``from __future__ import annotations``: the DSL reads these.)"""

from pathlib import Path
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

THREADS = 32
TILE = 64
TMA_SMEM_BYTES = TILE * TILE * 2 + 1024


@cute.kernel
def scale_kernel(x: cute.Tensor, y: cute.Tensor, rows: cutlass.Int32, scale: cutlass.Float32) -> None:
    row = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if row < rows:
        for column in cutlass.range(x.shape[1]):
            y[row, column] = x[row, column] * scale


@cute.kernel
def negate_kernel(y: cute.Tensor) -> None:
    row, column = cute.arch.thread_idx()[0], cute.arch.thread_idx()[1]
    y[row, column] = -y[row, column]


@cute.kernel
def nothing_kernel(
    a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, d: cute.Tensor, flag: cutlass.Boolean, byte: cutlass.Int8
) -> None:
    pass


@cute.kernel
def tma_kernel(atom: cute.CopyAtom, source: cute.Tensor, out: cute.Tensor) -> None:
    """Each block copies one tile through shared memory, one row of it to out."""
    thread = cute.arch.thread_idx()[0]
    smem = cutlass.memory.SmemAllocator()
    tile = smem.allocate_tensor(cutlass.Float16, cute.make_layout((TILE, TILE), stride=(TILE, 1)), 128)
    barrier = smem.allocate_array(cutlass.Int64, 1)
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    row, column, _ = cute.arch.block_idx()
    chosen = cute.local_tile(source, (TILE, TILE), (row, column))
    to_smem, from_gmem = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(chosen, 0, 2)
    )
    if cute.arch.warp_idx() == 0:
        cute.copy(atom, from_gmem, to_smem, tma_bar_ptr=barrier)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, TILE * TILE * 2)
    cute.arch.mbarrier_wait(barrier, 0)
    out[thread] = tile[0, thread]


@cute.jit
def scale(x: cute.Tensor, y: cute.Tensor, rows: cutlass.Int32, factor: cutlass.Float32, stream: cuda.CUstream) -> None:
    blocks = cute.ceil_div(x.shape[0], THREADS)
    scale_kernel(x, y, rows, factor).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.jit
def scale_and_negate(
    x: cute.Tensor, y: cute.Tensor, rows: cutlass.Int32, factor: cutlass.Float32, stream: cuda.CUstream
) -> None:
    blocks = cute.ceil_div(x.shape[0], THREADS)
    scale_kernel(x, y, rows, factor).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)
    negate_kernel(y).launch(grid=[3, 2, 1], block=[16, 4, 2], smem=1024, stream=stream)


@cute.jit
def many_dtypes(
    tensors: tuple,
    flag: cutlass.Boolean,
    byte: cutlass.Int8,
    smem_bytes: cutlass.Int32,
    stream: cuda.CUstream,
) -> None:
    nothing_kernel(tensors[0], tensors[1], tensors[2], tensors[3], flag, byte).launch(
        grid=[1, 1, 1], block=[THREADS, 1, 1], smem=smem_bytes, stream=stream
    )


@cute.jit
def copy_by_tma(x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream) -> None:
    layout = cute.make_layout((TILE, TILE), stride=(TILE, 1))
    atom, source = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, layout, (TILE, TILE))
    grid = [cute.ceil_div(x.shape[0], TILE), cute.ceil_div(x.shape[1], TILE), 1]
    tma_kernel(atom, source, out).launch(
        grid=grid, block=[TILE, 1, 1], cluster=[2, 1, 1], smem=TMA_SMEM_BYTES, stream=stream
    )


def matrix(dtype: Any, align: int, divisibility: int = 1) -> Any:
    """A stand-in for a tensor of two dimensions, with everything symbolic but the inner stride."""
    shape = (cute.sym_int32(), cute.sym_int32())
    stride = (cute.sym_int64(divisibility=divisibility), 1)
    return make_fake_tensor(dtype, shape, stride=stride, assumed_align=align)


def compile_scale(function: Any, folder: Path, options: str = "--enable-tvm-ffi", env_stream: bool = True) -> Any:
    """``scale`` or ``scale_and_negate`` for an A100, keeping its PTX."""
    return cute.compile(
        function,
        matrix(cutlass.Float32, 4),
        matrix(cutlass.Float32, 4),
        cutlass.Int32(1),
        cutlass.Float32(1.0),
        make_fake_stream(use_tvm_ffi_env_stream=env_stream),
        options=f"{options} --gpu-arch sm_80 --keep-ptx --dump-dir {folder}",
    )


def compile_many_dtypes(folder: Path) -> Any:
    bytes_of = {cutlass.BFloat16: 2, cutlass.Float8E4M3FN: 1, cutlass.Int8: 1, cutlass.Boolean: 1}
    return cute.compile(
        many_dtypes,
        tuple(matrix(dtype, size) for dtype, size in bytes_of.items()),
        cutlass.Boolean(True),
        cutlass.Int8(1),
        cutlass.Int32(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch sm_90a --keep-ptx --dump-dir {folder}",
    )


def compile_copy_by_tma(folder: Path) -> Any:
    out = make_fake_tensor(cutlass.Float16, (cute.sym_int32(),), stride=(1,), assumed_align=2)
    return cute.compile(
        copy_by_tma,
        matrix(cutlass.Float16, 16, divisibility=8),
        out,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch sm_90a --keep-ptx --dump-dir {folder}",
    )
