"""What is wrong with an access to shared memory: a closer look at those that the shadow's quick comparison rejects.

An access that is not ordered behind the one before may still be right: the same thread made both, or one instruction
of the whole warp lies between, or both are atomics, or the lane itself has waited although its warp has not. What is
left becomes findings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from layouts.simulator.clocks import (
    ATOMIC,
    CODE,
    COPIED,
    FENCED,
    IN_FLIGHT,
    LANES,
    ORDERED,
    WHOLE_WARP,
    BoolArray,
    Clocks,
    IntArray,
)

if TYPE_CHECKING:
    from layouts.simulator.shadow import Lanes, SharedShadow

UNINITIALIZED, ASYNC, RACE = "uninitialized", "async", "race"
ATOMIC_ACCESS = "atomic"


class Access(NamedTuple):
    """The accesses of one instruction.

    Attributes:
        what: "read", "write", "atomic", "asynchronous read" ... in words.
        lanes: who, (n,) or a slice.
        place: where, (n,), in units of the access's width.
        granules: of each piece of an access its granule, (n,) each.
        instruction: its static index.
        aligned: a warp executes it as one.
    """

    what: str
    lanes: Lanes
    place: IntArray
    granules: tuple[IntArray, ...]
    instruction: int
    aligned: bool = False


@dataclass(frozen=True)
class Finding:
    """An access to shared memory that is wrong, and the access that it conflicts with.

    Attributes:
        kind: "race", "async" (something is under way, or a proxy fence is missing) or "uninitialized".
        what, instruction: the access in words, its static index.
        cta, warp, lane: who made it: the CTA's place in the batch, the name of the warp or agent, the lane.
        address: in the CTA's shared memory, of the first place in question.
        problem: what is wrong, in words.
        other: the other access in words, "write by warp 1 lane 3"; empty if there is none.
        other_instruction: its static index, -1 if there is none.
        count: places in question in this call, with the same kind and other instruction.
    """

    kind: str
    what: str
    instruction: int
    cta: int
    warp: str
    lane: int
    address: int
    problem: str
    other: str
    other_instruction: int
    count: int

    @property
    def message(self) -> str:
        """One sentence, which names instructions by their index."""
        where = f"shared address {self.address:#x} of CTA {self.cta}"
        more = f" ({self.count} places in all)" if self.count > 1 else ""
        other = f" {self.other} at instruction {self.other_instruction}" if self.other else ""
        return (
            f"{self.kind}: {self.what} by {self.warp} lane {self.lane} at instruction {self.instruction}, {where}, "
            f"{self.problem}{other}{more}"
        )


class _Pairs(NamedTuple):
    """Accesses and, of each, an earlier one to the same granule: who and when. All (n,)."""

    lane: IntArray
    granule: IntArray
    agent: IntArray
    stamp: NDArray[np.int32]
    instruction: IntArray

    def where(self, keep: BoolArray) -> _Pairs:
        lane, granule, agent, stamp, instruction = self
        return _Pairs(lane[keep], granule[keep], agent[keep], stamp[keep], instruction[keep])


def after_writes(shadow: SharedShadow, access: Access, reads: bool) -> None:
    """Reports accesses that the last write to their place is not ordered before, and reads of what nothing wrote."""
    clocks = shadow.clocks
    pairs = _last_writes(shadow, access)
    if reads:
        _report(shadow, access, pairs.where(pairs.stamp < 0), (UNINITIALIZED, "of what nothing has written", ""))
    known = clocks.known[ORDERED, clocks.slot_of[pairs.lane], pairs.agent]
    pairs = pairs.where(pairs.stamp > known)
    excused = _same_thread(clocks, access, pairs)
    if access.what == ATOMIC_ACCESS:
        excused |= pairs.stamp & ATOMIC != 0
    pairs = pairs.where(~_harmless(clocks, pairs, excused))
    flying = pairs.stamp >= IN_FLIGHT
    _report(shadow, access, pairs.where(flying), (ASYNC, "while it is under way:", "asynchronous write"))
    _report(shadow, access, pairs.where(~flying), (RACE, "not ordered after the", "write"))


def after_reads(shadow: SharedShadow, access: Access) -> None:
    """Reports writes that an earlier read of their place is not ordered before."""
    clocks = shadow.clocks
    lane, granule = _entries(clocks, access)
    reads = shadow.reads[granule]
    late = reads > clocks.known[ORDERED][clocks.slot_of[lane]][:, shadow.readers]
    entry, column = np.nonzero(late)
    instruction = shadow.last_read[granule[entry]] & 0xFFFFFFFF
    pairs = _Pairs(lane[entry], granule[entry], shadow.readers[column], reads[late], instruction)
    own_warp = clocks.agent_of[pairs.lane] == pairs.agent
    excused = own_warp & (access.aligned | (pairs.stamp & CODE == WHOLE_WARP))
    excused |= _same_thread(clocks, access, pairs)
    if access.what == ATOMIC_ACCESS:
        excused |= pairs.stamp & ATOMIC != 0
    pairs = pairs.where(~_harmless(clocks, pairs, excused))
    flying = pairs.stamp >= IN_FLIGHT
    _report(shadow, access, pairs.where(flying), (ASYNC, "while it is under way:", "asynchronous read"))
    _report(shadow, access, pairs.where(~flying), (RACE, "not ordered after the", "read"))


def simultaneous_writes(shadow: SharedShadow, access: Access) -> None:
    """Reports places that several lanes write in the same call; the record of one of them is there already."""
    clocks = shadow.clocks
    pairs = _last_writes(shadow, access)
    other = (clocks.agent_of[pairs.lane] != pairs.agent) | (pairs.stamp & CODE != pairs.lane % LANES)
    _report(shadow, access, pairs.where(other), (RACE, "simultaneous with the", "write"))


def missing_fence(shadow: SharedShadow, access: Access) -> None:
    """Reports asynchronous reads of what threads have written, ordered but without a proxy fence on the way."""
    clocks = shadow.clocks
    pairs = _last_writes(shadow, access)
    slot = clocks.slot_of[pairs.lane]
    ordered = pairs.stamp <= clocks.known[ORDERED, slot, pairs.agent]
    ordered |= clocks.known_to_lane(pairs.lane, pairs.agent, pairs.stamp)
    generic = (pairs.agent < clocks.warps) & (pairs.stamp & COPIED == 0)
    unfenced = (pairs.stamp >= 0) & (pairs.stamp > clocks.known[FENCED, slot, pairs.agent])
    problem = (ASYNC, "without a fence.proxy.async after the", "write")
    _report(shadow, access, pairs.where(ordered & generic & unfenced), problem)


def _entries(clocks: Clocks, access: Access) -> tuple[IntArray, IntArray]:
    """Of every granule of every access the lane and the granule."""
    return np.tile(clocks.lanes[access.lanes], len(access.granules)), np.concatenate(access.granules)


def _last_writes(shadow: SharedShadow, access: Access) -> _Pairs:
    lane, granule = _entries(shadow.clocks, access)
    record = shadow.last_write[granule]
    stamp = (record & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
    return _Pairs(lane, granule, record >> 32, stamp, shadow.written_by[granule].astype(np.int64))


def _same_thread(clocks: Clocks, access: Access, pairs: _Pairs) -> BoolArray:
    """Where the same thread made both, on its own: what a whole warp accesses as one is not one thread's."""
    own = (clocks.agent_of[pairs.lane] == pairs.agent) & (pairs.stamp & CODE == pairs.lane % LANES)
    return own & (not access.aligned)


def _harmless(clocks: Clocks, pairs: _Pairs, excused: BoolArray) -> BoolArray:
    """Excused, or ordered before the lane though not before its warp. What has not ended never is."""
    return (pairs.stamp < IN_FLIGHT) & (excused | clocks.known_to_lane(pairs.lane, pairs.agent, pairs.stamp))


def _report(shadow: SharedShadow, access: Access, pairs: _Pairs, problem: tuple[str, str, str]) -> None:
    """One finding for each instruction on the other side.

    Args:
        problem: the kind, what is wrong in words, and what the other access was; empty if there is none.
    """
    if not len(pairs.lane):
        return
    kind, text, other = problem
    clocks = shadow.clocks
    others, firsts, counts = np.unique(pairs.instruction, return_index=True, return_counts=True)
    for instruction, first, count in zip(others.tolist(), firsts.tolist(), counts.tolist(), strict=True):
        lane, agent, code = (int(column[first]) for column in (pairs.lane, pairs.agent, pairs.stamp & CODE))
        slot = lane // LANES
        cta = slot % clocks.ctas
        finding = Finding(
            kind=kind,
            what=access.what,
            instruction=access.instruction,
            cta=cta,
            warp=clocks.names[slot // clocks.ctas],
            lane=lane % LANES,
            address=int(pairs.granule[first]) * shadow.granule - cta * shadow.smem_bytes,
            problem=text,
            other=f"{other} by {clocks.names[agent]}{_lane_text(code)}" if other else "",
            other_instruction=instruction,
            count=count,
        )
        shadow.report(finding)


def _lane_text(code: int) -> str:
    return f" lane {code}" if code < LANES else ""
