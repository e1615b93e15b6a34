"""Instructions on bits: logic, shifts, bit fields, permutations of bytes."""

from __future__ import annotations

from functools import lru_cache, reduce

import numpy as np

from layouts.simulator.instructions.elementwise import Array, Elementwise, Form, Function, elementwise, numpy_type
from layouts.simulator.instructions.formats import parts

_U32, _U64 = np.uint32, np.uint64
_BITS = ("b16", "b32", "b64")
_ONES = _U32(0xFFFFFFFF)


@elementwise("and", "or", "xor", types=("pred", *_BITS))
def _logic(form: Form) -> Elementwise:
    kind = form.need("pred", *_BITS)
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[form.base]
    return Elementwise(kind, (kind, kind), function)


@elementwise("not", types=("pred", *_BITS))
def _not(form: Form) -> Elementwise:
    kind = form.need("pred", *_BITS)
    return Elementwise(kind, (kind,), np.bitwise_not)


@elementwise("cnot", types=_BITS)
def _logical_not(form: Form) -> Elementwise:
    kind = form.need(*_BITS)
    dtype = numpy_type(kind)
    return Elementwise(kind, (kind,), lambda a: (a == 0).astype(dtype))


@lru_cache(maxsize=256)
def _products(table: int) -> tuple[tuple[int, ...], ...]:
    """A function of three bits as the products whose exclusive or it is.

    Args:
        table: bit 4a + 2b + c is the function's value at (a, b, c).

    Returns:
        for each product, the places of its factors among (a, b, c); the empty one is 1.
    """
    present = [table >> i & 1 for i in range(8)]
    for factor in (1, 2, 4):
        for i in range(8):
            if i & factor:
                present[i] ^= present[i ^ factor]
    return tuple(tuple(2 - bit for bit in range(3) if i >> bit & 1) for i in range(8) if present[i])


def _three_inputs(a: Array, b: Array, c: Array, table: Array) -> Array:
    sources = (a, b, c)
    result = np.zeros(np.broadcast(a, b, c).shape, _U32)
    for places in _products(int(table) & 0xFF):
        result = result ^ reduce(np.bitwise_and, (sources[place] for place in places), _ONES)
    return result


@elementwise("lop3", types=("b32",))
def _any_logic(form: Form) -> Elementwise:
    """The fourth source, the function's table, is an immediate."""
    form.need("b32")
    return Elementwise("b32", ("b32", "b32", "b32", "u32"), _three_inputs)


def _shift_amount(amount: Array, dtype: np.dtype) -> Array:
    """The amount (u32) in the shifted type, no larger than its width: numpy defines a shift by the width and more."""
    return np.minimum(amount, _U32(dtype.itemsize * 8)).astype(dtype)


def _shift(kind: str, function: np.ufunc) -> Elementwise:
    dtype = numpy_type(kind)
    if dtype.itemsize == 2:
        return Elementwise(kind, (kind, "u32"), lambda a, amount: function(a, _shift_amount(amount, dtype)))
    # An amount that is too large for a signed type turns negative: to numpy that, too, is more than the width.
    return Elementwise(kind, (kind, "u32"), lambda a, amount: function(a, amount, dtype=dtype))


@elementwise("shl", types=_BITS)
def _shift_left(form: Form) -> Elementwise:
    return _shift(form.need(*_BITS), np.left_shift)


_SHIFTED_RIGHT = (*_BITS, "u16", "u32", "u64", "s16", "s32", "s64")


@elementwise("shr", types=_SHIFTED_RIGHT)
def _shift_right(form: Form) -> Elementwise:
    return _shift(form.need(*_SHIFTED_RIGHT), np.right_shift)


def _joined(low: Array, high: Array) -> Array:
    return (high.astype(_U64) << _U64(32)) | low.astype(_U64)


@elementwise("shf", types=("b32",))
def _funnel_shift(form: Form) -> Elementwise:
    """32 bits out of the 64 that the first source (low) and the second (high) make."""
    left = form.need("l", "r") == "l"
    clamp = form.need("clamp", "wrap") == "clamp"
    form.need("b32")

    def shift(low: Array, high: Array, amount: Array) -> Array:
        count = (np.minimum(amount, _U32(32)) if clamp else amount & _U32(31)).astype(_U64)
        both = _joined(low, high)
        return ((both << count) >> _U64(32) if left else both >> count).astype(_U32)

    return Elementwise("b32", ("b32", "b32", "u32"), shift)


def _leading_zeros_32(a: Array) -> Array:
    return _U32(32) - np.frexp(a.astype(np.float64))[1].astype(_U32)


def leading_zeros(a: Array) -> Array:
    """How many of the upper bits are zero, of uint32 or uint64, as uint32."""
    if a.dtype == _U32:
        return _leading_zeros_32(a)
    high, low = (a >> _U64(32)).astype(_U32), a.astype(_U32)
    return np.where(high == 0, _U32(32) + _leading_zeros_32(low), _leading_zeros_32(high))


def _population(a: Array) -> Array:
    """How many bits are set, as uint32: sums of neighbours in fields of 2, 4 and 8 bits, then of all bytes."""
    dtype = a.dtype.type
    twos, fours, eights, ones = (dtype(byte * (np.iinfo(dtype).max // 0xFF)) for byte in (0x55, 0x33, 0x0F, 0x01))
    a = a - ((a >> dtype(1)) & twos)
    a = (a & fours) + ((a >> dtype(2)) & fours)
    a = (a + (a >> dtype(4))) & eights
    return ((a * ones) >> dtype(np.iinfo(dtype).bits - 8)).astype(_U32)


@elementwise("popc", "clz", types=("b32", "b64"))
def _count(form: Form) -> Elementwise:
    kind = form.need("b32", "b64")
    return Elementwise("u32", (kind,), {"popc": _population, "clz": leading_zeros}[form.base])


@elementwise("bfind", types=("u32", "s32", "u64", "s64"))
def _find_leading(form: Form) -> Elementwise:
    """The place of the highest bit that is set (of the highest that differs from the sign), or all ones."""
    shift_amount = form.flag("shiftamt")
    kind = form.need("u32", "s32", "u64", "s64")
    bits = _U32(numpy_type(kind).itemsize * 8)
    unsigned = f"u{kind[1:]}"

    def find(a: Array) -> Array:
        magnitude = np.where(a < 0, ~a, a).view(numpy_type(unsigned)) if kind[0] == "s" else a
        zeros = leading_zeros(magnitude)
        return np.where(zeros == bits, _ONES, zeros if shift_amount else bits - _U32(1) - zeros)

    return Elementwise("u32", (kind,), find)


_REVERSED = np.packbits(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)[:, ::-1], axis=1)[:, 0]


@elementwise("brev", types=("b32", "b64"))
def _reverse(form: Form) -> Elementwise:
    kind = form.need("b32", "b64")

    def reverse(a: Array) -> Array:
        return np.ascontiguousarray(_REVERSED[parts(a, np.uint8)[..., ::-1]]).view(a.dtype)[..., 0]

    return Elementwise(kind, (kind,), reverse)


def _low_mask(length: Array, dtype: np.dtype) -> Array:
    """The given number of low bits, set."""
    return ~np.left_shift(~dtype.type(0), _shift_amount(length, dtype))


def _field_operand(value: Array, dtype: np.dtype) -> Array:
    """A start or length as hardware takes it, where PTX leaves more than 255 open: of 32-bit fields a byte counts."""
    return value & _U32(0xFF) if dtype.itemsize == 4 else value


@elementwise("bfe", types=("u32", "s32", "u64", "s64"))
def _extract(form: Form) -> Elementwise:
    """The field of a that starts at bit b and has c bits, sign extended."""
    kind = form.need("u32", "s32", "u64", "s64")
    dtype = numpy_type(kind)
    bits = dtype.itemsize * 8

    def unsigned(a: Array, start: Array, length: Array) -> Array:
        shifted = np.right_shift(a, _shift_amount(_field_operand(start, dtype), dtype))
        return shifted & _low_mask(_field_operand(length, dtype), dtype)

    def signed(a: Array, start: Array, length: Array) -> Array:
        shifted = np.right_shift(a, _shift_amount(_field_operand(start, dtype), dtype))
        unused = (_U32(bits) - np.minimum(_field_operand(length, dtype), _U32(bits))).astype(dtype)
        return np.right_shift(np.left_shift(shifted, unused), unused)

    return Elementwise(kind, (kind, "u32", "u32"), signed if kind[0] == "s" else unsigned)


@elementwise("bfi", types=("b32", "b64"))
def _insert(form: Form) -> Elementwise:
    """b with the low d bits of a at bit c."""
    kind = form.need("b32", "b64")
    dtype = numpy_type(kind)

    def insert(a: Array, b: Array, start: Array, length: Array) -> Array:
        amount = _shift_amount(_field_operand(start, dtype), dtype)
        mask = np.left_shift(_low_mask(_field_operand(length, dtype), dtype), amount)
        return (b & ~mask) | (np.left_shift(a, amount) & mask)

    return Elementwise(kind, (kind, kind, "u32", "u32"), insert)


@elementwise("bmsk", types=("b32",))
def _mask(form: Form) -> Elementwise:
    """A mask of b bits that starts at bit a."""
    clamp = form.need("clamp", "wrap") == "clamp"
    form.need("b32")
    u32 = np.dtype(_U32)

    def mask(start: Array, length: Array) -> Array:
        if not clamp:
            start, length = start & _U32(31), length & _U32(31)
        return np.left_shift(_low_mask(length, u32), _shift_amount(start, u32))

    return Elementwise("b32", ("b32", "b32"), mask)


@elementwise("szext", types=("u32", "s32"))
def _extend(form: Form) -> Elementwise:
    """The low b bits of a, extended by zeros or by the sign."""
    clamp = form.need("clamp", "wrap") == "clamp"
    kind = form.need("u32", "s32")
    dtype = numpy_type(kind)

    def extend(a: Array, length: Array) -> Array:
        used = np.minimum(length, _U32(32)) if clamp else length & _U32(31)
        unused = (_U32(32) - used).astype(dtype)
        return np.right_shift(np.left_shift(a, unused), unused)

    return Elementwise(kind, (kind, "u32"), extend)


_SELECTORS = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}
"""For each mode of prmt and the low two bits of its third source, the selector of the mode without a name."""


@lru_cache(maxsize=256)
def _moves(selector: int) -> tuple[tuple[int, int, np.uint32], ...] | None:
    """A selector as moves (source, bytes to the left, bits to keep), or None if it repeats sign bits."""
    masks: dict[tuple[int, int], int] = {}
    for place in range(4):
        choice = selector >> 4 * place & 0xF
        if choice >= 8:
            return None
        move = choice // 4, place - choice % 4
        masks[move] = masks.get(move, 0) | 0xFF << 8 * place
    return tuple((source, left, _U32(mask)) for (source, left), mask in masks.items())


def _permute(a: Array, b: Array, selector: Array) -> Array:
    """Four bytes out of the eight of a (low) and b (high), each chosen by four bits of the selector."""
    moves = _moves(int(selector) & 0xFFFF) if np.ndim(selector) == 0 else None
    if moves is None:
        return _permute_by_lane(_joined(a, b), selector)
    result: Array = _U32(0)
    for source, left, mask in moves:
        value = (a, b)[source]
        shifted = value << _U32(8 * left) if left > 0 else value >> _U32(-8 * left) if left else value
        result = result | (shifted & mask)
    return result


def _permute_by_lane(both: Array, selector: Array) -> Array:
    result: Array = _U32(0)
    for place in range(4):
        choice = selector >> _U32(4 * place)
        byte = (both >> ((choice & _U32(7)) << _U32(3)).astype(_U64)).astype(np.uint8)
        sign = (byte.view(np.int8) >> np.int8(7)).view(np.uint8)
        chosen = np.where(choice & _U32(8), sign, byte)
        result = result | (chosen.astype(_U32) << _U32(8 * place))
    return result


def _by_mode(mode: str) -> Function:
    selectors = np.array(_SELECTORS[mode], _U32)
    return lambda a, b, control: _permute(a, b, selectors[control & _U32(3)])


@elementwise("prmt")
def _permutation(form: Form) -> Elementwise:
    form.need("b32")
    mode = form.take(*_SELECTORS)
    return Elementwise("b32", ("b32", "b32", "b32"), _by_mode(mode) if mode else _permute)
