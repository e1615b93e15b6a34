"""Global memory: the arrays of the host, each at a device address of its own, with guards between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layouts.simulator.errors import SimulatorError

FIRST_ADDRESS = 1 << 40
GUARD = 1 << 20  # bytes that belong to nothing before and behind each array
ALIGNMENT = 512  # of an allocation on a GPU

IntArray = NDArray[np.int64]


@dataclass
class Segment:
    """The storage of one array, at ``base``. Arrays that share storage on the host have a segment each.

    Attributes:
        name: for messages.
        base: device address of the storage's first byte.
        data: (bytes,) uint8, the memory of the host itself.
        valid: (bytes,) bool, the bytes that are elements of the array, not padding between its rows; None if all are.
        units: views of ``data`` by the size of an element, as far as it is aligned.
        narrowest: bytes of the shortest run of padding; only a longer access can have elements at both of its ends.
    """

    name: str
    base: int
    data: NDArray[np.uint8]
    valid: NDArray[np.bool_] | None
    units: dict[int, NDArray[Any]]
    narrowest: int = 0


class AddressError(SimulatorError):
    """An access outside of every array: ``problem`` in words, ``lane`` the first of the offenders by position."""

    def __init__(self, problem: str, position: int):
        super().__init__(problem)
        self.problem = problem
        self.position = position


class GlobalMemory:
    """The device addresses of the arrays that a kernel is given."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._next = FIRST_ADDRESS

    def add(self, array: Any, name: str) -> int:
        """Give an array a place.

        Args:
            array: numpy array or torch tensor on the CPU, of any strides.
            name: for messages.

        Returns:
            The device address of its first element. Storage and device address agree in their low bits as if the
            storage began at an allocation.
        """
        data, first, valid = _storage_of(array)
        base = self._next
        units = {size: data[: len(data) // size * size].view(f"u{size}") for size in (1, 2, 4, 8)}
        self.segments.append(Segment(name, base, data, valid, units, _narrowest_padding(valid)))
        self._next = base + -(-(len(data) + GUARD) // GUARD) * GUARD + GUARD
        return base + first

    def locate(self, address: IntArray, width: int) -> list[tuple[Segment, Any]]:
        """The segments that accesses of ``width`` bytes fall into, each with the positions of its accesses (a slice
        if there is only one).

        Raises:
            AddressError: some bytes of an access lie outside of every array, in padding, or are misaligned.
        """
        if (address & (width - 1)).any():
            position = int(np.flatnonzero(address & (width - 1))[0])
            raise AddressError(f"address {int(address[position]):#x} is not a multiple of {width} bytes", position)
        low, high = int(address.min()), int(address.max())
        for segment in self.segments:
            if segment.base <= low and high + width <= segment.base + len(segment.data):
                self._check_padding(segment, address, width)
                return [(segment, slice(None))]
        found: list[tuple[Segment, Any]] = []
        missing = np.ones(len(address), bool)
        for segment in self.segments:
            inside = (address >= segment.base) & (address + width <= segment.base + len(segment.data))
            if inside.any():
                positions = np.flatnonzero(inside)
                self._check_padding(segment, address, width, positions)
                found.append((segment, positions))
                missing &= ~inside
        if missing.any():
            position = int(np.flatnonzero(missing)[0])
            raise AddressError(self.describe(int(address[position]), width), position)
        return found

    def describe(self, address: int, width: int) -> str:
        """Where an address lies that is in no array."""
        if not self.segments:
            return f"{width} bytes at {address:#x}: there is no array at all"
        near = min(self.segments, key=lambda s: max(s.base - address, address - s.base - len(s.data)))
        if address < near.base:
            return f"{width} bytes at {address:#x}, {near.base - address} before the start of {near.name}"
        beyond = address + width - near.base - len(near.data)
        return f"{width} bytes at {address:#x}, {beyond} beyond the {len(near.data)} bytes of {near.name}"

    def _check_padding(self, segment: Segment, address: IntArray, width: int, positions: Any = slice(None)) -> None:
        if segment.valid is None:
            return
        offset = address[positions] - segment.base
        if width > segment.narrowest:  # there may be holes between the first byte and the last
            bad = ~segment.valid[offset[:, None] + np.arange(width)].all(axis=1)
        else:
            bad = ~(segment.valid[offset] & segment.valid[offset + (width - 1)])
        if bad.any():
            first = int(np.flatnonzero(bad)[0])
            position = int(np.arange(len(address))[positions][first])
            where = f"{width} bytes at byte {int(offset[first])} of the storage of {segment.name}"
            raise AddressError(f"{where}: they are padding between its elements, not part of it", position)

    def load(self, address: IntArray, size: int, count: int) -> NDArray[Any]:
        """``count`` elements of ``size`` bytes from each address: (n, count) unsigned.

        Raises:
            AddressError: as ``locate``.
        """
        steps = np.arange(count)
        parts = self.locate(address, size * count)
        if len(parts) == 1:
            segment, _ = parts[0]
            return segment.units[size][((address - segment.base) // size)[:, None] + steps]
        values = np.empty((len(address), count), f"u{size}")
        for segment, positions in parts:
            values[positions] = segment.units[size][((address[positions] - segment.base) // size)[:, None] + steps]
        return values

    def store(self, address: IntArray, values: NDArray[Any]) -> None:
        """Store ``values`` (n, count) of an unsigned type.

        Raises:
            AddressError: as ``locate``.
        """
        size, count = values.dtype.itemsize, values.shape[1]
        for segment, positions in self.locate(address, size * count):
            units = ((address[positions] - segment.base) // size)[:, None] + np.arange(count)
            segment.units[size][units] = values[positions]


def _storage_of(array: Any) -> tuple[NDArray[np.uint8], int, NDArray[np.bool_] | None]:
    """The bytes of an array's storage, the place of its first element there, and which bytes are its elements.

    Raises:
        SimulatorError: its elements are no numbers in memory that a kernel may write to.
    """
    if isinstance(array, np.ndarray):
        if array.dtype.hasobject:
            raise SimulatorError(f"an array of dtype {array.dtype}; allowed: numbers")
        if not array.flags.writeable:
            raise SimulatorError("an array that is read-only, to which a kernel might write; allowed: a copy of it")
        first, beyond = _extent(array)
        low, high = array.ctypes.data - first, array.ctypes.data + beyond
        owner = np.ndarray((high - low,), np.uint8, buffer=_memory(low, high - low, array))
        size, shape, strides = array.itemsize, array.shape, array.strides
    else:
        if array.device.type != "cpu":
            raise SimulatorError(f"a tensor on {array.device}; allowed: tensors on the CPU")
        storage = array.untyped_storage()
        owner = _torch_bytes(array, storage.nbytes())
        size = array.element_size()
        first = array.storage_offset() * size
        shape, strides = tuple(array.shape), tuple(stride * size for stride in array.stride())
    if 0 in shape:
        return owner[:0], 0, None
    valid = np.zeros(len(owner), bool)
    elements = np.lib.stride_tricks.as_strided(valid[first:], (*shape, size), (*strides, 1))
    elements[...] = True
    return owner, first, None if valid.all() else valid


def _narrowest_padding(valid: NDArray[np.bool_] | None) -> int:
    if valid is None:
        return 0
    edges = np.flatnonzero(np.diff(np.r_[True, valid, True]))
    return int((edges[1::2] - edges[::2]).min())


def _extent(array: NDArray[Any]) -> tuple[int, int]:
    """How many bytes an array reaches before its first element (negative strides) and from it on."""
    if not array.size:
        return 0, 0
    reach = [(extent - 1) * stride for extent, stride in zip(array.shape, array.strides, strict=True)]
    return -sum(step for step in reach if step < 0), sum(step for step in reach if step > 0) + array.itemsize


def _torch_bytes(tensor: Any, nbytes: int) -> NDArray[np.uint8]:
    import torch

    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), 0, (nbytes,), (1,))
    return flat.numpy()


def _memory(address: int, nbytes: int, owner: Any) -> Any:
    import ctypes

    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    memory._owner = owner  # type: ignore[attr-defined]
    return memory
