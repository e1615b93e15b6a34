"""Small number formats and packed registers: bf16, tf32, e4m3, e5m2, and what lies in the parts of a register."""

from __future__ import annotations

from functools import cache

import numpy as np

from layouts.simulator.instructions.elementwise import Array

_U32 = np.uint32
F16_NAN = np.uint16(0x7FFF).view(np.float16)
F32_NAN = np.uint32(0x7FFFFFFF).view(np.float32)
_EVEN_HALF = _U32(0x7FFF)
_LOW_HALF = _U32(0xFFFF)
_TF32 = _U32(0xFFFFE000)
_EXPONENT = _U32(0x7F800000)
SMALLEST_NORMAL = {
    np.float16: np.float16(2.0**-14),
    np.float32: np.float32(2.0**-126),
    np.float64: np.float64(2.0**-1022),
}


def parts(packed: Array, dtype: type) -> Array:
    """The parts of packed registers, lowest first: shape (...,) to (..., n)."""
    return np.asarray(packed)[..., None].view(dtype)


def packed(values: Array, dtype: type = np.uint32) -> Array:
    """The reverse of ``parts``: shape (..., n) to (...,) of ``dtype``."""
    return np.ascontiguousarray(values).view(dtype)[..., 0]


def interleaved(low: Array, high: Array) -> Array:
    """Two sources of one register, the low one first: shape (..., 2)."""
    out = np.empty((*np.broadcast(low, high).shape, 2), np.asarray(low).dtype)
    out[..., 0] = low
    out[..., 1] = high
    return out


def canonical(result: Array, values: Array, nan: Array) -> Array:
    """``result`` with ``nan`` wherever ``values`` are NaN."""
    is_nan = np.isnan(values)
    return np.where(is_nan, nan, result) if np.count_nonzero(is_nan) else result


def flush(values: Array) -> Array:
    """Subnormal numbers become zeros of the same sign (.ftz)."""
    dtype = values.dtype.type
    # A product keeps the zero's sign, infinities and NaNs.
    return values * (np.abs(values) >= SMALLEST_NORMAL[dtype]).astype(dtype)


def saturate(values: Array) -> Array:
    """Clamped to [0, 1]; NaN and -0 become +0 (.sat)."""
    zero, one = values.dtype.type(0), values.dtype.type(1)
    # The sum makes a signalling NaN quiet, which numpy passes over for certain, and -0 to +0.
    return np.fmin(np.fmax(values + zero, zero), one)


def relu(values: Array) -> Array:
    """Negative numbers and -0 become +0; NaN stays (.relu)."""
    zero = values.dtype.type(0)
    return np.maximum(values, zero) + zero


def f16_from_float(values: Array) -> Array:
    """Floats to float16, to nearest even; NaN becomes 0x7fff."""
    return canonical(values.astype(np.float16), values, F16_NAN)


def f32_from_bf16(raw: Array) -> Array:
    """Raw bf16 (uint16) to float32, exactly."""
    return (raw.astype(_U32) << _U32(16)).view(np.float32)


def bf16_from_f32(values: Array, mode: str = "rn") -> Array:
    """float32 to raw bf16 (uint16), rounded "rn", "rz", "rm" or "rp"; NaN becomes 0x7fff."""
    bits = values.view(_U32)
    if mode == "rn":
        raw = (bits + (_EVEN_HALF + ((bits >> _U32(16)) & _U32(1)))) >> _U32(16)
    else:
        raw = bits >> _U32(16)
        if mode != "rz":
            away = (bits >> _U32(31)) == _U32(mode == "rm")
            raw = raw + (away & ((bits & _LOW_HALF) != 0)).astype(_U32)
    return canonical(raw.astype(np.uint16), values, np.uint16(0x7FFF))


def tf32_from_f32(values: Array, mode: str) -> Array:
    """float32 rounded to the 10-bit mantissa of tf32, "rna" (ties away from zero), "rn" or "rz".

    NaN becomes 0x7fffffff, but "rna" knows no NaN: one with none of the upper payload's bits becomes an infinity.
    """
    bits = values.view(_U32)
    if mode == "rna":
        return ((bits + _U32(0x1000)) & _TF32).view(np.float32)
    if mode == "rn":
        bits = bits + (_U32(0xFFF) + ((bits >> _U32(13)) & _U32(1)))
    return canonical((bits & _TF32).view(np.float32), values, F32_NAN)


def finite_tf32_from_f32(values: Array) -> Array:
    """As ``tf32_from_f32`` rounds with "rna"; what has the exponent of infinity is then one step smaller (.satfinite),
    which makes infinities the largest finite number."""
    bits = tf32_from_f32(values, "rna").view(_U32)
    return np.where((bits & _EXPONENT) == _EXPONENT, bits - _U32(0x2000), bits).view(np.float32)


@cache
def fp8_values(name: str) -> np.ndarray:
    """What each of the 256 codes of "e4m3" or "e5m2" stands for, as float16 (every value is one)."""
    codes = np.arange(128)
    mantissa_bits, bias = {"e4m3": (3, 7), "e5m2": (2, 15)}[name]
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    normal = exponent > 0
    fraction = normal + mantissa / (1 << mantissa_bits)
    magnitude = np.ldexp(fraction, np.where(normal, exponent, 1) - bias).astype(np.float16)
    if name == "e4m3":
        magnitude[127] = F16_NAN
    else:
        magnitude[124] = np.inf
        magnitude[125:] = F16_NAN
    values = np.concatenate([magnitude, np.where(np.isnan(magnitude), F16_NAN, -magnitude)])
    values.setflags(write=False)
    return values


@cache
def _fp8_codes(name: str) -> np.ndarray:
    """The nearest finite 8-bit code (ties to even) of each of the 65536 bf16 numbers, as uint8."""
    values = fp8_values(name)[:128].astype(np.float64)
    values = values[np.isfinite(values)]
    midpoints = (values[:-1] + values[1:]) / 2
    numbers = f32_from_bf16(np.arange(1 << 16).astype(np.uint16))
    below = np.searchsorted(midpoints, np.abs(numbers), side="left")
    above = np.searchsorted(midpoints, np.abs(numbers), side="right")
    codes = np.where(below % 2 == 0, below, above) + 128 * np.signbit(numbers)
    return np.where(np.isnan(numbers), 0x7F, codes).astype(np.uint8)


def fp8_from_f32(values: Array, name: str) -> Array:
    """float32 to 8-bit codes of "e4m3" or "e5m2" (uint8), to nearest even.

    What is too large, infinities too, becomes the largest finite number (.satfinite); NaN becomes 0x7f.
    """
    bits = values.view(_U32)
    # Rounded to odd, bf16 keeps more than enough to round again exactly.
    odd = (bits >> _U32(16)) | ((bits & _LOW_HALF) != 0)
    return _fp8_codes(name)[odd]
