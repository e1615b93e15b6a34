"""Arithmetic and comparisons of floats and halves, against fractions and Python's floats."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from layouts.simulator.instructions.elementwise import numpy_type
from tests.simulator.arithmetic import (
    FORMATS,
    MODES,
    assert_same_floats,
    call,
    f32,
    floats,
    raw_floats,
    rounded,
    values_of,
)

COUNT = 600
HALVES = ("f16", "bf16")
KINDS = ("f32", "f64", *HALVES)


def divide(a: float, b: float) -> float:
    if b == 0:
        return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1, b)
    return a / b


# For finite sources the exact value, and for others what IEEE 754 says, which Python's floats follow.
EXACT: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "fma": lambda a, b, c: a * b + c,
}
PYTHON: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": divide,
    "fma": lambda a, b, c: a * b + c,
}


def expected_float(operation: str, kind: str, mode: str, sources: tuple[float, ...]) -> float:
    """One lane of an operation, rounded once."""
    divides_by_zero = operation == "div" and sources[1] == 0
    if not all(map(math.isfinite, sources)) or divides_by_zero:
        if operation == "fma" and all(map(math.isfinite, sources[:2])):
            return sources[2]
        return PYTHON[operation](*sources)
    value = EXACT[operation](*map(Fraction, sources))
    if value:
        return rounded(value, kind, mode)
    if operation in ("mul", "div"):
        return math.copysign(0, sources[0]) * math.copysign(1, sources[1])
    addends = (
        (math.copysign(0, sources[0]) * math.copysign(1, sources[1]), sources[2]) if operation == "fma" else sources
    )
    signs = [math.copysign(1, a) for a in addends]
    if operation == "fma" and sources[0] * sources[1]:
        signs[0] = -signs[1]
    if operation == "sub":
        signs[1] = -signs[1]
    if signs[0] == signs[1]:
        return math.copysign(0, signs[0])
    return -0.0 if mode == "rm" else 0.0


def check_arithmetic(operation: str, kind: str, mode: str, sources: list[np.ndarray]) -> None:
    expected = [
        expected_float(operation, kind, mode, lane) for lane in zip(*(values_of(kind, s) for s in sources), strict=True)
    ]
    opcode = f"{operation}.{mode}.{kind}"
    assert_same_floats(kind, call(opcode, *sources), expected, opcode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operation", ["add", "sub", "mul", "div", "fma"])
def test_f32_is_rounded_once_in_every_mode(operation: str, mode: str) -> None:
    sources = [floats("f32", COUNT, seed) for seed in range(3 if operation == "fma" else 2)]
    sources[1][::20] = -sources[0][::20]
    check_arithmetic(operation, "f32", mode, sources)


NEAREST = [(name, kind) for name in EXACT for kind in ("f64", *HALVES) if name != "div" or kind == "f64"]


@pytest.mark.parametrize(("operation", "kind"), NEAREST)
def test_other_types_are_rounded_once_to_nearest(operation: str, kind: str) -> None:
    sources = [floats(kind, 2 * COUNT, seed) for seed in range(3 if operation == "fma" else 2)]
    if operation == "fma" and kind == "f64":
        check_arithmetic(operation, kind, "rn", sources)
        rng = np.random.default_rng(0)
        sources = [np.ldexp(rng.standard_normal(COUNT), rng.integers(-90, 90, COUNT)) for _ in range(3)]
        sources[2][::3] = -(sources[0] * sources[1])[::3]
        sources[0][:5], sources[2][:7] = [0, -0.0, 0, np.inf, np.nan], [0, -0.0, 0, 1, 1, np.inf, -np.inf]
    check_arithmetic(operation, kind, "rn", sources)


@pytest.mark.parametrize("kind", ["f32", "bf16", "f64"])
def test_fma_is_not_rounded_twice(kind: str) -> None:
    """Sums that lie so close to the middle of two numbers that a first rounding to float64 would end there."""
    precision = FORMATS[kind][0]
    rng = np.random.default_rng(3)
    unit = 2.0 ** (1 - precision)
    a = 1 + unit * rng.integers(0, 4, COUNT)
    b = (1 - unit * rng.integers(-2, 3, COUNT)) * unit / 2 * 2.0 ** rng.integers(-60, 2, COUNT)
    c = (1 + unit * rng.integers(0, 4, COUNT)) * rng.choice([-1.0, 1.0], COUNT)
    if kind == "f32":  # around the smallest subnormals, too
        scale = rng.choice([1.0, 2.0**-126, 2.0**-148], COUNT)
        b, c = b * 2.0 ** rng.integers(0, 30, COUNT) * scale, c * scale
    stored = [v.astype(np.float32) if kind != "f64" else v for v in (a, b, c)]
    if kind == "bf16":
        stored = [(v.view(np.uint32) >> np.uint32(16)).astype(np.uint16) for v in stored]
    check_arithmetic("fma", kind, "rn", stored)


def test_products_of_bf16_below_the_smallest_normal_number() -> None:
    """Every mantissa times every mantissa, where float32 has fewer bits as well."""
    a = np.repeat(np.arange(0x0080, 0x0100), 128).astype(np.uint16)
    for exponent in range(116, 127):
        b = np.tile(np.arange(0x80) | exponent << 7, 128).astype(np.uint16)
        exact = np.array(values_of("bf16", a)) * np.array(values_of("bf16", b))
        small = exact < 2.0**-126
        expected = np.rint(exact * 2.0**133) * 2.0**-133
        found = np.array(values_of("bf16", call("mul.rn.bf16", a, b)))
        assert (found[small] == expected[small]).all()


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_fma_of_f64_where_its_product_is_out_of_range(scale: float) -> None:
    """Products below the subnormal numbers and above the largest one, from which an addend brings the sum back."""
    rng = np.random.default_rng(1)
    a, b = (np.ldexp(rng.standard_normal(COUNT), exponent) for exponent in (-537, -520))
    check_arithmetic("fma", "f64", "rn", [a, b, scale * np.ldexp(rng.standard_normal(COUNT), -1050)])
    a, b = (np.ldexp(rng.uniform(1, 2, COUNT), exponent) for exponent in (512, 511))
    check_arithmetic("fma", "f64", "rn", [a, b, -scale * np.ldexp(rng.uniform(0.5, 1, COUNT), 1022)])


def test_one_fma_where_rounding_twice_is_wrong() -> None:
    unit = np.float32(2.0**-23)
    a, b, c = np.float32(1) + unit, (np.float32(1) - unit) * np.float32(2.0**-24), np.float32(1) + unit
    assert call("fma.rn.f32", a, b, c) == c
    assert np.float32(np.float64(a) * np.float64(b) + np.float64(c)) != c


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_roots_and_reciprocals(kind: str) -> None:
    a = floats(kind, COUNT, 1)
    for mode in MODES if kind == "f32" else ("rn",):
        reciprocals = [expected_float("div", kind, mode, (1.0, x)) for x in values_of(kind, a)]
        assert_same_floats(kind, call(f"rcp.{mode}.{kind}", a), reciprocals, f"rcp.{mode}.{kind}")
        roots = call(f"sqrt.{mode}.{kind}", a)
        for x, root in zip(values_of(kind, a), values_of(kind, roots), strict=True):
            check_root(x, root, kind, mode)


def check_root(x: float, root: float, kind: str, mode: str) -> None:
    """By comparing squares: of the result, its neighbours and the middle between them."""
    if not math.isfinite(x) or x <= 0:
        assert (math.isnan(root) and not x >= 0) or root == x
        return
    dtype = numpy_type(kind).type
    value = Fraction(x)
    below, above = (Fraction(float(np.nextafter(dtype(root), dtype(to)))) for to in (-np.inf, np.inf))
    found = Fraction(root)
    if mode == "rn":
        assert ((below + found) / 2) ** 2 <= value <= ((above + found) / 2) ** 2
    elif mode == "rp":
        assert below**2 < value <= found**2
    else:
        assert found**2 <= value < above**2


def flushed(kind: str, value: float) -> float:
    smallest = 2.0 ** (1 - FORMATS[kind][1])
    return math.copysign(0, value) if abs(value) < smallest else value


@pytest.mark.parametrize("operation", ["add", "sub", "mul", "fma"])
@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_ftz_and_sat(operation: str, kind: str) -> None:
    sources = [floats(kind, COUNT, seed) for seed in range(3 if operation == "fma" else 2)]
    lanes = list(zip(*(values_of(kind, s) for s in sources), strict=True))
    plain = [expected_float(operation, kind, "rn", lane) for lane in lanes]
    flush = [
        flushed(kind, expected_float(operation, kind, "rn", tuple(flushed(kind, x) for x in lane))) for lane in lanes
    ]
    clamp = [0.0 if math.isnan(x) or x <= 0 else min(x, 1.0) for x in plain]
    both = [0.0 if math.isnan(x) or x <= 0 else min(x, 1.0) for x in flush]
    assert_same_floats(kind, call(f"{operation}.rn.ftz.{kind}", *sources), flush, "ftz")
    assert_same_floats(kind, call(f"{operation}.rn.sat.{kind}", *sources), clamp, "sat")
    assert_same_floats(kind, call(f"{operation}.rn.ftz.sat.{kind}", *sources), both, "ftz.sat")


@pytest.mark.parametrize("kind", HALVES)
def test_fma_with_relu(kind: str) -> None:
    sources = [floats(kind, COUNT, seed) for seed in range(3)]
    lanes = zip(*(values_of(kind, s) for s in sources), strict=True)
    expected = [x if math.isnan(x) or x > 0 else 0.0 for x in (expected_float("fma", kind, "rn", a) for a in lanes)]
    assert_same_floats(kind, call(f"fma.rn.relu.{kind}", *sources), expected)


def pair(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two raw 16-bit values in a register."""
    return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)


PAIRED = (
    [f"{name}.rn.{{}}" for name in ("add", "sub", "mul", "fma")]
    + [f"{name}.{{}}" for name in ("min", "max", "min.NaN", "max.NaN.xorsign.abs", "neg", "abs", "tanh.approx")]
    + ["fma.rn.relu.{}"]
)


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("form", PAIRED)
def test_pairs_are_two_of_one(form: str, kind: str) -> None:
    count = 3 if "fma" in form else 1 if form.startswith(("neg", "abs", "tanh")) else 2
    check_pairs(form.format(kind), form.format(f"{kind}x2"), kind, count)


def test_pairs_of_the_forms_that_only_one_half_type_has() -> None:
    for form in ("add.ftz.{}", "mul.rn.ftz.sat.{}", "sub.sat.{}", "min.ftz.{}", "max.ftz.NaN.{}"):
        check_pairs(form.format("f16"), form.format("f16x2"), "f16", 2)
    check_pairs("fma.rn.ftz.relu.f16", "fma.rn.ftz.relu.f16x2", "f16", 3)
    check_pairs("neg.ftz.f16", "neg.ftz.f16x2", "f16", 1)
    check_pairs("abs.ftz.f16", "abs.ftz.f16x2", "f16", 1)
    check_pairs("ex2.approx.f16", "ex2.approx.f16x2", "f16", 1)
    check_pairs("ex2.approx.ftz.bf16", "ex2.approx.ftz.bf16x2", "bf16", 1)


def check_pairs(single: str, double: str, kind: str, count: int) -> None:
    low = [raw_floats(kind, COUNT, seed) for seed in range(count)]
    high = [raw_floats(kind, COUNT, seed + 10) for seed in range(count)]
    stored = numpy_type(kind)
    expected = pair(*(call(single, *(raw.view(stored) for raw in part)).view(np.uint16) for part in (low, high)))
    found = call(double, *(pair(a, b) for a, b in zip(low, high, strict=True)))
    for shift in (0, 16):
        one, other = (((raw >> np.uint32(shift)).astype(np.uint16)).view(stored) for raw in (found, expected))
        assert_same_floats(kind, one, values_of(kind, other), double)


def larger(a: float, b: float, propagate: bool) -> float:
    """By definition: a NaN is passed over or wins, and +0 is above -0."""
    if math.isnan(a) or math.isnan(b):
        return math.nan if propagate or (math.isnan(a) and math.isnan(b)) else b if math.isnan(a) else a
    return max((a, b), key=lambda x: (x, math.copysign(1, x)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nan", ["", ".NaN"])
def test_extrema(kind: str, nan: str) -> None:
    a, b, c = (floats(kind, 2 * COUNT, seed) for seed in range(3))
    lanes = list(zip(values_of(kind, a), values_of(kind, b), values_of(kind, c), strict=True))
    if kind == "f64" and nan:
        return
    propagate = bool(nan)
    assert_same_floats(kind, call(f"max{nan}.{kind}", a, b), [larger(x, y, propagate) for x, y, _ in lanes], "max")
    smaller = [-larger(-x, -y, propagate) for x, y, _ in lanes]
    assert_same_floats(kind, call(f"min{nan}.{kind}", a, b), smaller, "min")
    if kind == "f32":
        thrice = [larger(larger(x, y, propagate), z, propagate) for x, y, z in lanes]
        assert_same_floats(kind, call(f"max{nan}.{kind}", a, b, c, num_sources=3), thrice, "max of three")
        magnitude = [larger(larger(abs(x), abs(y), propagate), abs(z), propagate) for x, y, z in lanes]
        found = call(f"max{nan}.abs.{kind}", a, b, c, num_sources=3)
        assert_same_floats(kind, found, magnitude, "max of three magnitudes")
        flush = [larger(flushed(kind, x), flushed(kind, y), propagate) for x, y, _ in lanes]
        assert_same_floats(kind, call(f"max.ftz{nan}.{kind}", a, b), flush, "max.ftz")
    if kind != "f64":
        signed = [
            math.copysign(larger(abs(x), abs(y), propagate), math.copysign(1, x) * math.copysign(1, y))
            for x, y, _ in lanes
        ]
        assert_same_floats(kind, call(f"max{nan}.xorsign.abs.{kind}", a, b), signed, "max.xorsign.abs")


@pytest.mark.parametrize("kind", KINDS)
def test_signs(kind: str) -> None:
    a, b = floats(kind, COUNT, 1), floats(kind, COUNT, 2)
    values = values_of(kind, a)
    assert_same_floats(kind, call(f"neg.{kind}", a), [-x for x in values])
    assert_same_floats(kind, call(f"abs.{kind}", a), [abs(x) for x in values])
    if kind in ("f32", "f64"):
        expected = [math.copysign(y, x) for x, y in zip(values, values_of(kind, b), strict=True)]
        assert_same_floats(kind, call(f"copysign.{kind}", a, b), expected)
    if kind == "f32":
        assert_same_floats(kind, call("neg.ftz.f32", a), [-flushed(kind, x) for x in values])


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_properties(kind: str) -> None:
    a = floats(kind, COUNT, 1)
    values = np.array(values_of(kind, a))
    smallest = 2.0 ** (1 - FORMATS[kind][1])
    subnormal = (np.abs(values) < smallest) & (values != 0)
    expected = {
        "finite": np.isfinite(values),
        "infinite": np.isinf(values),
        "number": values == values,
        "notanumber": values != values,
        "subnormal": subnormal,
        "normal": np.isfinite(values) & ~subnormal,
    }
    for name, holds in expected.items():
        assert (call(f"testp.{name}.{kind}", a) == holds).all(), name


def exp2(x: float) -> float:
    return math.inf if x >= 1024 else 2.0**x


APPROXIMATE: dict[str, Callable[[float], float]] = {
    "ex2": exp2,
    "lg2": lambda x: math.nan if x < 0 else -math.inf if x == 0 else math.log2(x),
    "sin": lambda x: math.nan if math.isinf(x) else math.sin(x),
    "cos": lambda x: math.nan if math.isinf(x) else math.cos(x),
    "tanh": math.tanh,
    "rcp": lambda x: divide(1.0, x),
    "sqrt": lambda x: math.nan if x < 0 else math.sqrt(x),
    "rsqrt": lambda x: math.nan if x < 0 else divide(1.0, math.copysign(math.sqrt(abs(x)), x)),
}


@pytest.mark.parametrize("name", APPROXIMATE)
@pytest.mark.parametrize("ftz", ["", ".ftz"])
def test_approximations_of_f32(name: str, ftz: str) -> None:
    """Within two units in the last place of the exact value, and exact where it is 0, infinite or NaN."""
    if name == "tanh" and ftz:
        return
    a = floats("f32", 2 * COUNT, 1)
    a[:8] = [-126, -127, -126.5, -149, -150, 127.5, 128, -1e-40]
    change = (lambda x: flushed("f32", x)) if ftz else (lambda x: x)
    found = values_of("f32", call(f"{name}.approx{ftz}.f32", a))
    for x, y in zip(values_of("f32", a), found, strict=True):
        exact = APPROXIMATE[name](change(x)) if not math.isnan(x) else math.nan
        with np.errstate(all="ignore"):
            nearest = change(float(np.float32(exact)))
        if math.isfinite(nearest) and nearest != 0:
            assert abs(y - nearest) <= 2 * max(abs(nearest) * 2**-23, 2**-149) or (y == 0 and abs(exact) < 2**-126), x
        else:
            assert math.isnan(nearest) == math.isnan(y), x
            assert math.isnan(y) or (y == nearest and math.copysign(1, y) == math.copysign(1, nearest)), x


def test_approximate_quotients() -> None:
    a, b = floats("f32", COUNT, 1), floats("f32", COUNT, 2)
    expected = [expected_float("div", "f32", "rn", lane) for lane in zip(a.tolist(), b.tolist(), strict=True)]
    assert_same_floats("f32", call("div.full.f32", a, b), expected)
    large = (np.abs(b) > 2.0**126) & np.isfinite(b)
    assert_same_floats(
        "f32", call("div.approx.f32", a, b)[~large], [x for x, no in zip(expected, large, strict=True) if not no]
    )
    found = call("div.approx.f32", f32(1e38, -1e38, np.inf, 1), f32(2e38, 2e38, 2e38, 2.0**126))
    assert_same_floats("f32", found, [0.0, -0.0, math.nan, 2.0**-126])


def test_other_approximations() -> None:
    a = np.array([4.0, 0.0, -0.0, 1e-310, -1.0, np.inf, np.nan])
    nan, inf = math.nan, math.inf
    assert_same_floats("f64", call("rcp.approx.ftz.f64", a), [0.25, inf, -inf, inf, -1.0, 0.0, nan])
    assert_same_floats("f64", call("rsqrt.approx.ftz.f64", a), [0.5, inf, -inf, inf, nan, 0.0, nan])
    half = np.array([0, -0.0, 1, 0.5, -24, -25, 15, 16, -np.inf, np.nan], np.float16)
    expected = [1.0, 1.0, 2.0, float(np.float16(2**0.5)), 2.0**-24, 0.0, 32768.0, inf, 0.0, nan]
    assert_same_floats("f16", call("ex2.approx.f16", half), expected)
    assert_same_floats("f16", call("tanh.approx.f16", half[:3]), [0.0, -0.0, float(np.float16(math.tanh(1)))])
    raw = np.array([0xC2FC, 0xC2FE, 0x3F80, 0x0001], np.uint16)  # -126, -127, 1, the smallest subnormal
    assert_same_floats("bf16", call("ex2.approx.ftz.bf16", raw), [2.0**-126, 0.0, 2.0, 1.0])


ORDERED: dict[str, Callable[[float, float], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


@pytest.mark.parametrize("kind", KINDS)
def test_comparisons(kind: str) -> None:
    a, b = floats(kind, COUNT, 1), floats(kind, COUNT, 2)
    a[::7] = b[::7]
    p = np.arange(COUNT) % 2 == 0
    lanes = list(zip(values_of(kind, a), values_of(kind, b), strict=True))
    unordered = np.array([math.isnan(x) or math.isnan(y) for x, y in lanes])
    expected = {"nan": unordered, "num": ~unordered}
    for name, holds in ORDERED.items():
        result = np.array([holds(x, y) for x, y in lanes])
        expected |= {name: result & ~unordered, f"{name}u": result | unordered}
    for name, result in expected.items():
        assert (call(f"setp.{name}.{kind}", a, b) == result).all(), name
        assert (call(f"setp.{name}.and.{kind}", a, b, p) == (result & p)).all(), name
        first, second = call(f"setp.{name}.{kind}", a, b, num_results=2)
        assert (first == result).all()
        assert (second == ~result).all()
        if kind in ("f32", "f64"):
            assert (call(f"set.{name}.s32.{kind}", a, b) == np.where(result, -1, 0)).all(), name


def test_comparisons_of_pairs() -> None:
    for kind in HALVES:
        low, high = ([raw_floats(kind, COUNT, seed + place) for seed in (1, 2)] for place in (0, 10))
        p = np.arange(COUNT) % 2 == 0
        stored = numpy_type(kind)
        first, second = (call(f"setp.lt.{kind}", *(raw.view(stored) for raw in part)) for part in (low, high))
        sources = [pair(a, b) for a, b in zip(low, high, strict=True)]
        found = call(f"setp.lt.{kind}x2", *sources)
        assert (found[0] == first).all()
        assert (found[1] == second).all()
        found = call(f"setp.lt.xor.{kind}x2", *sources, p)
        assert (found[0] == first ^ p).all()
        assert (found[1] == second ^ p).all()


def test_comparisons_that_flush() -> None:
    a = np.array([1e-40, -1e-40, 0.0, 2e-38], np.float32)
    assert call("setp.gt.f32", a, np.float32(0)).tolist() == [True, False, False, True]
    assert call("setp.gt.ftz.f32", a, np.float32(0)).tolist() == [False, False, False, True]
    assert call("set.eq.ftz.f32.f32", a, np.float32(0)).tolist() == [1, 1, 1, 0]
    half = np.array([2.0**-24, -(2.0**-15), 0.0, 1.0], np.float16)
    assert call("setp.eq.ftz.f16", half, np.float16(0)).tolist() == [True, True, True, False]
