"""Barriers of the CTA, of a warp, and mbarriers: what they order, and what goes wrong with them."""

from __future__ import annotations

import numpy as np
import pytest

from layouts.simulator.errors import UnknownInstructionError
from layouts.simulator.report import Report
from tests.simulator.module import launch, messages, place
from tests.simulator.small import kinds

SCHEDULES = ("lockstep", "serial", "reversed", "random")
OWN_WORD = "    shl.b32 %r8, %r1, 2;\n    add.u32 %r8, %r8, %r3;\n"
STORE = place("%rd3", "%rd1", 4) + "    st.global.u32 [%rd3], %r9;\n"
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


def text(report: Report, kind: str) -> str:
    """The first finding of a kind."""
    found = messages(report, kind)
    assert found, report.findings
    return found[0]


@every_schedule
@pytest.mark.parametrize("barrier", ["bar.sync 0", "bar.sync 3, 128", "barrier.sync 15", "bar.cta.sync %r7, %r6",
                                     "barrier.sync.aligned 1, 128"])  # fmt: skip
def test_all_warps_meet(barrier: str, schedule: str) -> None:
    """Rounds of a rotation through shared memory: two barriers each."""
    body = f"""{OWN_WORD}
    mov.u32 %r6, 128;
    mov.u32 %r7, 5;
    mov.u32 %r9, %r1;
    xor.b32 %r10, %r8, 128;
    xor.b32 %r10, %r10, 4;
    mov.u32 %r11, 0;
LOOP:
    st.shared.u32 [%r8], %r9;
    {barrier};
    ld.shared.u32 %r9, [%r10];
    {barrier};
    add.u32 %r9, %r9, 1;
    add.u32 %r11, %r11, 1;
    setp.lt.u32 %p1, %r11, 3;
    @%p1 bra LOOP;
""" + STORE  # fmt: skip
    out = np.zeros(256, np.uint32)
    body = body.replace(STORE, "    mad.lo.u32 %r12, %r2, 128, %r1;\n" + place("%rd3", "%rd1", 4, "%r12")
                        + "    st.global.u32 [%rd3], %r9;\n")  # fmt: skip
    report = launch(body, out, grid=2, block=128, schedule=schedule)
    assert not report.findings
    thread = np.arange(128)
    assert (out.reshape(2, 128) == (thread ^ 33) + 3).all()
    for first in (True, False):
        parts = body.split(f"    {barrier};\n")
        broken = (parts[0] + parts[1] + f"    {barrier};\n" + parts[2]) if first else "".join(
            [parts[0], f"    {barrier};\n", parts[1], parts[2]])  # fmt: skip
        assert kinds(launch(broken, out, block=128, schedule=schedule)) & {"race", "uninitialized"}


@every_schedule
def test_each_pair_of_warps_has_a_barrier(schedule: str) -> None:
    """The barrier's number comes from a register and differs between warps; the last warp is not full."""
    body = f"""{OWN_WORD}
    shr.u32 %r10, %r5, 1;
    add.u32 %r10, %r10, 1;
    st.shared.u32 [%r8], %r1;
    bar.sync %r10, 64;
    xor.b32 %r11, %r8, 128;
    mov.u32 %r9, 0;
    setp.lt.u32 %p1, %r1, 96;
    @%p1 ld.shared.u32 %r9, [%r11];
""" + STORE  # fmt: skip
    out = np.zeros(128, np.uint32)
    assert not launch(body, out, block=128, schedule=schedule).findings
    assert (out == np.where(np.arange(128) < 96, np.arange(128) ^ 32, 0)).all()
    assert not launch(body.replace("96", "64"), out, block=100, schedule=schedule).findings
    single = body.replace("%r10, 64", "%r5, 32")
    assert kinds(launch(single, out, block=128, schedule=schedule)) & {"race", "uninitialized"}
    with pytest.raises(UnknownInstructionError, match="several barriers"):
        launch(body.replace("%r10, 64", "%r4, 64"), out, block=128, schedule=schedule)


PRODUCER = f"""{OWN_WORD}
    mov.u32 %r9, 0;
    mov.u32 %r11, 0;
    setp.ge.u32 %p1, %r1, 64;
    @%p1 bra CONSUMER;
    bra.uni FILL;
AGAIN:
    bar.sync 2, 128;
FILL:
    add.u32 %r10, %r1, %r11;
    st.shared.u32 [%r8], %r10;
    bar.arrive 1, 128;
    add.u32 %r11, %r11, 1;
    setp.lt.u32 %p2, %r11, 4;
    @%p2 bra AGAIN;
    bra.uni END;
CONSUMER:
    bar.sync 1, 128;
    ld.shared.u32 %r10, [%r8-256];
    add.u32 %r9, %r9, %r10;
    add.u32 %r11, %r11, 1;
    setp.ge.u32 %p2, %r11, 4;
    @%p2 bra END;
    bar.arrive 2, 128;
    bra.uni CONSUMER;
END:
"""


@every_schedule
def test_some_arrive_and_others_wait(schedule: str) -> None:
    out = np.zeros(128, np.uint32)
    assert not launch(PRODUCER + STORE, out, block=128, schedule=schedule).findings
    assert (out[64:] == 4 * np.arange(64) + 6).all()
    for old, new in (
        ("    bar.sync 2, 128;\n", ""),
        ("    bar.sync 1, 128;\n", ""),
        ("bar.sync 1, 128", "bar.arrive 1, 128"),
    ):
        report = launch(PRODUCER.replace(old, new, 1) + STORE, out, block=128, schedule=schedule)
        assert kinds(report) & {"race", "uninitialized", "deadlock"}, old


@every_schedule
def test_those_that_only_arrive_learn_nothing(schedule: str) -> None:
    """bar.arrive does not order what follows it behind what the others did before."""
    body = f"""{OWN_WORD}
    mov.u32 %r9, 0;
    setp.ge.u32 %p1, %r1, 32;
    @%p1 bra SECOND;
    bar.arrive 1, 64;
    ld.shared.u32 %r9, [%r8+128];
    bra.uni END;
SECOND:
    st.shared.u32 [%r8], %r1;
    bar.sync 1, 64;
END:
""" + STORE  # fmt: skip
    report = launch(body, np.zeros(64, np.uint32), block=64, schedule=schedule)
    assert kinds(report) & {"race", "uninitialized"}


@every_schedule
@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        ("bar.sync 1, 64;", "barrier", "bar.sync 1, 64: 96 threads arrive where 64 are expected"),
        ("bar.sync 1, 128;", "deadlock", "wait in bar.sync 1, 128"),
        ("bar.arrive 2, 128;", "barrier", "barrier 2: 96 threads have arrived and nobody waits"),
        ("bar.sync 16;", "barrier", "allowed are barriers 0 to 15"),
        ("bar.sync 1, 80;", "barrier", "multiples of 32"),
        ("@%p1 bra L;\n bar.sync 0;\n bra.uni M;\nL: bar.sync 1;\nM:", "deadlock", "bar.sync 1"),
        ("@%p1 bra L;\n bar.sync 1, 96;\n bra.uni M;\nL: bar.sync 1;\nM:", "barrier", "it expects"),
        ("@%p2 bra L;\n bar.sync 0;\nL:", "divergence", "only"),
        ("@%p2 bra L;\n bar.warp.sync -1;\nL:", "divergence", "named by the mask but not here"),
        ("bar.warp.sync 0xFFFF;", "divergence", "thread 16 is here but not named by the mask"),
    ],
)
def test_mistakes_with_barriers(body: str, kind: str, words: str, schedule: str) -> None:
    tests = "    setp.eq.u32 %p1, %r5, 1;\n    setp.lt.u32 %p2, %r4, 3;\n"
    if schedule != "lockstep" and "96 threads" in words:
        words = "nobody waits" if "nobody" in words else ""
        kind = "barrier" if words else kind
    report = launch(f"{tests}    {body}\n", np.zeros(1, np.uint32), block=96, schedule=schedule)
    if not words:  # one warp comes after the others went on: it waits for ever
        assert kinds(report) & {"barrier", "deadlock"}
        return
    if "thread 16" in words and schedule != "lockstep":
        words = words.removeprefix("thread 16 ")
    assert words in text(report, kind)


@every_schedule
def test_a_deadlock_names_warps_and_instructions(schedule: str) -> None:
    body = """
    setp.eq.u32 %p1, %r5, 2;
    @%p1 bra OTHER;
    bar.sync 4, 128;
    bra.uni END;
OTHER:
    mbarrier.init.shared.b64 [tile], 3;
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [tile], 0;
    @!%p2 bra WAIT;
END:
"""
    setup = body.replace("    mbarrier.init", "    setp.ne.u32 %p3, %r4, 0;\n    @%p3 bra READY;\n    mbarrier.init")
    setup = setup.replace("WAIT:\n", "READY:\n    bar.warp.sync -1;\nWAIT:\n", 1)
    for grid in (1, 3):
        report = launch(setup, np.zeros(1, np.uint32), grid=grid, block=96, schedule=schedule)
        assert kinds(report) == {"deadlock"}
        message = text(report, "deadlock")
        assert "warps [2] wait in mbarrier.try_wait.parity.shared::cta.b64 %p2, [tile], 0" in message
        assert "wait in bar.sync 4, 128" in message
        assert ("warps [0, 1]" in message) or ("warps [0]" in message and "warps [1]" in message)


INIT = """
    mov.u32 %r9, 0;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READY;
{inits}
READY:
    bar.sync 0;
"""


def ring(stages: int, rounds: int) -> str:
    """One warp fills a ring of stages, two warps empty it; mbarriers full at 2048, empty at 3072; parity wraps."""
    inits = "".join(
        f"    mbarrier.init.shared.b64 [%r3+{2048 + 8 * i}], 32;\n"
        f"    mbarrier.init.shared.b64 [%r3+{3072 + 8 * i}], 64;\n"
        for i in range(stages)
    )
    return (
        INIT.format(inits=inits)
        + f"""
    mov.u32 %r10, 0;
    mov.u32 %r11, 0;
    mov.u32 %r12, 0;
    setp.ge.u32 %p2, %r1, 32;
LOOP:
    mad.lo.u32 %r13, %r11, 8, %r3;
    mad.lo.u32 %r14, %r11, 128, %r3;
    mad.lo.u32 %r14, %r4, 4, %r14;
    @%p2 bra CONSUME;
    xor.b32 %r15, %r12, 1;
EMPTY:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r13+3072], %r15;
    @!%p3 bra EMPTY;
    mad.lo.u32 %r16, %r10, 100, %r4;
    st.shared.u32 [%r14], %r16;
    mbarrier.arrive.release.cta.shared::cta.b64 _, [%r13+2048];
    bra.uni NEXT;
CONSUME:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r13+2048], %r12;
    @!%p3 bra CONSUME;
    ld.shared.u32 %r16, [%r14];
    mbarrier.arrive.shared.b64 %rd9, [%r13+3072];
    mad.lo.u32 %r9, %r9, 3, %r16;
NEXT:
    add.u32 %r10, %r10, 1;
    add.u32 %r11, %r11, 1;
    setp.eq.u32 %p4, %r11, {stages};
    @%p4 mov.u32 %r11, 0;
    selp.u32 %r17, 1, 0, %p4;
    xor.b32 %r12, %r12, %r17;
    setp.lt.u32 %p5, %r10, {rounds};
    @%p5 bra LOOP;
"""
    )


@every_schedule
@pytest.mark.parametrize(("stages", "rounds"), [(1, 3), (2, 7), (3, 11)])
def test_a_ring_of_mbarriers(stages: int, rounds: int, schedule: str) -> None:
    total = np.zeros(32, np.uint32)
    for i in range(rounds):
        total = total * np.uint32(3) + np.arange(32, dtype=np.uint32) + np.uint32(100 * i)
    out = np.zeros(96, np.uint32)
    body = ring(stages, rounds) + STORE
    assert not launch(body, out, block=96, schedule=schedule).findings
    assert (out.reshape(3, 32) == [np.zeros(32), total, total]).all()
    for old, new in (
        ("    @!%p3 bra EMPTY;\n", ""),
        ("    @!%p3 bra CONSUME;\n", ""),
        ("xor.b32 %r15, %r12, 1", "mov.b32 %r15, %r12"),
        ("    xor.b32 %r12, %r12, %r17;\n", ""),
        ("[%r13+3072];\n    mad", "[%r13+2048];\n    mad"),
        ("+3072], 64;", "+3072], 32;"),
        ("+3072], 64;", "+3072], 96;"),
        ("+2048], 32;", "+2048], 31;"),
    ):
        assert old in body
        report = launch(body.replace(old, new, 1), out, block=96, schedule=schedule)
        assert report.findings or (out[32:64] != total).any(), (old, new)  # old data may be read without a race


@every_schedule
def test_a_wait_for_the_state_that_an_arrival_gave(schedule: str) -> None:
    """Two mbarriers, chosen by the lane: each lane waits for the phase in which it arrived."""
    inits = "    mbarrier.init.shared.b64 [%r3], 32;\n    mbarrier.init.shared.b64 [%r3+8], 32;\n"
    body = INIT.format(inits=inits) + """
    and.b32 %r10, %r1, 1;
    mad.lo.u32 %r10, %r10, 8, %r3;
    mad.lo.u32 %r11, %r1, 4, %r3;
    mov.u32 %r12, 0;
LOOP:
    add.u32 %r13, %r1, %r12;
    st.shared.u32 [%r11+64], %r13;
    mbarrier.arrive.shared.b64 %rd9, [%r10];
WAIT:
    mbarrier.test_wait.shared.b64 %p2, [%r10], %rd9;
    @!%p2 bra WAIT;
    xor.b32 %r14, %r11, 130;
    xor.b32 %r14, %r14, 2;
    ld.shared.u32 %r13, [%r14+64];
    add.u32 %r9, %r9, %r13;
    mbarrier.arrive.shared.b64 %rd9, [%r10];
WAIT2:
    mbarrier.test_wait.shared.b64 %p2, [%r10], %rd9;
    @!%p2 bra WAIT2;
    add.u32 %r12, %r12, 1;
    setp.lt.u32 %p3, %r12, 3;
    @%p3 bra LOOP;
""" + STORE  # fmt: skip
    out = np.zeros(64, np.uint32)
    assert not launch(body, out, block=64, schedule=schedule).findings
    assert (out == 3 * (np.arange(64) ^ 32) + 3).all()


@every_schedule
def test_each_cta_has_its_own_mbarriers(schedule: str) -> None:
    """CTAs differ in their rounds; each invalidates and initialises again while others are still at it."""
    body = INIT.format(inits="    mbarrier.init.shared.b64 [%r3], 64;\n") + """
    mov.u32 %r10, 0;
LOOP:
    and.b32 %r11, %r10, 1;
    mbarrier.arrive.shared.b64 _, [%r3];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r3], %r11;
    @!%p2 bra WAIT;
    add.u32 %r10, %r10, 1;
    setp.le.u32 %p3, %r10, %r2;
    @%p3 bra LOOP;
    bar.sync 0;
    @%p1 bra GONE;
    mbarrier.inval.shared.b64 [%r3];
GONE:
    mad.lo.u32 %r12, %r2, 64, %r1;
""" + place("%rd3", "%rd1", 4, "%r12") + "    st.global.u32 [%rd3], %r10;\n"  # fmt: skip
    out = np.zeros((4, 64), np.uint32)
    assert not launch(body, out, grid=4, block=64, schedule=schedule).findings
    assert (out == np.arange(1, 5)[:, None]).all()
    late = body.replace("GONE:\n", "GONE:\n    bar.sync 0;\n    mbarrier.arrive.shared.b64 _, [%r3];\n")
    report = launch(late, out, grid=4, block=64, schedule=schedule)
    assert "no initialised mbarrier at shared address 0x0" in text(report, "barrier")


@every_schedule
@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (
            "L: mbarrier.try_wait.parity.shared.b64 %p2, [tile+8], 0;\n @!%p2 bra L;",
            "barrier",
            "no initialised mbarrier at shared address 0x8",
        ),
        ("mbarrier.arrive.shared.b64 _, [tile+8];", "barrier", "no initialised mbarrier at shared address 0x8"),
        ("mbarrier.arrive.shared.b64 _, [tile], 3;", "barrier", "arrivals more than the 64 expected at 0x0"),
        ("mbarrier.arrive.shared.b64 _, [tile+4];", "misaligned", "0x4 is not a multiple of 8"),
        ("mbarrier.arrive.shared.b64 _, [tile+8192];", "out_of_bounds", "0x2000"),
        ("mbarrier.init.shared.b64 [tile+4100], 1;", "out_of_bounds", "0x1004"),
        ("L: mbarrier.try_wait.parity.shared.b64 %p2, [tile+8192], 0;\n @!%p2 bra L;", "out_of_bounds", "0x2000"),
        ("L: mbarrier.try_wait.parity.shared.b64 %p2, [tile], 0;\n @!%p2 bra L;", "deadlock", "mbarrier.try_wait"),
        ("st.shared.u32 [tile+4], 1;", "race", "write"),
    ],
)
def test_mistakes_with_mbarriers(body: str, kind: str, words: str, schedule: str) -> None:
    start = INIT.format(inits="    mbarrier.init.shared.b64 [%r3], 64;\n")
    report = launch(f"{start}    {body}\n", np.zeros(1, np.uint32), block=64, schedule=schedule)
    assert words in text(report, kind)


@every_schedule
def test_some_lanes_at_a_wrong_place_do_not_keep_the_others(schedule: str) -> None:
    body = INIT.format(inits="    mbarrier.init.shared.b64 [%r3], 60;\n") + """
    setp.lt.u32 %p2, %r1, 60;
    selp.u32 %r10, 0, 4096, %p2;
    add.u32 %r10, %r10, %r3;
    mbarrier.arrive.shared.b64 %rd9, [%r10];
WAIT:
    mbarrier.test_wait.shared.b64 %p3, [%r10], %rd9;
    @!%p3 bra WAIT;
    mov.u32 %r9, 1;
""" + STORE  # fmt: skip
    out = np.zeros(64, np.uint32)
    report = launch(body, out, block=64, schedule=schedule)
    assert kinds(report) == {"out_of_bounds"}
    assert "thread 60: mbarrier.arrive.shared.b64" in report.findings[0].message
    assert out.all()


@every_schedule
def test_bytes_are_expected(schedule: str) -> None:
    """A phase with expected bytes ends when they have come; here nobody brings them."""
    wait = "WAIT:\n    mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0;\n    @!%p2 bra WAIT;\n    mov.u32 %r9, 1;\n"
    body = INIT.format(inits="    mbarrier.init.shared.b64 [%r3], 64;\n")
    one = "    mbarrier.arrive.expect_tx.shared.b64 _, [%r3], {};\n"
    out = np.zeros(64, np.uint32)
    assert not launch(body + one.format(0) + wait + STORE, out, block=64, schedule=schedule).findings
    assert out.all()
    assert kinds(launch(body + one.format(16) + wait + STORE, out, block=64, schedule=schedule)) == {"deadlock"}
    later = "    @!%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r3], 128;\n    bar.sync 0;\n" + one.format(0)
    assert kinds(launch(body + later + wait + STORE, out, block=64, schedule=schedule)) == {"deadlock"}
    gone = later.replace("128;", "0;")
    assert not launch(body + gone + wait + STORE, out, block=64, schedule=schedule).findings
