"""Conversions: cvt between integers, floats, halves and 8-bit floats, and cvt.pack."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from layouts.simulator.instructions.elementwise import Array, Elementwise, Form, Function, elementwise, numpy_type
from layouts.simulator.instructions.formats import (
    F16_NAN,
    bf16_from_f32,
    canonical,
    f16_from_float,
    f32_from_bf16,
    finite_tf32_from_f32,
    flush,
    fp8_from_f32,
    fp8_values,
    interleaved,
    packed,
    parts,
    relu,
    saturate,
    tf32_from_f32,
)
from layouts.simulator.instructions.integer import clip_to
from layouts.simulator.instructions.rounding import FLOAT_MODES, odd_sum, round_to

_INTEGERS = tuple(f"{sign}{bits}" for sign in "us" for bits in (8, 16, 32, 64))
_FLOATS = ("f16", "bf16", "f32", "f64")
_PAIRS = {"f16x2": "f16", "bf16x2": "bf16"}
_FP8 = {"e4m3x2": "e4m3", "e5m2x2": "e5m2"}
_TYPES = (*_INTEGERS, *_FLOATS, *_PAIRS, *_FP8, "tf32")
_INTEGRAL: dict[str, Function] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_FLAGS = ("ftz", "sat", "relu", "satfinite")
_WIDENING = {("f16", "f32"), ("f16", "f64"), ("bf16", "f32"), ("bf16", "f64"), ("f32", "f64")}
_LARGEST = {"f16": 65504.0, "bf16": float.fromhex("0x1.fep127"), "tf32": float.fromhex("0x1.ffcp127")}
_F64 = np.float64


@dataclass(frozen=True)
class _Conversion:
    """The modifiers of a cvt."""

    form: Form
    rounding: str | None
    flags: frozenset[str]
    result: str
    source: str

    def allow(self, roundings: tuple[str | None, ...], flags: tuple[str, ...] = ()) -> None:
        """Refuse any other rounding or flag."""
        if self.rounding not in roundings:
            allowed = ", ".join(mode or "none" for mode in roundings)
            raise self.form.refuse(f"the rounding {self.rounding} is not modelled here; allowed: {allowed}")
        for flag in sorted(self.flags.difference(flags)):
            raise self.form.refuse(f"the modifier .{flag} is not modelled between these types")

    def one(self, function: Function) -> Elementwise:
        return Elementwise(self.result, (self.source,), function)


@elementwise("cvt")
def _convert(form: Form) -> Elementwise:
    if form.flag("pack"):
        return _pack(form)
    rounding = form.take("rn", "rz", "rm", "rp", "rna", *_INTEGRAL)
    flags = set()
    while flag := form.take(*_FLAGS):
        flags.add(flag)
    conversion = _Conversion(form, rounding, frozenset(flags), form.need(*_TYPES), form.need(*_TYPES))
    result, source = conversion.result, conversion.source
    if "sat" in flags and result not in (*_INTEGERS, "f16", "f32", "f64"):
        raise form.refuse(f"the modifier .sat is not modelled for .{result}")
    if result in _INTEGERS:
        return _to_integer(conversion)
    if source in _FP8 or result in _FP8:
        return _fp8(conversion)
    if result in _PAIRS or result == "tf32" or _narrows_f32(conversion):
        return _from_f32(conversion)
    if source in _INTEGERS:
        return _float_from_integer(conversion)
    if source in _FLOATS:
        return _between_floats(conversion)
    raise form.refuse(f"a conversion from .{source} to .{result} is not modelled")


def _narrows_f32(conversion: _Conversion) -> bool:
    """Whether it is one of the forms to f16 and bf16 that exist for f32 alone."""
    narrows = conversion.source == "f32" and conversion.result in ("f16", "bf16")
    return narrows and conversion.rounding in ("rn", "rz") and not conversion.flags & {"ftz", "sat"}


def _to_integer(conversion: _Conversion) -> Elementwise:
    if conversion.source in _FLOATS:
        return _integer_from_float(conversion)
    if conversion.source not in _INTEGERS:
        raise conversion.form.refuse(f"a conversion from .{conversion.source} to .{conversion.result} is not modelled")
    conversion.allow((None,), ("sat",))
    dtype = numpy_type(conversion.result)
    if "sat" in conversion.flags:
        return conversion.one(lambda a: clip_to(a, dtype))
    return conversion.one(lambda a: a.astype(dtype))


def _as_f64(source: str, flushed: bool) -> Function:
    """Reads a float type into float64."""
    if source == "bf16":
        return lambda a: f32_from_bf16(a).astype(_F64)
    return (lambda a: flush(a).astype(_F64)) if flushed else (lambda a: a.astype(_F64))


def _read_flush(conversion: _Conversion) -> bool:
    """Whether subnormal sources are flushed: .ftz is for conversions that have an f32. To f16, hardware does not."""
    if "ftz" in conversion.flags and "f32" not in (conversion.source, conversion.result):
        raise conversion.form.refuse("the modifier .ftz is for f32")
    return "ftz" in conversion.flags and conversion.source == "f32" and conversion.result != "f16"


def _integer_from_float(conversion: _Conversion) -> Elementwise:
    """Clamped to the integer's range.

    NaN gives 0, but the integer with only the top bit set if the source is f64 or the result has 64 bits.
    """
    conversion.allow(tuple(_INTEGRAL), ("ftz", "sat"))
    read = _as_f64(conversion.source, _read_flush(conversion))
    to_integral = _INTEGRAL[conversion.rounding or ""]
    dtype = numpy_type(conversion.result)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    top_bit = np.uint64(1 << (dtype.itemsize * 8 - 1)).astype(dtype)
    of_nan = top_bit if conversion.source == "f64" or dtype.itemsize == 8 else dtype.type(0)

    def convert(a: Array) -> Array:
        values = read(a)
        # Before the rounding: the bounds are integers, and float64 may not hold the upper one exactly.
        inside = (values > _F64(low)) & (values < _F64(high))
        integers = to_integral(np.where(inside, values, _F64(0))).astype(dtype)
        clamped = np.where(values >= _F64(high), dtype.type(high), np.where(inside, integers, dtype.type(low)))
        return canonical(clamped, values, of_nan)

    return conversion.one(convert)


def _integer_as_f64(source: str) -> Function:
    """Reads an integer type into float64, exactly, or rounded to odd if it has 64 bits."""
    if source not in ("u64", "s64"):
        return lambda a: a.astype(_F64)
    shift = numpy_type(source).type(32)

    def read(a: Array) -> Array:
        high = a >> shift
        return odd_sum(np.ldexp(high.astype(_F64), 32), (a - (high << shift)).astype(_F64))

    return read


def _float_from_integer(conversion: _Conversion) -> Elementwise:
    conversion.allow(FLOAT_MODES, ("sat", "ftz") if conversion.result == "f32" else ("sat",))
    result, mode = conversion.result, conversion.rounding or "rn"
    read = _integer_as_f64(conversion.source)

    def convert(a: Array) -> Array:
        values = read(a)
        return round_to(saturate(values) if "sat" in conversion.flags else values, result, mode)

    if result == "f64":
        if conversion.source in ("u64", "s64") and mode != "rn":
            raise conversion.form.refuse(f"the rounding .{mode} is not modelled here; allowed: rn")
        convert = _saturated_if(conversion, lambda a: a.astype(_F64))
    elif result == "f32" and mode == "rn":
        convert = _saturated_if(conversion, lambda a: a.astype(np.float32))
    return conversion.one(convert)


def _saturated_if(conversion: _Conversion, function: Function) -> Function:
    return (lambda a: saturate(function(a))) if "sat" in conversion.flags else function


def _between_floats(conversion: _Conversion) -> Elementwise:
    source, result = conversion.source, conversion.result
    if source == result:
        return _same_float(conversion)
    widening = (source, result) in _WIDENING
    conversion.allow((None,) if widening else FLOAT_MODES, ("ftz", "sat"))
    flush_source = _read_flush(conversion)
    if result == "f32" and source in ("f16", "bf16") and not conversion.flags:
        return conversion.one(f32_from_bf16 if source == "bf16" else lambda a: a.astype(np.float32))
    mode = conversion.rounding or "rn"
    read = _as_f64(source, flush_source)
    flush_result = "ftz" in conversion.flags and result == "f32"

    def convert(a: Array) -> Array:
        values = saturate(read(a)) if "sat" in conversion.flags else read(a)
        rounded = round_to(values, result, mode)
        if result == "f16":
            return canonical(rounded, values, F16_NAN)
        return flush(rounded) if flush_result else rounded

    return conversion.one(convert)


def _same_float(conversion: _Conversion) -> Elementwise:
    """To itself: rounded to an integer, flushed, clamped, or copied."""
    conversion.allow((None, *_INTEGRAL), ("ftz", "sat"))
    flush_source = _read_flush(conversion)
    to_integral = _INTEGRAL.get(conversion.rounding or "")
    if conversion.source == "bf16" and to_integral:
        return conversion.one(lambda a: bf16_from_f32(to_integral(f32_from_bf16(a))))

    def convert(a: Array) -> Array:
        values = flush(a) if flush_source else a
        values = to_integral(values) if to_integral else values
        return saturate(values) if "sat" in conversion.flags else values

    return conversion.one(convert)


def _narrowed(kind: str, mode: str) -> Function:
    """Rounds float32 to "f16", raw "bf16" or "tf32"; NaN becomes the one that the format defines."""
    if kind == "bf16":
        return lambda a: bf16_from_f32(a, mode)
    if kind == "tf32":
        return lambda a: tf32_from_f32(a, mode)
    if mode == "rn":
        return f16_from_float
    return lambda a: canonical(round_to(a.astype(_F64), "f16", mode), a, F16_NAN)


def _from_f32(conversion: _Conversion) -> Elementwise:
    """From f32, to tf32, to a half type, or from two to a pair, the first source to the upper half."""
    if conversion.source != "f32":
        raise conversion.form.refuse(f"a conversion from .{conversion.source} to .{conversion.result} is not modelled")
    kind = _PAIRS.get(conversion.result, conversion.result)
    conversion.allow(("rna", "rn", "rz") if kind == "tf32" else ("rn", "rz"), ("relu", "satfinite"))
    if conversion.rounding == "rna" and "relu" in conversion.flags:
        raise conversion.form.refuse("the modifier .relu is not modelled with .rna")
    if conversion.rounding == "rna" and "satfinite" in conversion.flags:
        return conversion.one(finite_tf32_from_f32)
    narrow = _narrowed(kind, conversion.rounding or "rn")
    clamp = _clamped_if(conversion, kind)

    def convert(a: Array) -> Array:
        return narrow(clamp(a))

    if conversion.result not in _PAIRS:
        return conversion.one(convert)
    return Elementwise(conversion.result, ("f32", "f32"), lambda high, low: packed(convert(interleaved(low, high))))


def _clamped_if(conversion: _Conversion, kind: str) -> Function:
    """Applies .relu and .satfinite to float32."""
    limit = np.float32(_LARGEST.get(kind, np.inf))

    def clamp(a: Array) -> Array:
        a = relu(a) if "relu" in conversion.flags else a
        return np.clip(a, -limit, limit) if "satfinite" in conversion.flags else a

    return clamp


def _fp8(conversion: _Conversion) -> Elementwise:
    """Between two 8-bit floats in 16 bits and two f16 in 32 bits, or from two f32, the first to the upper byte."""
    result, source = conversion.result, conversion.source
    if result == "f16x2" and source in _FP8:
        conversion.allow(("rn",), ("relu",))
        values = fp8_values(_FP8[source])
        values = relu(values) if "relu" in conversion.flags else values
        return conversion.one(lambda a: packed(values[parts(a, np.uint8)]))
    if result not in _FP8 or source not in ("f32", "f16x2"):
        raise conversion.form.refuse(f"a conversion from .{source} to .{result} is not modelled")
    conversion.allow(("rn",), ("relu", "satfinite"))
    if "satfinite" not in conversion.flags:
        raise conversion.form.refuse("the modifier .satfinite is missing")
    name = _FP8[result]

    def encode(a: Array) -> Array:
        return packed(fp8_from_f32(relu(a) if "relu" in conversion.flags else a, name), np.uint16)

    if source == "f16x2":
        return conversion.one(lambda a: encode(parts(a, np.float16).astype(np.float32)))
    return Elementwise(result, ("f32", "f32"), lambda high, low: encode(interleaved(low, high)))


_PACKED_BITS = {"u16": 16, "s16": 16, "u8": 8, "s8": 8, "u4": 4, "s4": 4, "u2": 2, "s2": 2}


def _pack(form: Form) -> Elementwise:
    """Two s32, clamped, into the lowest bits, the second lowest; the third source, if any, is shifted up to them."""
    form.need("sat")
    kind = form.need(*_PACKED_BITS)
    bits = _PACKED_BITS[kind]
    form.need("s32")
    signed = kind[0] == "s"
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    mask, width = np.uint32((1 << bits) - 1), np.uint32(bits)

    def field(a: Array) -> Array:
        return np.clip(a, np.int32(low), np.int32(high)).view(np.uint32) & mask

    if bits == 16:
        return Elementwise("b32", ("s32", "s32"), lambda a, b: (field(a) << width) | field(b))
    form.need("b32")
    return Elementwise(
        "b32", ("s32", "s32", "b32"), lambda a, b, c: (c << (width + width)) | (field(a) << width) | field(b)
    )
