"""Operands of the micro-kernels: edge cases and random values of each PTX type, the same on every machine."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.unsignedinteger]

WIDTHS = {"pred": 32, "tf32": 32} | {f"{letter}{bits}": bits for letter in "bus" for bits in (8, 16, 32, 64)}
WIDTHS |= {"f16": 16, "bf16": 16, "f32": 32, "f64": 64} | dict.fromkeys(("e4m3x2", "e5m2x2"), 16)
WIDTHS |= dict.fromkeys(("f16x2", "bf16x2", "u16x2", "s16x2"), 32)
"""Bits that a buffer gives to a value. Predicates are words of 0 or 1."""

_FLOATS = {"f16": (16, 10), "bf16": (16, 7), "f32": (32, 23), "tf32": (32, 23), "f64": (64, 52)}
_INTERESTING = (0.0, 0.5, 1.0, 1.5, 2.5, 3.0, 127.5, 128.0, 255.5, 256.0, 448.0, 464.0, 480.0, 32767.5, 65504.0,
                65519.0, 65520.0, 57344.0, 61440.0, 2.0**31, 2.0**32, 2.0**63, 2.0**64, 2.0**-9, 2.0**-10, 2.0**-16,
                2.0**-17, 1.5 * 2.0**-24, 2.0**-25, 0.999999940395, 1.00000011920929, 2.0**126, 2.0**127)  # fmt: skip


def buffer_type(kind: str) -> np.dtype:
    """The unsigned numpy type of a buffer of values; 8-bit values lie in 16, whose upper ones are to be ignored."""
    return np.dtype(f"u{max(WIDTHS[kind], 16) // 8}")


def random_bits(count: int, *key: str | int) -> NDArray[np.uint64]:
    """Random 64-bit numbers of a key (splitmix64), which no version of numpy changes."""
    seed = zlib.crc32("/".join(map(str, key)).encode())
    with np.errstate(over="ignore"):
        z = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 20)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def values(kind: str, count: int, *key: str | int) -> Bits:
    """Values of a type: the first half edges in random order, the others random.

    Args:
        kind: a PTX type; or "small_KIND": integers of -4 to 4; "unit_KIND": floats of modest size; "angle_f32": up to
            pi; "order_b32": lane numbers within their group of 32 in random order.
        count: of values.
        key: names the operand; equal keys give equal values.

    Returns:
        (count,), raw bits in the unsigned type of ``buffer_type``.
    """
    purpose, _, base = kind.rpartition("_")
    if purpose:
        return _PURPOSES[purpose](base, count, *key)
    if kind == "pred":
        return (random_bits(count, "pred", *key) & np.uint64(1)).astype(np.uint32)
    if kind.endswith("x2"):
        return _pairs(kind[:-2], count, *key)
    edges, spread = (_float_edges, _random_floats) if kind in _FLOATS else (_integer_edges, _random_integers)
    table = edges(kind)
    picks = random_bits(count, "pick", *key)
    chosen = table[(picks % np.uint64(len(table))).astype(np.int64)]
    return np.where(np.arange(count) < count // 2, chosen, spread(kind, count, *key)).astype(table.dtype)


def operand_set(kinds: tuple[str, ...], count: int, name: str) -> list[Bits]:
    """The operands of a kernel: of the later ones of a type, every eighth value repeats that of the first."""
    result = [values(kind, count, name, place) for place, kind in enumerate(kinds)]
    for place, kind in enumerate(kinds):
        first = kinds.index(kind)
        if first < place and "_" not in kind and kind != "pred":
            result[place][5::8] = result[first][5::8]
    return result


def _integer_edges(kind: str) -> Bits:
    bits = WIDTHS[kind]
    top = 1 << (bits - 1)
    edges = [0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 0x7F, 0x80, 0xFF, 0x100, top, top - 1, top + 1]
    edges += [2 * top - 1, 2 * top - 2, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFF00]
    return np.array([edge & (2 * top - 1) for edge in edges], np.uint64).astype(buffer_type(kind))


def _random_integers(kind: str, count: int, *key: str | int) -> Bits:
    """Of all magnitudes, and their complements."""
    bits = WIDTHS[kind]
    raw, how = random_bits(count, "value", *key), random_bits(count, "how", *key)
    shifted = raw >> (np.uint64(64 - bits) + how % np.uint64(bits))
    numbers = np.where((how >> np.uint64(40)) & np.uint64(3) == 0, ~shifted, shifted).astype(buffer_type(kind))
    # The upper byte of a register that holds 8 bits must not matter.
    return numbers ^ (raw & np.uint64(0xFF00)).astype(np.uint16) if bits == 8 else numbers


def _float_edges(kind: str) -> Bits:
    bits, mantissa = _FLOATS[kind]
    dtype = buffer_type(kind)
    one = 1 << mantissa
    infinity = ((1 << (bits - 1 - mantissa)) - 1) << mantissa
    raw = [0, 1, 2, one - 1, one, one + 1, one // 2, 2 * one, infinity - 1, infinity, infinity + one // 2, infinity + 1]
    raw = [*raw, *(value | 1 << (bits - 1) for value in raw)]
    signed = np.array([sign * number for number in _INTERESTING for sign in (1, -1)])
    return np.concatenate([np.array(raw, np.uint64).astype(dtype), encode(signed, kind)])


def encode(numbers: NDArray[np.float64], kind: str) -> Bits:
    """Numbers as raw bits of a float type; towards zero for bf16."""
    with np.errstate(over="ignore"):
        if kind == "bf16":
            return (numbers.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        bits = _FLOATS[kind][0]
        return numbers.astype(f"f{bits // 8}").view(f"u{bits // 8}")


def _random_floats(kind: str, count: int, *key: str | int) -> Bits:
    """A third any bits, a third near 1, a third with so few bits in the mantissa that roundings tie."""
    bits, mantissa = _FLOATS[kind]
    raw, how = random_bits(count, "value", *key), random_bits(count, "how", *key)
    raw = raw >> np.uint64(64 - bits)
    bias = (1 << (bits - 2 - mantissa)) - 1
    near = (np.uint64(bias - 12) + (how >> np.uint64(8)) % np.uint64(24)) << np.uint64(mantissa)
    fraction = raw & np.uint64((1 << mantissa) - 1)
    sign = raw & np.uint64(1 << (bits - 1))
    kept = (how >> np.uint64(16)) % np.uint64(mantissa + 1)
    coarse = (fraction >> kept) << kept
    third = how % np.uint64(3)
    chosen = np.where(third == 0, raw, sign | near | np.where(third == 1, fraction, coarse))
    return chosen.astype(buffer_type(kind))


def _pairs(kind: str, count: int, *key: str | int) -> Bits:
    """Two values in one register; of 8-bit floats, all bit patterns."""
    if kind in ("e4m3", "e5m2"):
        both = np.arange(count, dtype=np.uint16)
        return (both & np.uint16(0xFF)) | ((both * np.uint16(37) + np.uint16(11)) << np.uint16(8))
    low, high = (values(kind, count, part, *key).astype(np.uint32) for part in ("low", "high"))
    return low | (high << np.uint32(16))


def _small(kind: str, count: int, *key: str | int) -> Bits:
    """Words of a type's packed integers from -4 to 4, which every float type holds exactly."""
    each = _ELEMENT_BITS[kind]
    raw = random_bits(count * (32 // each), "small", *key)
    return _packed((raw % np.uint64(9)).astype(np.float64) - 4, kind)


def _unit(kind: str, count: int, *key: str | int) -> Bits:
    """Words of a type's packed values between -2 and 2."""
    each = _ELEMENT_BITS[kind]
    raw = random_bits(count * (32 // each), "unit", *key)
    return _packed((raw >> np.uint64(40)).astype(np.float64) / 2.0**22 - 2, kind)


_ELEMENT_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "s32": 32, "s8": 8, "u8": 8, "e4m3": 8, "e5m2": 8}
_EIGHT_BITS = {"e4m3": (3, 7), "e5m2": (2, 15)}


def _packed(numbers: NDArray[np.float64], kind: str) -> Bits:
    if kind in ("s8", "u8", "s32"):
        return numbers.astype(np.int64).astype(np.dtype(f"u{_ELEMENT_BITS[kind] // 8}")).view(np.uint32)
    if kind in _EIGHT_BITS:
        mantissa, bias = _EIGHT_BITS[kind]
        size, exponent = np.frexp(np.abs(numbers))  # 0.5 <= size < 1
        fraction = np.floor(size * 2 ** (mantissa + 1)).astype(np.int64) - (1 << mantissa)
        raw = ((exponent.astype(np.int64) - 1 + bias) << mantissa) + fraction
        raw = np.where(np.abs(numbers) < 2.0 ** (1 - bias), 0, raw) | (np.signbit(numbers) * 0x80)
        return raw.astype(np.uint8).view(np.uint32)
    return encode(numbers, kind).view(np.uint32)


def _angle(kind: str, count: int, *key: str | int) -> Bits:
    raw = random_bits(count, "angle", *key)
    return encode(((raw >> np.uint64(11)).astype(np.float64) / 2.0**52 - 1) * np.pi, kind)


def _order(kind: str, count: int, *key: str | int) -> Bits:
    raw = random_bits(count, "order", *key).reshape(-1, 32)
    return np.argsort(raw, axis=1).astype(np.uint32).ravel()


_PURPOSES = {"small": _small, "unit": _unit, "angle": _angle, "order": _order}
