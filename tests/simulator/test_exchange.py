"""Exchange between the lanes of a warp against plain models: shfl, vote, elect, redux, activemask."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from layouts.simulator.errors import UnknownInstructionError
from tests.simulator.module import launch, messages, place
from tests.simulator.small import kinds

LOAD = place("%rd3", "%rd1", 4) + place("%rd4", "%rd2", 4) + "    ld.global.u32 %r9, [%rd3];\n"
STORE = "    st.global.u32 [%rd4], %r9;\n"
VALUES = np.random.default_rng(5).integers(0, 2**32, 96, np.uint32)


def results(body: str, values: NDArray = VALUES) -> NDArray[np.uint32]:
    """What each thread has in %r9 at the end, of its value in %r9; there must be no findings."""
    out = np.zeros(len(values), np.uint32)
    report = launch(LOAD + body + STORE, values, out, block=len(values))
    assert not report.findings
    return out


def shuffled(mode: str, lane: int, by: int, bounds: int) -> tuple[int, bool]:
    """The lane that a lane reads, and whether it lies in range, as the PTX manual says."""
    segment, clamp = bounds >> 8 & 31, bounds & 31
    last = (lane & segment) | (clamp & ~segment)
    source = {
        "up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": (lane & segment) | (by & ~segment)
    }[mode]  # fmt: skip
    inside = source >= last if mode == "up" else source <= last
    return (source if inside else lane), inside


@pytest.mark.parametrize("by", [0, 1, 5, 16, 31])
@pytest.mark.parametrize("width", [32, 16, 8, 2])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffles(mode: str, width: int, by: int) -> None:
    bounds = (32 - width) << 8 | (0 if mode == "up" else 31)
    source, inside = zip(*(shuffled(mode, lane, by, bounds) for lane in range(32)), strict=True)
    body = f"    shfl.sync.{mode}.b32 %r9|%p1, %r9, {by}, {bounds}, -1;\n"
    assert (results(body).reshape(3, 32) == VALUES.reshape(3, 32)[:, source]).all()
    assert (results(body + "    selp.u32 %r9, 1, 0, %p1;\n").reshape(3, 32) == inside).all()


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_each_lane_chooses_its_shuffle(mode: str) -> None:
    """Distance and bounds come from registers, also where a part of the warp shuffles alone."""
    distance, bounds = [(7 * lane + 3) & 63 for lane in range(32)], 0 if mode == "up" else 0x1F
    source = np.array([shuffled(mode, lane, by & 31, bounds)[0] for lane, by in enumerate(distance)])
    step = "    mad.lo.u32 %r10, %r4, 7, 3;\n    and.b32 %r10, %r10, 63;\n"
    body = f"{step}    mov.u32 %r11, {bounds};\n    shfl.sync.{mode}.b32 %r9, %r9, %r10, %r11, -1;\n"
    assert (results(body).reshape(3, 32) == VALUES.reshape(3, 32)[:, source]).all()
    half = f"""
    mov.u32 %r12, 0xFFFF;
    setp.lt.u32 %p1, %r4, 16;
    @%p1 bra LOW;
    shl.b32 %r12, %r12, 16;
LOW:
    @%p1 bra SHUFFLE;
    add.u32 %r9, %r9, 1;
SHUFFLE:
    @%p1 shfl.sync.{mode}.b32 %r9, %r9, 1, {0x1000 | bounds}, %r12;
    @!%p1 shfl.sync.{mode}.b32 %r9, %r9, 2, {0x1000 | bounds}, %r12;
"""
    source = np.array([shuffled(mode, lane, 1 + lane // 16, 0x1000 | bounds)[0] for lane in range(32)])
    moved = VALUES.reshape(3, 32) + (np.arange(32) >= 16).astype(np.uint32)
    assert (results(half).reshape(3, 32) == moved[:, source]).all()


def test_votes() -> None:
    for threshold in (0, 1 << 28, 1 << 31, 2**32 - 1):
        yes = np.asarray(threshold <= VALUES).reshape(3, 32)
        test = f"    setp.ge.u32 %p1, %r9, {threshold};\n"
        models = {"any": yes.any(1), "all": yes.all(1), "uni": yes.all(1) | ~yes.any(1)}
        for mode, expected in models.items():
            body = f"{test}    vote.sync.{mode}.pred %p2, %p1, -1;\n    selp.u32 %r9, 1, 0, %p2;\n"
            assert (results(body).reshape(3, 32) == np.asarray(expected)[:, None]).all()
        bits = (yes * (1 << np.arange(32, dtype=np.int64))).sum(axis=1)
        assert (results(f"{test}    vote.sync.ballot.b32 %r9, %p1, -1;\n").reshape(3, 32) == bits[:, None]).all()
        body = f"{test}    vote.sync.ballot.b32 %r9, !%p1, 0xFFFFFFFF;\n"
        assert (results(body).reshape(3, 32) == 2**32 - 1 - bits[:, None]).all()


def test_votes_in_a_block_that_ends_within_a_warp() -> None:
    values = VALUES[:41]
    body = "    setp.ge.u32 %p1, %r9, 0;\n    vote.sync.ballot.b32 %r9, %p1, -1;\n"
    assert (results(body, values) == np.where(np.arange(41) < 32, 2**32 - 1, 511)).all()
    body = "    setp.ge.u32 %p1, %r9, 0;\n    vote.sync.all.pred %p2, %p1, -1;\n    selp.u32 %r9, 1, 0, %p2;\n"
    assert results(body, values).all()
    body = "    activemask.b32 %r9;\n"
    assert (results(body, values) == np.where(np.arange(41) < 32, 2**32 - 1, 511)).all()


def test_lanes_of_a_warp_must_agree_on_the_mask() -> None:
    with pytest.raises(UnknownInstructionError, match="different members"):
        results("    shl.b32 %r10, 1, %r4;\n    redux.sync.add.u32 %r9, %r9, %r10;\n")


@pytest.mark.parametrize("mask", [0xFFFFFFFF, 0xFFFF0000, 0x00000100, 0x80000001])
def test_one_lane_is_elected(mask: int) -> None:
    named = mask >> np.arange(32) & 1
    leader = int(named.argmax())
    body = f"""
    mov.u32 %r10, {mask};
    shr.u32 %r11, %r10, %r4;
    and.b32 %r11, %r11, 1;
    setp.eq.u32 %p1, %r11, 1;
    mov.u32 %r9, 99;
    @!%p1 bra END;
    elect.sync %r12|%p2, %r10;
    selp.u32 %r9, 1, 0, %p2;
    mad.lo.u32 %r9, %r12, 2, %r9;
END:
"""
    expected = np.where(named == 1, 2 * leader + (np.arange(32) == leader), 99)
    assert (results(body).reshape(3, 32) == expected).all()


@pytest.mark.parametrize("mask", [0xFFFFFFFF, 0x0000FF00, 0x80000000])
@pytest.mark.parametrize(
    ("form", "model"),
    [
        ("add.u32", lambda x: np.add.reduce(x, dtype=np.uint32)),
        ("add.s32", lambda x: np.add.reduce(x, dtype=np.uint32)),
        ("min.u32", np.min),
        ("max.u32", np.max),
        ("min.s32", lambda x: x.view(np.int32).min().view(np.uint32)),
        ("max.s32", lambda x: x.view(np.int32).max().view(np.uint32)),
        ("and.b32", np.bitwise_and.reduce),
        ("or.b32", np.bitwise_or.reduce),
        ("xor.b32", np.bitwise_xor.reduce),
    ],
)
def test_reductions(form: str, model: object, mask: int) -> None:
    """Of the lanes in the mask; the others go around."""
    body = f"""
    mov.u32 %r10, {mask};
    shr.u32 %r11, %r10, %r4;
    and.b32 %r11, %r11, 1;
    setp.eq.u32 %p1, %r11, 0;
    @%p1 bra END;
    redux.sync.{form} %r9, %r9, %r10;
END:
"""
    named = (mask >> np.arange(32) & 1).astype(bool)
    warps = VALUES.reshape(3, 32)
    expected = [np.where(named, model(np.ascontiguousarray(warp[named])), warp) for warp in warps]  # type: ignore[operator]
    assert (results(body).reshape(3, 32) == expected).all()


@pytest.mark.parametrize(
    "instruction",
    [
        "shfl.sync.bfly.b32 %r9, %r9, 1, 31, -1;",
        "vote.sync.any.pred %p3, %p1, -1;",
        "redux.sync.add.u32 %r9, %r9, -1;",
        "elect.sync _|%p3, -1;",
        "bar.warp.sync -1;",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r9}, [tile];",
    ],
)
def test_lanes_that_are_named_must_be_here(instruction: str) -> None:
    test = "    st.shared.v4.b32 [tile], {%r9, %r9, %r9, %r9};\n" if "ldmatrix" in instruction else ""
    body = f"{test}    setp.eq.u32 %p1, %r1, 40;\n    @%p1 bra END;\n    {instruction}\nEND:\n"
    report = launch(LOAD + body + STORE, VALUES, np.zeros(96, np.uint32), block=96)
    assert "divergence" in kinds(report)
    found = messages(report, "divergence")[0]
    assert "thread 40 is named by the mask but not here" in found or "lanes execute it" in found
