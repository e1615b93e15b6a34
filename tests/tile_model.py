"""A block's tiles in numpy: CuTe layouts as tables, and what the hardware does with the addresses that they give.

The tables are read off the layout objects that the kernel uses; what ldmatrix, mma and the shared-memory banks do is
written down here from NVIDIA's PTX manual, so that the two are independent of each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cutlass.cute as cute
import numpy as np
import numpy.typing as npt
from cutlass._mlir import ir  # private: the only way to evaluate layouts on the host; the DSL's version is pinned

LANES = 32
BANKS = 32
BANK_BYTES = 4
PHASE_BYTES = BANKS * BANK_BYTES  # what shared memory delivers in one wavefront
ELEMENT_BYTES = 2

Array = npt.NDArray[Any]


@contextmanager
def layouts_on_host() -> Iterator[None]:
    """Inside, layouts can be made and evaluated by plain Python."""
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            yield


def offsets(layout: Any) -> Array:
    """A layout's element offsets: one axis per top-level mode, each in colexicographic order."""
    if not hasattr(layout, "inner"):
        return _affine(layout.shape, layout.stride)
    linear = _affine(layout.outer.shape, layout.outer.stride) + int(layout.offset)
    swizzle = layout.inner
    mask = ((1 << swizzle.num_bits) - 1) << (swizzle.num_base + swizzle.num_shift)
    return linear ^ ((linear & mask) >> swizzle.num_shift)


def coordinates(partitions: list[cute.Tensor]) -> Array:
    """Partitions of an identity tensor, one per thread, as (thread, modes..., coordinate)."""
    first = partitions[0]
    steps = _coordinate_steps(first.shape, first.stride)
    bases = np.array([tuple(p.iterator) for p in partitions])
    return bases.reshape(len(partitions), *[1] * (steps.ndim - 1), -1) + steps


def _affine(shape: Any, stride: Any) -> Array:
    modes = [_mode(n, d, 1)[..., 0] for n, d in zip(shape, stride, strict=True)]
    return _outer_sum(modes)


def _coordinate_steps(shape: Any, stride: Any) -> Array:
    modes = [_mode(n, d, 2) for n, d in zip(shape, stride, strict=True)]
    return np.stack([_outer_sum([mode[..., axis] for mode in modes]) for axis in (0, 1)], axis=-1)


def _mode(shape: Any, stride: Any, width: int) -> Array:
    """Offsets of one mode in colexicographic order, (size, width): a plain stride counts along the first axis."""
    if isinstance(shape, tuple):
        table = np.zeros((1, width), dtype=np.int64)
        for n, d in zip(shape, stride, strict=True):
            table = (_mode(n, d, width)[:, None] + table[None]).reshape(-1, width)
        return table
    step = np.zeros(width, dtype=np.int64)
    if isinstance(stride, int):
        step[0] = stride
        assert width == 1 or stride == 0
    else:
        (axis,) = stride.mode
        step[axis] = stride.value
    return np.arange(shape)[:, None] * step


def _outer_sum(modes: list[Array]) -> Array:
    total = np.zeros((), dtype=np.int64)
    for mode in modes:
        total = total[..., None] + mode
    return total


def wavefronts(addresses: Array, access_bytes: int) -> tuple[int, int]:
    """Shared-memory wavefronts of warp-wide accesses, and the fewest possible for their width.

    ``addresses`` (accesses, 32) are bytes. A warp's access of 16 bytes is served in four phases of 8 lanes, one of 4
    bytes or less in one phase of 32 lanes. A phase takes as many wavefronts as the busiest bank has different words;
    lanes that read the same word share it. ldmatrix is four phases, one for the 8 rows of each matrix.
    """
    lanes = min(LANES, PHASE_BYTES // access_bytes)
    words = addresses.reshape(-1, lanes, 1) // BANK_BYTES + np.arange(max(1, access_bytes // BANK_BYTES))
    total = 0
    for phase in words.reshape(words.shape[0], -1):
        total += int(np.bincount(np.unique(phase) % BANKS).max())
    return total, words.shape[0]


def ldmatrix(memory: Array, rows: Array, transpose: bool) -> Array:
    """ldmatrix.x4: lane l gives the offset of row l % 8 of matrix l / 8.

    ``rows`` (..., 32) are element offsets into ``memory``. Returns (..., 32, 8): each lane's elements, two of every
    matrix: (l / 4, 2 (l % 4)) and its right neighbour or, transposed, its lower one.
    """
    lane = np.arange(LANES)
    across, along = lane[:, None] // 4, 2 * (lane[:, None] % 4) + np.arange(2)
    row, column = (along, across) if transpose else (across, along)
    matrices = memory[rows.reshape(*rows.shape[:-1], 4, 8)[..., None] + np.arange(8)]  # (..., matrix, row, column)
    picked = matrices[..., row, column]  # (..., matrix, lane, 2)
    return np.moveaxis(picked, -3, -2).reshape(*rows.shape[:-1], LANES, 8)


def mma_a(fragments: Array) -> Array:
    """The 16x16 A of mma.m16n8k16 from (..., 32, 8) registers' elements."""
    lane, value = np.arange(LANES)[:, None], np.arange(8)
    row = lane // 4 + 8 * (value // 2 % 2)
    column = 2 * (lane % 4) + value % 2 + 8 * (value // 4)
    return _scatter(fragments, row, column, (16, 16))


def mma_b(fragments: Array) -> Array:
    """The 8x16 B (its rows are the product's columns) of mma.m16n8k16 from (..., 32, 4) registers' elements."""
    lane, value = np.arange(LANES)[:, None], np.arange(4)
    row = lane // 4 + 0 * value
    column = 2 * (lane % 4) + value % 2 + 8 * (value // 2)
    return _scatter(fragments, row, column, (8, 16))


def accumulators(product: Array) -> Array:
    """(..., 32, 4) registers' elements that hold the 16x8 C of mma.m16n8k16."""
    lane, value = np.arange(LANES)[:, None], np.arange(4)
    return product[..., lane // 4 + 8 * (value // 2), 2 * (lane % 4) + value % 2]


def _scatter(values: Array, row: Array, column: Array, shape: tuple[int, int]) -> Array:
    matrix = np.full((*values.shape[:-2], *shape), -1, dtype=values.dtype)
    matrix[..., row, column] = values
    return matrix
