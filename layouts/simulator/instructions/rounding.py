"""Exact arithmetic through float64: sums rounded to odd, and rounding from there in any direction.

A value *rounded to odd* keeps in its last bit whether anything was cut off. Rounding it again to a format with at least
two bits less, in any direction, gives what rounding the exact value once would have given.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from layouts.simulator.instructions.elementwise import Array
from layouts.simulator.instructions.formats import bf16_from_f32

FLOAT_MODES = ("rn", "rz", "rm", "rp")

_F64 = np.float64
_BELOW_HALF = np.uint64((1 << 28) - 1)  # the bits of a float64 below half a unit in the last place of a float32
_SPLIT = _F64((1 << 27) + 1)
_F64_SAFE = (-900, 990)  # exponents of a product, and of what else enters a sum, between which fma_f64 is exact


def _two_sum(x: Array, y: Array) -> tuple[Array, Array]:
    """float64: the rounded sum and what the rounding cut off, exactly."""
    total = x + y
    of_y = total - x
    return total, (x - (total - of_y)) + (y - of_y)


def _two_product(x: Array, y: Array) -> tuple[Array, Array]:
    """float64: the rounded product and what the rounding cut off, exactly unless something over- or underflows."""
    product = x * y
    x_high, y_high = (v * _SPLIT - (v * _SPLIT - v) for v in (x, y))
    x_low, y_low = x - x_high, y - y_high
    return product, x_low * y_low - (((product - x_high * y_high) - x_low * y_high) - x_high * y_low)


def odd_sum(x: Array, y: Array) -> Array:
    """float64: x + y, rounded to odd."""
    total, error = _two_sum(x, y)
    bits = total.view(np.int64)
    inexact = np.abs(error) > 0  # not for NaN, which the error of an infinite sum is
    even = (bits & np.int64(1)) == 0
    step = np.where((error > 0) == (total > 0), np.int64(1), np.int64(-1))
    return (bits + step * (inexact & even)).view(_F64)


def odd_f32(values: Array) -> Array:
    """float64 to float32, rounded to odd."""
    rounded = values.astype(np.float32)
    back = rounded.astype(_F64)
    bits = rounded.view(np.int32)
    even = (bits & np.int32(1)) == 0
    away = np.abs(values) > np.abs(back)
    step = np.where(away, np.int32(1), np.int32(-1))
    return (bits + step * (even & ((values < back) | (values > back)))).view(np.float32)


def round_to(values: Array, ptx_type: str, mode: str) -> Array:
    """Round float64 (exact, or rounded to odd) to "f64", "f32", "f16" or "bf16" (raw uint16).

    Args:
        mode: "rn" to nearest even, "rz" towards zero, "rm" down, "rp" up.
    """
    if ptx_type == "f64":
        return values
    if ptx_type == "bf16":
        return bf16_from_f32(odd_f32(values), mode)
    dtype = {"f32": np.float32, "f16": np.float16}[ptx_type]
    nearest = values.astype(dtype)
    if mode == "rn":
        return nearest
    back = nearest.astype(_F64)
    if mode == "rz":
        wrong, target = np.abs(back) > np.abs(values), dtype(0)
    elif mode == "rm":
        wrong, target = back > values, dtype(-np.inf)
    else:
        wrong, target = back < values, dtype(np.inf)
    return np.where(wrong, np.nextafter(nearest, target), nearest)


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """float32: a * b + c, rounded once, to nearest even."""
    product = np.multiply(a, b, dtype=_F64)
    total = np.add(product, c, dtype=_F64)
    # float64 has to be rounded to odd only where it ends halfway between two numbers of float32, or exactly at one.
    if np.count_nonzero(total.view(np.uint64) & _BELOW_HALF) != np.size(total):
        total = odd_sum(product, np.asarray(c).astype(_F64))
    return total.astype(np.float32)


def fma_odd(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float32 (or less), as float64 rounded to odd."""
    return odd_sum(np.multiply(a, b, dtype=_F64), np.asarray(c).astype(_F64))


def fma_f64(a: Array, b: Array, c: Array) -> Array:
    """float64: a * b + c, rounded once, to nearest even."""
    product, product_error = _two_product(a, b)
    low, low_error = _two_sum(c, product_error)
    high, high_error = _two_sum(product, low)
    result = high + odd_sum(low_error, high_error)
    plain = np.asarray(a * b + c)
    # Zeros keep their sign, and infinities do not become NaN, in the plain formula.
    result = np.where(np.isfinite(result) & (result != 0), result, plain)
    return _with_exact_extremes(result, a, b, c)


def _with_exact_extremes(result: Array, a: Array, b: Array, c: Array) -> Array:
    """The results anew, one by one, where what the product's rounding cut off may have under- or overflowed."""
    a, b, c = np.broadcast_arrays(a, b, c)
    sizes = [np.frexp(x)[1].astype(np.int32) for x in (a, b, c)]
    product = sizes[0] + sizes[1]
    safe = (product > _F64_SAFE[0]) & (product < _F64_SAFE[1]) & (np.maximum(sizes[0], sizes[1]) < _F64_SAFE[1])
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    for place in np.argwhere(finite & (a != 0) & (b != 0) & ~(safe & (sizes[2] < _F64_SAFE[1]))):
        at = tuple(place)
        exact = Fraction(float(a[at])) * Fraction(float(b[at])) + Fraction(float(c[at]))
        result[at] = _nearest_f64(exact) if exact else result[at]
    return result


def _nearest_f64(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")
