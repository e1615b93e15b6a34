"""cp.async: copies land as late as the program allows, and who may read them when."""

from __future__ import annotations

import numpy as np
import pytest

from tests.simulator.module import launch, place
from tests.simulator.small import kinds, run

SCHEDULES = ("lockstep", "serial", "reversed", "random")
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
BYTES = np.random.default_rng(11).integers(1, 256, 4096, np.uint8)


def pipeline(depth: int, pending: int) -> str:
    """Ten tiles of a word for each thread, `depth` in flight; each thread reads its neighbour's word."""
    return f"""
    mov.u32 %r9, 0;
    mov.u32 %r10, 0;
    mov.u32 %r11, 0;
    and.b32 %r20, %r1, 63;
    mad.lo.u32 %r12, %r1, 4, %r3;
    xor.b32 %r13, %r12, 132;
    mov.b64 %rd5, %rd1;
{place("%rd5", "%rd1", 4)}
FILL:
    setp.ge.u32 %p1, %r10, 10;
    @%p1 bra EMPTY;
    mul.lo.u32 %r14, %r10, 256;
    rem.u32 %r15, %r10, {depth};
    mad.lo.u32 %r15, %r15, 256, %r12;
    cvt.u64.u32 %rd6, %r14;
    add.s64 %rd6, %rd6, %rd5;
    cp.async.ca.shared.global [%r15], [%rd6], 4;
EMPTY:
    cp.async.commit_group;
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %p2, %r10, {depth};
    @%p2 bra FILL;
    cp.async.wait_group {pending};
    bar.sync 0;
    rem.u32 %r16, %r11, {depth};
    mad.lo.u32 %r16, %r16, 256, %r13;
    ld.shared.u32 %r17, [%r16];
    mad.lo.u32 %r9, %r9, 3, %r17;
    bar.sync 0;
    add.u32 %r11, %r11, 1;
    setp.lt.u32 %p3, %r11, 10;
    @%p3 bra FILL;
{place("%rd7", "%rd2", 4)}
    st.global.u32 [%rd7], %r9;
"""


@every_schedule
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_pipeline_of_copies(depth: int, schedule: str) -> None:
    tiles, out = BYTES[:2560].view(np.uint32).reshape(10, 64), np.zeros(64, np.uint32)
    expected = np.zeros(64, np.uint32)
    for tile in tiles:
        expected = expected * np.uint32(3) + tile[np.arange(64) ^ 33]
    right = pipeline(depth, depth - 1)
    assert not launch(right, tiles, out, block=64, schedule=schedule).findings
    assert (out == expected).all()
    early = launch(pipeline(depth, depth), tiles, out, block=64, schedule=schedule)
    assert "async" in kinds(early)
    assert (out != expected).all()
    for barrier in (0, 1):
        parts = right.split("    bar.sync 0;\n")
        broken = (
            "    bar.sync 0;\n".join(parts[:2]) + parts[2]
            if barrier
            else parts[0] + "    bar.sync 0;\n".join(parts[1:])
        )
        report = launch(broken, tiles, out, block=64, schedule=schedule)
        assert kinds(report) & {"race", "async", "uninitialized"}, barrier


@every_schedule
@pytest.mark.parametrize(("form", "width"), [("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)])
def test_zeros_follow_what_is_copied(form: str, width: int, schedule: str) -> None:
    """Lane i copies i % (width + 1) bytes; nothing is read beyond them, not even outside of the array."""
    source, out = BYTES[: 32 * width], np.full((32, width), 0xEE, np.uint8)
    vector = {4: "u32 %r11", 8: "v2.u32 {%r11, %r12}", 16: "v4.u32 {%r11, %r12, %r13, %r14}"}[width]
    kind, registers = vector.split(" ", 1)
    body = f"""
    rem.u32 %r9, %r4, {width + 1};
    mad.lo.u32 %r10, %r4, {width}, %r3;
{place("%rd3", "%rd1", width)}{place("%rd4", "%rd2", width)}
    setp.eq.u32 %p1, %r9, 0;
    @%p1 mov.u64 %rd3, 0;
    cp.async.{form}.shared.global [%r10], [%rd3], {width}, %r9;
    cp.async.wait_all;
    ld.shared.{kind} {registers}, [%r10];
    st.global.{kind} [%rd4], {registers};
"""
    assert not launch(body, source, out, schedule=schedule).findings
    kept = np.arange(width) < (np.arange(32) % (width + 1))[:, None]
    assert (out == np.where(kept, source.reshape(32, width), 0)).all()


@every_schedule
def test_a_lane_waits_for_its_own_groups(schedule: str) -> None:
    """Lanes that copy less often have fewer groups under way; wait_all takes what was not committed too."""
    copies = """
    mad.lo.u32 %r10, %r1, 16, %r3;
    cp.async.cg.shared.global [%r10], [%rd3], 16;
    {commit}
    @%p1 cp.async.cg.shared.global [%r10+1024], [%rd3], 16;
    @%p1 cp.async.commit_group;
    {wait}
    {sync}
    ld.shared.u32 %r9, [%r10];
    st.global.u32 [%rd4], %r9;
"""
    body = "    and.b32 %r8, %r1, 1;\n    setp.eq.u32 %p1, %r8, 1;\n" + place("%rd3", "%rd1", 16)
    body += place("%rd4", "%rd2", 4) + copies
    source, out = BYTES[:1024], np.zeros(64, np.uint32)
    commit = "cp.async.commit_group;"
    for first, wait, late in (
        (commit, "cp.async.wait_group 0;", []),
        (commit, "cp.async.wait_all;", []),
        ("", "cp.async.wait_all;", []),
        (commit, "cp.async.wait_group 1;", [0]),
        (commit, "cp.async.wait_group 2;", [0, 1]),
        ("", "cp.async.wait_group 0;", [0]),
    ):
        text = body.format(commit=first, wait=wait, sync="")
        report = launch(text, source, out, block=64, schedule=schedule)
        assert kinds(report) == ({"async"} if late else set()), wait
        right = out == source.view(np.uint32)[::4]
        assert (right == ~np.isin(np.arange(64) % 2, late)).all()


@every_schedule
def test_shared_memory_must_not_be_touched_under_way(schedule: str) -> None:
    body = (
        place("%rd3", "%rd1", 16)
        + """
    mad.lo.u32 %r10, %r1, 16, %r3;
    st.shared.u32 [%r10+4], 7;
    cp.async.cg.shared.global [%r10], [%rd3], 16;
    cp.async.commit_group;
    {use}
    cp.async.wait_group 0;
    bar.sync 0;
    ld.shared.u32 %r9, [%r10+4];
"""
    )
    for use, expected in (
        ("", set()),
        ("st.shared.u32 [%r10+4], 9;", {"async"}),
        ("ld.shared.u32 %r9, [%r10+8];", {"async"}),
        ("cp.async.cg.shared.global [%r10], [%rd3], 16;\n    cp.async.commit_group;", {"async"}),
    ):
        report = launch(body.replace("{use}", use), BYTES[:1024], block=64, schedule=schedule)
        assert kinds(report) == expected, use


@every_schedule
@pytest.mark.parametrize("form", ["noinc", "counted"])
def test_an_mbarrier_tells_of_copies(form: str, schedule: str) -> None:
    """A warp copies four tiles into a ring of two, another reads them."""
    body = """
    mov.u32 %r9, 0;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r3+2048], {count};
    mbarrier.init.shared.b64 [%r3+2056], {count};
    mbarrier.init.shared.b64 [%r3+3072], 32;
    mbarrier.init.shared.b64 [%r3+3080], 32;
READY:
    bar.sync 0;
    mov.u32 %r10, 0;
    mad.lo.u32 %r12, %r4, 16, %r3;
    setp.ge.u32 %p2, %r1, 32;
LOOP:
    and.b32 %r13, %r10, 1;
    shr.u32 %r14, %r10, 1;
    and.b32 %r14, %r14, 1;
    mad.lo.u32 %r15, %r13, 512, %r12;
    mad.lo.u32 %r16, %r13, 8, %r3;
    @%p2 bra READ;
    xor.b32 %r14, %r14, 1;
EMPTY:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r16+3072], %r14;
    @!%p3 bra EMPTY;
    mad.lo.u32 %r17, %r10, 32, %r4;
    mul.wide.u32 %rd5, %r17, 16;
    add.s64 %rd5, %rd5, %rd1;
    cp.async.cg.shared.global [%r15], [%rd5], 16;
    {arrive}
    bra.uni NEXT;
READ:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r16+2048], %r14;
    @!%p3 bra READ;
    xor.b32 %r18, %r15, 32;
    ld.shared.u32 %r17, [%r18];
    mad.lo.u32 %r9, %r9, 3, %r17;
    mbarrier.arrive.shared.b64 _, [%r16+3072];
NEXT:
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %p4, %r10, 4;
    @%p4 bra LOOP;
""" + place("%rd4", "%rd2", 4) + "    st.global.u32 [%rd4], %r9;\n"  # fmt: skip
    noinc = "cp.async.mbarrier.arrive.noinc.shared.b64 [%r16+2048];"
    counted = "cp.async.mbarrier.arrive.shared.b64 [%r16+2048];\n    mbarrier.arrive.shared.b64 _, [%r16+2048];"
    body = body.replace("{arrive}", noinc if form == "noinc" else counted).replace("{count}", "32")
    source, out = BYTES[:2048], np.zeros(64, np.uint32)
    expected = np.zeros(32, np.uint32)
    for tile in source.view(np.uint32).reshape(4, 32, 4):
        expected = expected * np.uint32(3) + tile[np.arange(32) ^ 2, 0]
    assert not launch(body, source, out, block=64, schedule=schedule).findings
    assert (out[32:] == expected).all()
    signal = noinc[: noinc.index("%r16")] if form == "noinc" else "    " + counted[: counted.index("%r16")]
    for old, new in (
        ("    @!%p3 bra READ;\n", ""),
        ("    @!%p3 bra EMPTY;\n", ""),
        (signal, "mbarrier.arrive.shared.b64 _, [" if form == "noinc" else "    // ["),
        ("[%r3+2048], 32", "[%r3+2048], 33"),
        ("[%r3+2048], 32", "[%r3+2048], 31"),
    ):
        assert old in body
        report = launch(body.replace(old, new, 1), source, out, block=64, schedule=schedule)
        assert report.findings, (old, new)


def test_an_arrival_that_waits_for_copies_closes_no_group() -> None:
    """wait_group 1 leaves the latest group in flight, whatever mbarrier the copies signal as well."""
    body = """
    add.s32 %r11, %r6, 1024;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra ready;
    mbarrier.init.shared.b64 [%r11], 32;
ready:
    bar.sync 0;
    cp.async.ca.shared.global [%r7], [%rd1], 4;
    cp.async.mbarrier.arrive.noinc.shared.b64 [%r11];
    cp.async.commit_group;
    cp.async.wait_group 1;
    ld.shared.b32 %r5, [%r7];
"""
    source = np.arange(32, dtype=np.int32)
    report, out = run(body, source)
    assert "async" in kinds(report)
    assert not (out == source).any()
    report, out = run(body.replace("wait_group 1", "wait_group 0"), source)
    assert not report.findings
    assert (out == source).all()
