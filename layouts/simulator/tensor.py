"""Bulk copies between global and shared memory, of tensor tiles (TMA) and of plain bytes: what goes where.

A *tensor map* describes a tensor in global memory and the box that a copy moves. Its 128 bytes are not documented; they
are read here as the DSL's host code writes them. Bits that have not been seen set are refused, not ignored.

What is not modelled: the im2col, gather and scatter modes, interleaved layouts, steps between the elements of a box,
rounding to tf32, and rows of a box narrower than its swizzle.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from layouts.simulator.errors import SimulatorError
from layouts.simulator.warpgroup import swizzled

Integers = npt.NDArray[np.int64]

TENSOR_MAP_BYTES = 128
_ELEMENT_BYTES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "f16": 2, "f32": 4, "f64": 8, "bf16": 2}
_KINDS = {0: "u8", 1: "u16", 2: "u32", 4: "u64", 6: "f16", 7: "f32", 9: "f64", 10: "bf16"}
_SWIZZLE_BYTES = (16, 32, 64, 128)


@dataclass(frozen=True)
class TensorMap:
    """What a tensor map says. Dimensions are counted from the innermost, as in a copy's coordinates.

    Attributes:
        address: of the tensor in global memory.
        kind: of an element: its type for the copy engine, which takes signed integers for unsigned ones and eight-bit
            floats for bytes.
        shape: of the tensor, in elements.
        strides: from one element to the next along each dimension, in bytes.
        box: the shape of what a copy moves, in elements.
        swizzle_bytes: width of the swizzle in shared memory: 32, 64 or 128; 16 without one.
    """

    address: int
    kind: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def element_bytes(self) -> int:
        return _ELEMENT_BYTES[self.kind]

    @property
    def box_bytes(self) -> int:
        """How many bytes a load reports to its barrier, also if part of the box lies outside the tensor."""
        return int(np.prod(self.box)) * self.element_bytes


# Which bits of the eight words that matter have a known meaning.
_KNOWN_BITS = (
    0x01FFFFFF_FFFFFFF0,  # address
    0xFFFFFFFF_002667FF,  # lowest stride; whether the tensor is large, L2 promotion, swizzle, kind, rank, map's type
    0xFFFFFFFF_FFFFFFFF,  # the next two strides
    0x0000FFFF_FFFFFFFF,  # the high bits of all four strides; the last stride
    0xFFFFFFFF_FFFFFFFF,  # sizes of two dimensions
    0xFFFFFFFF_FFFFFFFF,  # of two more
    0xFF000000_FFFFFFFF,  # the box along the innermost dimension; size of the last dimension
    0x00000000_FFFFFFFF,  # the box along the others
)
_TILED = 2


@lru_cache(maxsize=256)
def decode_tensor_map(data: bytes) -> TensorMap:
    """Read a tensor map.

    Args:
        data: its 128 bytes. The second half does not matter.

    Raises:
        SimulatorError: there are fewer bytes, or some bits are not understood.
    """
    if len(data) < TENSOR_MAP_BYTES:
        raise SimulatorError(f"tensor map of {len(data)} bytes: it must have {TENSOR_MAP_BYTES}")
    words = struct.unpack_from("<8Q", data)
    for i, (word, known) in enumerate(zip(words, _KNOWN_BITS, strict=True)):
        if word & ~known:
            raise SimulatorError(f"tensor map: bits {word & ~known:#x} of its 64-bit word {i} are not understood")
    rank = (words[1] >> 4 & 7) + 1
    kind = words[1] >> 7 & 15
    if words[1] & 15 != _TILED or kind not in _KINDS or rank > 5:
        raise SimulatorError(f"tensor map: type, kind and rank in {words[1] & 0x7FF:#x} are not understood")
    low = (words[1] >> 32, words[2] & _LOW, words[2] >> 32, words[3] & _LOW)
    strides = [16 * (low[i] | (words[3] >> (32 + 4 * i) & 15) << 32) for i in range(rank - 1)]
    last = (words[4] & _LOW, words[4] >> 32, words[5] & _LOW, words[5] >> 32, words[6] & _LOW)
    box = (words[6] >> 56, *(words[7] >> 8 * i & 0xFF for i in range(4)))
    return TensorMap(
        address=words[0],
        kind=_KINDS[kind],
        shape=tuple(size + 1 for size in last[:rank]),
        strides=(_ELEMENT_BYTES[_KINDS[kind]], *strides),
        box=tuple(size + 1 for size in box[:rank]),
        swizzle_bytes=_SWIZZLE_BYTES[words[1] >> 13 & 3],
    )


_LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class Transfer:
    """The units that several copies move, in either direction.

    Attributes:
        copies: (units,), which copy each unit belongs to.
        global_addresses: (units,), of each unit's first byte.
        shared_addresses: (units,), likewise, in the shared window.
        inside: (units,), whether the unit lies inside the tensor. A load writes zeros for one that does not, and a
            store leaves it out; its global address means nothing.
        unit_bytes: bytes of a unit.
    """

    copies: Integers
    global_addresses: Integers
    shared_addresses: Integers
    inside: npt.NDArray[np.bool_]
    unit_bytes: int


def tile_transfer(tensor_map: TensorMap, coordinates: npt.ArrayLike, shared_addresses: npt.ArrayLike) -> Transfer:
    """What copies of boxes of one tensor move, element by element.

    Args:
        tensor_map: of the tensor.
        coordinates: (copies, rank), of each box's first element, the innermost dimension first. May be negative.
        shared_addresses: (copies,), of each box in the shared window.

    Returns:
        The elements, those of each copy in the order in which the box lies in shared memory but for the swizzle.

    Raises:
        SimulatorError: a shared address is not a multiple of 128, the coordinates have another rank, or the box's rows
            are not modelled.
    """
    corners = np.asarray(coordinates, np.int64)
    starts = np.asarray(shared_addresses, np.int64)
    if corners.ndim != 2 or corners.shape[1] != tensor_map.rank:
        raise SimulatorError(f"coordinates of shape {corners.shape}: the tensor has {tensor_map.rank} dimensions")
    _check_multiple("shared address of a tensor copy", starts, 128)
    _check_rows(tensor_map)
    elements = int(np.prod(tensor_map.box))
    inside = np.ones((len(corners), *tensor_map.box[::-1]), bool)
    for i, (size, extent) in enumerate(zip(tensor_map.shape, tensor_map.box, strict=True)):
        index = corners[:, i, None] + np.arange(extent)
        along = ((index >= 0) & (index < size)).reshape(
            len(corners), *(1,) * (tensor_map.rank - 1 - i), extent, *(1,) * i
        )
        inside &= along
    first = tensor_map.address + corners @ np.array(tensor_map.strides, np.int64)
    offsets = np.arange(elements) * tensor_map.element_bytes
    return Transfer(
        copies=np.repeat(np.arange(len(corners)), elements),
        global_addresses=(first[:, None] + _offsets_of_box(tensor_map)).reshape(-1),
        shared_addresses=swizzled(starts[:, None] + offsets, tensor_map.swizzle_bytes).reshape(-1),
        inside=inside.reshape(-1),
        unit_bytes=tensor_map.element_bytes,
    )


def _check_rows(tensor_map: TensorMap) -> None:
    row = tensor_map.box[0] * tensor_map.element_bytes
    if row % 16:
        raise SimulatorError(f"{tensor_map}: a row of the box has {row} bytes, which is not a multiple of 16")
    if tensor_map.swizzle_bytes > 16 and row != tensor_map.swizzle_bytes:
        raise SimulatorError(
            f"{tensor_map}: a row of the box has {row} bytes; under a swizzle of {tensor_map.swizzle_bytes} only rows "
            "of as many bytes are modelled"
        )


@lru_cache(maxsize=256)
def _offsets_of_box(tensor_map: TensorMap) -> Integers:
    """(elements,): from the box's first element to each other, in bytes of global memory."""
    offsets = np.zeros(1, np.int64)
    for stride, extent in zip(tensor_map.strides, tensor_map.box, strict=True):
        offsets = np.add.outer(np.arange(extent, dtype=np.int64) * stride, offsets).reshape(-1)
    return offsets


def bulk_transfer(global_addresses: npt.ArrayLike, shared_addresses: npt.ArrayLike, sizes: npt.ArrayLike) -> Transfer:
    """What plain bulk copies (cp.async.bulk) move, 16 bytes at a time.

    Args:
        global_addresses, shared_addresses: (copies,), of each copy's first byte.
        sizes: (copies,), bytes of each copy.

    Raises:
        SimulatorError: an address or a size is not a multiple of 16.
    """
    sources, starts, counts = (np.asarray(values, np.int64) for values in (global_addresses, shared_addresses, sizes))
    _check_multiple("global address of a bulk copy", sources, 16)
    _check_multiple("shared address of a bulk copy", starts, 16)
    _check_multiple("size of a bulk copy", counts, 16)
    units = counts // 16
    copies = np.repeat(np.arange(len(units)), units)
    offsets = 16 * (np.arange(len(copies)) - np.repeat(np.cumsum(units) - units, units))
    return Transfer(
        copies=copies,
        global_addresses=sources[copies] + offsets,
        shared_addresses=starts[copies] + offsets,
        inside=np.ones(len(copies), bool),
        unit_bytes=16,
    )


def _check_multiple(name: str, values: Integers, unit: int) -> None:
    if (values % unit).any():
        raise SimulatorError(f"{name}: {values[values % unit != 0][0]:#x} is not a multiple of {unit}")
