"""For the tests of arithmetic: operands with edge cases, exact rounding by fractions, and a checked call."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from layouts.simulator.instructions.elementwise import lookup, numpy_type

FLOAT_BITS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}
FORMATS = {"f16": (11, 15), "bf16": (8, 127), "f32": (24, 127), "f64": (53, 1023)}  # precision, largest exponent
MODES = ("rn", "rz", "rm", "rp")


def call(opcode: str, *sources: Any, **shape: int) -> Any:
    """Run an instruction on arrays; check the results' types and shapes, and that scalars give the same."""
    instruction = lookup(opcode, **shape)
    assert len(sources) == len(instruction.sources)
    sources = tuple(np.asarray(s, numpy_type(t)) for s, t in zip(sources, instruction.sources, strict=True))
    with np.errstate(all="ignore"):
        results = instruction.function(*sources)
        lane = tuple(s.reshape(-1)[0] for s in sources)
        scalars = instruction.function(*lane)
        mixed = instruction.function(lane[0], *sources[1:])
    types = instruction.result
    if isinstance(types, str):
        results, scalars, mixed, types = (results,), (scalars,), (mixed,), (types,)
    for result, scalar, partly, kind in zip(results, scalars, mixed, types, strict=True):
        assert result.dtype == scalar.dtype == partly.dtype == numpy_type(kind), opcode
        np.broadcast_to(result, np.broadcast_shapes(*(s.shape for s in sources)))
        np.broadcast_to(partly, np.broadcast_shapes(*(s.shape for s in sources[1:])))
        assert np.shape(scalar) == ()
        np.testing.assert_array_equal(scalar, result.reshape(-1)[0], opcode)
        if result.size:
            np.testing.assert_array_equal(np.ravel(partly)[0], result.reshape(-1)[0], opcode)
    return results if len(results) > 1 else results[0]


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def integers(kind: str, count: int, seed: int) -> np.ndarray:
    """A third edge cases, a third of few bits, a third random bits, of an integer type."""
    rng = np.random.default_rng(seed)
    dtype = numpy_type(kind)
    bits = dtype.itemsize * 8
    unsigned = np.dtype(f"u{dtype.itemsize}")
    edges = [0, 1, 2, 3, 5, bits - 1, bits, bits + 1, (1 << bits) - 1, (1 << bits) - 2, 1 << (bits - 1)]
    edges += [
        (1 << (bits - 1)) - 1,
        (1 << (bits - 1)) + 1,
        (1 << bits // 2) - 1,
        (1 << bits // 2) + 1,
        255,
        256 % (1 << bits),
    ]
    raw = rng.integers(0, 1 << bits, count, dtype=unsigned, endpoint=False) if bits < 64 else _random_u64(rng, count)
    few = raw >> rng.integers(0, bits, count).astype(unsigned)
    edge = np.array(edges, dtype=unsigned)[rng.integers(0, len(edges), count)]
    return np.choose(rng.integers(0, 3, count), [edge, few, raw]).astype(unsigned).view(dtype)


def _random_u64(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, (1 << 64) - 1, count, dtype=np.uint64, endpoint=True)


def raw_floats(kind: str, count: int, seed: int) -> np.ndarray:
    """Raw bits of a float type: edge cases, random bits, and numbers of moderate size."""
    rng = np.random.default_rng(seed)
    bits = FLOAT_BITS[kind]
    precision, largest = FORMATS[kind]
    unsigned = np.dtype(f"u{bits // 8}")
    infinity = (2 * largest + 1) << (precision - 1)
    one = largest << (precision - 1)
    normal = 1 << (precision - 1)
    magnitudes = [0, 1, 2, normal - 1, normal, normal + 1, one - 1, one, one + 1, one + normal, infinity - 1, infinity]
    magnitudes += [infinity + 1, infinity + normal // 2, infinity + normal - 1, one + normal // 2]
    edges = np.array(magnitudes + [m | 1 << (bits - 1) for m in magnitudes], dtype=unsigned)
    raw = _random_u64(rng, count).astype(unsigned)
    exponents = rng.integers(largest - min(12, largest - 1), largest + min(12, largest), count).astype(unsigned)
    mask = unsigned.type((1 << (bits - 1)) | ((1 << (precision - 1)) - 1))
    moderate = (raw & mask) | exponents << unsigned.type(precision - 1)
    return np.choose(rng.integers(0, 3, count), [edges[rng.integers(0, len(edges), count)], raw, moderate]).astype(
        unsigned
    )


def floats(kind: str, count: int, seed: int) -> np.ndarray:
    """The same as the numpy type in which the kind is passed."""
    return raw_floats(kind, count, seed).view(numpy_type(kind))


def values_of(kind: str, stored: np.ndarray) -> list[float]:
    """What stored floats (raw for bf16) stand for, as Python floats."""
    if kind == "bf16":
        stored = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(all="ignore"):
        return [float(v) for v in stored.astype(np.float64)]


def rounded(value: Fraction, kind: str, mode: str = "rn") -> float:
    """A fraction that is not zero, rounded to a format by the definition of the mode."""
    precision, largest = FORMATS[kind]
    size, sign = abs(value), -1 if value < 0 else 1
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    while Fraction(2) ** exponent > size:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= size:
        exponent += 1
    quantum = Fraction(2) ** (max(exponent, 1 - largest) - precision + 1)
    steps, rest = divmod(size, quantum)
    away = {"rz": False, "rm": value < 0, "rp": value > 0}.get(
        mode, 2 * rest > quantum or (2 * rest == quantum and steps % 2)
    )
    if rest and away:
        steps += 1
    result = steps * quantum
    top = (2 - Fraction(2) ** (1 - precision)) * Fraction(2) ** largest
    if result > top:
        infinite = mode == "rn" or (mode == "rp" and value > 0) or (mode == "rm" and value < 0)
        return math.copysign(math.inf if infinite else float(top), sign)
    return math.copysign(float(result), sign)


def assert_same_floats(kind: str, stored: np.ndarray, expected: list[float], message: object = "") -> None:
    """Equal values, zeros with equal signs, NaN where NaN is expected."""
    found = values_of(kind, np.ravel(stored))
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        same = (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
        assert same, f"{message}: lane {i} is {a!r}, not {b!r}"
