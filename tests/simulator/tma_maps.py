"""Tensor maps as the DSL's host code makes them. (No ``from __future__ import annotations``: the DSL reads this.)"""

from pathlib import Path
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from layouts.simulator.launch import capture

DTYPES = {
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
    "float64": cutlass.Float64,
    "uint8": cutlass.Uint8,
    "int16": cutlass.Int16,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
}


@cute.kernel
def idle_kernel(atom: cute.CopyAtom, source: cute.Tensor) -> None:
    pass


def compile_map(dtype: Any, box: tuple[int, ...], swizzle_bits: int, folder: Path, internal_type: Any = None) -> Any:
    """A host function that makes the map of a tensor of any sizes and strides, for copies of a box."""

    def atom_and_tensor(x: Any) -> Any:
        strides = tuple(int(np.prod(box[:i])) for i in range(len(box)))
        layout = cute.make_layout(box, stride=strides)
        if swizzle_bits:
            layout = cute.make_composed_layout(cute.make_swizzle(swizzle_bits, 4, 3), 0, layout)
        operation = cpasync.CopyBulkTensorTileG2SOp()
        return cpasync.make_tiled_tma_atom(operation, x, layout, box, internal_type=internal_type)

    @cute.jit
    def make(x: cute.Tensor, stream: cuda.CUstream) -> None:
        atom, source = atom_and_tensor(x)
        idle_kernel(atom, source).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

    shape = tuple(cute.sym_int32() for _ in box)
    outer = tuple(cute.sym_int64(divisibility=128 // dtype.width) for _ in box[1:])
    tensor = make_fake_tensor(dtype, shape, stride=(1, *outer), assumed_align=16)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch sm_90a --keep-ptx --dump-dir {folder}"
    return cute.compile(make, tensor, stream, options=options)


def map_bytes(compiled: Any, array: Any, address: int) -> bytes:
    """The map of an array that lies at an address. Its innermost dimension comes first."""
    return capture(compiled, [array], lambda _: address)[0].parameters[0]
