"""What the machine does with small kernels: branches, exchange, memory, copies, barriers, atomics, mistakes."""

from __future__ import annotations

import numpy as np
import pytest

from layouts.simulator.errors import SimulatorError, UnknownInstructionError
from layouts.simulator.ptx import parse
from tests.simulator.small import HEAD, TAIL, kinds, run

SCHEDULES = ("lockstep", "serial", "reversed", "random")
SOURCE = np.arange(96, dtype=np.int32) * 7 % 41


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lanes_part_and_meet(schedule: str) -> None:
    """Nested branches, and a loop whose trip count differs by lane; the shuffle behind them needs whole warps."""
    body = """
    and.b32 %r8, %r1, 1;
    setp.eq.s32 %p1, %r8, 0;
    @%p1 bra even;
    setp.lt.s32 %p2, %r1, 40;
    @%p2 bra small;
    add.s32 %r5, %r5, 1000;
small:
    add.s32 %r5, %r5, 100;
    bra.uni met;
even:
    mov.b32 %r9, %r1;
loop:
    setp.le.s32 %p3, %r9, 0;
    @%p3 bra met;
    add.s32 %r5, %r5, 1;
    sub.s32 %r9, %r9, 3;
    bra.uni loop;
met:
    shfl.sync.bfly.b32 %r5, %r5, 1, 31, -1;
"""
    report, out = run(body, SOURCE, schedule=schedule)
    thread = np.arange(96)
    odd = SOURCE + 100 + 1000 * (thread >= 40)
    expected = np.where(thread % 2 == 1, odd, SOURCE + -(-thread // 3))
    assert (out == expected[thread ^ 1]).all()
    assert not report.findings


def test_threads_end_early_and_blocks_need_not_fill_warps() -> None:
    body = "    setp.gt.s32 %p1, %r1, 50;\n    @%p1 bra gone;\n    bar.sync 0;\n    add.s32 %r5, %r5, 1;\n"
    report, out = run(body, SOURCE[:70], tail=TAIL.replace("    ret;", "gone:\n    ret;"))
    assert (out[:51] == SOURCE[:51] + 1).all()
    assert (out[51:] == -1).all()
    assert kinds(report) == {"divergence"}  # a barrier that a part of warp 1 reaches
    report, out = run("    add.s32 %r5, %r5, 1;\n", SOURCE[:70])
    assert (out == SOURCE[:70] + 1).all()
    assert not report.findings


@pytest.mark.parametrize(
    ("instruction", "source_lane"),
    [
        ("shfl.sync.idx.b32 %r5, %r5, 3, 31, -1;", lambda lane: np.full(32, 3)),
        ("shfl.sync.up.b32 %r5, %r5, 2, 0, -1;", lambda lane: np.where(lane >= 2, lane - 2, lane)),
        ("shfl.sync.down.b32 %r5, %r5, 5, 31, -1;", lambda lane: np.where(lane + 5 < 32, lane + 5, lane)),
        ("shfl.sync.bfly.b32 %r5, %r5, 4, 31, -1;", lambda lane: lane ^ 4),
        ("shfl.sync.idx.b32 %r5, %r5, 1, 0x181f, -1;", lambda lane: lane // 8 * 8 + 1),
    ],
)
def test_shuffles(instruction: str, source_lane: object) -> None:
    _, out = run(f"    {instruction}\n", SOURCE)
    lane = source_lane(np.arange(32))  # type: ignore[operator]
    assert (out.reshape(3, 32) == SOURCE.reshape(3, 32)[:, lane]).all()


def test_votes() -> None:
    body = "    setp.gt.s32 %p1, %r5, 20;\n    vote.sync.ballot.b32 %r5, %p1, -1;\n"
    _, out = run(body, SOURCE)
    bits = (SOURCE.reshape(3, 32) > 20) @ (1 << np.arange(32, dtype=np.int64))
    assert (out.view(np.uint32).reshape(3, 32) == bits[:, None]).all()
    body = "    setp.gt.s32 %p1, %r5, 39;\n    vote.sync.any.pred %p2, %p1, -1;\n    selp.b32 %r5, 1, 0, %p2;\n"
    _, out = run(body, SOURCE)
    any_above = np.any(SOURCE.reshape(3, 32) > 39, axis=1)
    assert (out == np.repeat(any_above, 32)).all()


EXCHANGE = """
    st.shared.b32 [%r7], %r5;
    bar.sync 0;
    xor.b32 %r8, %r7, 128;
    ld.shared.b32 %r5, [%r8];
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shared_memory_between_warps(schedule: str) -> None:
    report, out = run(EXCHANGE, SOURCE[:64], schedule=schedule, grid=1)
    assert (out == np.roll(SOURCE[:64], 32)).all()
    assert not report.findings
    assert report.shared_wavefronts == 4
    report, _ = run(EXCHANGE.replace("    bar.sync 0;\n", ""), SOURCE[:64], schedule=schedule)
    assert kinds(report) & {"race", "uninitialized"}


def test_lanes_of_a_warp_need_a_warp_sync() -> None:
    body = EXCHANGE.replace("128", "4")
    for sync in ("bar.warp.sync -1;", "bar.sync 0;"):
        report, out = run(body.replace("bar.sync 0;", sync), SOURCE)
        assert not report.findings
        assert (out == SOURCE[np.arange(96) ^ 1]).all()
    report, _ = run(body.replace("    bar.sync 0;\n", ""), SOURCE)
    assert kinds(report) == {"race"}


COPY = """
    cp.async.ca.shared.global [%r7], [%rd1], 4;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    xor.b32 %r8, %r7, 128;
    ld.shared.b32 %r5, [%r8];
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_asynchronous_copies_land_late(schedule: str) -> None:
    report, out = run(COPY, SOURCE[:64], schedule=schedule)
    assert (out == np.roll(SOURCE[:64], 32)).all()
    assert not report.findings
    for missing in ("    cp.async.wait_group 0;\n", "    cp.async.commit_group;\n", "wait_group 0"):
        changed = COPY.replace(missing, "wait_group 1" if missing == "wait_group 0" else "")
        report, out = run(changed, SOURCE[:64], schedule=schedule)
        assert "async" in kinds(report)
        assert not (out == np.roll(SOURCE[:64], 32)).any()
    report, _ = run(COPY.replace("    bar.sync 0;\n", ""), SOURCE[:64], schedule=schedule)
    assert kinds(report) & {"race", "async", "uninitialized"}


def test_bytes_beyond_the_source_size_are_zeros() -> None:
    body = COPY.replace("], 4;", "], 4, %r9;").replace(
        "    cp.async.ca", "    selp.b32 %r9, 4, 0, %p1;\n    cp.async.ca", 1
    )
    body = "    setp.lt.s32 %p1, %r1, 10;\n" + body.replace("128", "0")
    report, out = run(body, SOURCE)
    assert (out == np.where(np.arange(96) < 10, SOURCE, 0)).all()
    assert not report.findings


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("ld.shared.b32 %r5, [%r6+4096];", "out_of_bounds", "0x1000"),
        ("ld.shared.v2.b32 {%r5, %r8}, [%r6+4];", "misaligned", "multiple of 8"),
        ("ld.global.b32 %r5, [%rd1+400];", "out_of_bounds", "argument 0"),
        ("ld.global.b32 %r5, [%rd1+2];", "misaligned", "multiple of 4"),
        ("ld.shared.b32 %r5, [%r7];", "uninitialized", "shared address 0x0"),
        ("mov.b32 %r5, %r60;", "register", "%r60"),
        ("bar.sync 1, 64;", "barrier", "96 threads arrive where 64"),
        ("bar.sync 1, 128;", "deadlock", "warps [0, 1, 2] wait in bar.sync 1, 128"),
        ("bar.sync 1, 32;", "barrier", "96 threads arrive where 32"),
    ],
)
def test_mistakes_are_named(line: str, kind: str, words: str) -> None:
    report, _ = run(f"    {line}\n", SOURCE)
    texts = [finding.message for finding in report.findings if finding.kind == kind]
    assert texts, report.findings
    assert words in texts[0]


def test_padding_between_rows_is_not_the_array() -> None:
    wide = np.zeros((4, 40), np.int32)
    rows = wide[:, :32]
    source = np.ascontiguousarray(rows)
    from layouts.simulator.simulate import simulate

    text = HEAD.format(shared=16, target="sm_80") + TAIL
    report = simulate(text, [rows, source], grid=1, block=64)
    assert kinds(report) == {"out_of_bounds"}
    assert "padding" in report.findings[0].message


RING = """
    mov.b32 %r10, tile;
    add.s32 %r11, %r10, 1024;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra ready;
    mbarrier.init.shared.b64 [%r11], 32;
    mbarrier.init.shared.b64 [%r11+8], 32;
ready:
    bar.sync 0;
    mov.b32 %r12, 0;
    mov.b32 %r13, 0;
    and.b32 %r14, %r1, 31;
    shl.b32 %r14, %r14, 2;
    add.s32 %r14, %r14, %r10;
    setp.ge.s32 %p2, %r1, 32;
    @%p2 bra consumer;
producer:
    and.b32 %r15, %r12, 1;
    xor.b32 %r16, %r15, 1;
empty:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r11+8], %r16;
    @!%p3 bra empty;
    add.s32 %r17, %r5, %r12;
    st.shared.b32 [%r14], %r17;
    mbarrier.arrive.shared.b64 _, [%r11];
    add.s32 %r12, %r12, 1;
    setp.lt.s32 %p4, %r12, 5;
    @%p4 bra producer;
    bra.uni done;
consumer:
    and.b32 %r15, %r12, 1;
full:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r11], %r15;
    @!%p3 bra full;
    ld.shared.b32 %r17, [%r14];
    add.s32 %r13, %r13, %r17;
    mbarrier.arrive.shared.b64 _, [%r11+8];
    add.s32 %r12, %r12, 1;
    setp.lt.s32 %p4, %r12, 5;
    @%p4 bra consumer;
    mov.b32 %r5, %r13;
done:
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_producer_and_a_consumer(schedule: str) -> None:
    report, out = run(RING, SOURCE[:64], schedule=schedule)
    assert (out[32:] == 5 * SOURCE[:32] + 10).all()
    assert not report.findings


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    @!%p3 bra empty;\n", ""),
        ("    @!%p3 bra full;\n", ""),
        ("[%r11], 32;", "[%r11], 33;"),
        ("[%r11], 32;", "[%r11], 16;"),
        ("    mbarrier.arrive.shared.b64 _, [%r11+8];\n", ""),
        ("xor.b32 %r16, %r15, 1;", "mov.b32 %r16, %r15;"),
        ("    bar.sync 0;\n", ""),
    ],
)
def test_a_broken_ring_is_found(schedule: str, old: str, new: str) -> None:
    assert old in RING
    report, _ = run(RING.replace(old, new, 1), SOURCE[:64], schedule=schedule)
    assert report.findings


def test_the_mbarrier_that_copies_signal() -> None:
    body = """
    add.s32 %r11, %r6, 1024;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra ready;
    mbarrier.init.shared.b64 [%r11], 64;
ready:
    bar.sync 0;
    cp.async.ca.shared.global [%r7], [%rd1], 4;
    cp.async.mbarrier.arrive.noinc.shared.b64 [%r11];
wait:
    mbarrier.test_wait.parity.shared.b64 %p2, [%r11], 0;
    @!%p2 bra wait;
    xor.b32 %r8, %r7, 128;
    ld.shared.b32 %r5, [%r8];
"""
    for schedule in SCHEDULES:
        report, out = run(body, SOURCE[:64], schedule=schedule)
        assert not report.findings
        assert (out == np.roll(SOURCE[:64], 32)).all()
        report, _ = run(body.replace("    @!%p2 bra wait;\n", ""), SOURCE[:64], schedule=schedule)
        assert "async" in kinds(report)


def test_the_last_block_is_one() -> None:
    """atom.inc wraps: of four CTAs exactly one sees the limit, and the counter is zero again."""
    counter = np.zeros(128, np.int32)
    body = """
    ld.param.b64 %rd4, [source];
    mov.b32 %r8, 127;
    atom.acq_rel.gpu.global.inc.u32 %r5, [%rd4], %r8;
"""
    report, out = run(body, counter, grid=4)
    assert sorted(out.tolist()) == list(range(128))
    assert counter[0] == 0
    assert not report.findings


def test_runs_of_mma_are_the_same_together_and_apart() -> None:
    mma = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    start = "".join(
        f"    mov.b32 %r{i}, {0x3C003800 + 17 * i};\n    xor.b32 %r{i}, %r{i}, %r5;\n" for i in range(10, 18)
    )
    zero = "".join(f"    mov.b32 %r{i}, 0;\n" for i in range(20, 32))
    a, b, c = "{%r10,%r11,%r12,%r13}", "{%r14,%r15}", "{%r16,%r17}"
    first, second, third = "{%r20,%r21,%r22,%r23}", "{%r24,%r25,%r26,%r27}", "{%r28,%r29,%r30,%r31}"
    runs = [f"{mma} {first}, {a}, {b}, {first};", f"{mma} {second}, {a}, {c}, {second};",
            f"{mma} {third}, {a}, {b}, {first};"]  # fmt: skip
    collect = "".join(f"    xor.b32 %r5, %r5, %r{i};\n" for i in range(20, 32))
    together = run(start + zero + "\n".join(runs) + "\n" + collect, SOURCE)[1]
    apart = run(start + zero + "\n    mov.b32 %r9, 0;\n".join(runs) + "\n" + collect, SOURCE)[1]
    assert (together == apart).all()
    assert len(np.unique(together)) > 10


def test_what_is_not_modelled_is_named() -> None:
    with pytest.raises(UnknownInstructionError, match="tcgen05"):
        run("    tcgen05.wait.ld.sync.aligned;\n", SOURCE)
    with pytest.raises(SimulatorError, match="schedule is 'fair'"):
        run("", SOURCE, schedule="fair")


def test_scopes_of_inline_assembly_repeat_names() -> None:
    scope = "{ .reg .b32 x; .reg .pred p; mov.b32 x, %r5; setp.gt.s32 p, x, 20; @p bra L; add.s32 %r5, x, 1; L: }\n"
    kernel = parse(HEAD.format(shared=16, target="sm_80") + scope + scope + TAIL)
    assert len(kernel.labels) == 2
    _, out = run(scope + scope, SOURCE)
    once = np.where(SOURCE > 20, SOURCE, SOURCE + 1)
    assert (out == np.where(once > 20, once, once + 1)).all()
