"""Arithmetic of f16 and bf16, alone or two in a register.

Sums and products are computed in float32, which has bits enough that rounding once more is right; fma goes through
float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from layouts.simulator.instructions.elementwise import Array, Elementwise, Form, Function, elementwise
from layouts.simulator.instructions.floating import read_extremum, with_flush, with_saturation
from layouts.simulator.instructions.formats import (
    bf16_from_f32,
    f16_from_float,
    f32_from_bf16,
    flush,
    packed,
    parts,
    relu,
)
from layouts.simulator.instructions.rounding import fma_odd, odd_f32

_KINDS = ("f16", "f16x2", "bf16", "bf16x2")


@dataclass(frozen=True)
class _Half:
    """A half type: how its raw values become float32, and how results, float32 or float64, become raw values."""

    kind: str

    @property
    def is_f16(self) -> bool:
        """Which has .ftz and .sat, as bf16 has not."""
        return self.kind.startswith("f16")

    def read(self, raw: Array) -> Array:
        if self.is_f16:
            return (parts(raw, np.float16) if self.kind == "f16x2" else raw).astype(np.float32)
        return f32_from_bf16(parts(raw, np.uint16) if self.kind == "bf16x2" else raw)

    def write(self, values: Array) -> Array:
        if self.is_f16:
            rounded = f16_from_float(values)
        else:
            rounded = bf16_from_f32(odd_f32(values) if values.dtype == np.float64 else values)
        return packed(rounded) if self.kind.endswith("x2") else rounded

    def lift(self, function: Function) -> Function:
        """A function of float32 as one of raw values."""
        return lambda *sources: self.write(function(*(self.read(source) for source in sources)))

    def flush(self, function: Function) -> Function:
        """A function of raw f16 values, with subnormal sources and results flushed."""
        if self.kind == "f16":
            return with_flush(function)

        def flush_parts(raw: Array) -> Array:
            return packed(flush(parts(raw, np.float16)))

        return lambda *sources: flush_parts(function(*map(flush_parts, sources)))


@elementwise("add", "sub", "mul", types=_KINDS)
def _arithmetic(form: Form) -> Elementwise:
    kind = form.rest[-1]
    half = _Half(kind)
    form.flag("rn")
    flushed = half.is_f16 and form.flag("ftz")
    saturated = half.is_f16 and form.flag("sat")
    form.need(kind)
    function = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[form.base]
    lifted = half.lift(with_saturation(function) if saturated else function)
    return Elementwise(kind, (kind, kind), half.flush(lifted) if flushed else lifted)


def _fma_exact(a: Array, b: Array, c: Array) -> Array:
    """Of f16: float64 holds every sum exactly that may lie near the middle between two numbers of f16."""
    return np.add(np.multiply(a, b, dtype=np.float64), c, dtype=np.float64)


@elementwise("fma", types=_KINDS)
def _multiply_add(form: Form) -> Elementwise:
    kind = form.rest[-1]
    half = _Half(kind)
    form.need("rn")
    flushed = half.is_f16 and form.flag("ftz")
    change = form.take("sat", "relu") if half.is_f16 else form.take("relu")
    form.need(kind)
    function: Function = _fma_exact if half.is_f16 else fma_odd
    if change == "sat":
        function = with_saturation(function)
    elif change == "relu":
        function = _with_relu(function)
    lifted = half.lift(function)
    return Elementwise(kind, (kind, kind, kind), half.flush(lifted) if flushed else lifted)


def _with_relu(function: Function) -> Function:
    return lambda *sources: relu(function(*sources))


@elementwise("min", "max", types=_KINDS)
def _extremum(form: Form) -> Elementwise:
    kind = form.rest[-1]
    half = _Half(kind)
    flushed = half.is_f16 and form.flag("ftz")
    lifted = half.lift(read_extremum(form, flushes=False))
    form.need(kind)
    return Elementwise(kind, (kind, kind), half.flush(lifted) if flushed else lifted)


_SIGN_BITS = {"f16": 0x8000, "bf16": 0x8000, "f16x2": 0x80008000, "bf16x2": 0x80008000}


@elementwise("neg", "abs", types=_KINDS)
def _sign(form: Form) -> Elementwise:
    kind = form.rest[-1]
    half = _Half(kind)
    flushed = half.is_f16 and form.flag("ftz")
    form.need(kind)
    unsigned = np.uint32 if kind.endswith("x2") else np.uint16
    mask = unsigned(_SIGN_BITS[kind])

    def change(raw: Array) -> Array:
        bits = raw.view(unsigned)
        return (bits ^ mask if form.base == "neg" else bits & ~mask).view(raw.dtype)

    return Elementwise(kind, (kind,), half.flush(change) if flushed else change)


@elementwise("ex2", types=_KINDS)
def _exp2(form: Form) -> Elementwise:
    """bf16 always flushes, f16 never does."""
    kind = form.rest[-1]
    half = _Half(kind)
    form.need("approx")
    if half.is_f16:
        return Elementwise(form.need(kind), (kind,), half.lift(np.exp2))
    form.need("ftz")
    return Elementwise(form.need(kind), (kind,), half.lift(with_flush(np.exp2)))


@elementwise("tanh", types=_KINDS)
def _tanh(form: Form) -> Elementwise:
    form.need("approx")
    kind = form.need(*_KINDS)
    return Elementwise(kind, (kind,), _Half(kind).lift(np.tanh))
