"""Loads and stores of every width and space, and accesses that go where nothing is."""

from __future__ import annotations

import re

import numpy as np
import pytest

from layouts.simulator.memory import AddressError, GlobalMemory
from tests.simulator.module import launch, messages, place
from tests.simulator.small import kinds

SCHEDULES = ("lockstep", "serial", "reversed", "random")
LETTERS = {8: "h", 16: "h", 32: "r", 64: "rd"}
FORMS = [
    (bits, count)
    for bits in (8, 16, 32, 64)
    for count in (1, 2, 4)
    if bits * count <= 128
]  # fmt: skip
NOISE = np.random.default_rng(3).integers(0, 256, 32 * 64, np.uint8)


def names(bits: int, count: int) -> str:
    """A vector of registers, or one."""
    parts = [f"%{LETTERS[bits]}{i}" for i in range(10, 10 + count)]
    return parts[0] if count == 1 else "{" + ", ".join(parts) + "}"


def suffix(bits: int, count: int) -> str:
    return (f".v{count}" if count > 1 else "") + f".b{bits}"


@pytest.mark.parametrize(("bits", "count"), FORMS)
@pytest.mark.parametrize("space", ["global", "shared", "local"])
def test_every_width_in_every_space(space: str, bits: int, count: int) -> None:
    """Global to the space and back: each thread has its own bytes, an odd one goes without."""
    width, kind, registers = bits * count // 8, suffix(bits, count), names(bits, count)
    clear = "".join(f"    mov.b{max(bits, 16)} {name.strip()}, 0;\n" for name in registers.strip("{}").split(","))
    through = {
        "global": "",
        "shared": f"    mad.lo.u32 %r20, %r1, {width}, %r3;\n    @%p1 st.shared{kind} [%r20+128], {registers};\n{clear}"
        f"    @%p1 ld.shared{kind} {registers}, [%r20+128];\n",
        "local": f"    @%p1 st.local{kind} [depot+16], {registers};\n{clear}"
        f"    @%p1 ld.local{kind} {registers}, [depot+16];\n",
    }[space]
    body = (
        "    .local .align 16 .b8 depot[48];\n    setp.ne.u32 %p1, %r1, 5;\n"
        + place("%rd3", "%rd1", width)
        + place("%rd4", "%rd2", width)
        + f"    ld.global{kind} {registers}, [%rd3];\n{through}    @%p1 st.global{kind} [%rd4], {registers};\n"
    )
    source = NOISE[: 64 * width]
    out = np.zeros_like(source)
    for schedule in SCHEDULES:
        out[:] = 0
        report = launch(body, source, out, block=64, schedule=schedule)
        assert not report.findings
        expected = source.reshape(64, width).copy()
        expected[5] = 0
        assert (out.reshape(64, width) == expected).all()


def test_thirty_two_bytes_at_once() -> None:
    body = place("%rd3", "%rd1", 32) + place("%rd4", "%rd2", 32)
    eight = "{" + ", ".join(f"%r{i}" for i in range(10, 18)) + "}"
    out = np.zeros(1024, np.uint8)
    body += f"    ld.global.v8.b32 {eight}, [%rd3];\n    st.global.v8.b32 [%rd4], {eight};\n"
    assert not launch(body, NOISE[:1024], out, target="sm_100a").findings
    assert (out == NOISE[:1024]).all()


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("kind", ["s8", "u8", "b8", "s16", "u16", "s32", "u32"])
@pytest.mark.parametrize("wide", ["r", "rd"])
def test_narrow_loads_are_extended(kind: str, wide: str, space: str) -> None:
    size, bits = int(kind[1:]) // 8, {"r": 32, "rd": 64}[wide]
    source = NOISE[: 32 * size]
    out = np.zeros(32, f"i{bits // 8}")
    body = place("%rd3", "%rd1", size) + place("%rd4", "%rd2", bits // 8)
    if space == "shared":
        body += f"    ld.global.{kind} %{wide}9, [%rd3];\n    mad.lo.u32 %r20, %r1, {size}, %r3;\n"
        body += f"    st.shared.{kind} [%r20], %{wide}9;\n    mov.b{bits} %{wide}9, 0;\n"
        body += f"    ld.shared.{kind} %{wide}9, [%r20];\n"
    else:
        body += f"    ld.global.{kind} %{wide}9, [%rd3];\n"
    body += f"    st.global.b{bits} [%rd4], %{wide}9;\n"
    assert not launch(body, source, out).findings
    values = source.view(f"{'i' if kind[0] == 's' else 'u'}{size}")
    assert (out == values.astype(out.dtype)).all()


def test_eight_bits_in_sixteen_bit_registers() -> None:
    out = np.zeros(32, np.int16)
    body = place("%rd3", "%rd1", 1) + place("%rd4", "%rd2", 2)
    for kind, dtype in (("s8", np.int8), ("u8", np.uint8)):
        assert not launch(
            f"{body}    ld.global.{kind} %h9, [%rd3];\n    st.global.b16 [%rd4], %h9;\n", NOISE[:32], out
        ).findings
        assert (out == NOISE[:32].view(dtype).astype(np.int16)).all()


def test_constants_can_be_stored() -> None:
    out = np.zeros(4, np.uint64)
    body = """
    setp.ne.u32 %p1, %r1, 0;
    @%p1 ret;
    mov.f32 %f1, 0f40000000;
    st.global.v2.f32 [%rd1], {%f1, 0f3F800000};
    st.global.v4.b16 [%rd1+8], {1, 2, -1, 4};
    st.global.f64 [%rd1+16], 0d3FF0000000000000;
    st.global.b8 [%rd1+24], 0x1FF;
"""
    assert not launch(body, out).findings
    assert out.tolist() == [0x3F80000040000000, 0x0004FFFF00020001, 0x3FF0000000000000, 0xFF]


def test_parameters_of_every_kind() -> None:
    from layouts.simulator.simulate import simulate

    text = """.version 8.0
.target sm_80
.entry kernel(.param .u64 out, .param .u32 number, .param .f32 factor, .param .align 8 .b8 many[24], .param .s16 small)
{
    .reg .b64 %rd<9>; .reg .b32 %r<9>; .reg .b16 %h<9>;
    ld.param.u64 %rd1, [out];
    ld.param.v2.b32 {%r1, %r2}, [many+8];
    ld.param.u32 %r3, [number];
    ld.param.f32 %r4, [factor];
    ld.param.s16 %r5, [small];
    ld.param.u64 %rd2, [many+16];
    st.global.v4.b32 [%rd1], {%r1, %r2, %r3, %r4};
    st.global.b32 [%rd1+16], %r5;
    st.global.b64 [%rd1+24], %rd2;
    ret;
}
"""
    out = np.zeros(8, np.uint32)
    many = np.arange(100, 106, dtype=np.uint32).tobytes()
    assert not simulate(text, [out, 77, 1.0, many, -2], grid=1, block=1).findings
    assert out.tolist() == [102, 103, 77, 0x3F800000, 2**32 - 2, 0, 104, 105]


def test_every_thread_has_its_own_local_memory() -> None:
    body = """
    .local .align 8 .b8 depot[64];
    and.b32 %r12, %r1, 15;
    mul.wide.u32 %rd5, %r12, 4;
    mov.b64 %rd6, depot;
    add.s64 %rd5, %rd5, %rd6;
    st.local.u32 [%rd5], %r1;
    bar.sync 0;
    ld.local.u32 %r9, [%rd5];
""" + place("%rd3", "%rd1", 4) + "    st.global.u32 [%rd3], %r9;\n"  # fmt: skip
    out = np.zeros(64, np.uint32)
    for schedule in SCHEDULES:
        out[:] = 0
        assert not launch(body, out, block=64, schedule=schedule).findings
        assert (out == np.arange(64)).all()


OFFENDERS = "    mov.u32 %r9, 1;\n    mul.lo.u32 %r10, %r1, 4;\n    add.u32 %r11, %r10, %r3;\n" + place(
    "%rd3", "%rd1", 4
)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("instruction", "kind", "words"),
    [
        ("ld.global.u32 %r9, [%rd3+256];", "out_of_bounds", "thread 0: ld.global.u32 %r9, .*argument 0"),
        ("ld.global.u32 %r9, [%rd3+128];", "out_of_bounds", "thread 32: .*, 4 beyond the 256 bytes of argument 0"),
        ("st.global.u32 [%rd3+4], %r9;", "out_of_bounds", "thread 63: .*, 4 beyond the 256 bytes of argument 0"),
        ("st.global.u32 [%rd3-8], %r9;", "out_of_bounds", "thread 0: .*, 8 before the start of argument 0"),
        ("ld.global.u32 %r9, [%rd20];", "out_of_bounds", "thread 0: .*4 bytes at 0x0"),
        ("ld.global.u32 %r9, [%rd3+3];", "misaligned", "thread 0: .*multiple of 4"),
        ("ld.global.v2.u32 {%r9, %r12}, [%rd3];", "misaligned", "thread 1: .*multiple of 8"),
        ("red.global.add.u32 [%rd3+252], %r9;", "out_of_bounds", "thread 1: .*argument 0"),
        ("ld.shared.u32 %r9, [%r11+40];", "out_of_bounds", "thread 54: .*0x100 is not in the block's 256 bytes"),
        ("st.shared.u32 [%r11+40], %r9;", "out_of_bounds", "thread 54: .*0x100"),
        ("st.shared.u32 [%r11-4], %r9;", "out_of_bounds", "thread 0: .*0x.*256 bytes"),
        ("st.shared.u32 [%r11+2], %r9;", "misaligned", "thread 0: .*0x2 is not a multiple of 4"),
        ("st.shared.v4.u32 [%r11], {%r9, %r9, %r9, %r9};", "misaligned", "thread 1: .*0x4 is not a multiple of 16"),
        ("atom.shared.add.u32 %r9, [%r11+40], %r9;", "out_of_bounds", "thread 54: .*0x100"),
        ("st.local.u32 [%rd20], %r9;", "out_of_bounds", "thread 4: .*0x10 is not in the thread's 16 bytes"),
        ("st.local.u32 [2], %r9;", "misaligned", "thread 0: .*local address 0x2 is not a multiple of 4"),
        ("ld.local.u32 %r9, [16];", "out_of_bounds", "thread 0: .*local address 0x10"),
        ("cp.async.ca.shared.global [%r11], [%rd3+4], 4;", "out_of_bounds", "thread 63: .*argument 0"),
        ("cp.async.ca.shared.global [%r11+4], [%rd3], 4;", "out_of_bounds", "thread 63: .*0x100"),
        ("cp.async.cg.shared.global [%r3], [%rd3], 16;", "misaligned", "thread 1: .*multiple of 16"),
    ],
)
def test_wrong_addresses_are_found(instruction: str, kind: str, words: str, schedule: str) -> None:
    """Named is the first lane in question, of the warp that came first."""
    if schedule in ("reversed", "random"):
        words = re.sub(r"thread \d+:", r"thread \\d+:", re.sub("0x[0-9a-f]+", "0x[0-9a-f]+", words))
    body = "    .local .align 16 .b8 depot[16];\n" + OFFENDERS + f"    {instruction}\n"
    report = launch(body, np.zeros(64, np.uint32), block=64, shared=256, schedule=schedule)
    found = messages(report, kind)
    assert found, report.findings
    assert re.search(f"CTA \\(0, 0, 0\\), {words}", found[0]), found[0]


def test_lanes_with_right_addresses_go_on() -> None:
    array, out = np.arange(40, dtype=np.uint32), np.zeros(64, np.uint32)
    body = place("%rd3", "%rd1", 4) + place("%rd4", "%rd2", 4)
    body += "    ld.global.u32 %r9, [%rd3];\n    st.global.u32 [%rd4], %r9;\n    st.global.u32 [%rd3], 7;\n"
    report = launch(body, array, out, block=64)
    assert (out[:40] == np.arange(40)).all()
    assert (array == 7).all()
    assert [finding.kind for finding in report.findings] == ["out_of_bounds"] * 2
    guarded = "    setp.lt.u32 %p1, %r1, 40;\n" + body.replace("    ld.", "    @%p1 ld.")
    guarded = guarded.replace("    st.global.u32 [%rd3]", "    @%p1 st.global.u32 [%rd3]")
    report = launch("    mov.u32 %r9, 0;\n" + guarded, array, out, block=64)
    assert not report.findings
    assert (out == np.where(np.arange(64) < 40, 7, 0)).all()


@pytest.mark.parametrize("space", ["global", "shared"])
def test_wrong_atomics_leave_the_others_alone(space: str) -> None:
    out = np.zeros(64, np.uint32)
    body = OFFENDERS + (
        "    st.shared.u32 [%r11], 0;\n    bar.sync 0;\n    setp.gt.u32 %p1, %r1, 2;\n"
        f"    @%p1 atom.{space}.add.u32 %r9, [{'%rd3' if space == 'global' else '%r11'}+12], 5;\n"
        "    bar.sync 0;\n    ld.shared.u32 %r9, [%r11];\n"
    )
    if space == "shared":
        body += "    st.global.u32 [%rd3], %r9;\n"
    report = launch(body, out, block=64, shared=256)
    assert kinds(report) == {"out_of_bounds"}
    assert "thread 61" in report.findings[0].message
    assert (out == np.where(np.arange(64) < 6, 0, 5)).all()


def test_padding_belongs_to_nobody() -> None:
    """Between rows, between columns, and within a vector whose ends are elements."""
    out = np.zeros((32, 4), np.uint32)
    store = place("%rd4", "%rd2", 16) + "    st.global.v4.u32 [%rd4], {%r9, %r10, %r11, %r12};\n"
    load = place("%rd3", "%rd1", 16) + "    ld.global.v4.u32 {%r9, %r10, %r11, %r12}, [%rd3];\n"
    wide = np.arange(32 * 8, dtype=np.uint32).reshape(32, 8)
    for array, thread in (
        (wide[:, :6], 1),
        (wide[:, ::3], 0),
        (wide.reshape(64, 4)[::2], 1),
        (wide.reshape(-1)[: 31 * 8].reshape(31, 8)[:, :7], 1),
    ):
        report = launch(load + store, array, out, block=2)
        (message,) = messages(report, "out_of_bounds")
        assert f"thread {thread}: " in message
        assert "argument 0: they are padding between its elements" in message
    report = launch(load + store, wide, out)
    assert not report.findings
    assert (out == wide.reshape(64, 4)[:32]).all()


def test_the_lane_is_named_where_lanes_hit_several_arrays() -> None:
    padded = np.zeros((8, 4), np.uint32)[:, :2]
    other = np.zeros(32, np.uint32)
    body = """
    setp.lt.u32 %p1, %r1, 9;
    selp.b64 %rd5, %rd2, %rd1, %p1;
    and.b32 %r9, %r1, 1;
    setp.eq.u32 %p2, %r1, 20;
    selp.u32 %r9, 2, %r9, %p2;
""" + place("%rd3", "%rd5", 4, "%r9") + "    st.global.u32 [%rd3], 3;\n"  # fmt: skip
    (message,) = messages(launch(body, padded, other), "out_of_bounds")
    assert "thread 20: " in message
    assert "byte 8 of the storage of argument 0" in message
    assert other[:2].tolist() == [3, 3]
    assert padded[0].tolist() == [3, 3]


def test_segments_lie_apart() -> None:
    memory = GlobalMemory()
    first, second = (memory.add(np.zeros(n, np.uint8), name) for n, name in ((100, "a"), (200, "b")))
    assert second - first > 1 << 20
    assert first % 512 == second % 512 == 0
    addresses = np.array([second + 8, first + 96, first])
    memory.store(addresses, np.array([[1], [2], [3]], np.uint32))
    assert memory.load(addresses, 4, 1)[:, 0].tolist() == [1, 2, 3]
    with pytest.raises(AddressError, match="beyond the 100 bytes of a") as caught:
        memory.locate(np.array([first, second, first + 100]), 4)
    assert caught.value.position == 2
    reverse = np.arange(10, dtype=np.int32)[::-1]
    assert memory.load(np.array([memory.add(reverse, "c")]), 4, 1)[0, 0] == 9


@pytest.mark.parametrize("order", ["volatile", "relaxed.gpu", "acquire.sys", "nc", "L1::no_allocate", "cg"])
def test_hints_change_nothing(order: str) -> None:
    out = np.zeros(32, np.uint32)
    body = place("%rd3", "%rd1", 4) + place("%rd4", "%rd2", 4)
    form = f"{order}.global" if order in ("volatile", "relaxed.gpu", "acquire.sys") else f"global.{order}"
    body += f"    ld.{form}.u32 %r9, [%rd3];\n    st.global.u32 [%rd4], %r9;\n"
    assert not launch(body, NOISE[:128].view(np.uint32), out).findings
    assert (out == NOISE[:128].view(np.uint32)).all()
