"""Races in global memory: within a CTA, between CTAs, and the merge by the last of them."""

from __future__ import annotations

import numpy as np
import pytest

from layouts.simulator.report import Report
from layouts.simulator.scheduler import SCHEDULES
from tests.simulator.module import launch, messages, place

BLOCK = 64
NUMBER = f"    mad.lo.u32 %r20, %r2, {BLOCK}, %r1;\n" + place("%rd4", "%rd1", 4, "%r20")
STORE = NUMBER + "    st.global.u32 [%rd4], %r20;\n"
BARRIER = "    bar.sync 0;\n"
FENCE = "    fence.acq_rel.gpu;\n"
# Each CTA leaves its part in %rd1 and counts in %rd2; the last one adds up all parts into %rd3.
COUNT = """
    setp.eq.u32 %p1, %r1, 0;
    @%p1 atom{order}.global.add.u32 %r21, [%rd2], 1;
    @%p1 st.shared.u32 [tile], %r21;
"""
MERGE = f"""
    ld.shared.u32 %r22, [tile];
    mov.u32 %r23, %nctaid.x;
    sub.u32 %r23, %r23, 1;
    setp.ne.u32 %p2, %r22, %r23;
    @%p2 bra DONE;
{{fence}}
    mov.u32 %r24, 0;
    mov.u32 %r25, 0;
{place("%rd5", "%rd1", 4, "%r1")}
NEXT:
    ld.global{{cache}}.u32 %r26, [%rd5];
    add.u32 %r24, %r24, %r26;
    add.s64 %rd5, %rd5, {4 * BLOCK};
    add.u32 %r25, %r25, 1;
    setp.le.u32 %p3, %r25, %r23;
    @%p3 bra NEXT;
{place("%rd6", "%rd3", 4, "%r1")}
    st.global.u32 [%rd6], %r24;
DONE:
"""


def run(body: str, grid: int = 5, schedule: str = "lockstep") -> tuple[Report, bool]:
    """The report, and whether the sums are right, if the body makes any."""
    parts, out = np.zeros((grid, BLOCK), np.uint32), np.zeros(BLOCK, np.uint32)
    report = launch(body, parts, np.zeros(1, np.uint32), out, grid=grid, block=BLOCK, schedule=schedule)
    return report, bool((out == parts.sum(0)).all())


def merge(order: str = ".acq_rel.gpu", before: str = BARRIER, after: str = BARRIER, fence: str = "") -> str:
    return STORE + before + COUNT.format(order=order) + after + MERGE.format(fence=fence, cache="")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "body",
    [
        merge(),
        merge("", before=FENCE + BARRIER, fence=FENCE),
        merge("", before=BARRIER + FENCE, fence="    membar.gl;\n"),
        merge(".relaxed.gpu", before=FENCE + BARRIER, after=FENCE + BARRIER),
        merge(".release.gpu", fence=FENCE),
    ],
    ids=["acq_rel", "fences of all", "membar", "fence of the reading lane", "release"],
)
def test_the_last_block_merges(body: str, schedule: str) -> None:
    for grid in (5, 70):  # more CTAs than run together
        report, right = run(body, grid, schedule)
        assert right
        assert not report.findings


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "body",
    [
        merge(""),
        merge(".relaxed.gpu", before=FENCE + BARRIER),
        merge(".relaxed.gpu", fence=FENCE),
        merge(".acq_rel.cta"),
        merge(".release.gpu"),
        merge(".acquire.gpu"),
        merge(before=""),
        merge("", before=BARRIER + "    fence.acq_rel.cta;\n", fence=FENCE),
    ],
    ids=[
        "relaxed", "no fence to read", "no fence to write", "scope", "no acquire", "no release", "no barrier",
        "scope of a fence",
    ],
)  # fmt: skip
def test_what_a_merge_lacks(body: str, schedule: str) -> None:
    report, _ = run(body, 5, schedule)
    assert {finding.kind for finding in report.findings} == {"race"}


def test_a_finding_names_both_sides() -> None:
    report, _ = run(merge(".relaxed.gpu"))
    (message,) = messages(report, "race")
    assert "of the storage of argument 0, not ordered after the write by CTA (" in message
    assert "in st.global.u32 [%rd4], %r20" in message


def test_a_chain_of_words_orders() -> None:
    """CTA 0 tells CTA 1 by one word, and this one CTA 2 by another."""
    words = np.zeros(2, np.uint32)
    body = f"""
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra DONE;
{place("%rd5", "%rd2", 4, "%r2")}
    setp.ne.u32 %p2, %r2, 0;
    @%p2 bra POLL;
    st.global.u32 [%rd1], 7;
    st.release.gpu.global.u32 [%rd2], 1;
    bra DONE;
TOLD:
    setp.eq.u32 %p4, %r2, 2;
    @%p4 bra LAST;
    st.release.gpu.global.u32 [%rd5], 1;
    bra DONE;
LAST:
    ld.global.u32 %r22, [%rd1];
    st.global.u32 [%rd3], %r22;
    bra DONE;
POLL:
    ld.acquire.gpu.global.u32 %r21, [%rd5+-4];
    setp.ne.u32 %p3, %r21, 0;
    @%p3 bra TOLD;
    bra POLL;
DONE:
"""
    for changed, found in (
        (body, False),
        (body.replace("st.release.gpu.global.u32 [%rd5]", "st.relaxed.gpu.global.u32 [%rd5]"), True),
    ):
        value, out = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
        report = launch(changed, value, words * 0, out, grid=3, block=32)
        assert out[0] == 7
        assert bool(messages(report, "race")) == found
        assert len(report.findings) == found


def neighbour(between: str, body: str = STORE) -> str:
    """A thread reads what the next one of its CTA wrote."""
    index = f"    add.u32 %r21, %r1, 1;\n    rem.u32 %r21, %r21, {BLOCK};\n    mad.lo.u32 %r21, %r2, {BLOCK}, %r21;\n"
    return body + between + index + place("%rd5", "%rd1", 4, "%r21") + "    ld.global.u32 %r22, [%rd5];\n"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_within_a_cta_a_barrier_orders(schedule: str) -> None:
    assert not run(neighbour(BARRIER), schedule=schedule)[0].findings
    assert messages(run(neighbour(""), schedule=schedule)[0], "race")
    assert messages(run(neighbour("    bar.warp.sync 0xffffffff;\n"), schedule=schedule)[0], "race")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_several_ctas_write_one_place(schedule: str) -> None:
    body = place("%rd4", "%rd1", 4, "%r1") + "    st.global.u32 [%rd4], %r2;\n"
    assert not run(body, grid=1, schedule=schedule)[0].findings
    for grid in (2, 70):
        assert messages(run(body, grid, schedule)[0], "race")


def test_neighbouring_elements_are_apart() -> None:
    """CTAs that write every other 16-bit element of the same words."""
    body = "    mad.lo.u32 %r20, %r1, 2, %r2;\n" + place("%rd4", "%rd1", 2, "%r20") + "    mov.b16 %h1, 5;\n"
    assert not run(body + "    st.global.u16 [%rd4], %h1;\n", grid=2)[0].findings


def test_launches_are_ordered_and_strong_accesses_do_not_race() -> None:
    body = place("%rd4", "%rd1", 4, "%r1") + "    st.relaxed.gpu.global.u32 [%rd4], %r2;\n"
    assert not run(body)[0].findings
    assert not run(body.replace("st.relaxed.gpu", "st.volatile"))[0].findings


def test_unchecked_runs_find_none() -> None:
    parts = np.zeros((2, BLOCK), np.uint32)
    body = place("%rd4", "%rd1", 4, "%r1") + "    st.global.u32 [%rd4], %r2;\n"
    assert not launch(body, parts, grid=2, block=BLOCK, checked=False).findings
