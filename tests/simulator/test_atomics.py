"""Atomics on global and shared memory, over several CTAs."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import pytest

from layouts.simulator.errors import UnknownInstructionError
from layouts.simulator.simulate import simulate
from tests.simulator.module import launch, place
from tests.simulator.small import kinds

SCHEDULES = ("lockstep", "serial", "reversed", "random")
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
NUMBER = "    mov.u32 %r20, %ntid.x;\n    mad.lo.u32 %r20, %r2, %r20, %r1;\n"
OUT = NUMBER + place("%rd3", "%rd2", 4, "%r20")
VALUES = np.random.default_rng(9).integers(0, 2**32, 256, np.uint32)


@every_schedule
def test_tickets_are_a_permutation(schedule: str) -> None:
    counter, out = np.full(2, 5, np.uint32), np.zeros(4 * 96, np.uint32)
    body = OUT + "    atom.global.add.u32 %r9, [%rd1], 3;\n    st.global.u32 [%rd3], %r9;\n"
    assert not launch(body, counter, out, grid=4, block=96, schedule=schedule).findings
    assert sorted(out.tolist()) == list(range(5, 5 + 3 * 384, 3))
    assert counter.tolist() == [5 + 3 * 384, 5]


@every_schedule
def test_tickets_in_shared_memory(schedule: str) -> None:
    body = OUT + """
    setp.eq.u32 %p1, %r1, 0;
    @%p1 st.shared.u32 [tile+8], 0;
    bar.sync 0;
    setp.ne.u32 %p2, %r1, 7;
    mov.u32 %r9, 1000;
    @%p2 atom.shared::cta.relaxed.cta.add.u32 %r9, [tile+8], 1;
    bar.sync 0;
    ld.shared.u32 %r10, [tile+8];
    mad.lo.u32 %r9, %r10, 10000, %r9;
    st.global.u32 [%rd3], %r9;
""".replace("shared::cta.relaxed.cta", "relaxed.cta.shared::cta")  # fmt: skip
    out = np.zeros((3, 96), np.uint32)
    assert not launch(body, np.zeros(1), out, grid=3, block=96, schedule=schedule).findings
    for block in out:
        assert sorted((block - 950000).tolist()) == [*range(95), 1000]
        assert block[7] == 951000
    missing = body.replace("    bar.sync 0;\n    ld.shared", "    ld.shared")
    assert "race" in kinds(launch(missing, np.zeros(1), out, grid=3, block=96, schedule=schedule))


def increment(old: int, limit: int) -> int:
    return 0 if old >= limit else old + 1


def decrement(old: int, limit: int) -> int:
    return limit if old == 0 or old > limit else old - 1


MODELS: dict[str, Any] = {
    "add.u32": lambda old, b: (old + b) % 2**32,
    "and.b32": lambda old, b: old & b,
    "or.b32": lambda old, b: old | b,
    "xor.b32": lambda old, b: old ^ b,
    "min.u32": min,
    "max.u32": max,
    "min.s32": lambda old, b: min(old, b, key=lambda x: x - 2**32 * (x >> 31)),
    "max.s32": lambda old, b: max(old, b, key=lambda x: x - 2**32 * (x >> 31)),
}


@every_schedule
@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("form", MODELS)
def test_the_order_does_not_matter(form: str, space: str, schedule: str) -> None:
    """Each of 8 words takes the values of every eighth thread of both CTAs."""
    values = VALUES[:192] | 0x0F0F0000 if form == "and.b32" else VALUES[:192]
    body = NUMBER + place("%rd3", "%rd1", 4, "%r20") + """
    and.b32 %r10, %r1, 7;
    ld.global.u32 %r9, [%rd3];
    mad.lo.u32 %r11, %r10, 4, %r3;
    setp.lt.u32 %p1, %r1, 8;
    @%p1 st.shared.u32 [%r11], {start};
    bar.sync 0;
    atom.shared.{form} %r12, [%r11], %r9;
    bar.sync 0;
    ld.shared.u32 %r9, [%r11];
""" + place("%rd4", "%rd2", 4, "%r10") + "    @%p1 red.relaxed.gpu.global.{form} [%rd4], %r9;\n"  # fmt: skip
    if space == "global":
        head, _, _ = body.partition("    mad.lo.u32 %r11")
        body = head + place("%rd4", "%rd2", 4, "%r10") + "    red.relaxed.gpu.global.{form} [%rd4], %r9;\n"
    start = {"add": 0, "or": 0, "xor": 0, "and": -1, "min": -1, "max": 0}[form[:3].rstrip(".")]
    if form.endswith("s32"):
        start = {"min": 0x7FFFFFFF, "max": -0x80000000}[form[:3]]
    body = body.replace("{form}", form).replace("{start}", str(start))
    out = np.full(8, start & 0xFFFFFFFF, np.uint32)
    assert not launch(body, values, out, grid=2, block=96, schedule=schedule).findings
    of_word = values.reshape(24, 8).T.tolist()
    assert out.tolist() == [reduce(MODELS[form], words, start & 0xFFFFFFFF) for words in of_word]


@every_schedule
@pytest.mark.parametrize(("change", "model"), [("inc", increment), ("dec", decrement)])
def test_counters_wrap(change: str, model: Any, schedule: str) -> None:
    counter, out = np.array([3, 50], np.uint32), np.zeros((2, 64), np.uint32)
    body = OUT + f"    atom.global.{change}.u32 %r9, [%rd1], 9;\n    st.global.u32 [%rd3], %r9;\n"
    assert not launch(body, counter, out, grid=2, block=64, schedule=schedule).findings
    seen, old = [], 3
    for _ in range(128):
        seen.append(old)
        old = model(old, 9)
    assert sorted(out.ravel().tolist()) == sorted(seen)
    assert counter.tolist() == [old, 50]


@every_schedule
@pytest.mark.parametrize("space", ["global", "shared"])
def test_exchange_and_compare(space: str, schedule: str) -> None:
    """One thread wins the compare and swap; values that are exchanged form a chain."""
    cell = {"global": "%rd1", "shared": "%r3"}[space]
    body = OUT + """
    setp.eq.u32 %p1, %r1, 0;
    @%p1 st.{space}.v2.u32 [{cell}], {1000, 1000};
    bar.sync 0;
    add.u32 %r10, %r1, 1;
    atom.{space}.cas.b32 %r9, [{cell}], 1000, %r10;
    setp.eq.u32 %p2, %r9, 1000;
    selp.u32 %r9, 5000, 0, %p2;
    atom.{space}.exch.b32 %r11, [{cell}+4], %r1;
    add.u32 %r9, %r9, %r11;
    st.global.u32 [%rd3], %r9;
    bar.sync 0;
    @%p1 ld.{space}.v2.u32 {%r12, %r13}, [{cell}];
    @%p1 st.global.v2.u32 [%rd1], {%r12, %r13};
""".replace("{space}", space).replace("{cell}", cell)  # fmt: skip
    cells, out = np.zeros(2, np.uint32), np.zeros(96, np.uint32)
    assert not launch(body, cells, out, block=96, schedule=schedule).findings
    (winner,) = np.flatnonzero(out >= 5000)
    assert cells[0] == winner + 1
    chain = out % 5000
    assert sorted([*chain.tolist(), int(cells[1])]) == [*range(96), 1000]


def test_other_types() -> None:
    cells = np.array([0, 2**40], np.uint64)
    floats = np.zeros(32, np.float32)
    body = """
    cvt.u64.u32 %rd9, %r1;
    atom.global.add.u64 %rd10, [%rd1], %rd9;
    red.global.max.u64 [%rd1+8], %rd9;
    red.global.add.f32 [%rd2+4], 0f3F000000;
"""
    assert not launch(body, cells, floats).findings
    assert cells.tolist() == [496, 2**40]
    assert floats[:3].tolist() == [0, 16, 0]
    with pytest.raises(UnknownInstructionError, match=r"red\.global\.add\.noftz\.f16"):
        launch("    red.global.add.noftz.f16 [%rd1], %h1;\n", cells)


@every_schedule
def test_the_last_block_adds_up(schedule: str) -> None:
    """Blocks leave partial sums, the last that arrives adds them; the counter is ready for the next launch."""
    blocks = 7
    memory, out = np.zeros(64, np.uint32), np.zeros(32, np.uint32)
    body = """
    add.u32 %r9, %r2, 1;
    mul.wide.u32 %rd20, %r2, 4;
    add.s64 %rd3, %rd1, %rd20;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra WAIT;
    st.global.u32 [%rd3+4], %r9;
    fence.acq_rel.gpu;
    mov.u32 %r11, %nctaid.x;
    sub.u32 %r11, %r11, 1;
    atom.acq_rel.gpu.global.inc.u32 %r10, [%rd1], %r11;
    setp.eq.u32 %p2, %r10, %r11;
    selp.u32 %r12, 1, 0, %p2;
    st.shared.u32 [tile], %r12;
WAIT:
    bar.sync 0;
    ld.shared.u32 %r12, [tile];
    setp.eq.u32 %p3, %r12, 0;
    @%p3 bra END;
    mov.u32 %r13, 0;
    mov.u32 %r14, 0;
    mov.b64 %rd4, %rd1;
SUM:
    ld.global.u32 %r15, [%rd4+4];
    add.u32 %r13, %r13, %r15;
    add.s64 %rd4, %rd4, 4;
    add.u32 %r14, %r14, 1;
    setp.lt.u32 %p4, %r14, %nctaid.x;
    @%p4 bra SUM;
    mul.wide.u32 %rd20, %r1, 4;
    add.s64 %rd5, %rd2, %rd20;
    red.global.add.u32 [%rd5], %r13;
END:
"""
    for turn in (1, 2):
        assert not launch(body, memory, out, grid=blocks, block=32, schedule=schedule).findings
        assert (out == turn * blocks * (blocks + 1) // 2).all()
        assert memory[0] == 0


SPIN = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 flag, .param .u64 out)
{
    .reg .pred %p<4>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [flag];
    ld.param.u64 %rd2, [out];
    mov.u32 %r1, %ctaid.x;
    setp.ne.u32 %p1, %r1, WAITS;
    @%p1 bra SETS;
SPIN:
    ld.acquire.gpu.global.u32 %r2, [%rd1];
    setp.eq.u32 %p2, %r2, 0;
    @%p2 bra SPIN;
    st.global.u32 [%rd2], %r2;
    ret;
SETS:
    mov.u32 %r3, 7;
    st.release.gpu.global.u32 [%rd1], %r3;
    ret;
}
"""


@every_schedule
@pytest.mark.parametrize("waits", ["0", "1"])
def test_a_block_that_spins_lets_the_other_set_its_flag(schedule: str, waits: str) -> None:
    flag, out = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    report = simulate(SPIN.replace("WAITS", waits), [flag, out], grid=2, block=32, schedule=schedule)
    assert out.tolist() == [7]
    assert not report.findings
