"""Warps that share a program counter, and what becomes of their lanes at a branch that parts them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

LANES = 32

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Lanes = slice | IntArray


@dataclass(eq=False)
class Frame:
    """A branch at which warps parted: their lanes meet again at ``pc``.

    Attributes:
        pc: where they meet.
        missing: by slot, the (32,) lanes that have not come yet and have not exited.
        arrived: by slot, the lanes that wait there.
    """

    pc: int
    missing: dict[int, BoolArray] = field(default_factory=dict)
    arrived: dict[int, BoolArray] = field(default_factory=dict)


class Group:
    """Warps at one program counter.

    Attributes:
        pc: index of the next instruction.
        slots: (n,) ascending.
        lanes: their lanes, n * 32 of the lane axis; a slice if the slots follow each other.
        active: (n * 32,) the lanes that take part, None if all do.
        frames: the branches at which these lanes parted from others of their warps, the latest last.
        stalled: how often in a row it found an mbarrier's phase incomplete, with nothing happening between.
        seen: how many events there had been by then.
        polled: the instruction of the poll that failed just now, -1 if there is none.
    """

    __slots__ = ("active", "frames", "lanes", "pc", "polled", "seen", "slots", "stalled")

    def __init__(self, pc: int, slots: IntArray, active: BoolArray | None, frames: tuple[Frame, ...] = ()):
        self.pc = pc
        self.slots = slots
        self.lanes = lanes_of(slots)
        self.active = active
        self.frames = frames
        self.stalled = 0
        self.seen = -1
        self.polled = -1

    @property
    def num_lanes(self) -> int:
        return len(self.slots) * LANES if self.active is None else int(np.count_nonzero(self.active))

    def rows(self) -> BoolArray:
        """The lanes that take part, (n, 32)."""
        return np.ones((len(self.slots), LANES), bool) if self.active is None else self.active.reshape(-1, LANES)

    def lane_numbers(self) -> IntArray:
        """The numbers on the lane axis of the lanes that take part."""
        lanes = (self.slots[:, None] * LANES + np.arange(LANES)).ravel()
        return lanes if self.active is None else lanes[self.active]

    def part(self, keep: BoolArray) -> Group:
        """The warps with ``keep`` (n,)."""
        active = None if self.active is None else self.active.reshape(-1, LANES)[keep].ravel()
        return Group(self.pc, self.slots[keep], active, self.frames)


def lanes_of(slots: IntArray) -> Lanes:
    first, last = int(slots[0]), int(slots[-1])
    if last - first == len(slots) - 1:
        return slice(first * LANES, (last + 1) * LANES)
    return (slots[:, None] * LANES + np.arange(LANES)).ravel()


def by_slot(lanes: IntArray) -> tuple[IntArray, BoolArray | None]:
    """The slots of lanes, ascending, and which lanes of each there are, (n, 32); None if all are."""
    slots = np.unique(lanes // LANES)
    if len(lanes) == len(slots) * LANES:
        return slots, None
    active = np.zeros((len(slots), LANES), bool)
    active[np.searchsorted(slots, lanes // LANES), lanes % LANES] = True
    return slots, active


def merged(groups: list[Group]) -> Group:
    """Groups of different warps at the same place, as one."""
    slots = np.concatenate([group.slots for group in groups])
    order = np.argsort(slots, kind="stable")
    active = None
    if any(group.active is not None for group in groups):
        active = np.concatenate([group.rows() for group in groups])[order].ravel()
    return Group(groups[0].pc, slots[order], active, groups[0].frames)
