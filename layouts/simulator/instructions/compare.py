"""Comparisons and selections: setp, set, selp, slct, of integers and floats."""

from __future__ import annotations

import numpy as np

from layouts.simulator.instructions.elementwise import Array, Elementwise, Form, Function, elementwise, numpy_type
from layouts.simulator.instructions.formats import f32_from_bf16, flush, parts

_EQUALITY: dict[str, Function] = {"eq": np.equal, "ne": np.not_equal}
_ORDER: dict[str, Function] = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
_UNSIGNED: dict[str, Function] = (
    _EQUALITY | _ORDER | {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
)
_FLOAT: dict[str, Function] = _ORDER | {
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b),
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b),
    "nan": lambda a, b: (a != a) | (b != b),
}
_BOOLEAN = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}

_BIT_TYPES = ("b16", "b32", "b64")
_UNSIGNED_TYPES = ("u16", "u32", "u64")
_SIGNED_TYPES = ("s16", "s32", "s64")
_FLOAT_TYPES = ("f32", "f64")
_HALF_TYPES = ("f16", "f16x2", "bf16", "bf16x2")
_COMPARED = (*_BIT_TYPES, *_UNSIGNED_TYPES, *_SIGNED_TYPES, *_FLOAT_TYPES)


def _comparisons(kind: str) -> dict[str, Function]:
    """What may be compared of a type, by name."""
    if kind in _BIT_TYPES:
        return _EQUALITY
    if kind in _UNSIGNED_TYPES:
        return _UNSIGNED
    return _EQUALITY | _ORDER if kind in _SIGNED_TYPES else _FLOAT


def _widened(kind: str, function: Function) -> Function:
    """A comparison of floats as one of the raw sources of a half type."""
    read: dict[str, Function] = {
        "f16x2": lambda raw: parts(raw, np.float16),
        "bf16": f32_from_bf16,
        "bf16x2": lambda raw: f32_from_bf16(parts(raw, np.uint16)),
    }
    return (lambda a, b: function(read[kind](a), read[kind](b))) if kind in read else function


def _flushed(function: Function) -> Function:
    return lambda a, b: function(flush(a), flush(b))


def _read_comparison(form: Form, kind: str) -> tuple[Function, Function | None]:
    """The comparison of two sources, and the operation that joins it with a predicate."""
    compare = _comparisons(kind)[form.need(*_comparisons(kind))]
    join = form.take(*_BOOLEAN)
    if kind in ("f32", "f16", "f16x2") and form.flag("ftz"):
        compare = _flushed(compare)
    return _widened(kind, compare), _BOOLEAN[join] if join else None


def _two_predicates(compare: Function, join: Function | None) -> Function:
    """p|q: the second is the comparison negated, joined alike."""

    def joined(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
        holds = compare(a, b)
        return join(holds, c), join(~holds, c)  # type: ignore[misc]

    def plain(a: Array, b: Array) -> tuple[Array, Array]:
        holds = compare(a, b)
        return holds, ~holds

    return joined if join else plain


def _of_two_parts(compare: Function, join: Function | None) -> Function:
    """p|q: the first is of the low parts of the sources, the second of the high ones."""

    def compare_parts(a: Array, b: Array, *predicate: Array) -> tuple[Array, Array]:
        holds = compare(a, b)
        low, high = holds[..., 0], holds[..., 1]
        return (join(low, *predicate), join(high, *predicate)) if join else (low, high)

    return compare_parts


@elementwise("setp", types=_COMPARED + _HALF_TYPES)
def _set_predicate(form: Form) -> Elementwise:
    kind = form.rest[-1]
    compare, join = _read_comparison(form, kind)
    form.need(kind)
    sources = (kind, kind, "pred") if join else (kind, kind)
    if kind.endswith("x2"):
        return Elementwise(("pred", "pred"), sources, _of_two_parts(compare, join))
    if form.num_results == 2:
        return Elementwise(("pred", "pred"), sources, _two_predicates(compare, join))
    return Elementwise("pred", sources, (lambda a, b, c: join(compare(a, b), c)) if join else compare)


@elementwise("set", types=_COMPARED)
def _set(form: Form) -> Elementwise:
    """All ones or 1.0 where the comparison holds, 0 elsewhere."""
    kind = form.rest[-1]
    compare, join = _read_comparison(form, kind)
    result = form.need("u32", "s32", "f32")
    form.need(kind)
    dtype = numpy_type(result)
    yes, no = dtype.type(1) if result == "f32" else ~dtype.type(0), dtype.type(0)
    if join:
        return Elementwise(result, (kind, kind, "pred"), lambda a, b, c: np.where(join(compare(a, b), c), yes, no))
    return Elementwise(result, (kind, kind), lambda a, b: np.where(compare(a, b), yes, no))


@elementwise("selp", types=_COMPARED)
def _select(form: Form) -> Elementwise:
    kind = form.need(*_COMPARED)
    return Elementwise(kind, (kind, kind, "pred"), lambda a, b, predicate: np.where(predicate, a, b))


@elementwise("slct", types=("s32", "f32"))
def _select_by_sign(form: Form) -> Elementwise:
    """a where c >= 0, b elsewhere (where c is NaN, too)."""
    ftz = form.flag("ftz")
    kind = form.need(*_COMPARED)
    control = form.need("f32") if ftz else form.need("s32", "f32")

    def select(a: Array, b: Array, c: Array) -> Array:
        return np.where((flush(c) if ftz else c) >= 0, a, b)

    return Elementwise(kind, (kind, kind, control), select)
