"""Matrix instructions of a warp, as functions over all warps of a group: ldmatrix, stmatrix, movmatrix and mma.sync.

Registers are ``(registers, n, 32)`` arrays of uint32: n warps of 32 lanes. A *fragment* is the part of a matrix that a
lane holds in its registers; ``fragment_map`` says which part.

What mma does not model: the order in which the hardware adds the products, and the bits that it drops while it adds
them. Products are exact and are added in float32; integers are exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from layouts.simulator.errors import UnknownInstructionError

Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]

LANES = 32
ELEMENT_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "s8": 8, "u8": 8, "e4m3": 8, "e5m2": 8}
ACCUMULATORS = {
    "f16": ("f16", "f32"),
    "bf16": ("f32",),
    "tf32": ("f32",),
    "s8": ("s32",),
    "u8": ("s32",),
    "e4m3": ("f16", "f32"),
    "e5m2": ("f16", "f32"),
}
MIXED_TYPES = ({"s8", "u8"}, {"e4m3", "e5m2"})


# Matrices of 8 x 8 16-bit elements.


def ldmatrix(rows: npt.NDArray[np.uint8], transpose: bool = False) -> Words:
    """ldmatrix.m8n8.b16: rows of 8x8 matrices to registers.

    Args:
        rows: (n, matrices, 8, 16) bytes; lane ``8 * i + r`` of a warp gave the address of row r of matrix i.
        transpose: as with ``.trans``.

    Returns:
        (matrices, n, 32): lane l gets elements (l // 4, 2 * (l % 4)) and the one right of it, or, transposed,
        (2 * (l % 4), l // 4) and the one below it.
    """
    n, matrices = rows.shape[:2]
    elements = rows.view(np.uint16)
    if transpose:
        return _transposed(elements.swapaxes(0, 1)).view(np.uint32).reshape(matrices, n, LANES)
    return elements.view(np.uint32).reshape(n, matrices, LANES).swapaxes(0, 1)


def stmatrix(registers: Words, transpose: bool = False) -> npt.NDArray[np.uint8]:
    """stmatrix.m8n8.b16, the inverse of ``ldmatrix``: (matrices, n, 32) registers to (n, matrices, 8, 16) bytes."""
    matrices, n = registers.shape[:2]
    elements = np.ascontiguousarray(registers.swapaxes(0, 1)).view(np.uint16).reshape(n, matrices, 8, 8)
    return (_transposed(elements) if transpose else elements).view(np.uint8)


def movmatrix(register: Words) -> Words:
    """movmatrix.m8n8.trans.b16: the (n, 32) fragments of 8x8 matrices to the fragments of their transposes."""
    elements = np.ascontiguousarray(register).view(np.uint16).reshape(len(register), 8, 8)
    return _transposed(elements).view(np.uint32).reshape(register.shape)


def _transposed(matrices: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    return np.ascontiguousarray(matrices.swapaxes(-1, -2))


# Which element of which matrix a lane's registers hold.


@cache
def fragment_map(shape: str, operand: str, bits: int | None = None) -> npt.NDArray[np.intp]:
    """Where the elements of a lane's fragment lie in their matrix.

    Args:
        shape: of the mma, such as "m16n8k16".
        operand: "A" (m x k), "B" (k x n), "C" or "D" (m x n).
        bits: of an element of A and B: 8, 16 or 32. Left out, it is the usual one of the shape: 16 for k8 and k16,
            8 for k32, 32 for k4.

    Returns:
        (32, elements, 2), read-only: row and column of each element of each lane. Elements are counted as the PTX
        manual counts a0, a1, ...: those in the low bits of a register first.

    Raises:
        ValueError: there is no such fragment.
    """
    match = re.fullmatch(r"m16n8k(\d+)", shape)
    if match is None:
        raise ValueError(f"shape {shape!r}: must be m16n8k4, m16n8k8, m16n8k16 or m16n8k32")
    if operand not in ("A", "B", "C", "D"):
        raise ValueError(f"operand {operand!r}: must be A, B, C or D")
    k = int(match[1])
    packed = 32 // (bits or {4: 32, 8: 16, 16: 16, 32: 8}.get(k, 16))
    if k not in (4 * packed, 8 * packed):
        raise ValueError(f"shape {shape}: has no elements of {32 // packed} bits")
    table = _result_map() if operand in "CD" else _operand_map(operand, k, packed)
    table.setflags(write=False)
    return table


def _operand_map(operand: str, k: int, packed: int) -> npt.NDArray[np.intp]:
    """A register holds ``packed`` neighbours along k; a quad of lanes holds 4 * packed of them."""
    lane = np.arange(LANES)[:, None]
    blocks = 2 if operand == "A" else 1
    element = np.arange(blocks * k // 4)
    register, inside = element // packed, element % packed
    outer = lane // 4 + 8 * (register % blocks)
    inner = packed * (lane % 4) + inside + 4 * packed * (register // blocks)
    return np.stack((outer, inner) if operand == "A" else (inner, outer), axis=-1)


def _result_map() -> npt.NDArray[np.intp]:
    lane, element = np.arange(LANES)[:, None], np.arange(4)
    return np.stack((lane // 4 + 8 * (element // 2), 2 * (lane % 4) + element % 2), axis=-1)


# mma.sync


@dataclass(frozen=True)
class MmaForm:
    """A form of mma.sync with A in rows, B in columns and m16n8.

    Attributes:
        k: of the shape m16n8k.
        a, b: the types of A's and B's elements.
        accumulator: the type of C's and D's elements.
        saturate: with ``.satfinite``.
    """

    k: int
    a: str
    b: str
    accumulator: str
    saturate: bool = False

    @property
    def a_registers(self) -> int:
        return 2 * self.b_registers

    @property
    def b_registers(self) -> int:
        return self.k * ELEMENT_BITS[self.b] // 128

    @property
    def c_registers(self) -> int:
        return 2 if self.accumulator == "f16" else 4


_OPCODE = re.compile(
    r"mma\.sync\.aligned\.m16n8k(?P<k>\d+)\.row\.col(?P<saturate>\.satfinite)?(?P<kind>\.kind::f8f6f4)?"
    r"\.(?P<d>\w+)\.(?P<a>\w+)\.(?P<b>\w+)\.(?P<c>\w+)"
)


@cache
def mma_form(opcode: str) -> MmaForm:
    """The form of a full opcode, "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32".

    Raises:
        UnknownInstructionError: the form is not modelled.
    """
    match = _OPCODE.fullmatch(opcode)
    if match is None or not _is_modelled(match):
        raise UnknownInstructionError(f"{opcode}: this form of mma is not modelled")
    return MmaForm(int(match["k"]), match["a"], match["b"], match["d"], bool(match["saturate"]))


def _is_modelled(match: re.Match[str]) -> bool:
    accumulators = ACCUMULATORS.get(match["a"], ())
    return (
        match["d"] == match["c"]
        and match["d"] in accumulators
        and (match["a"] == match["b"] or {match["a"], match["b"]} in MIXED_TYPES)
        and int(match["k"]) * ELEMENT_BITS[match["a"]] in (128, 256)
        and (match["d"] == "s32" or not match["saturate"])
        and (match["a"] in ("e4m3", "e5m2") or not match["kind"])
    )


def mma(form: MmaForm, a: Words, b: Words, c: Words) -> Words:
    """D = A B + C for each of n warps.

    Args:
        form: as ``mma_form`` gives it.
        a, b, c: fragments, (registers, n, 32) with ``form.a_registers`` and so on.

    Returns:
        D's fragments, of c's shape.

    Raises:
        ValueError: an operand has another number of registers.
    """
    return mma_many(form, a[None], b[None], c[None], ((0, 0),))[0]


_PRODUCTS_AT_ONCE = 1 << 16  # so many elements stay in a core's cache between the product and the sum


@np.errstate(all="ignore")
def mma_many(form: MmaForm, a: Words, b: Words, c: Words, pairs: Sequence[tuple[int, int]]) -> Words:
    """Several mma instructions of one form, of which none reads what another writes.

    Operands that several of them read are given, and decoded, once.

    Args:
        form: as ``mma_form`` gives it.
        a: the different A fragments, (count, ``form.a_registers``, n, 32).
        b: the different B fragments, (count, ``form.b_registers``, n, 32).
        c: each instruction's C fragments, (instructions, ``form.c_registers``, n, 32).
        pairs: for each instruction, which of a and which of b it multiplies.

    Returns:
        D's fragments, of c's shape.

    Raises:
        ValueError: an operand has another number of registers, or there are more or fewer pairs than C fragments.
    """
    expected = (form.a_registers, form.b_registers, form.c_registers)
    if (a.shape[1], b.shape[1], c.shape[1]) != expected or len(pairs) != len(c):
        raise ValueError(
            f"a, b, c of shapes {a.shape}, {b.shape}, {c.shape} and {len(pairs)} pairs: {form} takes {expected} "
            "registers of each and as many pairs as there are c"
        )
    left = quad_ordered_matrices(a, form.a, 2)
    right = quad_ordered_matrices(b, form.b, 1).swapaxes(-1, -2)
    n = c.shape[2]
    c = np.ascontiguousarray(c)
    d = np.empty_like(c)
    at_once = max(1, _PRODUCTS_AT_ONCE // (128 * n))
    products = np.empty((min(at_once, len(c)), n, 16, 8), np.float32)
    for start in range(0, len(c), at_once):
        some = slice(start, start + at_once)
        for product, (i, j) in zip(products, pairs[some], strict=False):
            np.matmul(left[i], right[j], out=product)
        _ACCUMULATE[form.accumulator](products[: len(c) - start], c[some], form.saturate, d[some])
    return d


def quad_ordered_matrices(fragments: Words, kind: str, blocks: int) -> Floats:
    """The values of fragments, in matrices whose columns stand as the lanes of a quad hold them.

    A sum over k does not care about k's order as long as A and B agree, and in this order the registers of a lane
    simply stand side by side.

    Args:
        fragments: (count, registers, n, 32).
        kind: the type of an element, such as "f16".
        blocks: 2 for A, whose rows l // 4 and l // 4 + 8 lane l holds, 1 for B, of which it holds column l // 4.

    Returns:
        (count, n, 8 * blocks, k) float32, B transposed. With p elements in a register, column
        (l * registers / blocks + r) * p + i holds what stands at k = 4 * p * r + p * l + i, for lane l of a quad.
    """
    count, registers, n = fragments.shape[:3]
    by_k = fragments.reshape(count, registers // blocks, blocks, n, LANES)
    words = np.empty((count, n, blocks, LANES, registers // blocks), np.uint32)
    for i in range(registers // blocks):
        words[..., i] = by_k[:, i].swapaxes(1, 2)
    return element_values(words, kind).reshape(count, n, 8 * blocks, -1)


def element_values(words: Words, kind: str) -> Floats:
    """The values of the elements packed in words.

    Args:
        words: (..., w), contiguous.
        kind: the type of an element: "f16", "bf16", "tf32", "s8", "u8", "e4m3" or "e5m2".

    Returns:
        (..., w * elements in a word) float32.
    """
    return _DECODE[kind](words)


_FEW = 2048


def _decode_f16(words: Words) -> Floats:
    """Faster for many values than numpy's own conversion, which is kept for few, and for infinities and NaNs.

    Sign, exponent and mantissa move to their places in a float32, and the product with 2**112 corrects the exponent's
    bias, also of subnormal numbers.
    """
    halves = words.view(np.int16)
    if words.size <= _FEW or halves.max() >= 0x7C00 or words.view(np.uint16).max() >= 0xFC00:
        return words.view(np.float16).astype(np.float32)
    bits = halves.astype(np.int32)
    bits <<= 13
    bits &= -0x70002000
    values = bits.view(np.float32)
    values *= np.float32(2.0**112)
    return values


def _decode_bf16(words: Words) -> Floats:
    bits = words.view(np.uint16).astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def _decode_tf32(words: Words) -> Floats:
    return (words & np.uint32(0xFFFFE000)).view(np.float32)


def _decode_s8(words: Words) -> Floats:
    return words.view(np.int8).astype(np.float32)


def _decode_u8(words: Words) -> Floats:
    return words.view(np.uint8).astype(np.float32)


def _eight_bit_floats(mantissa_bits: int, bias: int, has_infinity: bool) -> Floats:
    """The value of each of the 256 codes."""
    codes = np.arange(256)
    exponent = (codes & 0x7F) >> mantissa_bits
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    values = np.where(exponent > 0, 1 + mantissa, mantissa) * 2.0 ** (np.maximum(exponent, 1) - bias)
    if has_infinity:
        values[codes & 0x7F == 0x7C] = np.inf
        values[codes & 0x7F > 0x7C] = np.nan
    else:
        values[codes & 0x7F == 0x7F] = np.nan
    return np.where(codes & 0x80, -values, values).astype(np.float32)


E4M3_VALUES = _eight_bit_floats(mantissa_bits=3, bias=7, has_infinity=False)
E5M2_VALUES = _eight_bit_floats(mantissa_bits=2, bias=15, has_infinity=True)


def _decode_e4m3(words: Words) -> Floats:
    return E4M3_VALUES.take(words.view(np.uint8))


def _decode_e5m2(words: Words) -> Floats:
    return E5M2_VALUES.take(words.view(np.uint8))


_DECODE: dict[str, Callable[[Words], Floats]] = {
    "f16": _decode_f16,
    "bf16": _decode_bf16,
    "tf32": _decode_tf32,
    "s8": _decode_s8,
    "u8": _decode_u8,
    "e4m3": _decode_e4m3,
    "e5m2": _decode_e5m2,
}


def _accumulate_f32(products: Floats, c: Words, saturate: bool, out: Words) -> None:
    shape = _split_shape(c)
    np.add(_single_elements(products), c.view(np.float32).reshape(shape), out=out.view(np.float32).reshape(shape))


def _accumulate_s32(products: Floats, c: Words, saturate: bool, out: Words) -> None:
    shape = _split_shape(c)
    addend = _single_elements(products).astype(np.int32)
    if not saturate:
        np.add(addend, c.view(np.int32).reshape(shape), out=out.view(np.int32).reshape(shape))
        return
    wide = addend.astype(np.int64) + c.view(np.int32).reshape(shape)
    out.view(np.int32).reshape(shape)[...] = np.clip(wide, -(2**31), 2**31 - 1)


def _accumulate_f16(products: Floats, c: Words, saturate: bool, out: Words) -> None:
    """A register holds two neighbours of a row."""
    count, registers, n, lanes = c.shape
    pairs = products.reshape(count, n, registers, lanes, 2).swapaxes(1, 2)
    halves = c.view(np.float16).reshape(pairs.shape)
    out.view(np.float16).reshape(pairs.shape)[...] = pairs + halves.astype(np.float32)


def _single_elements(products: Floats) -> Floats:
    """(count, n, 16, 8) matrices seen as registers of one element: (count, 2 halves of rows, 2 columns, n, 32)."""
    return products.reshape(*products.shape[:2], 2, LANES, 2).transpose(0, 2, 4, 1, 3)


def _split_shape(c: Words) -> tuple[int, ...]:
    return (len(c), 2, 2, *c.shape[2:])


_ACCUMULATE: dict[str, Callable[[Floats, Words, bool, Words], None]] = {
    "f32": _accumulate_f32,
    "s32": _accumulate_s32,
    "f16": _accumulate_f16,
}
