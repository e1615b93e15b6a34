"""The matrix instruction of a Hopper warpgroup, wgmma, as functions over several warpgroups.

A *matrix descriptor* says where in shared memory the tile of an operand lies, and a *core matrix*, 8 rows of 16 bytes,
is the unit in which it lies there. When an instruction reads and when its result lands is the caller's business.

What is not modelled: sparse forms, and what ``fragments`` says of the sums. Eight-bit floats are summed in float32,
where Hopper's tensor cores keep fewer bits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

from layouts.simulator.errors import SimulatorError, UnknownInstructionError
from layouts.simulator.fragments import (
    ACCUMULATORS,
    ELEMENT_BITS,
    LANES,
    MIXED_TYPES,
    Floats,
    Words,
    element_values,
    quad_ordered_matrices,
)
from layouts.simulator.ptx import Immediate, Instruction, Operand, Vector

WARPS = 4
ROWS = 64


# Matrix descriptors


@dataclass(frozen=True)
class MatrixDescriptor:
    """What a 64-bit matrix descriptor says.

    Attributes:
        start: byte address of the tile in the shared window.
        leading_bytes, stride_bytes: the two offsets between core matrices, or between groups of them.
        base_offset: for tiles whose swizzle pattern does not start where its size divides the address.
        swizzle_bytes: width of the swizzle: 32, 64 or 128; 16, the width of a core matrix, without one.
    """

    start: int
    leading_bytes: int
    stride_bytes: int
    base_offset: int
    swizzle_bytes: int


_SWIZZLE_BYTES = (16, 128, 64, 32)


def decode_descriptor(descriptor: int) -> MatrixDescriptor:
    """Take the 64 bits of a matrix descriptor apart."""
    return MatrixDescriptor(
        start=(descriptor & 0x3FFF) << 4,
        leading_bytes=(descriptor >> 16 & 0x3FFF) << 4,
        stride_bytes=(descriptor >> 32 & 0x3FFF) << 4,
        base_offset=descriptor >> 49 & 7,
        swizzle_bytes=_SWIZZLE_BYTES[descriptor >> 62 & 3],
    )


@lru_cache(maxsize=4096)
def operand_addresses(descriptor: int, rows: int, k: int, element_bytes: int, k_major: bool) -> npt.NDArray[np.intp]:
    """Where the elements of a tile lie.

    Args:
        descriptor: the 64 bits of the tile's matrix descriptor.
        rows: M for A, N for B.
        k: of the instruction.
        element_bytes: 1, 2 or 4.
        k_major: whether k is contiguous. The other way round elements must have 2 bytes.

    Returns:
        (rows, k), read-only: the byte address in the shared window of each element.

    Raises:
        SimulatorError: the descriptor has a base offset, or elements of 1 or 4 bytes are not K-major.
    """
    fields = decode_descriptor(descriptor)
    if fields.base_offset:
        raise SimulatorError(f"matrix descriptor {descriptor:#018x}: base offset {fields.base_offset} is not modelled")
    if not k_major and element_bytes != 2:
        raise SimulatorError(f"elements of {element_bytes} bytes: only those of 2 bytes may be MN-major")
    row, column = np.arange(rows)[:, None], np.arange(k)
    offsets = _k_major_offsets if k_major else _mn_major_offsets
    addresses = swizzled(fields.start + offsets(fields, row, column, element_bytes), fields.swizzle_bytes)
    addresses.setflags(write=False)
    return addresses


def _k_major_offsets(
    fields: MatrixDescriptor, row: npt.NDArray[np.intp], column: npt.NDArray[np.intp], element_bytes: int
) -> npt.NDArray[np.intp]:
    """Groups of 8 rows, each as wide as the swizzle, lie a stride apart. Only unswizzled ones need the other offset."""
    width = fields.swizzle_bytes
    inside, beyond = column * element_bytes % width, column * element_bytes // width
    return row % 8 * width + row // 8 * fields.stride_bytes + inside + beyond * fields.leading_bytes


def _mn_major_offsets(
    fields: MatrixDescriptor, row: npt.NDArray[np.intp], column: npt.NDArray[np.intp], element_bytes: int
) -> npt.NDArray[np.intp]:
    """As above with k for the rows; and without a swizzle the two offsets change places."""
    width = fields.swizzle_bytes
    along_mn, along_k = fields.leading_bytes, fields.stride_bytes
    if width == 16:
        along_mn, along_k = along_k, along_mn
    inside, beyond = row * element_bytes % width, row * element_bytes // width
    return column % 8 * width + column // 8 * along_k + inside + beyond * along_mn


def swizzled(addresses: npt.NDArray[np.intp], width: int) -> npt.NDArray[np.intp]:
    """Where the bytes at these addresses lie under a swizzle of 32, 64 or 128 bytes (16: none): units of 16 bytes trade
    places, by address bits 7 and up."""
    return addresses ^ ((addresses >> 7 & (width // 16 - 1)) << 4)


# Fragments


@cache
def accumulator_map(n: int) -> npt.NDArray[np.intp]:
    """(128, n / 2, 2), read-only: row and column in the 64 x n result of each element that each thread holds."""
    thread, element = np.arange(WARPS * LANES)[:, None], np.arange(n // 2)
    row = 16 * (thread // LANES) + thread % LANES // 4 + 8 * (element // 2 % 2)
    column = 8 * (element // 4) + 2 * (thread % 4) + element % 2
    table = np.stack((row, column), axis=-1)
    table.setflags(write=False)
    return table


# The instruction


@dataclass(frozen=True)
class WgmmaForm:
    """A form of wgmma.mma_async.

    Attributes:
        n, k: of the shape m64nNkK.
        a, b: the types of A's and B's elements.
        accumulator: the type of the result's elements.
        saturate: with ``.satfinite``.
    """

    n: int
    k: int
    a: str
    b: str
    accumulator: str
    saturate: bool = False

    @property
    def element_bytes(self) -> int:
        """Of A and of B."""
        return ELEMENT_BITS[self.a] // 8

    @property
    def registers(self) -> int:
        """How many hold a thread's part of the result."""
        return self.n // 4 if self.accumulator == "f16" else self.n // 2


_OPCODE = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k(?P<k>\d+)(?P<saturate>\.satfinite)?"
    r"\.(?P<d>\w+)\.(?P<a>\w+)\.(?P<b>\w+)"
)


@cache
def wgmma_form(opcode: str) -> WgmmaForm:
    """The form of a full opcode, "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16".

    Raises:
        UnknownInstructionError: the form is not modelled.
    """
    match = _OPCODE.fullmatch(opcode)
    if match is None or not _is_modelled(match):
        raise UnknownInstructionError(f"{opcode}: this form of wgmma is not modelled")
    return WgmmaForm(int(match["n"]), int(match["k"]), match["a"], match["b"], match["d"], bool(match["saturate"]))


def _is_modelled(match: re.Match[str]) -> bool:
    return (
        match["d"] in ACCUMULATORS.get(match["a"], ())
        and (match["a"] == match["b"] or {match["a"], match["b"]} in MIXED_TYPES)
        and int(match["k"]) * ELEMENT_BITS[match["a"]] == 256
        and int(match["n"]) in range(8, 257, 8)
        and (match["d"] == "s32" or not match["saturate"])
    )


@dataclass(frozen=True)
class WgmmaOperands:
    """What stands where in a wgmma instruction.

    Attributes:
        d: the result's registers.
        a: A's registers, or the one operand that is its descriptor.
        b: B's descriptor.
        scale_d: predicate (or constant): whether the result is added to what d holds.
        sign: 1 or -1, the product of the two operands' signs.
        a_k_major, b_k_major: of the tiles in shared memory.
    """

    d: tuple[Operand, ...]
    a: tuple[Operand, ...]
    b: Operand
    scale_d: Operand
    sign: int = 1
    a_k_major: bool = True
    b_k_major: bool = True

    @property
    def a_in_registers(self) -> bool:
        return len(self.a) > 1


def wgmma_operands(instruction: Instruction) -> WgmmaOperands:
    """Sort the operands of a wgmma instruction.

    Raises:
        UnknownInstructionError: their number or kind is not that of a form that is modelled.
    """
    form = wgmma_form(instruction.opcode)
    d, a, b, scale_d, *constants = instruction.operands
    values = [constant.value for constant in constants if isinstance(constant, Immediate)]
    a_items = a.items if isinstance(a, Vector) else (a,)
    signs = 0 if form.accumulator == "s32" else 2
    majors = 0 if form.element_bytes != 2 else 1 if isinstance(a, Vector) else 2
    fits = len(constants) == len(values) == signs + majors and len(a_items) in (1, 4)
    if not (fits and isinstance(d, Vector) and len(d.items) == form.registers):
        raise UnknownInstructionError(f"{instruction.text}: these operands are not those of {form}")
    if not set(values[:signs]) <= {1, -1} or not set(values[signs:]) <= {0, 1}:
        raise UnknownInstructionError(f"{instruction.text}: signs must be 1 or -1, and transpositions 0 or 1")
    sign = int(np.prod(values[:signs])) if signs else 1
    a_major, b_major = [0, 0, *values[signs:]][-2:]
    return WgmmaOperands(d.items, a_items, b, scale_d, sign, not a_major, not b_major)


@dataclass(frozen=True)
class Tiles:
    """The tiles of one operand of several warpgroups, which may belong to several CTAs.

    Attributes:
        descriptors: (g,) uint64, each warpgroup's matrix descriptor.
        ctas: (g,), which row of the shared memory each warpgroup reads.
        rows: 64 for A, N for B.
        k_major: whether k is contiguous.
    """

    descriptors: npt.NDArray[np.uint64]
    ctas: npt.NDArray[np.intp]
    rows: int
    k_major: bool


def shared_operand(shared: npt.NDArray[np.uint8], tiles: Tiles, k: int, kind: str) -> Floats:
    """Read the tiles of an operand from shared memory.

    Args:
        shared: (ctas, bytes), contiguous, the bytes a multiple of 16.
        tiles: what to read.
        k: of the instruction.
        kind: the type of the operand's elements, such as "f16".

    Returns:
        (g, rows, k) values.

    Raises:
        SimulatorError: a tile does not lie within the shared memory, or its descriptor is not modelled.
    """
    units = shared.view(np.complex128)  # any type of 16 bytes will do: a swizzle never splits as many
    values = np.empty((len(tiles.ctas), tiles.rows, k), np.float32)
    for descriptor in np.unique(tiles.descriptors).tolist():
        addresses = operand_addresses(descriptor, tiles.rows, k, ELEMENT_BITS[kind] // 8, tiles.k_major)
        if addresses.max() >= shared.shape[1]:
            raise SimulatorError(
                f"matrix descriptor {descriptor:#018x}: the tile reaches byte {addresses.max()} of shared memory, "
                f"which has {shared.shape[1]}"
            )
        readers = tiles.descriptors == descriptor
        per_unit = 128 // ELEMENT_BITS[kind]
        where = addresses[:, ::per_unit] if tiles.k_major else addresses[::per_unit].T
        tile = np.ascontiguousarray(units[tiles.ctas[readers][:, None, None], where // 16])
        elements = element_values(tile.view(np.uint32), kind)
        values[readers] = elements if tiles.k_major else elements.swapaxes(1, 2)
    return values


def register_operand(registers: Words, kind: str) -> Floats:
    """A's values from the registers of the warpgroups.

    Args:
        registers: (4, 4, g, 32): register, warp of the warpgroup, warpgroup, lane.
        kind: the type of A's elements, such as "f16".

    Returns:
        (g, 64, k) values.
    """
    count, warps, groups = registers.shape[:3]
    packed = 32 // ELEMENT_BITS[kind]
    values = quad_ordered_matrices(registers.reshape(1, count, warps * groups, LANES), kind, 2)
    by_register = values.reshape(warps, groups, 16, 4, count // 2, packed)
    return by_register.transpose(1, 0, 2, 4, 3, 5).reshape(groups, ROWS, 2 * count * packed)


@np.errstate(all="ignore")
def wgmma(form: WgmmaForm, d: Words, a: Floats, b: Floats, scale_d: npt.ArrayLike = True, sign: int = 1) -> Words:
    """D = A B, or A B + D, for each of g warpgroups.

    Args:
        form: as ``wgmma_form`` gives it.
        d: (``form.registers``, 4, g, 32): register, warp of the warpgroup, warpgroup, lane.
        a: (g, 64, k) values.
        b: (g, n, k) values.
        scale_d: whether to add D: a bool, or (g,) bools.
        sign: 1 or -1, by which the product is multiplied.

    Returns:
        The new D.

    Raises:
        ValueError: d has another number of registers.
    """
    if d.shape[:2] != (form.registers, WARPS):
        raise ValueError(f"d of shape {d.shape}: {form} takes ({form.registers}, {WARPS}, g, {LANES})")
    product = sign * np.matmul(a, b.swapaxes(-1, -2))
    adds = np.broadcast_to(np.asarray(scale_d, bool), len(product))[:, None]
    if form.accumulator == "f16":
        return _sum_f16(product, d, adds[..., None])
    elements = _by_register(product)
    if form.accumulator == "f32":
        total = elements + np.where(adds, d.view(np.float32), np.float32(0))
        return np.ascontiguousarray(total).view(np.uint32)
    return _sum_s32(elements, np.where(adds, d.view(np.int32), 0), form.saturate)


def _sum_f16(product: Floats, d: Words, adds: npt.NDArray[np.bool_]) -> Words:
    """A register holds two neighbours of a row."""
    pairs = _by_register(product).reshape(-1, 2, *d.shape[1:])
    halves = np.moveaxis(pairs, 1, -1)
    old = np.ascontiguousarray(d).view(np.float16).reshape(halves.shape)
    total = halves + np.where(adds, old, np.float16(0))
    return np.ascontiguousarray(total, np.float16).view(np.uint32).reshape(d.shape)


def _sum_s32(product: Floats, addend: npt.NDArray[np.int32], saturate: bool) -> Words:
    total = product.astype(np.int64) + addend
    if saturate:
        total = np.clip(total, -(2**31), 2**31 - 1)
    return total.astype(np.int32).view(np.uint32)


def _by_register(product: Floats) -> Floats:
    """(g, 64, n) results to (n / 2, 4, g, 32): element of a thread, warp, warpgroup, lane."""
    groups, _, n = product.shape
    split = product.reshape(groups, WARPS, 2, 8, n // 8, 4, 2)
    return split.transpose(4, 2, 6, 1, 0, 3, 5).reshape(n // 2, WARPS, groups, LANES)
