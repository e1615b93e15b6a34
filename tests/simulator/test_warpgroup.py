"""wgmma against plain matrix products, over the tiles and with the descriptors of a kernel that the DSL compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layouts.simulator import warpgroup
from layouts.simulator.errors import SimulatorError, UnknownInstructionError
from layouts.simulator.fragments import E4M3_VALUES
from layouts.simulator.ptx import Address, Immediate, Instruction, Kernel, Operand, Register, Symbol, Vector, parse
from layouts.simulator.warpgroup import Tiles, WgmmaForm, wgmma, wgmma_form, wgmma_operands
from tests.simulator.wgmma_kernel import Case, TileLayout, compile_products

Array = np.ndarray[Any, Any]

CASES = [
    Case(128, 64, 64, "K_SW128", "MN_SW128"),
    Case(128, 64, 64, "MN_SW128", "K_SW128"),
    Case(64, 128, 64, "MN_SW64", "K_SW64"),
    Case(128, 96, 32, "MN_SW32", "K_SW32"),
    Case(64, 32, 64, "K_INTER", "MN_INTER"),
    Case(128, 64, 64, "MN_INTER", "K_INTER"),
    Case(64, 64, 64, "K_SW32", "MN_SW32"),
    Case(64, 256, 32, "K_SW64", "MN_SW128"),
    Case(64, 128, 64, "", "MN_SW64"),
    Case(64, 64, 128, "K_SW128", "K_SW64", "e4m3"),
    Case(64, 64, 64, "K_INTER", "K_SW32", "s8"),
]


class Compiled:
    """The wgmma instructions of the cases and what their descriptors are if shared memory starts at 0."""

    def __init__(self, folder: Path) -> None:
        ptx, self.layouts = compile_products(CASES, folder)
        kernel = parse(ptx)
        self.instructions: list[Instruction] = []
        self.values: list[dict[Operand, int]] = []
        known: dict[Operand, int] = {}
        for instruction in kernel.instructions:
            if instruction.base == "wgmma" and "mma_async" in instruction.opcode:
                self.instructions.append(instruction)
                self.values.append(dict(known))
            else:
                evaluate(kernel, instruction, known)

    def of_case(self, index: int) -> list[tuple[Instruction, dict[Operand, int]]]:
        counts = [case.m // 64 * (case.k // case.k_of_instruction) for case in CASES]
        start = sum(counts[:index])
        return list(zip(self.instructions, self.values, strict=True))[start : start + counts[index]]


def evaluate(kernel: Kernel, instruction: Instruction, known: dict[Operand, int]) -> None:
    """Keep track of what follows from the shared variables' addresses alone."""

    def value(operand: Operand) -> int | None:
        if isinstance(operand, Immediate):
            return operand.value
        if isinstance(operand, Symbol):
            return kernel.shared.get(operand.name)
        return known.get(operand)

    if not instruction.operands or not isinstance(instruction.operands[0], (Register, Vector)):
        return
    destination, *rest = instruction.operands
    sources = [value(operand) for operand in rest if not isinstance(operand, (Vector, Address))]
    if instruction.opcode == "mov.b64" and isinstance(destination, Vector) and sources[0] is not None:
        known[destination.items[0]], known[destination.items[1]] = sources[0] & 0xFFFFFFFF, sources[0] >> 32
    elif instruction.opcode == "mov.b64" and isinstance(rest[0], Vector):
        low, high = (value(item) for item in rest[0].items)
        if low is not None and high is not None:
            known[destination] = low | high << 32
    elif instruction.base in OPERATIONS and len(rest) == len(sources) and None not in sources:
        bits = 64 if instruction.opcode.endswith("64") or ".u64" in instruction.opcode else 32
        known[destination] = OPERATIONS[instruction.base](*sources) & ((1 << bits) - 1)
    else:
        known.pop(destination, None)


OPERATIONS: dict[str, Any] = {
    "mov": lambda a: a,
    "shfl": lambda a, *how: a,
    "cvt": lambda a: a,
    "add": lambda a, b: a + b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(tmp_path_factory.mktemp("dump"))


def tile_offsets(layout: TileLayout, element_bytes: int) -> Array:
    """(rows, columns): the byte offset of each element of a tile, as CuTe defines its layout."""

    def steps(shape: Any, stride: Any) -> Array:
        if isinstance(shape, int):
            return np.arange(shape) * stride
        offsets = np.zeros(1, int)
        for inner_shape, inner_stride in zip(shape, stride, strict=True):
            offsets = np.add.outer(steps(inner_shape, inner_stride), offsets).reshape(-1)
        return offsets

    rows, columns = (steps(shape, stride) for shape, stride in zip(layout.shape, layout.stride, strict=True))
    offsets: Array = element_bytes * np.add.outer(rows, columns)
    mask = (1 << layout.swizzle_bits) - 1
    for bit in range(3):
        if mask >> bit & 1:
            offsets = np.where(offsets >> (7 + bit) & 1, offsets ^ (1 << (4 + bit)), offsets)
    return offsets


def random_tile(kind: str, shape: tuple[int, int], seed: int) -> tuple[Array, Array]:
    """Raw elements, and what they are worth."""
    rng = np.random.default_rng(seed)
    if kind == "f16":
        halves = rng.standard_normal(shape).astype(np.float16)
        return halves, halves.astype(np.float64)
    raw = rng.integers(0, 64, shape, dtype=np.uint8) | rng.integers(0, 2, shape, dtype=np.uint8) << 7
    return raw, (E4M3_VALUES[raw] if kind == "e4m3" else raw.view(np.int8)).astype(np.float64)


def place(shared: Array, addresses: Array, tile: Array) -> None:
    for byte in range(tile.itemsize):
        shared[addresses + byte] = tile.view(np.uint8).reshape(*tile.shape, -1)[..., byte]


def start_of(descriptor: int) -> int:
    return warpgroup.decode_descriptor(descriptor).start


@pytest.mark.parametrize("index", range(len(CASES)))
def test_products_of_the_dsls_tiles(compiled: Compiled, index: int) -> None:
    case = CASES[index]
    form_bytes = 2 if case.kind == "f16" else 1
    a_layout, b_layout = (tile_offsets(layout, form_bytes) for layout in compiled.layouts[index])
    steps = compiled.of_case(index)
    first = wgmma_operands(steps[0][0])
    a_tile, a_values = random_tile(case.kind, (case.m, case.k), 1)
    b_tile, b_values = random_tile(case.kind, (case.n, case.k), 2)
    shared = np.zeros(compiled_bytes(compiled), np.uint8)
    place(shared, start_of(steps[0][1][first.b]) + b_layout, b_tile)
    if case.a:
        place(shared, start_of(steps[0][1][first.a[0]]) + a_layout, a_tile)
    blocks = case.m // 64
    form = wgmma_form(steps[0][0].opcode)
    totals = [np.zeros((form.registers, 4, 1, 32), np.uint32) for _ in range(blocks)]
    for i, (instruction, values) in enumerate(steps):
        operands = wgmma_operands(instruction)
        row, column = i % blocks * 64, i // blocks * form.k
        b = shared_operand(shared, values[operands.b], case.n, operands.b_k_major, form)
        a = a_values[None, row : row + 64, column : column + form.k].astype(np.float32)
        if case.a:
            np.testing.assert_array_equal(
                a, shared_operand(shared, values[operands.a[0]], 64, operands.a_k_major, form)
            )
        totals[i % blocks] = wgmma(form, totals[i % blocks], a, b, i >= blocks, operands.sign)
    result = np.concatenate([matrix_of(total) for total in totals])
    if case.kind == "s8":
        np.testing.assert_array_equal(result.view(np.int32), a_values @ b_values.T)
    else:
        np.testing.assert_allclose(result, a_values @ b_values.T, atol=1e-4)


def compiled_bytes(compiled: Compiled) -> int:
    return sum(case.k * (case.m + case.n) * 2 + 2048 for case in CASES) + 1024


def shared_operand(shared: Array, descriptor: int, rows: int, k_major: bool, form: WgmmaForm) -> Array:
    tiles = Tiles(np.array([descriptor], np.uint64), np.array([0]), rows, k_major)
    return warpgroup.shared_operand(shared[None], tiles, form.k, form.a)


def matrix_of(total: Array) -> Array:
    """(registers, 4, 1, 32) to the 64 x n result, by the manual's formula."""
    count = len(total)
    result = np.zeros((64, 2 * count), np.float32)
    for i in range(count):
        for warp in range(4):
            for lane in range(32):
                row = 16 * warp + lane // 4 + 8 * (i // 2 % 2)
                result[row, 8 * (i // 4) + lane % 4 * 2 + i % 2] = total.view(np.float32)[i, warp, 0, lane]
    return result


def test_operands_of_the_dsl(compiled: Compiled) -> None:
    for index, case in enumerate(CASES):
        for instruction, _ in compiled.of_case(index):
            operands = wgmma_operands(instruction)
            assert operands.a_in_registers == (case.a == "")
            assert len(operands.d) == case.n // 2
            assert operands.a_k_major == (not case.a.startswith("MN"))
            assert operands.b_k_major == (not case.b.startswith("MN"))
            assert operands.sign == 1


def test_accumulator_map() -> None:
    table = warpgroup.accumulator_map(24)
    registers = np.arange(12 * 128, dtype=np.uint32).reshape(12, 4, 1, 32)
    matrix = matrix_of(registers.astype(np.float32).view(np.uint32))
    for thread in range(128):
        for i in range(12):
            assert matrix[tuple(table[thread, i])] == registers.reshape(12, 128)[i, thread]


@pytest.mark.parametrize("kind", ["f16", "bf16", "tf32", "s8", "e5m2"])
def test_a_from_registers(kind: str) -> None:
    """Warp w has rows 16 w and up, laid out as A of the warp's mma."""
    bits = {"f16": 16, "bf16": 16, "tf32": 32}.get(kind, 8)
    packed = 32 // bits
    numbers = np.random.default_rng(0).integers(-8, 8, (2, 64, 8 * packed)).astype(np.float32)
    registers = np.zeros((4, 4, 2, 32), np.uint32)
    for group, warp, lane, register, i in np.ndindex(2, 4, 32, 4, packed):
        row = 16 * warp + lane // 4 + 8 * (register % 2)
        column = lane % 4 * packed + i + 4 * packed * (register // 2)
        registers[register, warp, group, lane] |= np.uint32(code(kind, numbers[group, row, column]) << bits * i)
    np.testing.assert_array_equal(warpgroup.register_operand(registers, kind), numbers)


def code(kind: str, number: np.float32) -> int:
    bits = int(number.view(np.uint32))
    if kind == "tf32":
        return bits
    if kind == "bf16":
        return bits >> 16
    if kind == "s8":
        return int(number) & 0xFF
    half = int(np.float16(number).view(np.uint16))
    return half if kind == "f16" else half >> 8


def test_several_warpgroups_of_several_ctas() -> None:
    rng = np.random.default_rng(0)
    shared = rng.standard_normal((3, 4096)).astype(np.float16).view(np.uint8).reshape(3, 8192)
    descriptors = np.array([2 << 62, 64 | 2 << 62, 2 << 62], np.uint64) | np.uint64(32 << 32)
    tiles = Tiles(descriptors, np.array([2, 0, 0]), 16, True)
    values = warpgroup.shared_operand(shared, tiles, 16, "f16")
    for i, (descriptor, cta) in enumerate(zip(descriptors, tiles.ctas, strict=True)):
        alone = Tiles(np.array([descriptor]), np.array([0]), 16, True)
        np.testing.assert_array_equal(values[i], warpgroup.shared_operand(shared[cta : cta + 1], alone, 16, "f16")[0])
    form = wgmma_form("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16")
    a = rng.standard_normal((3, 64, 16)).astype(np.float32)
    d = rng.standard_normal((8, 4, 3, 32)).astype(np.float32).view(np.uint32)
    result = wgmma(form, d, a, values, [True, False, True], -1)
    for i, scale in enumerate((1, 0, 1)):
        expected = scale * matrix_of(d[:, :, i : i + 1]) - a[i] @ values[i].T
        np.testing.assert_allclose(matrix_of(result[:, :, i : i + 1]), expected, atol=1e-5)


@pytest.mark.parametrize("scale", [False, True])
def test_half_results(scale: bool) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((1, 64, 16)).astype(np.float32), rng.standard_normal((1, 24, 16)).astype(np.float32)
    d = rng.standard_normal((6, 4, 1, 32, 2)).astype(np.float16)
    form = wgmma_form("wgmma.mma_async.sync.aligned.m64n24k16.f16.f16.f16")
    result = wgmma(form, d.view(np.uint32)[..., 0], a, b, scale).view(np.float16).reshape(d.shape)

    def matrix(halves: Array) -> Array:
        elements = np.moveaxis(halves, -1, 1).reshape(12, 4, 1, 32).astype(np.float32)
        return matrix_of(elements.view(np.uint32))

    np.testing.assert_allclose(matrix(result), a[0] @ b[0].T + scale * matrix(d), atol=0.02)


@pytest.mark.parametrize("saturate", [False, True])
def test_integers_wrap_or_saturate(saturate: bool) -> None:
    form = WgmmaForm(8, 32, "u8", "u8", "s32", saturate)
    d = np.full((4, 4, 1, 32), 2**31 - 10, np.uint32)
    ones = np.ones((1, 64, 32), np.float32)
    result = wgmma(form, d, ones, ones[:, :8]).view(np.int32)
    assert (result == (2**31 - 1 if saturate else -(2**31) + 22)).all()


def test_descriptor_fields() -> None:
    fields = warpgroup.decode_descriptor(0x1234 | 0x0ABC << 16 | 0x3DEF << 32 | 5 << 49 | 3 << 62)
    assert fields == warpgroup.MatrixDescriptor(0x12340, 0xABC0, 0x3DEF0, 5, 32)


def test_what_is_refused() -> None:
    with pytest.raises(SimulatorError, match="base offset 1"):
        warpgroup.operand_addresses(1 << 49, 64, 16, 2, True)
    with pytest.raises(SimulatorError, match="elements of 1 bytes"):
        warpgroup.operand_addresses(0, 64, 32, 1, False)
    tiles = Tiles(np.array([0x20 | 8 << 32 | 8 << 16], np.uint64), np.array([0]), 8, True)
    with pytest.raises(SimulatorError, match="reaches byte 766 of shared memory, which has 752"):
        warpgroup.shared_operand(np.zeros((1, 752), np.uint8), tiles, 16, "f16")
    ones = np.ones((1, 64, 16), np.float32)
    with pytest.raises(ValueError, match=r"d of shape \(8, 4, 1, 32\)"):
        wgmma(WgmmaForm(8, 16, "f16", "f16", "f32"), np.zeros((8, 4, 1, 32), np.uint32), ones, ones[:, :8])


@pytest.mark.parametrize(
    "opcode",
    [
        "wgmma.mma_async.sync.aligned.m64n12k16.f32.f16.f16",
        "wgmma.mma_async.sync.aligned.m64n264k16.f32.f16.f16",
        "wgmma.mma_async.sync.aligned.m64n64k8.f32.f16.f16",
        "wgmma.mma_async.sync.aligned.m64n64k16.f16.bf16.bf16",
        "wgmma.mma_async.sp.sync.aligned.m64n64k32.f32.f16.f16",
        "wgmma.mma_async.sync.aligned.m64n64k256.s32.b1.b1.and.popc",
    ],
)
def test_other_forms_are_refused(opcode: str) -> None:
    with pytest.raises(UnknownInstructionError):
        wgmma_form(opcode)
