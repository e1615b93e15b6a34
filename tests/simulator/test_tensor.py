"""Tensor maps that the DSL's host code made, and what copies by them move, against plain loops."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import cutlass
import numpy as np
import pytest

from layouts.simulator.errors import SimulatorError
from layouts.simulator.tensor import TensorMap, Transfer, bulk_transfer, decode_tensor_map, tile_transfer
from tests.simulator.tma_maps import DTYPES, compile_map, map_bytes

ADDRESS = 0x7F12_3456_7890


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dump")


def view(dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """An array of these byte strides that nobody reads."""
    return np.lib.stride_tricks.as_strided(np.zeros(1, dtype), shape, strides)


@pytest.mark.parametrize(
    ("shape", "box", "strides"),
    [
        ((1000,), (64,), ()),
        ((100, 70), (256, 1), (208,)),
        ((100, 70, 30), (32, 16, 8), (208, 20480)),
        ((1, 7, 3, 2), (8, 7, 3, 2), (16, 112, 336)),
        ((100, 70, 30, 20, 10), (32, 16, 4, 2, 3), (208, 20480, 819200, 24576000)),
    ],
)
def test_shapes_strides_and_boxes(
    shape: tuple[int, ...], box: tuple[int, ...], strides: tuple[int, ...], folder: Path
) -> None:
    compiled = compile_map(cutlass.Float16, box, 0, folder)
    decoded = decode_tensor_map(map_bytes(compiled, view("float16", shape, (2, *strides)), ADDRESS))
    assert decoded == TensorMap(ADDRESS, "f16", shape, (2, *strides), box, 16)


def test_extremes(folder: Path) -> None:
    """The largest sizes, and strides that need all their 40 bits, each in its place."""
    compiled = compile_map(cutlass.Uint8, (16, 2, 2, 2, 2), 0, folder)
    sizes = (2**31 - 1, 2, 3, 4, 5)
    for i in range(4):
        strides = tuple(16 * (j + 2) + ((i + 1 << 36) if i == j else 0) for j in range(4))
        decoded = decode_tensor_map(map_bytes(compiled, view("uint8", sizes, (1, *strides)), 2**57 - 16))
        assert decoded == TensorMap(2**57 - 16, "u8", sizes, (1, *strides), (16, 2, 2, 2, 2), 16)


@pytest.mark.parametrize("name", DTYPES)
def test_kinds(name: str, folder: Path) -> None:
    compiled = compile_map(DTYPES[name], (128 // DTYPES[name].width, 8), 0, folder)
    size = DTYPES[name].width // 8
    decoded = decode_tensor_map(map_bytes(compiled, view(name, (100, 70), (size, 1024)), ADDRESS))
    assert decoded.kind == name.replace("float", "f").replace("uint", "u").replace("int", "u")
    assert decoded.element_bytes == size
    assert decoded.box_bytes == 128


@pytest.mark.parametrize("swizzle_bits", [1, 2, 3])
def test_swizzles(swizzle_bits: int, folder: Path) -> None:
    box = (8 << swizzle_bits, 16)
    compiled = compile_map(cutlass.Float16, box, swizzle_bits, folder)
    decoded = decode_tensor_map(map_bytes(compiled, view("float16", (100, 70), (2, 256)), ADDRESS))
    assert decoded.swizzle_bytes == 16 << swizzle_bits
    assert decoded.box == box


def test_rounding_to_tf32_is_refused(folder: Path) -> None:
    compiled = compile_map(cutlass.Float32, (32, 8), 0, folder, cutlass.TFloat32)
    data = map_bytes(compiled, view("float32", (100, 70), (4, 512)), ADDRESS)
    with pytest.raises(SimulatorError, match="bits 0x10000 of its 64-bit word 1 are not understood"):
        decode_tensor_map(data)


WORDS = (ADDRESS, 0x10_0004_0312, 0, 0, 0x45_0000_0063, 0, 0x3F << 56, 0x3F)


@pytest.mark.parametrize(
    ("word", "bits", "message"),
    [
        (0, 1, "word 0"),
        (1, 1 << 11, "word 1"),
        (1, 1 << 15, "word 1"),
        (1, 1 << 19, "word 1"),
        (1, 1, "0x313"),
        (1, 0x40, "0x352"),
        (1, 1 << 10, "0x712"),
        (6, 1 << 32, "word 6"),
        (7, 1 << 32, "word 7"),
    ],
)
def test_bits_that_are_not_understood(word: int, bits: int, message: str) -> None:
    assert decode_tensor_map(struct.pack("<8Q64x", *WORDS)).box == (64, 64)
    changed = list(WORDS)
    changed[word] ^= bits
    with pytest.raises(SimulatorError, match=message):
        decode_tensor_map(struct.pack("<8Q64x", *changed))


def test_short_map() -> None:
    with pytest.raises(SimulatorError, match="of 64 bytes: it must have 128"):
        decode_tensor_map(bytes(64))


def load(transfer: Transfer, memory: Any, shared: Any) -> None:
    """Carry out loads of several copies to as many rows of shared memory."""
    for byte in range(transfer.unit_bytes):
        values = np.where(transfer.inside, memory[np.where(transfer.inside, transfer.global_addresses, 0) + byte], 0)
        shared[transfer.copies, transfer.shared_addresses + byte] = values


@pytest.mark.parametrize(
    ("box", "swizzle_bytes"), [((8, 6, 3), 16), ((16, 6, 3), 32), ((32, 16, 2), 64), ((64, 16, 1), 128)]
)
def test_tiles(box: tuple[int, ...], swizzle_bytes: int) -> None:
    tensor = np.random.default_rng(0).integers(1, 2**15, (4, 20, 104), dtype=np.uint16)
    sizes = (100, 19, 4)
    tensor_map = TensorMap(64, "u16", sizes, (2, 208, 4160), box, swizzle_bytes)
    memory = np.concatenate([np.zeros(64, np.uint8), tensor.view(np.uint8).reshape(-1)])
    corners = [(0, 0, 0), (-5, 15, 3), (90, -3, -1), (200, 0, 0)]
    starts = [0, 128, 1024, 2048 + 640]
    shared = np.full((4, 16384), 0xEE, np.uint8)
    transfer = tile_transfer(tensor_map, corners, starts)
    load(transfer, memory, shared)
    assert len(transfer.copies) * 2 == 4 * tensor_map.box_bytes
    for row, corner, start in zip(shared, corners, starts, strict=True):
        expected = np.full(16384, 0xEE, np.uint8)
        for i, (z, y, x) in enumerate(np.ndindex(*box[::-1])):
            place = tuple(c + o for c, o in zip(corner, (x, y, z), strict=True))
            inside = all(0 <= c < size for c, size in zip(place, sizes, strict=True))
            value = tensor[place[::-1]] if inside else np.uint16(0)
            unit, line = (start + 2 * i) // 16 % 8, (start + 2 * i) // 128
            swapped = unit ^ (line % (swizzle_bytes // 16))
            where = line * 128 + swapped * 16 + 2 * i % 16
            expected[where : where + 2] = np.array([value]).view(np.uint8)
        np.testing.assert_array_equal(row, expected)


def test_what_tile_copies_refuse() -> None:
    tensor_map = TensorMap(64, "f16", (100, 19), (2, 208), (64, 8), 128)
    with pytest.raises(SimulatorError, match="0x140 is not a multiple of 128"):
        tile_transfer(tensor_map, [(0, 0), (0, 0)], [128, 320])
    with pytest.raises(SimulatorError, match=r"shape \(1, 3\): the tensor has 2 dimensions"):
        tile_transfer(tensor_map, [(0, 0, 0)], [128])
    with pytest.raises(SimulatorError, match="row of the box has 64 bytes; under a swizzle of 128"):
        tile_transfer(TensorMap(64, "f16", (100, 19), (2, 208), (32, 8), 128), [(0, 0)], [128])
    with pytest.raises(SimulatorError, match="row of the box has 8 bytes"):
        tile_transfer(TensorMap(64, "f16", (100, 19), (2, 208), (4, 8), 16), [(0, 0)], [128])


def test_bulk_copies() -> None:
    transfer = bulk_transfer([1600, 320, 64], [16, 512, 48], [32, 0, 48])
    assert transfer.copies.tolist() == [0, 0, 2, 2, 2]
    assert transfer.global_addresses.tolist() == [1600, 1616, 64, 80, 96]
    assert transfer.shared_addresses.tolist() == [16, 32, 48, 64, 80]
    assert transfer.inside.all()
    assert transfer.unit_bytes == 16


@pytest.mark.parametrize(
    ("values", "message"),
    [(([8], [0], [16]), "global address"), (([0], [8], [16]), "shared address"), (([0], [0], [8]), "size")],
)
def test_what_bulk_copies_refuse(values: tuple[list[int], ...], message: str) -> None:
    with pytest.raises(SimulatorError, match=f"{message} of a bulk copy: 0x8 is not a multiple of 16"):
        bulk_transfer(*values)
