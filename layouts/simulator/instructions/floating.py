"""Arithmetic of f32 and f64.

Sums, products, quotients, roots and fma are rounded as IEEE 754 says. The .approx functions are more accurate than the
hardware's, which PTX bounds but does not define. ``mul`` and ``add`` without a rounding are not contracted into
``fma``, as ptxas may do.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from layouts.simulator.instructions.elementwise import Array, Elementwise, Form, Function, elementwise
from layouts.simulator.instructions.formats import SMALLEST_NORMAL, flush, saturate
from layouts.simulator.instructions.rounding import FLOAT_MODES, fma_f32, fma_f64, fma_odd, odd_sum, round_to

_KINDS = ("f32", "f64")
_F64 = np.float64
_UPPER_WORD = np.uint64(0xFFFFFFFF << 32)
_HALF_A_WORD = np.uint64(1 << 31)


def with_flush(function: Function) -> Function:
    """Subnormal sources and results become zeros (.ftz)."""
    return lambda *sources: flush(function(*(flush(source) for source in sources)))


def with_saturation(function: Function) -> Function:
    """The result is clamped to [0, 1] (.sat)."""
    return lambda *sources: saturate(function(*sources))


def _read_flush(form: Form, kind: str) -> bool:
    return kind == "f32" and form.flag("ftz")


def _finish(form: Form, kind: str, num_sources: int, function: Function) -> Elementwise:
    """Read .ftz and .sat and the type."""
    if _read_flush(form, kind):
        function = with_flush(function)
    if kind == "f32" and form.flag("sat"):
        function = with_saturation(function)
    form.need(kind)
    return Elementwise(kind, (kind,) * num_sources, function)


def _read_rounding(form: Form, kind: str, default: str | None = None) -> str:
    mode = form.take(*FLOAT_MODES) if default else form.need(*FLOAT_MODES)
    if kind == "f64" and mode not in (None, "rn"):
        raise form.refuse(f"the rounding .{mode} is not modelled for f64; allowed: rn")
    return mode or default or "rn"


def _rounded(exact: Function, mode: str) -> Function:
    """Round what a function gives in float64, exact or rounded to odd, to float32."""
    return lambda *sources: round_to(exact(*sources), "f32", mode)


def _sum(mode: str) -> Function:
    if mode == "rn":
        return np.add
    if mode == "rm":  # -(-a + -b) rounded up: then a zero out of a and -a is negative, as rounding down has it
        upward = _sum("rp")
        return lambda a, b: -upward(-a, -b)
    return _rounded(lambda a, b: odd_sum(a.astype(_F64), b.astype(_F64)), mode)


def _difference(mode: str) -> Function:
    add = _sum(mode)
    return np.subtract if mode == "rn" else lambda a, b: add(a, -b)


def _product(mode: str) -> Function:
    return np.multiply if mode == "rn" else _rounded(lambda a, b: np.multiply(a, b, dtype=_F64), mode)


@elementwise("add", "sub", "mul", types=_KINDS)
def _arithmetic(form: Form) -> Elementwise:
    kind = form.rest[-1]
    mode = _read_rounding(form, kind, default="rn")
    make = {"add": _sum, "sub": _difference, "mul": _product}[form.base]
    return _finish(form, kind, 2, make(mode))


def _fma(mode: str) -> Function:
    if mode == "rn":
        return fma_f32
    if mode == "rm":
        upward = _fma("rp")
        return lambda a, b, c: -upward(-a, b, -c)
    return _rounded(fma_odd, mode)


@elementwise("fma", "mad", types=_KINDS)
def _multiply_add(form: Form) -> Elementwise:
    kind = form.rest[-1]
    mode = _read_rounding(form, kind)
    return _finish(form, kind, 3, fma_f64 if kind == "f64" else _fma(mode))


def _reciprocal(a: Array) -> Array:
    return a.dtype.type(1) / a


def _reciprocal_root(a: Array) -> Array:
    return a.dtype.type(1) / np.sqrt(a)


def _approximate_quotient(a: Array, b: Array) -> Array:
    """a times the reciprocal of b, which hardware takes for 0 where it is below 2^-126."""
    size = np.abs(b)
    too_large = (size > np.float32(2.0**126)) & (size < np.float32(np.inf))
    return np.where(too_large, a * np.copysign(np.float32(0), b), a / b)


def _directed(function: Function, mode: str) -> Function:
    """In float64 no quotient or root is rounded onto a float32 number that it is not: rounding twice is right."""
    return function if mode == "rn" else _rounded(lambda *s: function(*(a.astype(_F64) for a in s)), mode)


@elementwise("div", types=_KINDS)
def _quotient(form: Form) -> Elementwise:
    kind = form.rest[-1]
    approximate = form.take("approx", "full") if kind == "f32" else None
    if approximate:
        function = _approximate_quotient if approximate == "approx" else np.divide
    else:
        function = _directed(np.divide, _read_rounding(form, kind))
    return _without_saturation(form, kind, 2, function)


def _without_saturation(form: Form, kind: str, num_sources: int, function: Function) -> Elementwise:
    if _read_flush(form, kind):
        function = with_flush(function)
    form.need(kind)
    return Elementwise(kind, (kind,) * num_sources, function)


def _of_upper_words(function: Function) -> Function:
    """.approx.ftz.f64: of a source only the upper 32 bits count (a NaN with none there is an infinity), of the result
    the lower ones are 0."""

    def of_upper_words(a: Array) -> Array:
        result = flush(function(flush((np.asarray(a).view(np.uint64) & _UPPER_WORD).view(_F64))))
        return np.where(np.isfinite(result), ((result.view(np.uint64) + _HALF_A_WORD) & _UPPER_WORD).view(_F64), result)

    return of_upper_words


@elementwise("rcp", "sqrt", types=_KINDS)
def _reciprocal_or_root(form: Form) -> Elementwise:
    kind = form.rest[-1]
    function: Function = np.sqrt if form.base == "sqrt" else _reciprocal
    if kind == "f64" and form.base == "rcp" and form.flag("approx"):
        form.need("ftz")
        return Elementwise(form.need("f64"), ("f64",), _of_upper_words(function))
    if kind == "f64" or not form.flag("approx"):
        function = _directed(function, _read_rounding(form, kind))
    return _without_saturation(form, kind, 1, function)


@elementwise("rsqrt", types=_KINDS)
def _inverse_root(form: Form) -> Elementwise:
    form.need("approx")
    flushed = form.flag("ftz")
    kind = form.need(*_KINDS)
    if not flushed:
        return Elementwise(kind, (kind,), _reciprocal_root)
    return Elementwise(kind, (kind,), (_of_upper_words if kind == "f64" else with_flush)(_reciprocal_root))


def _flushed_exp2(a: Array) -> Array:
    """A subnormal source gives 1 anyway, and no result is negative: only a subnormal result is left to flush."""
    result = np.exp2(a)
    return result * (a >= np.float32(-126)) if np.count_nonzero(a < np.float32(-126)) else result


_FUNCTIONS = {"ex2": np.exp2, "lg2": np.log2, "sin": np.sin, "cos": np.cos, "tanh": np.tanh}


@elementwise(*_FUNCTIONS, types=("f32",))
def _function(form: Form) -> Elementwise:
    form.need("approx")
    function: Function = _FUNCTIONS[form.base]
    if form.base != "tanh" and form.flag("ftz"):
        function = _flushed_exp2 if form.base == "ex2" else with_flush(function)
    return Elementwise(form.need("f32"), ("f32",), function)


@elementwise("neg", "abs", types=_KINDS)
def _sign(form: Form) -> Elementwise:
    kind = form.rest[-1]
    return _without_saturation(form, kind, 1, {"neg": np.negative, "abs": np.abs}[form.base])


@elementwise("copysign", types=_KINDS)
def _copy_sign(form: Form) -> Elementwise:
    """b with the sign of a."""
    kind = form.need(*_KINDS)
    return Elementwise(kind, (kind, kind), lambda a, b: np.copysign(b, a))


def extremum(largest: bool, propagate: bool) -> Function:
    """The larger or smaller of two floats, -0 below +0.

    Args:
        propagate: whether a NaN among the sources is the result (.NaN), or the other source is.
    """
    if propagate:
        function: np.ufunc = np.maximum if largest else np.minimum
    else:
        function = np.fmax if largest else np.fmin

    def choose(a: Array, b: Array) -> Array:
        result = function(a, b)
        if np.count_nonzero(np.abs(result) > 0) == np.size(result):
            return result
        return _with_zeros_and_nans(result, a, b, largest, propagate)

    return choose


def _with_zeros_and_nans(result: Array, a: Array, b: Array, largest: bool, propagate: bool) -> Array:
    """What numpy leaves open in an extremum: the sign of a zero, and whether a signalling NaN is passed over."""
    negative = np.signbit(a) & np.signbit(b) if largest else np.signbit(a) | np.signbit(b)
    signed = np.copysign(result, np.where(negative, result.dtype.type(-1), result.dtype.type(1)))
    result = np.where((result == 0) & (a == b), signed, result)
    return result if propagate else np.where(np.isnan(a), b, np.where(np.isnan(b), a, result))


def magnitude_extremum(largest: bool, propagate: bool) -> Function:
    """The larger or smaller magnitude, negative if just one of the two sources is (.xorsign.abs)."""
    choose = extremum(largest, propagate)

    def with_sign(a: Array, b: Array) -> Array:
        sign = np.where(np.signbit(a) ^ np.signbit(b), a.dtype.type(-1), a.dtype.type(1))
        return np.copysign(choose(np.abs(a), np.abs(b)), sign)

    return with_sign


def read_extremum(form: Form, flushes: bool) -> Function:
    """Read the modifiers of min or max up to the type: {.ftz}{.NaN}{.xorsign.abs}."""
    largest = form.base == "max"
    flushed = flushes and form.flag("ftz")
    propagate = form.flag("NaN")
    if form.flag("xorsign"):
        form.need("abs")
        function = magnitude_extremum(largest, propagate)
    else:
        function = extremum(largest, propagate)
    return with_flush(function) if flushed else function


@elementwise("min", "max", types=_KINDS)
def _extremum(form: Form) -> Elementwise:
    kind = form.rest[-1]
    if kind == "f32" and form.num_sources == 3:
        return _extremum_of_three(form)
    choose = extremum(form.base == "max", propagate=False) if kind == "f64" else read_extremum(form, flushes=True)
    return Elementwise(form.need(kind), (kind, kind), choose)


def _extremum_of_three(form: Form) -> Elementwise:
    """{.ftz}{.NaN}{.abs}.f32; .abs takes the sources' magnitudes."""
    flushed = form.flag("ftz")
    choose = extremum(form.base == "max", form.flag("NaN"))
    magnitudes = form.flag("abs")

    def choose_of_three(*sources: Array) -> Array:
        return reduce(choose, map(np.abs, sources) if magnitudes else sources)

    function = with_flush(choose_of_three) if flushed else choose_of_three
    return Elementwise(form.need("f32"), ("f32", "f32", "f32"), function)


def _is_subnormal(a: Array) -> Array:
    return (a != 0) & (np.abs(a) < SMALLEST_NORMAL[a.dtype.type])


_PROPERTIES: dict[str, Function] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda a: ~np.isnan(a),
    "notanumber": np.isnan,
    "normal": lambda a: np.isfinite(a) & ~_is_subnormal(a),  # zeros count as normal
    "subnormal": _is_subnormal,
}


@elementwise("testp", types=_KINDS)
def _test(form: Form) -> Elementwise:
    function = _PROPERTIES[form.need(*_PROPERTIES)]
    return Elementwise("pred", (form.need(*_KINDS),), function)
