"""Integer arithmetic: sums, products, quotients, extrema, dot products."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from layouts.simulator.instructions.elementwise import Array, Elementwise, Form, Function, elementwise, numpy_type
from layouts.simulator.instructions.formats import packed, parts, relu

UNSIGNED = ("u16", "u32", "u64")
SIGNED = ("s16", "s32", "s64")
INTEGERS = UNSIGNED + SIGNED
PAIRS = {"u16x2": np.uint16, "s16x2": np.int16}
WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


def by_pairs(function: Function, dtype: type) -> Function:
    """A function of 16-bit values as one of registers that hold two."""
    return lambda *sources: packed(function(*(parts(source, dtype) for source in sources)))


def clip_to(values: Array, dtype: np.dtype) -> Array:
    """Integers of another type, clamped to what ``dtype`` can hold (.sat)."""
    source, target = np.iinfo(values.dtype), np.iinfo(dtype)
    low, high = max(source.min, target.min), min(source.max, target.max)
    return np.clip(values, values.dtype.type(low), values.dtype.type(high)).astype(dtype)


def _saturated(function: Function) -> Function:
    """A function of s32 whose result is clamped instead of wrapped."""
    s32 = np.dtype(np.int32)
    return lambda *sources: clip_to(function(*(source.astype(np.int64) for source in sources)), s32)


@elementwise("add", "sub", types=INTEGERS + tuple(PAIRS))
def _sum(form: Form) -> Elementwise:
    function = {"add": np.add, "sub": np.subtract}[form.base]
    saturate = form.flag("sat")
    if saturate:
        return Elementwise(form.need("s32"), ("s32", "s32"), _saturated(function))
    kind = form.need(*INTEGERS, *(PAIRS if form.base == "add" else ()))
    return Elementwise(kind, (kind, kind), by_pairs(function, PAIRS[kind]) if kind in PAIRS else function)


def _high_u64(a: Array, b: Array) -> Array:
    """The upper 64 bits of a product of uint64."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a_low, a_high, b_low, b_high = a & low, a >> half, b & low, b >> half
    middle = a_high * b_low + ((a_low * b_low) >> half)
    other = a_low * b_high + (middle & low)
    return a_high * b_high + (middle >> half) + (other >> half)


def _high_s64(a: Array, b: Array) -> Array:
    zero = np.int64(0)
    unsigned = _high_u64(a.view(np.uint64), b.view(np.uint64)).view(np.int64)
    return unsigned - np.where(a < zero, b, zero) - np.where(b < zero, a, zero)


def _product(mode: str, kind: str) -> Function:
    """The product of two integers: its lower or upper half ("lo", "hi"), or all of it ("wide")."""
    if mode == "lo":
        return np.multiply
    if kind in ("u64", "s64"):
        return {"u64": _high_u64, "s64": _high_s64}[kind]
    wide, dtype = numpy_type(WIDE[kind]), numpy_type(kind)
    if mode == "wide":
        return lambda a, b: np.multiply(a, b, dtype=wide)
    bits = wide.type(dtype.itemsize * 8)
    return lambda a, b: (np.multiply(a, b, dtype=wide) >> bits).astype(dtype)


@elementwise("mul", "mad", types=INTEGERS)
def _multiply(form: Form) -> Elementwise:
    mode = form.need("lo", "hi", "wide")
    saturate = form.base == "mad" and mode == "hi" and form.flag("sat")
    kind = form.need(*(("s32",) if saturate else WIDE if mode == "wide" else INTEGERS))
    result = WIDE[kind] if mode == "wide" else kind
    product = _product(mode, kind)
    if form.base == "mul":
        return Elementwise(result, (kind, kind), product)
    add = _saturated(np.add) if saturate else np.add
    return Elementwise(result, (kind, kind, result), lambda a, b, c: add(product(a, b), c))


def _magnitude(a: Array) -> Array:
    return np.abs(a).view(f"u{a.dtype.itemsize}")


def _unsigned_quotient(a: Array, b: Array) -> Array:
    return np.where(b == 0, ~a.dtype.type(0), a // b)


def _unsigned_remainder(a: Array, b: Array) -> Array:
    return np.where(b == 0, ~a.dtype.type(0), a % b)


def _signed_quotient(a: Array, b: Array) -> Array:
    """Rounded towards zero."""
    quotient = (_magnitude(a) // _magnitude(b)).view(a.dtype)
    return np.where(b == 0, a.dtype.type(-1), np.where((a ^ b) < 0, -quotient, quotient))


def _signed_remainder(a: Array, b: Array) -> Array:
    """With the sign of the dividend."""
    remainder = (_magnitude(a) % _magnitude(b)).view(a.dtype)
    return np.where(b == 0, a.dtype.type(-1), np.where(a < 0, -remainder, remainder))


@elementwise("div", "rem", types=INTEGERS)
def _divide(form: Form) -> Elementwise:
    """A division by zero, which PTX leaves open, gives all ones, quotient and remainder."""
    kind = form.need(*INTEGERS)
    functions = {
        "div": (_unsigned_quotient, _signed_quotient),
        "rem": (_unsigned_remainder, _signed_remainder),
    }[form.base]
    return Elementwise(kind, (kind, kind), functions[kind in SIGNED])


@elementwise("neg", "abs", types=SIGNED)
def _sign(form: Form) -> Elementwise:
    kind = form.need(*SIGNED)
    return Elementwise(kind, (kind,), {"neg": np.negative, "abs": np.abs}[form.base])


@elementwise("min", "max", types=INTEGERS + tuple(PAIRS))
def _extremum(form: Form) -> Elementwise:
    function = {"min": np.minimum, "max": np.maximum}[form.base]
    clamp = form.flag("relu")
    kind = form.need(*(("s32", "s16x2") if clamp else (*INTEGERS, *PAIRS)))

    def clamped(a: Array, b: Array) -> Array:
        return relu(function(a, b))

    each = clamped if clamp else function
    return Elementwise(kind, (kind, kind), by_pairs(each, PAIRS[kind]) if kind in PAIRS else each)


@elementwise("sad", types=INTEGERS)
def _sum_of_difference(form: Form) -> Elementwise:
    kind = form.need(*INTEGERS)
    return Elementwise(kind, (kind, kind, kind), lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c)


_BYTES = {"u32": np.uint8, "s32": np.int8}
_HALVES = {"u32": np.uint16, "s32": np.int16}


def _dot(a_type: str, b_type: str, a_parts: Mapping[str, type], b_offset: int | None) -> Elementwise:
    """c plus the sum of the products of the parts of a and b; ``b_offset`` is the first of two bytes of b."""
    result = "u32" if a_type == b_type == "u32" else "s32"
    dtype = numpy_type(result)
    chosen = slice(None) if b_offset is None else slice(b_offset, b_offset + 2)

    def dot(a: Array, b: Array, c: Array) -> Array:
        left = parts(a, a_parts[a_type]).astype(np.int64)
        right = parts(b, _BYTES[b_type])[..., chosen].astype(np.int64)
        return (left * right).sum(axis=-1).astype(dtype) + c

    return Elementwise(result, (a_type, b_type, result), dot)


@elementwise("dp4a", types=("u32", "s32"))
def _dot_of_bytes(form: Form) -> Elementwise:
    return _dot(form.need("u32", "s32"), form.need("u32", "s32"), _BYTES, None)


@elementwise("dp2a", types=("u32", "s32"))
def _dot_of_halves(form: Form) -> Elementwise:
    offset = {"lo": 0, "hi": 2}[form.need("lo", "hi")]
    return _dot(form.need("u32", "s32"), form.need("u32", "s32"), _HALVES, offset)
