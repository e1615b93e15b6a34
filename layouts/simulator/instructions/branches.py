"""Control flow: branches that part the lanes of a warp, where they meet again, and the end of a thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from layouts.simulator.flow import EXIT, branch_target
from layouts.simulator.group import LANES, BoolArray, Frame, Group
from layouts.simulator.instructions.machine_code import Control, control, go_on
from layouts.simulator.ptx import Instruction

if TYPE_CHECKING:
    from layouts.simulator.machine import Machine


@control("bra")
def branch(machine: Machine, instruction: Instruction) -> Control:
    """bra, guarded or not: warps whose lanes disagree are parted until the nearest point that all ways pass."""
    count = len(machine.kernel.instructions)
    target = branch_target(machine.kernel, instruction)
    target = target if target < count else EXIT
    following = instruction.index + 1 if instruction.index + 1 < count else EXIT
    if instruction.guard is None:
        return lambda group: go_on(machine, group, target)
    register, negated = instruction.guard
    row = machine.row(register)
    meeting = _meeting_point(machine, instruction.index)

    def run(group: Group) -> list[Group]:
        taken = row[group.lanes] ^ negated
        if group.active is not None:
            taken = taken & group.active
        number = np.count_nonzero(taken)
        if number == 0:
            return go_on(machine, group, following)
        if number == group.num_lanes:
            return go_on(machine, group, target)
        return _part(machine, group, taken, (target, following, meeting))

    return run


@control("ret", "exit")
def end(machine: Machine, instruction: Instruction) -> Control:
    """ret, exit: threads end."""
    if instruction.guard is None:
        return lambda group: leave(machine, group)
    register, negated = instruction.guard
    row = machine.row(register)

    def run(group: Group) -> list[Group]:
        leaving = row[group.lanes] ^ negated
        if group.active is not None:
            leaving = leaving & group.active
        if not leaving.any():
            return go_on(machine, group, instruction.index + 1)
        staying = ~leaving if group.active is None else group.active & ~leaving
        parts = [leave(machine, _with_lanes(group, leaving, group.pc, group.frames))]
        if staying.any():
            parts.append(go_on(machine, _with_lanes(group, staying, group.pc, group.frames), instruction.index + 1))
        return [part for some in parts for part in some]

    return run


def _meeting_point(machine: Machine, index: int) -> int:
    start = max(start for start in machine.blocks if start <= index)
    return machine.meeting[start]


def _part(machine: Machine, group: Group, taken: BoolArray, places: tuple[int, int, int]) -> list[Group]:
    """Both ways of a branch: whole warps go their way, others part until the meeting point."""
    target, following, meeting = places
    active = np.ones(len(taken), bool) if group.active is None else group.active
    ways = ((target, taken), (following, active & ~taken))
    by_warp: list[BoolArray] = [np.any(way.reshape(-1, LANES), axis=1) for _, way in ways]
    parted: BoolArray = np.logical_and(by_warp[0], by_warp[1])
    groups: list[Group] = []
    for (pc, _), goes in zip(ways, by_warp, strict=True):
        whole: BoolArray = np.logical_and(goes, ~parted)
        if whole.any():
            groups += go_on(machine, group.part(whole), pc)
    if not parted.any():
        return groups
    some = group.part(parted)
    rows = active.reshape(-1, LANES)[parted]
    frame = Frame(meeting, {int(slot): lanes.copy() for slot, lanes in zip(some.slots, rows, strict=True)})
    for pc, way in ways:
        lanes = np.ascontiguousarray(way.reshape(-1, LANES)[parted]).ravel()
        groups += go_on(machine, Group(some.pc, some.slots, lanes, (*group.frames, frame)), pc)
    return groups


def _with_lanes(group: Group, lanes: BoolArray, pc: int, frames: tuple[Frame, ...]) -> Group:
    warps = lanes.reshape(-1, LANES).any(axis=1)
    rows = lanes.reshape(-1, LANES)[warps]
    return Group(pc, group.slots[warps], None if rows.all() else rows.ravel(), frames)


def arrive(machine: Machine, group: Group) -> list[Group]:
    """Lanes come to where they meet those that they parted from: warps that are complete go on."""
    frame = group.frames[-1]
    rows = group.rows()
    for slot, lanes in zip(group.slots.tolist(), rows, strict=True):
        frame.arrived[slot] = frame.arrived.get(slot, False) | lanes
        frame.missing[slot] &= ~lanes
    return _go_on_if_complete(machine, frame, group.slots.tolist(), group.frames[:-1])


def _go_on_if_complete(machine: Machine, frame: Frame, slots: list[int], frames: tuple[Frame, ...]) -> list[Group]:
    complete = [slot for slot in slots if slot in frame.missing and not frame.missing[slot].any()]
    for slot in complete:
        del frame.missing[slot]
    complete = [slot for slot in complete if slot in frame.arrived]
    if not complete:
        return []
    rows = np.stack([frame.arrived.pop(slot) for slot in complete])
    group = Group(frame.pc, np.array(complete), None if rows.all() else rows.ravel(), frames)
    return go_on(machine, group, frame.pc)


def leave(machine: Machine, group: Group) -> list[Group]:
    """Threads end: nobody waits for them at a meeting point or a barrier of the whole CTA any more."""
    machine.exited[group.lane_numbers()] = True
    machine.events += 1
    rows = group.rows()
    groups: list[Group] = []
    for depth in range(len(group.frames) - 1, -1, -1):
        frame = group.frames[depth]
        for slot, lanes in zip(group.slots.tolist(), rows, strict=True):
            if slot in frame.missing:
                frame.missing[slot] &= ~lanes
        groups += _go_on_if_complete(machine, frame, group.slots.tolist(), group.frames[:depth])
    from layouts.simulator.instructions.barriers import threads_left

    return groups + threads_left(machine, group)
