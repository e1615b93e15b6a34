"""The matrix instructions of a warp against plain loops over the PTX manual's formulas for each lane."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from layouts.simulator import fragments
from layouts.simulator.errors import UnknownInstructionError
from layouts.simulator.fragments import MmaForm, fragment_map, mma, mma_form, mma_many

Array = np.ndarray[Any, Any]
WARPS = 3
MANY_WARPS = 20  # values enough for the faster way of decoding halves


def manual_fragment(operand: str, k: int, bits: int, lane: int) -> list[tuple[int, int]]:
    """(row, column) of each element that a lane holds, as the manual writes it for each shape."""
    group, thread = lane >> 2, lane % 4
    if operand == "C":
        return [(group if i < 2 else group + 8, thread * 2 + (i & 1)) for i in range(4)]
    if operand == "A":
        return [manual_a(k, bits, group, thread, i) for i in range(k // 2)]
    return [(manual_b_row(k, bits, thread, i), group) for i in range(k // 4)]


def manual_a(k: int, bits: int, group: int, thread: int, i: int) -> tuple[int, int]:
    if (k, bits) == (16, 16):
        row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
        return row, thread * 2 + (i & 1) + (0 if i < 4 else 8)
    if (k, bits) == (8, 16):
        return (group if i < 2 else group + 8), thread * 2 + (i & 1)
    if (k, bits) == (32, 8):
        row = group if 0 <= i < 4 or 8 <= i < 12 else group + 8
        return row, thread * 4 + (i & 3) + (0 if i < 8 else 16)
    if (k, bits) == (16, 8):
        return (group if i < 4 else group + 8), thread * 4 + (i & 3)
    if (k, bits) == (8, 32):
        return (group if i in (0, 2) else group + 8), (thread if i < 2 else thread + 4)
    assert (k, bits) == (4, 32)
    return (group if i == 0 else group + 8), thread


def manual_b_row(k: int, bits: int, thread: int, i: int) -> int:
    if bits == 16:
        return thread * 2 + (i & 1) + (0 if i < 2 else 8)
    if bits == 8:
        return thread * 4 + (i & 3) + (0 if i < 4 else 16)
    return thread if i == 0 else thread + 4


def scatter(matrices: Array, operand: str, k: int, bits: int) -> Array:
    """(n, rows, columns) raw elements to (registers, n, 32) words."""
    lanes = [manual_fragment(operand, k, bits, lane) for lane in range(32)]
    elements = [[[matrix[place] for place in places] for places in lanes] for matrix in matrices]
    words = np.array(elements, matrices.dtype).view(np.uint32)
    return np.ascontiguousarray(words.transpose(2, 0, 1))


def gather(registers: Array, dtype: type) -> Array:
    """(registers, n, 32) words of C to (n, 16, 8) elements of a type."""
    elements: Array = np.ascontiguousarray(registers.transpose(1, 2, 0)).view(dtype)
    matrices = np.zeros((registers.shape[1], 16, 8), dtype)
    for n in range(len(matrices)):
        for lane in range(32):
            for i, place in enumerate(manual_fragment("C", 0, 0, lane)):
                matrices[n][place] = elements[n, lane, i]
    return matrices


def eight_bit_float(code: int, mantissa_bits: int, bias: int) -> float:
    sign = -1.0 if code & 128 else 1.0
    exponent, mantissa = (code & 127) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (2**mantissa_bits + mantissa) * 2.0 ** (exponent - bias - mantissa_bits)


def random_elements(kind: str, shape: tuple[int, ...], seed: int) -> tuple[Array, Array]:
    """Raw elements and what they are worth in float64."""
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal(shape).astype(np.float32)
    if kind == "f16":
        halves = numbers.astype(np.float16)
        halves[..., ::5] *= np.float16(1e-5)  # subnormal numbers
        return halves.view(np.uint16), halves.astype(np.float64)
    if kind == "bf16":
        raw = (numbers.view(np.uint32) >> 16).astype(np.uint16)
        return raw, (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if kind == "tf32":
        bits = numbers.view(np.uint32)
        return bits, (bits >> 13 << 13).view(np.float32).astype(np.float64)
    raw = rng.integers(0, 256, shape, dtype=np.uint8)
    if kind in ("s8", "u8"):
        return raw, (raw.view(np.int8) if kind == "s8" else raw).astype(np.float64)
    raw &= np.uint8(0xBF)  # neither huge numbers nor NaNs
    mantissa_bits, bias = (3, 7) if kind == "e4m3" else (2, 15)
    return raw, np.vectorize(lambda code: eight_bit_float(int(code), mantissa_bits, bias))(raw)


OPCODES = [
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16",
    "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32",
    "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32",
    "mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16",
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
    "mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32",
    "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
    "mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32",
    "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32",
    "mma.sync.aligned.m16n8k32.row.col.f16.e4m3.e4m3.f16",
    "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e4m3.e4m3.f32",
    "mma.sync.aligned.m16n8k16.row.col.f32.e4m3.e4m3.f32",
]
INTEGER_OPCODES = [
    f"mma.sync.aligned.m16n8k{k}.row.col{saturate}.s32.{a}.{b}.s32"
    for k in (16, 32)
    for saturate in ("", ".satfinite")
    for a in ("s8", "u8")
    for b in ("s8", "u8")
]


def operands(form: MmaForm, warps: int) -> tuple[Array, Array, Array]:
    """A's and B's words, and the products' matrices in float64."""
    a, a_values = random_elements(form.a, (warps, 16, form.k), 1)
    b, b_values = random_elements(form.b, (warps, form.k, 8), 2)
    bits = a.itemsize * 8
    return scatter(a, "A", form.k, bits), scatter(b, "B", form.k, bits), a_values @ b_values


@pytest.mark.parametrize(("opcode", "warps"), [*((opcode, WARPS) for opcode in OPCODES), (OPCODES[0], MANY_WARPS)])
def test_mma_floats(opcode: str, warps: int) -> None:
    form = mma_form(opcode)
    a, b, product = operands(form, warps)
    dtype = np.float16 if form.accumulator == "f16" else np.float32
    c = np.random.default_rng(3).standard_normal((warps, 16, 8)).astype(dtype)
    d = gather(mma(form, a, b, scatter(c, "C", 0, 0)), dtype)
    scale = np.abs(product).max()
    tolerance = 2 * np.finfo(dtype).eps * scale if dtype is np.float16 else 4e-6 * scale
    np.testing.assert_allclose(d, product + c, rtol=0, atol=tolerance)


@pytest.mark.parametrize("opcode", INTEGER_OPCODES)
def test_mma_integers(opcode: str) -> None:
    form = mma_form(opcode)
    a, b, product = operands(form, WARPS)
    c = np.random.default_rng(3).integers(-(2**31), 2**31, (WARPS, 16, 8), dtype=np.int32)
    c[:, ::2] = 2**31 - 1
    c[:, 1::4] = -(2**31)
    total = product.astype(np.int64) + c
    expected = np.clip(total, -(2**31), 2**31 - 1) if form.saturate else (total + 2**31) % 2**32 - 2**31
    np.testing.assert_array_equal(gather(mma(form, a, b, scatter(c, "C", 0, 0)), np.int32), expected)


def test_mma_propagates_nan_and_infinity_without_warnings(recwarn: pytest.WarningsRecorder) -> None:
    form = mma_form(OPCODES[0])
    a = np.ones((1, 16, 16), np.float16)
    b = np.ones((1, 16, 8), np.float16)
    a[0, 0, 3], a[0, 1, 4], a[0, 2, 5], a[0, 3, 6] = np.inf, -np.inf, np.nan, np.inf
    b[0, 6, 7] = 0
    d = gather(
        mma(form, scatter(a, "A", 16, 16), scatter(b, "B", 16, 16), np.zeros((4, 1, 32), np.uint32)), np.float32
    )[0]
    assert (d[0] == np.inf).all()
    assert (d[1] == -np.inf).all()
    assert np.isnan(d[2]).all()
    assert (d[3, :7] == np.inf).all()
    assert np.isnan(d[3, 7])
    assert (d[4:] == np.array([16] * 7 + [15])).all()
    assert not recwarn.list


def test_each_special_half_is_noticed() -> None:
    b = scatter(np.full((MANY_WARPS, 16, 8), 0x3C00, np.uint16), "B", 16, 16)
    for bits in (0x7C00, 0x7C01, 0x7FFF, 0xFC00, 0xFC01, 0xFFFF):
        a = np.full((MANY_WARPS, 16, 16), 0x8001, np.uint16)
        a[7, 5, 9] = bits
        d = mma(mma_form(OPCODES[0]), scatter(a, "A", 16, 16), b, np.zeros((4, MANY_WARPS, 32), np.uint32))
        expected = np.ones((MANY_WARPS, 16, 8), bool)
        expected[7, 5] = False
        np.testing.assert_array_equal(np.isfinite(gather(d, np.float32)), expected)


def test_eight_bit_codes() -> None:
    for table, mantissa_bits, bias in ((fragments.E4M3_VALUES, 3, 7), (fragments.E5M2_VALUES, 2, 15)):
        for code in range(256):
            if np.isfinite(table[code]):
                assert table[code] == eight_bit_float(code, mantissa_bits, bias)
    assert np.flatnonzero(~np.isfinite(fragments.E4M3_VALUES)).tolist() == [0x7F, 0xFF]
    assert fragments.E4M3_VALUES[0x7E] == 448
    assert fragments.E5M2_VALUES[0x7B] == 57344
    assert fragments.E5M2_VALUES[[0x7C, 0xFC]].tolist() == [np.inf, -np.inf]
    assert np.isnan(fragments.E5M2_VALUES[[0x7D, 0x7F, 0xFD, 0xFF]]).all()


@pytest.mark.parametrize("opcode", [OPCODES[0], OPCODES[2], INTEGER_OPCODES[0], INTEGER_OPCODES[-1]])
def test_many_equals_one_by_one(opcode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragments, "_PRODUCTS_AT_ONCE", 3 * WARPS * 128)
    form = mma_form(opcode)
    rng = np.random.default_rng(0)
    a = rng.standard_normal((2, form.a_registers, WARPS, 32, 2)).astype(np.float16).view(np.uint32)[..., 0]
    b = rng.standard_normal((5, form.b_registers, WARPS, 32, 2)).astype(np.float16).view(np.uint32)[..., 0]
    pairs = [(0, 0), (1, 0), (1, 1), (0, 1), (0, 4), (1, 3), (0, 2)]
    c = rng.standard_normal((len(pairs), form.c_registers, WARPS, 32)).astype(np.float32).view(np.uint32)
    d = mma_many(form, a, b, c, pairs)
    assert d.flags.c_contiguous
    for i, (first, second) in enumerate(pairs):
        np.testing.assert_array_equal(d[i], mma(form, a[first], b[second], c[i]))


@pytest.mark.parametrize(
    "opcode",
    [
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k16.row.col.f16.bf16.bf16.f16",
        "mma.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32",
        "mma.sync.aligned.m16n8k16.row.col.satfinite.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k16.row.col.kind::f8f6f4.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f16",
        "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32",
        "mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    ],
)
def test_other_forms_are_refused(opcode: str) -> None:
    with pytest.raises(UnknownInstructionError, match=opcode.replace(".", r"\.")):
        mma_form(opcode)


def test_wrong_registers_are_refused() -> None:
    registers = [np.zeros((count, 1, 32), np.uint32) for count in (2, 2, 4)]
    with pytest.raises(ValueError, match=r"takes \(4, 2, 4\)"):
        mma(mma_form(OPCODES[0]), *registers)


@pytest.mark.parametrize(("k", "bits"), [(16, 16), (8, 16), (32, 8), (16, 8), (8, 32), (4, 32)])
def test_fragment_map_is_the_manuals(k: int, bits: int) -> None:
    for operand in "ABC":
        table = fragment_map(f"m16n8k{k}", operand, bits)
        assert table.tolist() == [
            [list(place) for place in manual_fragment(operand, k, bits, lane)] for lane in range(32)
        ]
    assert fragment_map(f"m16n8k{k}", "D", bits).tolist() == fragment_map(f"m16n8k{k}", "C", bits).tolist()


def test_fragment_map_arguments() -> None:
    assert fragment_map("m16n8k16", "A").shape == (32, 8, 2)
    assert fragment_map("m16n8k32", "A").shape == (32, 16, 2)
    with pytest.raises(ValueError, match="shape 'm8n8k4'"):
        fragment_map("m8n8k4", "A")
    with pytest.raises(ValueError, match="operand 'E'"):
        fragment_map("m16n8k16", "E")
    with pytest.raises(ValueError, match="no elements of 32 bits"):
        fragment_map("m16n8k16", "A", 32)


@pytest.mark.parametrize("matrices", [1, 2, 4])
@pytest.mark.parametrize("transpose", [False, True])
def test_ldmatrix_and_stmatrix(matrices: int, transpose: bool) -> None:
    elements = np.random.default_rng(0).integers(0, 2**16, (WARPS, matrices, 8, 8), dtype=np.uint16)
    registers = fragments.ldmatrix(elements.view(np.uint8), transpose)
    assert registers.shape == (matrices, WARPS, 32)
    for i in range(matrices):
        for warp in range(WARPS):
            matrix = elements[warp, i].T if transpose else elements[warp, i]
            for lane in range(32):
                low, high = matrix[lane // 4, 2 * (lane % 4)], matrix[lane // 4, 2 * (lane % 4) + 1]
                assert registers[i, warp, lane] == int(low) | int(high) << 16
    np.testing.assert_array_equal(fragments.stmatrix(registers, transpose), elements.view(np.uint8))


def test_movmatrix() -> None:
    matrices = np.random.default_rng(0).integers(0, 2**16, (WARPS, 1, 8, 8), dtype=np.uint16)
    before = fragments.ldmatrix(matrices.view(np.uint8))[0]
    after = fragments.ldmatrix(np.ascontiguousarray(matrices.swapaxes(2, 3)).view(np.uint8))[0]
    np.testing.assert_array_equal(fragments.movmatrix(before), after)
