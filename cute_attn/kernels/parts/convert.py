"""8-bit elements of the cache to fp16, in registers and exactly: four of a word to two words of pairs.

fp16 holds every int8 and every e4m3 number, and tensor cores multiply it by queries and weights in fp16. So the scores
have the accuracy of 16-bit queries; nothing is rounded to 8 bits.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Uint32

from cute_attn.kernels.parts.instructions import permute_bytes

# Which of a word's bytes make the two pairs: neighbours, or first and third, second and fourth.
NEIGHBOURS = ((0, 1), (2, 3))
ALTERNATING = ((0, 2), (1, 3))

Pairs = tuple[tuple[int, int], tuple[int, int]]

FIRST_FP8_ARCH = 89  # converts e4m3 by an instruction


def to_fp16(word: Uint32, cache_dtype: str, pairs: Pairs, capability: int) -> list[Uint32]:
    """The four elements of a word as two registers of fp16 pairs."""
    if cache_dtype == "int8":
        return _int8_to_fp16(word, pairs)
    if capability >= FIRST_FP8_ARCH:
        return _e4m3_to_fp16(word, pairs)
    return _e4m3_to_fp16_by_bits(word, pairs)


def _int8_to_fp16(word: Uint32, pairs: Pairs) -> list[Uint32]:
    """fp16 0x6400 + u is the number 1024 + u for a byte u; x + 128 is such a byte."""
    moved = word ^ Uint32(0x80808080)
    return [
        cute.arch.inline_ptx(
            "{ .reg .b32 bias; mov.b32 bias, 0x64806480; sub.rn.f16x2 {$w0}, {$r0}, bias; }",
            write_only_types=[Uint32],
            read_only_args=[permute_bytes(moved, 0x64646464, low | 4 << 4 | high << 8 | 4 << 12)],
        )
        for low, high in pairs
    ]


def _e4m3_to_fp16(word: Uint32, pairs: Pairs) -> list[Uint32]:
    if pairs != NEIGHBOURS:
        (a, b), (c, d) = pairs
        word = permute_bytes(word, 0, a | b << 4 | c << 8 | d << 12)
    words = cute.arch.inline_ptx(
        "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, l; cvt.rn.f16x2.e4m3x2 {$w1}, h; }",
        write_only_types=[Uint32, Uint32],
        read_only_args=[word],
    )
    return list(words)


def _e4m3_to_fp16_by_bits(word: Uint32, pairs: Pairs) -> list[Uint32]:
    """s eeee mmm as s 0eeee mmm0000000 is 2^-8 of the number, subnormal or not: fp16's exponent has 8 more of bias.

    0x7f, NaN in e4m3, becomes 480 here.
    """
    words = []
    for low, high in pairs:
        spread = permute_bytes(word, 0, 4 | low << 4 | 4 << 8 | high << 12)
        words.append(
            cute.arch.inline_ptx(
                "{ .reg .b32 m, s, f; shr.u32 m, {$r0}, 1; and.b32 m, m, 0x3f803f80; and.b32 s, {$r0}, 0x80008000; "
                "or.b32 m, m, s; mov.b32 f, 0x5c005c00; mul.rn.f16x2 {$w0}, m, f; }",
                write_only_types=[Uint32],
                read_only_args=[spread],
            )
        )
    return words
