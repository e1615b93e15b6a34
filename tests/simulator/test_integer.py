"""Integer instructions and those on bits, against Python's integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from layouts.simulator.instructions.elementwise import lookup, numpy_type
from tests.simulator.arithmetic import call, integers

COUNT = 600
INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")


def wrap(value: int, kind: str) -> int:
    """A Python integer as the type holds it."""
    bits = int(kind[1:])
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value


def limits(kind: str) -> tuple[int, int]:
    bits = int(kind[1:])
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


def clamp(value: int, kind: str) -> int:
    low, high = limits(kind)
    return max(low, min(high, value))


def check(opcode: str, reference: Callable[..., int], kinds: tuple[str, ...] | None = None) -> None:
    """Compare an instruction with a function of Python integers, whose result is wrapped."""
    instruction = lookup(opcode)
    kinds = kinds or instruction.sources
    sources = [integers(kind, COUNT, seed) for seed, kind in enumerate(kinds)]
    found = call(opcode, *sources)
    assert isinstance(instruction.result, str)
    expected = [wrap(reference(*lane), instruction.result) for lane in zip(*(s.tolist() for s in sources), strict=True)]
    differ = [i for i, pair in enumerate(zip(found.tolist(), expected, strict=True)) if pair[0] != pair[1]]
    assert not differ, (opcode, [(tuple(s[i] for s in sources), found[i], expected[i]) for i in differ[:3]])


def quotient(a: int, b: int) -> int:
    return -1 if b == 0 else abs(a) // abs(b) * (-1 if (a < 0) != (b < 0) else 1)


def remainder(a: int, b: int) -> int:
    return -1 if b == 0 else a - b * quotient(a, b)


@pytest.mark.parametrize("kind", INTEGERS)
def test_arithmetic(kind: str) -> None:
    bits = int(kind[1:])
    check(f"add.{kind}", lambda a, b: a + b)
    check(f"sub.{kind}", lambda a, b: a - b)
    check(f"mul.lo.{kind}", lambda a, b: a * b)
    check(f"mul.hi.{kind}", lambda a, b: a * b >> bits)
    check(f"mad.lo.{kind}", lambda a, b, c: a * b + c)
    check(f"mad.hi.{kind}", lambda a, b, c: (a * b >> bits) + c)
    check(f"div.{kind}", quotient)
    check(f"rem.{kind}", remainder)
    check(f"min.{kind}", min)
    check(f"max.{kind}", max)
    check(f"sad.{kind}", lambda a, b, c: abs(a - b) + c)


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_wide_products(kind: str) -> None:
    check(f"mul.wide.{kind}", lambda a, b: a * b)
    check(f"mad.wide.{kind}", lambda a, b, c: a * b + c)


@pytest.mark.parametrize("kind", ["s16", "s32", "s64"])
def test_signs(kind: str) -> None:
    check(f"neg.{kind}", lambda a: -a)
    check(f"abs.{kind}", abs)


def test_saturating_and_clamping_forms() -> None:
    check("add.sat.s32", lambda a, b: clamp(a + b, "s32"))
    check("sub.sat.s32", lambda a, b: clamp(a - b, "s32"))
    check("mad.hi.sat.s32", lambda a, b, c: clamp((a * b >> 32) + c, "s32"))
    check("min.relu.s32", lambda a, b: max(min(a, b), 0))
    check("max.relu.s32", lambda a, b: max(a, b, 0))


def halves(value: int, kind: str) -> tuple[int, int]:
    return wrap(value, kind), wrap(value >> 16, kind)


@pytest.mark.parametrize("kind", ["u16", "s16"])
def test_two_in_a_register(kind: str) -> None:
    def both(function: Callable[[int, int], int]) -> Callable[[int, int], int]:
        def apply(a: int, b: int) -> int:
            low, high = (function(x, y) for x, y in zip(halves(a, kind), halves(b, kind), strict=True))
            return (low & 0xFFFF) | (high & 0xFFFF) << 16

        return apply

    def run(opcode: str, function: Callable[[int, int], int]) -> None:
        sources = [integers("u32", COUNT, seed) for seed in (5, 6)]
        expected = [both(function)(a, b) for a, b in zip(*(s.tolist() for s in sources), strict=True)]
        assert call(opcode, *sources).tolist() == expected

    run(f"add.{kind}x2", lambda a, b: a + b)
    run(f"min.{kind}x2", min)
    run(f"max.{kind}x2", max)
    if kind == "s16":
        run("max.relu.s16x2", lambda a, b: max(a, b, 0))


def byte(value: int, place: int, kind: str) -> int:
    return wrap(value >> 8 * place, f"{kind[0]}8")


@pytest.mark.parametrize("a_kind", ["u32", "s32"])
@pytest.mark.parametrize("b_kind", ["u32", "s32"])
def test_dot_products(a_kind: str, b_kind: str) -> None:
    check(f"dp4a.{a_kind}.{b_kind}", lambda a, b, c: c + sum(byte(a, i, a_kind) * byte(b, i, b_kind) for i in range(4)))
    for mode, first in (("lo", 0), ("hi", 2)):
        check(
            f"dp2a.{mode}.{a_kind}.{b_kind}",
            lambda a, b, c, first=first: (
                c + sum(wrap(a >> 16 * i, f"{a_kind[0]}16") * byte(b, first + i, b_kind) for i in range(2))
            ),
        )


@pytest.mark.parametrize("kind", ["b16", "b32", "b64"])
def test_logic(kind: str) -> None:
    check(f"and.{kind}", lambda a, b: a & b)
    check(f"or.{kind}", lambda a, b: a | b)
    check(f"xor.{kind}", lambda a, b: a ^ b)
    check(f"not.{kind}", lambda a: ~a)
    check(f"cnot.{kind}", lambda a: int(a == 0))
    check(f"shl.{kind}", lambda a, n: a << min(n, 64))
    check(f"shr.{kind}", lambda a, n: a >> min(n, 64))


def test_logic_of_predicates() -> None:
    p, q = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)
    assert call("and.pred", p, q).tolist() == [False, False, False, True]
    assert call("or.pred", p, q).tolist() == [False, True, True, True]
    assert call("xor.pred", p, q).tolist() == [False, True, True, False]
    assert call("not.pred", p).tolist() == [True, True, False, False]


@pytest.mark.parametrize("kind", INTEGERS)
def test_shifts_to_the_right(kind: str) -> None:
    check(f"shr.{kind}", lambda a, n: a >> min(n, 64))


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_funnel_shifts(mode: str) -> None:
    def amount(n: int) -> int:
        return min(n, 32) if mode == "clamp" else n % 32

    check(f"shf.l.{mode}.b32", lambda low, high, n: ((high << 32 | low) << amount(n)) >> 32)
    check(f"shf.r.{mode}.b32", lambda low, high, n: (high << 32 | low) >> amount(n))


def test_lop3_computes_every_table() -> None:
    a, b, c = (integers("u32", 8, seed) for seed in (1, 2, 3))
    for table in range(256):
        expected = [
            sum((table >> (4 * (x >> i & 1) + 2 * (y >> i & 1) + (z >> i & 1)) & 1) << i for i in range(32))
            for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
        ]
        assert call("lop3.b32", a, b, c, np.uint32(table)).tolist() == expected, table


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_fields(kind: str) -> None:
    """Of starts and lengths above 255 hardware takes the low byte if the field has 32 bits, else all bits."""
    bits = int(kind[1:])
    taken = 0xFF if bits == 32 else 0xFFFFFFFF

    def extract(a: int, start: int, length: int) -> int:
        start, length = start & taken, length & taken
        value = a & (1 << bits) - 1
        sign = 0 if kind[0] == "u" or length == 0 else value >> min(start + length - 1, bits - 1) & 1
        field = [value >> start + i & 1 if i < length and start + i < bits else sign for i in range(bits)]
        return sum(bit << i for i, bit in enumerate(field))

    def insert(a: int, b: int, start: int, length: int) -> int:
        for i in range(min(length & taken, bits)):
            place = (start & taken) + i
            if place < bits:
                b = b & ~(1 << place) | (a >> i & 1) << place
        return b

    check(f"bfe.{kind}", extract)
    if kind[0] == "u":
        check(f"bfi.b{bits}", insert)


@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_counts_of_bits(kind: str) -> None:
    bits = int(kind[1:])
    check(f"popc.{kind}", lambda a: bin(a).count("1"))
    check(f"clz.{kind}", lambda a: bits - a.bit_length())
    check(f"brev.{kind}", lambda a: int(f"{a:0{bits}b}"[::-1], 2))


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bfind(kind: str) -> None:
    bits = int(kind[1:])

    def find(a: int) -> int:
        return (~a if a < 0 else a).bit_length() - 1

    check(f"bfind.{kind}", find)
    check(f"bfind.shiftamt.{kind}", lambda a: bits - 1 - find(a) if find(a) >= 0 else -1)


def test_masks_and_extensions() -> None:
    check("bmsk.clamp.b32", lambda start, length: ((1 << min(length, 32)) - 1) << min(start, 32))
    check("bmsk.wrap.b32", lambda start, length: ((1 << length % 32) - 1) << start % 32)

    def low_bits(a: int, used: int, kind: str) -> int:
        value = a & (1 << used) - 1
        return value - (1 << used) if kind == "s32" and used and value >> (used - 1) else value

    for kind in ("u32", "s32"):
        check(f"szext.clamp.{kind}", lambda a, n, kind=kind: low_bits(a, min(n, 32), kind))
        check(f"szext.wrap.{kind}", lambda a, n, kind=kind: low_bits(a, n % 32, kind))


def permuted(a: int, b: int, selector: int) -> int:
    source = b << 32 | a
    result = 0
    for place in range(4):
        choice = selector >> 4 * place & 0xF
        picked = source >> 8 * (choice & 7) & 0xFF
        if choice & 8:
            picked = 0xFF if picked & 0x80 else 0
        result |= picked << 8 * place
    return result


def test_permutations() -> None:
    check("prmt.b32", permuted)
    a, b = integers("u32", COUNT, 1), integers("u32", COUNT, 2)
    for selector in (0x5410, 0x7632, 0x3210, 0x7654, 0x3276, 0x0123, 0x4040, 0x9910, 0x8765, 0xFFFF, 0x17531):
        expected = [permuted(x, y, selector) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        assert call("prmt.b32", a, b, np.uint32(selector)).tolist() == expected, hex(selector)


def test_permutations_by_mode() -> None:
    # The modes move whole bytes: these are the bytes that come out of 0..3 (a) and 4..7 (b).
    a, b = 0x03020100, 0x07060504
    expected = {
        "f4e": [0x03020100, 0x04030201, 0x05040302, 0x06050403],
        "b4e": [0x05060700, 0x06070001, 0x07000102, 0x00010203],
        "rc8": [0x00000000, 0x01010101, 0x02020202, 0x03030303],
        "ecl": [0x03020100, 0x03020101, 0x03020202, 0x03030303],
        "ecr": [0x00000000, 0x01010100, 0x02020100, 0x03020100],
        "rc16": [0x01000100, 0x03020302, 0x01000100, 0x03020302],
    }
    for mode, results in expected.items():
        for control, result in enumerate(results):
            assert call(f"prmt.b32.{mode}", np.full(3, a), b, np.uint32(control + 4)).tolist() == [result] * 3, mode
        assert call(f"prmt.b32.{mode}", np.full(4, a), b, np.arange(4)).tolist() == results, mode


INTEGER_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
SAME_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


@pytest.mark.parametrize("kind", INTEGERS)
def test_comparisons(kind: str) -> None:
    a, b = integers(kind, COUNT, 1), integers(kind, COUNT, 2)
    b[::5] = a[::5]
    p = np.arange(COUNT) % 2 == 0
    lanes = list(zip(a.tolist(), b.tolist(), strict=True))
    names = {name: name for name in INTEGER_COMPARISONS} | (SAME_UNSIGNED if kind[0] == "u" else {})
    for name, meaning in names.items():
        expected = np.array([INTEGER_COMPARISONS[meaning](x, y) for x, y in lanes])
        assert (call(f"setp.{name}.{kind}", a, b) == expected).all()
        first, second = call(f"setp.{name}.{kind}", a, b, num_results=2)
        assert (first == expected).all()
        assert (second == ~expected).all()
        assert (call(f"setp.{name}.and.{kind}", a, b, p) == (expected & p)).all()
        assert (call(f"setp.{name}.xor.{kind}", a, b, p) == (expected ^ p)).all()
        first, second = call(f"setp.{name}.or.{kind}", a, b, p, num_results=2)
        assert (first == (expected | p)).all()
        assert (second == (~expected | p)).all()
        assert (call(f"set.{name}.u32.{kind}", a, b) == np.where(expected, 0xFFFFFFFF, 0)).all()
        assert (call(f"set.{name}.f32.{kind}", a, b) == expected).all()
        assert (call(f"set.{name}.and.s32.{kind}", a, b, p) == np.where(expected & p, -1, 0)).all()


@pytest.mark.parametrize("kind", ["b16", "b32", "b64"])
def test_equality_of_bits(kind: str) -> None:
    a = integers(kind, COUNT, 1)
    b = np.where(np.arange(COUNT) % 3 == 0, a, integers(kind, COUNT, 2))
    assert (call(f"setp.eq.{kind}", a, b) == (a == b)).all()
    assert (call(f"setp.ne.{kind}", a, b) == (a != b)).all()


@pytest.mark.parametrize("kind", ["b16", "b32", "b64", "u32", "s16", "s64", "f32", "f64"])
def test_selections(kind: str) -> None:
    dtype = numpy_type(kind)
    unsigned = f"u{dtype.itemsize * 8}"
    a, b = (integers(unsigned, COUNT, seed).view(dtype) for seed in (1, 2))
    p = np.arange(COUNT) % 3 == 0
    chosen = np.where(p, a.view(unsigned.replace("u", "uint")), b.view(unsigned.replace("u", "uint")))
    found = lookup(f"selp.{kind}").function(a, b, p)
    assert found.dtype == dtype
    assert (found.view(chosen.dtype) == chosen).all()
    assert lookup(f"slct.{kind}.s32").function(a, b, np.where(p, 0, -1).astype(np.int32)).view(
        chosen.dtype
    ).tolist() == (chosen.tolist())


def test_selection_by_the_sign_of_a_float() -> None:
    control = np.array([1, 0.0, -0.0, -1, np.nan, np.inf, -np.inf, -1e-45], np.float32)
    assert call("slct.s32.f32", 1, 2, control).tolist() == [1, 1, 1, 2, 2, 1, 2, 2]
    assert call("slct.ftz.s32.f32", 1, 2, control).tolist() == [1, 1, 1, 2, 2, 1, 2, 1]
