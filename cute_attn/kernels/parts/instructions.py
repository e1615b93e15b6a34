"""Instructions that the decode kernels use by name: PTX that compiles for every architecture from sm_80.

Registers of fragments are 32-bit words (two 16-bit elements, the lower index in the lower half); addresses in shared
memory are 32-bit, those in global memory 64-bit integers.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

MMA_TYPES = {"float16": "f16", "bfloat16": "bf16"}
ONES = {"float16": 0x3C003C00, "bfloat16": 0x3F803F80}  # two of them


def _names(letter: str, count: int, first: int = 0) -> str:
    """Operands of a vector: "{$r0}, {$r1}"."""
    return ", ".join(f"{{${letter}{first + i}}}" for i in range(count))


def copy_16_bytes(shared: Int32, source: Int64, size: Int32 | int = 16) -> None:
    """cp.async past the L1 cache; of 16 bytes ``size`` (16 or 0) are read and the others become zero."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[shared, source, Int32(size)],
    )


def copy_16_whole_bytes(shared: Int32, source: Int64) -> None:
    """cp.async past the L1 cache of 16 bytes."""
    cute.arch.inline_ptx("cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16;", read_only_args=[shared, source])


def ldmatrix(address: Int32, count: int = 4, transpose: bool = False) -> list[Uint32]:
    """``count`` 8x8 matrices of 16-bit elements; lane 8 i + r gives the address of row r of matrix i."""
    trans = ".trans" if transpose else ""
    words = cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{_names('w', count)}}}, [{{$r0}}];",
        write_only_types=[Uint32] * count,
        read_only_args=[address],
    )
    return list(words) if count > 1 else [words]


def transpose_8x8(word: Uint32) -> Uint32:
    """movmatrix: the fragment of an 8x8 matrix of 16-bit elements to that of its transpose."""
    return cute.arch.inline_ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[word]
    )


def mma(dtype: str, c: Any, at: int, a: list[Uint32], b: list[Uint32]) -> None:
    """m16n8k16: adds the product of A (4 registers) and B (2) to the 4 accumulators that begin at ``c[at]``."""
    kind = MMA_TYPES[dtype]
    results = cute.arch.inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{_names('w', 4)}}}, {{{_names('r', 4)}}}, "
        f"{{{_names('r', 2, 4)}}}, {{{_names('r', 4, 6)}}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *(c[at + i] for i in range(4))],
    )
    for i in range(4):
        c[at + i] = results[i]


def sum_columns(dtype: str, b: list[Uint32]) -> tuple[Float32, ...]:
    """m16n8k16 with ones for A: sums of B's columns; a lane's columns as in accumulators."""
    kind = MMA_TYPES[dtype]
    return cute.arch.inline_ptx(
        f"{{ .reg .f32 z; .reg .b32 o; mov.f32 z, 0f00000000; mov.b32 o, {ONES[dtype]:#x}; "
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{_names('w', 4)}}}, {{o, o, o, o}}, "
        f"{{{_names('r', 2)}}}, {{z, z, z, z}}; }}",
        write_only_types=[Float32] * 4,
        read_only_args=b,
    )


def pack(dtype: str, low: Float32, high: Float32) -> Uint32:
    """Two numbers rounded to 16 bits, in one register."""
    return cute.arch.inline_ptx(
        f"cvt.rn.{MMA_TYPES[dtype]}x2.f32 {{$w0}}, {{$r1}}, {{$r0}};",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )


def unpack(dtype: str, word: Uint32) -> tuple[Float32, Float32]:
    """The two 16-bit numbers of a register, exactly."""
    if dtype == "bfloat16":
        text = (
            "{ .reg .b32 t; shl.b32 t, {$r0}, 16; mov.b32 {$w0}, t; and.b32 t, {$r0}, 0xffff0000; mov.b32 {$w1}, t; }"
        )
    else:
        text = "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.f32.f16 {$w0}, l; cvt.f32.f16 {$w1}, h; }"
    return cute.arch.inline_ptx(text, write_only_types=[Float32, Float32], read_only_args=[word])


def permute_bytes(word: Uint32, other: int, selector: int) -> Uint32:
    """prmt: byte i of the result is byte (selector >> 4 i) & 7 of ``word`` (0-3) and of a constant (4-7)."""
    return cute.arch.inline_ptx(
        f"{{ .reg .b32 c; mov.b32 c, {other:#x}; prmt.b32 {{$w0}}, {{$r0}}, c, {selector:#06x}; }}",
        write_only_types=[Uint32],
        read_only_args=[word],
    )


def quotient(number: Int32, divisor: Int32 | int) -> Int32:
    """number // divisor of numbers that are not negative, which the compiler cannot know: signed ones take longer."""
    return Int32(Uint32(number) // Uint32(divisor))


def load_words(address: Int64, count: int) -> list[Uint32]:
    """Plain load of 1, 2 or 4 words."""
    vector = f".v{count}" if count > 1 else ""
    words = cute.arch.inline_ptx(
        f"ld.global{vector}.b32 {{{_names('w', count)}}}, [{{$r0}}];" if count > 1 else "ld.global.b32 {$w0}, [{$r0}];",
        write_only_types=[Uint32] * count,
        read_only_args=[address],
    )
    return list(words) if count > 1 else [words]


def load_number(tensor: cute.Tensor, index: Int32, dtype: Any) -> Any:
    """An element of a dense vector of 32-bit numbers, loaded where this stands in the program."""
    address = tensor.iterator.toint() + Int64(index) * 4
    return cute.arch.inline_ptx("ld.global.b32 {$w0}, [{$r0}];", write_only_types=[dtype], read_only_args=[address])


def load_floats_of_other_blocks(address: Int64) -> tuple[Float32, ...]:
    """Four numbers that another block of this launch has written: past the L1 cache, which may hold what was before."""
    return cute.arch.inline_ptx(
        f"ld.relaxed.gpu.global.v4.f32 {{{_names('w', 4)}}}, [{{$r0}}];",
        write_only_types=[Float32] * 4,
        read_only_args=[address],
    )


def store_floats(address: Int64, values: list[Float32]) -> None:
    """Four numbers to global memory."""
    cute.arch.inline_ptx(f"st.global.v4.f32 [{{$r0}}], {{{_names('r', 4, 1)}}};", read_only_args=[address, *values])


def store_words(address: Int64, words: list[Uint32]) -> None:
    """Two words to global memory."""
    cute.arch.inline_ptx("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, *words])


def count_up_and_wrap(address: Int64, last: Int32) -> Int32:
    """Adds one to a counter, which goes from ``last`` to 0; returns what it was. Orders memory both ways."""
    return cute.arch.inline_ptx(
        "atom.acq_rel.gpu.global.inc.u32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Int32],
        read_only_args=[address, last],
    )


def store_shared_words(address: Int32, words: list[Uint32]) -> None:
    """Two words to shared memory."""
    cute.arch.inline_ptx("st.shared.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, *words])


def load_shared_words(address: Int32) -> list[Uint32]:
    """Two words from shared memory."""
    words = cute.arch.inline_ptx(
        "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Uint32, Uint32], read_only_args=[address]
    )
    return list(words)


def wait_for_all_but(groups: int) -> None:
    """All but the newest ``groups`` groups of copies have landed, of every lane of the warp."""
    cute.arch.cp_async_wait_group(groups)
    cute.arch.sync_warp()
