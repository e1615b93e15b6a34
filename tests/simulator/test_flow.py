"""Branches that part lanes, loops of different lengths, threads that end early, blocks of any size, schedules."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from layouts.simulator.errors import UnknownInstructionError
from layouts.simulator.flow import EXIT, blocks_of, meeting_points
from layouts.simulator.ptx import parse
from tests.simulator.module import launch, messages, module, place
from tests.simulator.small import kinds

SCHEDULES = ("lockstep", "serial", "reversed", "random")
STORE = place("%rd3", "%rd1", 4, "%r20") + "    st.global.u32 [%rd3], %r9;\n"
THREAD = "    mov.u32 %r21, %ntid.x;\n    mad.lo.u32 %r20, %r2, %r21, %r1;\n"


def results(body: str, threads: int = 96, grid: int = 1, **options: str) -> NDArray[np.uint32]:
    """What each thread has in %r9 at the end; there must be no findings."""
    out = np.full(threads * grid, 0xFFFFFFFF, np.uint32)
    report = launch(THREAD + body, out, grid=grid, block=threads, **options)
    assert not report.findings
    return out


NESTED = """
    mov.u32 %r9, 0;
    and.b32 %r10, %r1, 1;
    setp.eq.u32 %p1, %r10, 0;
    @%p1 bra EVEN;
    setp.lt.u32 %p2, %r1, 50;
    @%p2 bra ODD_LOW;
    add.u32 %r9, %r9, 1;
    and.b32 %r11, %r1, 4;
    setp.eq.u32 %p3, %r11, 0;
    @!%p3 bra JOIN;
    add.u32 %r9, %r9, 10;
    bra.uni JOIN;
ODD_LOW:
    add.u32 %r9, %r9, 100;
JOIN:
    add.u32 %r9, %r9, 1000;
    bra.uni END;
EVEN:
    add.u32 %r9, %r9, 10000;
END:
    add.u32 %r9, %r9, %r1;
"""


def nested(thread: int) -> int:
    if thread % 2 == 0:
        return 10000 + thread
    high = 1 + (10 if thread & 4 == 0 else 0)
    return (100 if thread < 50 else high) + 1000 + thread


COLLATZ = """
    mov.u32 %r9, 0;
    add.u32 %r10, %r1, 1;
    setp.eq.u32 %p1, %r10, 1;
    @%p1 bra END;
LOOP:
    and.b32 %r11, %r10, 1;
    setp.eq.u32 %p2, %r11, 0;
    @%p2 bra HALF;
    mad.lo.u32 %r10, %r10, 3, 1;
    bra.uni NEXT;
HALF:
    shr.u32 %r10, %r10, 1;
NEXT:
    add.u32 %r9, %r9, 1;
    setp.ne.u32 %p3, %r10, 1;
    @%p3 bra LOOP;
END:
"""


def collatz(thread: int) -> int:
    value, steps = thread + 1, 0
    while value != 1:
        value, steps = (value // 2 if value % 2 == 0 else 3 * value + 1), steps + 1
    return steps


TRIANGLE = """
    mov.u32 %r9, 0;
    mov.u32 %r10, 0;
    and.b32 %r12, %r1, 7;
OUTER:
    setp.ge.u32 %p1, %r10, %r12;
    @%p1 bra END;
    mov.u32 %r11, 0;
INNER:
    setp.gt.u32 %p2, %r11, %r10;
    @%p2 bra INNER_END;
    add.u32 %r9, %r9, 1;
    add.u32 %r11, %r11, 1;
    setp.eq.u32 %p3, %r9, 17;
    @%p3 bra END;
    bra.uni INNER;
INNER_END:
    add.u32 %r10, %r10, 1;
    bra.uni OUTER;
END:
"""


def triangle(thread: int) -> int:
    rows = thread % 8
    return min(rows * (rows + 1) // 2, 17)


WARPS_DISAGREE = """
    mov.u32 %r9, 1;
    setp.eq.u32 %p1, %r5, 1;
    @%p1 bra SECOND;
    add.u32 %r9, %r9, 1;
    setp.eq.u32 %p2, %r5, 2;
    @!%p2 bra END;
    add.u32 %r9, %r9, 5;
    bra.uni END;
SECOND:
    add.u32 %r9, %r9, 30;
END:
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("threads", [96, 70, 5])
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (NESTED, nested),
        (COLLATZ, collatz),
        (TRIANGLE, triangle),
        (WARPS_DISAGREE, lambda thread: [2, 31, 7][thread // 32]),
    ],
    ids=["nested", "collatz", "triangle", "warps disagree"],
)
def test_every_thread_goes_its_way(body: str, expected: Callable[[int], int], threads: int, schedule: str) -> None:
    out = results(body + STORE, threads, grid=3, schedule=schedule).reshape(3, threads)
    assert (out == [expected(thread) for thread in range(threads)]).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("body", [NESTED, COLLATZ, TRIANGLE])
def test_lanes_are_together_again_behind_a_branch(body: str, schedule: str) -> None:
    mask = "    mov.u32 %r20, %r1;\n    activemask.b32 %r9;\n"
    assert (results(body + mask + STORE, schedule=schedule) == 0xFFFFFFFF).all()
    beyond = results(body + mask + STORE, 40, schedule=schedule)
    assert (beyond == np.where(np.arange(40) < 32, 0xFFFFFFFF, 0xFF)).all()


def test_lanes_that_parted_run_by_themselves() -> None:
    body = """
    mov.u32 %r9, 0;
    setp.lt.u32 %p1, %r4, 11;
    @%p1 bra FEW;
    activemask.b32 %r9;
    bra.uni END;
FEW:
    setp.lt.u32 %p2, %r4, 3;
    @%p2 bra END;
    activemask.b32 %r9;
END:
"""
    lane = np.arange(96) % 32
    expected = np.select([lane >= 11, lane >= 3], [0xFFFFF800, 0x7F8])
    assert (results(body + STORE) == expected).all()


EXIT_INSIDE = """
    mov.u32 %r9, 0;
    and.b32 %r10, %r1, 3;
    mov.u32 %r11, 0;
LOOP:
    setp.eq.u32 %p1, %r11, %r10;
    @%p1 bra STOP;
    add.u32 %r9, %r9, %r1;
    bra.uni NEXT;
STOP:
    setp.eq.u32 %p2, %r10, 2;
    setp.gt.u32 %p3, %r1, 64;
    @%p2 {exit};
    @%p3 {exit};
NEXT:
    add.u32 %r11, %r11, 1;
    setp.lt.u32 %p4, %r11, 4;
    @%p4 bra LOOP;
    activemask.b32 %r12;
    and.b32 %r12, %r12, 0xF;
    mad.lo.u32 %r9, %r12, 1000, %r9;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("instruction", ["exit", "ret"])
def test_threads_end_where_they_parted(schedule: str, instruction: str) -> None:
    """Nobody waits for them where the others meet."""
    body = EXIT_INSIDE.replace("{exit}", instruction) + STORE
    out = np.full(96, 0xFFFFFFFF, np.uint32)
    report = launch(THREAD + body, out, block=96, schedule=schedule)
    thread = np.arange(96)
    ended = (thread % 4 == 2) | (thread > 64)
    mask = np.where(thread < 64, 0b1011, 0b0001)
    assert (out == np.where(ended, 0xFFFFFFFF, 3 * thread + 1000 * mask)).all()
    assert not report.findings


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_warp_that_ended_is_not_waited_for(schedule: str) -> None:
    body = """
    setp.eq.u32 %p1, %r5, 1;
    @%p1 exit;
    mov.u32 %r9, %r1;
    bar.sync 0;
    add.u32 %r9, %r9, 1;
"""
    out = np.zeros(96, np.uint32)
    assert not launch(THREAD + body + STORE, out, block=96, schedule=schedule).findings
    assert (out == np.where(np.arange(96) // 32 == 1, 0, np.arange(96) + 1)).all()


def test_a_block_in_three_dimensions() -> None:
    body = """
    mov.u32 %r10, %tid.y;
    mov.u32 %r11, %tid.z;
    mad.lo.u32 %r20, %r11, 3, %r10;
    mad.lo.u32 %r20, %r20, 5, %r1;
    mov.u32 %r12, %ctaid.y;
    mad.lo.u32 %r20, %r12, 30, %r20;
    mov.u32 %r9, %laneid;
    mov.u32 %r12, %warpid;
    mad.lo.u32 %r9, %r12, 100, %r9;
"""
    out = np.full(60, 0xFFFFFFFF, np.uint32)
    report = launch(body + STORE, out, grid=(1, 2), block=(5, 3, 2))
    assert (out.reshape(2, 30) == np.arange(30)).all()
    assert not report.findings
    assert (report.warps, report.block, report.grid) == (2, (5, 3, 2), (1, 2, 1))


def test_executions_and_lanes_are_counted() -> None:
    out = np.zeros(80, np.uint32)
    body = """
    mov.u32 %r9, 5;
    setp.lt.u32 %p1, %r1, 40;
    @%p1 add.u32 %r9, %r9, 1;
    @%p1 bra SKIP;
    add.u32 %r9, %r9, 7;
SKIP:
"""
    for schedule in SCHEDULES:
        report = launch(THREAD + body + STORE, out, block=80, schedule=schedule)
        counts = {each.text: (each.executions, each.lanes) for each in report.instructions}
        assert counts["mov.u32 %r9, 5;".rstrip(";")] == (3, 80)
        assert counts["@%p1 add.u32 %r9, %r9, 1"] == (3, 40)
        assert counts["add.u32 %r9, %r9, 7"] == (2, 40)
        assert (out == np.where(np.arange(80) < 40, 6, 12)).all()


def test_a_register_that_one_way_does_not_write_is_found() -> None:
    body = """
    setp.lt.u32 %p1, %r4, 4;
    @%p1 bra SKIP;
    mov.u32 %r9, 3;
SKIP:
    add.u32 %r9, %r9, 1;
"""
    out = np.zeros(64, np.uint32)
    report = launch(THREAD + body + STORE, out, block=64)
    (message,) = messages(report, "register")
    assert "CTA (0, 0, 0), thread 0" in message
    assert "%r9 is read in add.u32 %r9, %r9, 1" in message
    assert report.findings[0].count == 8
    always = "    setp.lt.u32 %p1, %r4, 99;\n    @%p1 mov.u32 %r9, 3;\n    add.u32 %r9, %r9, 1;\n"
    assert (results(always + STORE) == 4).all()  # a guard that always holds
    never = always.replace("99", "0")
    assert kinds(launch(THREAD + never + STORE, np.zeros(96, np.uint32), block=96)) == {"register"}
    unguarded = "    @%p7 mov.u32 %r9, 3;\n    mov.u32 %r9, 4;\n"
    assert "%p7" in messages(launch(THREAD + unguarded + STORE, out, block=64), "register")[0]


def test_meeting_points() -> None:
    kernel = parse(module(NESTED))
    blocks = blocks_of(kernel, frozenset())
    meeting = meeting_points(blocks)
    first, *_ = blocks
    assert meeting[first] == kernel.labels["END"]
    assert meeting[kernel.labels["ODD_LOW"]] == kernel.labels["JOIN"]
    assert meeting[len(kernel.instructions) - 1] == EXIT
    endless = parse(module("LOOP:\n    add.u32 %r9, %r1, 1;\n    bra.uni LOOP;\n"))
    blocks = blocks_of(endless, frozenset())
    assert meeting_points(blocks)[endless.labels["LOOP"]] == EXIT


@pytest.mark.parametrize("line", ["frobnicate.u32 %r9, %r1;", "@%p1 add.u128 %r9, %r1, 1;", "mov.u32 %r9, %clock;",
                                  "@%p1 bar.sync 0;", "ld.global.frob.u32 %r9, [%rd1];"])  # fmt: skip
def test_what_is_not_modelled_is_named(line: str) -> None:
    """Also where no thread comes: before anything runs."""
    with pytest.raises(UnknownInstructionError) as caught:
        launch(f"    ret;\n    {line}\n", np.zeros(1, np.uint32))
    named = {"mov.u32 %r9, %clock;": "%clock", "@%p1 add.u128 %r9, %r1, 1;": "add.u128"}.get(line, line.rstrip(";"))
    assert named in str(caught.value)


def test_undefined_bytes_that_prmt_puts_where_nothing_looks() -> None:
    bytes_beside = "mov.b32 %r9, 7; prmt.b32 %r6, %r60, %r61, 0x3340; prmt.b32 %r9, %r9, %r6, 0x5410;"
    report = launch(THREAD + bytes_beside + "and.b32 %r9, %r9, 0xffff;" + STORE, np.zeros(32, np.uint32), block=32)
    assert not report.findings
