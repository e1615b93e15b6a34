"""Conversions, against Python's integers, fractions and torch."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch

from layouts.simulator.instructions.elementwise import numpy_type
from tests.simulator.arithmetic import (
    FORMATS,
    MODES,
    assert_same_floats,
    call,
    f32,
    floats,
    integers,
    rounded,
    values_of,
)

COUNT = 600
INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
ALL_HALVES = np.arange(1 << 16).astype(np.uint16)
INTEGRAL: dict[str, Callable[[float], int]] = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FP8_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


def limits(kind: str) -> tuple[int, int]:
    info = np.iinfo(numpy_type(kind))
    return int(info.min), int(info.max)


@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("result", INTEGERS)
def test_between_integers(source: str, result: str) -> None:
    a = integers(source, COUNT, 1)
    low, high = limits(result)
    wrapped = [(x - low) % (high - low + 1) + low for x in a.tolist()]
    assert call(f"cvt.{result}.{source}", a).tolist() == wrapped
    assert call(f"cvt.sat.{result}.{source}", a).tolist() == [max(low, min(high, x)) for x in a.tolist()]


@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("result", ["f16", "bf16", "f32", "f64"])
def test_from_integers(source: str, result: str) -> None:
    a = integers(source, COUNT, 1)
    wide = source in ("u64", "s64")
    # Around the middle between two floats, where rounding twice goes wrong.
    shifts = np.arange(COUNT) % (np.iinfo(a.dtype).bits - 1)
    middles = (np.array([1 << int(s) for s in shifts], dtype=object) * 3 // 2 + (np.arange(COUNT) % 3 - 1)) % (
        limits(source)[1] + 1
    )
    a[::2] = middles.astype(a.dtype)[::2]
    for mode in ("rn",) if result == "f64" and wide else MODES:
        expected = [rounded(Fraction(x), result, mode) if x else 0.0 for x in a.tolist()]
        assert_same_floats(result, call(f"cvt.{mode}.{result}.{source}", a), expected, f"{mode} from {source}")
    clamped = [0.0 if x <= 0 else 1.0 for x in a.tolist()]
    if result != "bf16":
        assert_same_floats(result, call(f"cvt.rn.sat.{result}.{source}", a), clamped)


def to_integer(x: float, rounding: str, source: str, result: str) -> int:
    low, high = limits(result)
    if math.isnan(x):
        top_bit = low if result[0] == "s" else (high + 1) // 2
        return top_bit if source == "f64" or result in ("u64", "s64") else 0
    return (high if x > 0 else low) if math.isinf(x) else max(low, min(high, INTEGRAL[rounding](x)))


@pytest.mark.parametrize("source", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("result", INTEGERS)
def test_to_integers(source: str, result: str) -> None:
    a = floats(source, COUNT, 1)
    if source in ("f32", "f64"):
        low, high = limits(result)
        edges = [
            float(v) + d for v in (low, 0, high) for d in (-1.5, -1, -0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75, 1, 1.5)
        ]
        a[: len(edges)] = edges
    for rounding in INTEGRAL:
        expected = [to_integer(x, rounding, source, result) for x in values_of(source, a)]
        assert call(f"cvt.{rounding}.{result}.{source}", a).tolist() == expected, rounding
        assert call(f"cvt.{rounding}.sat.{result}.{source}", a).tolist() == expected, rounding


def test_to_integers_with_flush() -> None:
    assert call("cvt.rpi.s32.f32", f32(1e-40, 2e-38)).tolist() == [1, 1]
    assert call("cvt.rpi.ftz.s32.f32", f32(1e-40, 2e-38)).tolist() == [0, 1]


def round_float(x: float, kind: str, mode: str) -> float:
    return x if not math.isfinite(x) or x == 0 else rounded(Fraction(x), kind, mode)


NARROWING = [
    ("f64", "f32"),
    ("f64", "f16"),
    ("f64", "bf16"),
    ("f32", "f16"),
    ("f32", "bf16"),
    ("f16", "bf16"),
    ("bf16", "f16"),
]


@pytest.mark.parametrize(("source", "result"), NARROWING)
def test_to_smaller_floats(source: str, result: str) -> None:
    a = floats(source, 2 * COUNT, 1)
    if source in ("f32", "f64"):  # numbers around the middles of the smaller type, its subnormals and overflow too
        small = np.array(values_of(result, floats(result, COUNT, 2)))
        with np.errstate(all="ignore"):
            middle = small * (1 + 2.0 ** -FORMATS[result][0])
            a[::2] = np.nextafter(middle.astype(a.dtype), a.dtype.type(0))
            a[::4] = middle.astype(a.dtype)[::2]
    for mode in MODES:
        expected = [round_float(x, result, mode) for x in values_of(source, a)]
        assert_same_floats(result, call(f"cvt.{mode}.{result}.{source}", a), expected, mode)


@pytest.mark.parametrize(
    ("source", "result"), [("f16", "f32"), ("f16", "f64"), ("bf16", "f32"), ("bf16", "f64"), ("f32", "f64")]
)
def test_to_larger_floats(source: str, result: str) -> None:
    a = floats(source, COUNT, 1)
    assert_same_floats(result, call(f"cvt.{result}.{source}", a), values_of(source, a))


def test_all_halves_against_struct() -> None:
    a = ALL_HALVES.view(np.float16)
    expected = [struct.unpack("<e", struct.pack("<H", raw))[0] for raw in range(1 << 16)]
    assert_same_floats("f32", call("cvt.f32.f16", a), expected)


def test_flush_and_saturation_between_floats() -> None:
    a = f32(1e-40, -1e-40, 2e-38, -0.5, 0.25, 7, np.inf, -np.inf, np.nan)
    nan, inf = math.nan, math.inf
    tail = [float(np.float32(2e-38)), -0.5, 0.25, 7.0, inf, -inf, nan]
    assert_same_floats("f64", call("cvt.ftz.f64.f32", a), [0.0, -0.0, *tail])
    assert_same_floats("f32", call("cvt.ftz.f32.f32", a), [0.0, -0.0, *tail])
    clamped = [float(a[0]), 0.0, tail[0], 0.0, 0.25, 1.0, 1.0, 0.0, 0.0]
    assert_same_floats("f32", call("cvt.sat.f32.f32", a), clamped)
    assert_same_floats("f32", call("cvt.ftz.sat.f32.f32", a), [0.0, *clamped[1:]])
    for raw in (0x7F800001, 0xFF800001, 0x80000000):  # signalling NaNs and -0
        assert_same_floats("f32", call("cvt.sat.f32.f32", np.array([raw] * 9, np.uint32).view(np.float32)), [0.0] * 9)
    assert_same_floats("f16", call("cvt.rn.sat.f16.f32", a[3:]), clamped[3:])
    assert_same_floats(
        "f32", call("cvt.rn.ftz.f32.f64", np.array([1e-40, -1e-40, 0.1])), [0.0, -0.0, float(np.float32(0.1))]
    )
    assert_same_floats("f16", call("cvt.rp.ftz.f16.f32", f32(1e-40, 2e-38)), [2.0**-24, 2.0**-24])  # as hardware


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
def test_rounding_to_an_integral_float(kind: str) -> None:
    a = floats(kind, COUNT, 1)
    for rounding, function in INTEGRAL.items():
        expected = [math.copysign(function(x), x) if math.isfinite(x) else x for x in values_of(kind, a)]
        assert_same_floats(kind, call(f"cvt.{rounding}.{kind}.{kind}", a), expected, rounding)


def halves_of(packed: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    low, high = packed.astype(np.uint16), (packed >> np.uint32(16)).astype(np.uint16)
    return low.view(numpy_type(kind)), high.view(numpy_type(kind))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("mode", ["rn", "rz"])
def test_pairs_from_f32(kind: str, mode: str) -> None:
    """The first source goes to the upper half; NaN becomes 0x7fff."""
    a, b = floats("f32", COUNT, 1), floats("f32", COUNT, 2)
    largest = values_of(kind, np.array([0x7BFF if kind == "f16" else 0x7F7F], np.uint16).view(numpy_type(kind)))[0]
    changes: dict[str, Callable[[float], float]] = {
        "": lambda x: x,
        ".relu": lambda x: x if math.isnan(x) or x > 0 else 0.0,
        ".satfinite": lambda x: x if math.isnan(x) else max(-largest, min(largest, x)),
    }
    for flags, change in changes.items():
        expected = [[round_float(change(x), kind, mode) for x in values.tolist()] for values in (b, a)]
        low, high = halves_of(call(f"cvt.{mode}{flags}.{kind}x2.f32", a, b), kind)
        assert_same_floats(kind, low, expected[0], flags)
        assert_same_floats(kind, high, expected[1], flags)
        single = call(f"cvt.{mode}{flags}.{kind}.f32", a)
        assert (single.view(np.uint16) == high.view(np.uint16)).all()
        assert (single.view(np.uint16)[np.isnan(a)] == 0x7FFF).all()


def test_bf16_against_torch() -> None:
    a = floats("f32", 5000, 3)
    expected = torch.from_numpy(a).to(torch.bfloat16).view(torch.uint16).numpy()
    found = call("cvt.rn.bf16.f32", a)
    assert (found == np.where(np.isnan(a), 0x7FFF, expected)).all()


def test_tf32() -> None:
    a = floats("f32", COUNT, 1)
    bits = a.view(np.uint32).astype(np.int64)
    finite = np.isfinite(a)
    sign, magnitude = bits & 0x80000000, bits & 0x7FFFFFFF
    rest = magnitude & 0x1FFF
    down = magnitude - rest
    odd = (down >> 13) & 1
    up = {"rz": 0, "rna": rest >= 0x1000, "rn": (rest > 0x1000) | ((rest == 0x1000) & (odd == 1))}
    for mode, carry in up.items():
        expected = (sign | down + np.asarray(carry) * 0x2000)[finite]
        assert (call(f"cvt.{mode}.tf32.f32", a).view(np.uint32)[finite] == expected).all(), mode
    assert (call("cvt.rn.tf32.f32", f32(np.nan, np.inf)).view(np.uint32) == [0x7FFFFFFF, 0x7F800000]).all()
    assert (call("cvt.rna.tf32.f32", f32(np.nan, np.inf)).view(np.uint32) == [0x7FC00000, 0x7F800000]).all()
    payload = np.array([0x7F800001], np.uint32).view(np.float32)
    assert call("cvt.rna.tf32.f32", payload).tolist() == [np.inf]
    assert call("cvt.rna.satfinite.tf32.f32", payload).view(np.uint32) == 0x7F7FE000
    assert call("cvt.rna.satfinite.tf32.f32", np.float32(3.402e38)).view(np.uint32) == 0x7F7FE000
    assert call("cvt.rn.relu.tf32.f32", f32(-1, 1)).tolist() == [0, 1]


def torch_codes(values: np.ndarray, name: str) -> np.ndarray:
    """8-bit codes as torch rounds them, with what is too large clamped before."""
    clamped = torch.from_numpy(values).clamp(-FP8_LARGEST[name], FP8_LARGEST[name])
    codes = clamped.to(FP8[name]).view(torch.uint8).numpy()
    return np.where(np.isnan(values), 0x7F, codes)


@pytest.mark.parametrize("name", FP8)
def test_every_half_to_8_bits(name: str) -> None:
    values = ALL_HALVES.view(np.float16).astype(np.float32)
    packed = ALL_HALVES.astype(np.uint32) | ALL_HALVES[::-1].astype(np.uint32) << np.uint32(16)
    found = call(f"cvt.rn.satfinite.{name}x2.f16x2", packed)
    expected = torch_codes(values, name)
    assert (found & 0xFF == expected).all()
    assert (found >> 8 == expected[::-1]).all()
    clamped = call(f"cvt.rn.satfinite.relu.{name}x2.f16x2", packed)
    assert (clamped & 0xFF == np.where(expected > 0x7F, 0, expected)).all()


@pytest.mark.parametrize("name", FP8)
def test_f32_to_8_bits(name: str) -> None:
    a, b = floats("f32", 20000, 1), floats("f32", 20000, 2)
    middles = torch.arange(256, dtype=torch.uint8).view(FP8[name]).float().numpy()
    middles = np.sort(middles[np.isfinite(middles)])
    middles = (middles[:-1] + middles[1:]) / 2
    a[: 3 * len(middles)] = np.concatenate(
        [np.nextafter(middles, np.float32(to)) for to in (-np.inf, np.inf)] + [middles]
    )
    found = call(f"cvt.rn.satfinite.{name}x2.f32", a, b)
    assert (found >> 8 == torch_codes(a, name)).all()
    assert (found & 0xFF == torch_codes(b, name)).all()


@pytest.mark.parametrize("name", FP8)
def test_every_8_bit_code_to_halves(name: str) -> None:
    codes = np.arange(256).astype(np.uint8)
    packed = codes.astype(np.uint16) | codes[::-1].astype(np.uint16) << np.uint16(8)
    expected = [float(x) for x in torch.from_numpy(codes).view(FP8[name]).float()]
    low, high = halves_of(call(f"cvt.rn.f16x2.{name}x2", packed), "f16")
    assert_same_floats("f16", low, expected)
    assert_same_floats("f16", high, expected[::-1])
    assert (low.view(np.uint16)[np.isnan(low)] == 0x7FFF).all()
    low, _ = halves_of(call(f"cvt.rn.relu.f16x2.{name}x2", packed), "f16")
    assert_same_floats("f16", low, [x if math.isnan(x) or x > 0 else 0.0 for x in expected])


@pytest.mark.parametrize("kind", ["u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2"])
def test_pack(kind: str) -> None:
    bits = int(kind[1:])
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)
    a, b, c = integers("s32", COUNT, 1), integers("s32", COUNT, 2), integers("u32", COUNT, 3)

    def field(x: int) -> int:
        return max(low, min(high, x)) & (1 << bits) - 1

    if bits == 16:
        found = call(f"cvt.pack.sat.{kind}.s32", a, b)
        shifted = [0] * COUNT
    else:
        found = call(f"cvt.pack.sat.{kind}.s32.b32", a, b, c)
        shifted = [x << 2 * bits for x in c.tolist()]
    expected = [
        z & 0xFFFFFFFF | field(x) << bits | field(y) for x, y, z in zip(a.tolist(), b.tolist(), shifted, strict=True)
    ]
    assert found.tolist() == expected
