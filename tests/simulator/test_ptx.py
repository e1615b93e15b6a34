"""The parser: scopes, sources, immediates, vectors, predicates, parameters, variables, and what it rejects."""

from __future__ import annotations

import re

import numpy as np
import pytest

from layouts.simulator.errors import PtxSyntaxError
from layouts.simulator.ptx import (
    Address,
    Immediate,
    Instruction,
    Kernel,
    Negated,
    PredicatePair,
    Register,
    Special,
    Symbol,
    Vector,
    parse,
)
from tests.simulator.module import launch, module


def parsed(body: str, **options: str) -> Kernel:
    return parse(module(body, **options))  # type: ignore[arg-type]


def only(body: str) -> Instruction:
    """The instruction of a body: what stands between the prologue and ret."""
    return parsed(body).instructions[-2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", Immediate(7)),
        ("-7", Immediate(-7)),
        ("0x1F", Immediate(31)),
        ("-0x10", Immediate(-16)),
        ("0X7fU", Immediate(127)),
        ("017", Immediate(15)),
        ("0b101", Immediate(5)),
        ("0", Immediate(0)),
        ("0f3F800000", Immediate(0x3F800000, "f32")),
        ("0Fff800000", Immediate(0xFF800000, "f32")),
        ("0d3FF0000000000000", Immediate(0x3FF0000000000000, "f64")),
        ("1.5", Immediate(0x3FF8000000000000, "f64")),
        ("-1.5e1", Immediate(0xC02E000000000000, "f64")),
    ],
)
def test_immediates(text: str, expected: Immediate) -> None:
    assert only(f"mov.b32 %r9, {text};").operands[1] == expected


def test_immediates_have_their_values() -> None:
    out = np.zeros(6, np.uint32)
    doubles = np.zeros(2, np.float64)
    body = """
    setp.ne.s32 %p1, %r1, 0;
    @%p1 ret;
    mov.f32 %f1, 0f40490FDB;
    mov.b32 %r9, -0x10;
    add.s32 %r10, %r9, -5;
    add.f32 %f2, %f1, 0fBF800000;
    st.global.f32 [%rd1], %f1;
    st.global.u32 [%rd1+4], %r9;
    st.global.u32 [%rd1+8], %r10;
    st.global.f32 [%rd1+12], %f2;
    st.global.u32 [%rd1+16], 0xFFFFFFFF;
    st.global.s32 [%rd1+20], -1;
    mov.f64 %d1, 0d4005BF0A8B145769;
    st.global.f64 [%rd2], %d1;
    add.f64 %d2, %d1, -1.5;
    st.global.f64 [%rd2+8], %d2;
"""
    assert not launch(body, out, doubles).findings
    floats = out.view(np.float32)
    assert floats[0] == np.float32(np.pi)
    assert floats[3] == np.float32(np.pi) - np.float32(1)
    assert out[[1, 2, 4, 5]].tolist() == [2**32 - 16, 2**32 - 21, 2**32 - 1, 2**32 - 1]
    assert doubles.tolist() == [np.e, np.e - 1.5]


def test_operands() -> None:
    setp = only("@!%p3 setp.lt.and.s32 %p1|%p2, %r9, %tid.y, !%p4;")
    first, second, third, fourth = (Register(f"%p{i}", "pred", i) for i in (1, 2, 3, 4))
    assert setp.guard == (third, True)
    assert setp.parts == ("setp", "lt", "and", "s32")
    assert setp.operands == (
        PredicatePair(first, second),
        Register("%r9", "b32", 9),
        Special("%tid.y"),
        Negated(fourth),
    )
    assert only("@%p3 mov.b32 %r9, tile;").operands[1] == Symbol("tile")
    assert only("@%p3 mov.b32 %r9, tile;").guard == (third, False)
    assert only("elect.sync _|%p1, -1;").operands[0] == PredicatePair(None, first)
    load = only("ld.global.v4.b32 {%r9, _, %r10,%r11}, [%rd1 + -16];")
    nine, ten, eleven = (Register(f"%r{i}", "b32", i) for i in (9, 10, 11))
    assert load.operands == (Vector((nine, None, ten, eleven)), Address(Register("%rd1", "b64", 1), -16))
    assert only("mbarrier.arrive.shared.b64 _, [tile+0x10];").operands == (None, Address(Symbol("tile"), 16))
    assert only("ld.shared.b32 %r9, [64];").operands[1] == Address(None, 64)
    assert only("ld.shared.b32 %r9, [%r10-4];").operands[1] == Address(ten, -4)
    assert only("ld.shared.b32 %r9, [%r10+010];").operands[1] == Address(ten, 8)
    tensor = only("cp.async.bulk.tensor.2d.shared::cluster.global [%r9], [%rd1, {%r10, 0}], [tile];")
    assert tensor.operands[1] == Address(Register("%rd1", "b64", 1), 0, (ten, Immediate(0)))


def test_both_results_and_a_negated_source_of_setp() -> None:
    out = np.zeros((2, 32), np.uint32)
    body = """
    setp.lt.u32 %p4, %r4, 4;
    setp.lt.and.u32 %p1|%p2, %r4, 20, !%p4;
    selp.u32 %r9, 1, 0, %p1;
    selp.u32 %r10, 1, 0, %p2;
    mul.wide.u32 %rd20, %r4, 4;
    add.s64 %rd3, %rd1, %rd20;
    st.global.u32 [%rd3], %r9;
    st.global.u32 [%rd3+128], %r10;
"""
    assert not launch(body, out).findings
    lane = np.arange(32)
    assert (out[0] == ((lane < 20) & (lane >= 4))).all()
    assert (out[1] == ((lane >= 20) & (lane >= 4))).all()


def test_sources_come_from_loc() -> None:
    files = '.file 1 "/somewhere/one.py"\n.file 2 "two.py", 5, 6\n'
    body = """
    .loc 1 20 5
    mov.b32 %r9, 1;
    mov.b32 %r10, 2;
    .loc 2 31 1, function_name $L__info_string0, inlined_at 1 20 5
    mov.b32 %r11, 3;   // .loc 1 77 1
    /* .loc 1
       78 1 */
    .loc 1 0 0
    mov.b32 %r12, 4;
"""
    found = [instruction.source for instruction in parsed(body, before=files).instructions]
    assert found[-5:-1] == ["one.py:20", "one.py:20", "two.py:31", None]


SCOPE = """
    {
    .reg .pred p; .reg .b32 t<2>;
    add.u32 t1, %r9, 1;
    { .reg .b32 t1; mov.u32 t1, 100; add.u32 %r10, %r10, t1; }
    setp.lt.u32 p, t1, 40;
    @p bra DONE;
    bra AGAIN;
    AGAIN: sub.u32 t1, t1, 40;
    DONE:
    mov.u32 %r9, t1;
    }
"""


def test_scopes_repeat_labels_and_registers() -> None:
    kernel = parsed("    mov.u32 %r9, %r4;\n    mov.u32 %r10, 0;\n" + SCOPE * 3 + "DONE:\n")
    assert len(kernel.labels) == 7
    assert kernel.labels["DONE"] == len(kernel.instructions) - 1
    assert all(name == "DONE" or "@" in name for name in kernel.labels)
    assert kernel.registers["b32"] == 64 + 16 + 9  # %r, %f, and three in each scope
    out = np.zeros(32, np.uint32)
    body = "    mov.u32 %r9, %r4;\n    mov.u32 %r10, 0;\n" + SCOPE * 12
    body += "    add.u32 %r9, %r9, %r10;\n    mul.wide.u32 %rd20, %r4, 4;\n    add.s64 %rd3, %rd1, %rd20;\n"
    assert not launch(body + "    st.global.u32 [%rd3], %r9;\n", out).findings
    assert (out == (np.arange(32) + 12) % 40 + 1200).all()


def test_parameters_lie_at_aligned_places() -> None:
    text = """.version 8.0
.target sm_90a
.entry kernel(
    .param .u32 first, .param .align 8 .b8 second[20],
    .param .u8 third, .param .f64 fourth, .param .u16 fifth
) .reqntid 64, 2
{ ret; }
"""
    kernel = parse(text)
    places = [(p.name, p.offset, p.size) for p in kernel.parameters]
    assert places == [("first", 0, 4), ("second", 8, 20), ("third", 28, 1), ("fourth", 32, 8), ("fifth", 40, 2)]
    assert kernel.parameter_bytes == 42
    assert (kernel.name, kernel.target, kernel.required_block) == ("kernel", "sm_90a", (64, 2, 1))
    assert parse(text.replace(" .reqntid 64, 2", "")).required_block is None


def test_shared_and_local_variables_have_places() -> None:
    before = ".extern .shared .align 1024 .b8 dynamic[];\n.shared .align 4 .b8 small_one[6];\n"
    body = "    .shared .align 16 .b32 other[3];\n    .local .b8 one;\n    .local .align 8 .b64 two[2];\n"
    kernel = parsed(body, before=before)
    assert kernel.shared == {"small_one": 0, "tile": 128, "other": 4224, "dynamic": 5120}
    assert kernel.static_smem_bytes == 4236
    assert (kernel.local, kernel.local_bytes) == ({"one": 0, "two": 8}, 24)


def test_one_entry_of_several() -> None:
    two = ".version 8.0\n.target sm_80\n.entry one() { ret; }\n.visible .entry two(.param .u32 x)\n{ exit; }\n"
    assert [parse(two, name).instructions[0].opcode for name in ("one", "two")] == ["ret", "exit"]
    for name in (None, "three"):
        with pytest.raises(PtxSyntaxError, match=re.escape("['one', 'two']")):
            parse(two, name)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("add.s32 %r9, %q1, 1; @%q2 bra X;", "%q2 is not declared"),
        ("mov.b32 %r9, 3~4;", "'3~4'"),
        ("ld.shared.b32 %r9, [%r1*4];", "[%r1*4]"),
        ("ld.shared.b32 %r9, [%r1+%tid];", "[%r1+%tid]"),
        ("ld.shared.b32 %r9, [%r1+9x];", "[%r1+9x]"),
        (".reg .b128 %x;", ".b128"),
        (".shared .b8 wrong[4] extra;", "wrong[4] extra"),
        ("{ mov.b32 %r9, 1;", "brace"),
    ],
)
def test_what_is_not_understood_is_named(body: str, words: str) -> None:
    with pytest.raises(PtxSyntaxError, match=re.escape(words)):
        parsed(body)


def test_a_branch_to_nowhere_is_named() -> None:
    with pytest.raises(PtxSyntaxError, match="bra NOWHERE"):
        launch("    bra NOWHERE;\n", np.zeros(1, np.int32))
