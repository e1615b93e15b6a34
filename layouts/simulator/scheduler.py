"""Which warps run next: schedules, and what to do when all of them wait."""

from __future__ import annotations

import random
from collections.abc import Callable

from layouts.simulator.errors import SimulatorError
from layouts.simulator.group import LANES, Group, merged
from layouts.simulator.machine import Machine

SCHEDULES = ("lockstep", "serial", "reversed", "random")
SPINS = 3  # polls of an mbarrier with nothing happening between, after which a warp is stuck
MAX_STEPS = 2_000_000  # of a batch: minutes
FAIR_TURN = 1024  # so often the warp that has waited longest runs, whatever the schedule: another may spin on its flag


def run(machine: Machine, schedule: str, seed: int, max_steps: int = MAX_STEPS) -> None:
    """Run a batch to its end, or until it is stuck (a finding).

    Args:
        schedule: "lockstep" runs all warps together, "serial" and "reversed" one warp of each CTA as far as it gets,
            from the first or the last, "random" any of them for a block.
        seed: of the random schedule.
        max_steps: blocks of instructions, each run by one group of warps, after which it counts as endless.
    """
    if schedule not in SCHEDULES:
        raise SimulatorError(f"schedule is {schedule!r}; allowed: {', '.join(SCHEDULES)}")
    machine.start(by_warp=schedule != "lockstep")
    chance = random.Random(seed)
    pick = _picker(machine, schedule, chance)
    executions = dict.fromkeys(machine.blocks, 0)
    lanes = dict.fromkeys(machine.blocks, 0)
    for turn in range(1, max_steps + 1):
        candidates = [group for group in machine.ready if group.seen != machine.events]
        if not candidates:  # a poll in vain is no wait: a kernel that goes on regardless must see what it gets
            candidates = [group for group in machine.ready if group.stalled == 1]
        if not candidates:
            if machine.delayed:
                machine.delayed.pop(0)()
                machine.events += 1
                continue
            candidates = [group for group in machine.ready if group.stalled < SPINS]
            if not candidates:
                break
        elif schedule == "random" and machine.delayed and chance.random() < 0.1:
            machine.delayed.pop(0)()
            machine.events += 1
        group = pick(candidates) if turn % FAIR_TURN else _longest_waiting(machine, candidates)
        handlers, control = machine.code[group.pc]
        executions[group.pc] += len(group.slots)
        lanes[group.pc] += group.num_lanes
        for handler in handlers:
            handler(group)
        machine.ready += control(group)
    else:
        raise SimulatorError(f"{machine.kernel.name} has not ended after {max_steps:,} steps: max_steps allows more")
    for start, block in machine.blocks.items():
        machine.counters.executions[start : block.end] += executions[start]
        machine.counters.lanes[start : block.end] += lanes[start]
    for check in machine.at_end:
        check()
    _report_stuck(machine)


def _longest_waiting(machine: Machine, groups: list[Group]) -> Group:
    """The ready ones stand in the order in which they last ran."""
    machine.ready.remove(groups[0])
    return groups[0]


def _picker(machine: Machine, schedule: str, chance: random.Random) -> Callable[[list[Group]], Group]:
    def warp(group: Group) -> int:
        return int(group.slots[0]) // machine.ctas

    def take(group: Group) -> Group:
        machine.ready.remove(group)
        return group

    if schedule == "lockstep":
        return lambda groups: _together(machine, min(groups, key=lambda group: group.pc))
    if schedule == "serial":
        return lambda groups: take(min(groups, key=lambda group: (warp(group), group.pc)))
    if schedule == "reversed":
        return lambda groups: take(min(groups, key=lambda group: (-warp(group), group.pc)))
    return lambda groups: take(chance.choice(groups))


def _together(machine: Machine, first: Group) -> Group:
    """The group with all others that stand at the same place and met the same branches."""
    same = [
        group for group in machine.ready if group.pc == first.pc and group.frames == first.frames and not group.stalled
    ]
    if len(same) < 2 or first.stalled:
        machine.ready.remove(first)
        return first
    slots = {int(slot) for group in same for slot in group.slots}
    if len(slots) != sum(len(group.slots) for group in same):  # two parts of one warp
        machine.ready.remove(first)
        return first
    machine.ready = [group for group in machine.ready if group not in same]
    return merged(same)


def _report_stuck(machine: Machine) -> None:
    """Warps that have not ended: which, and what each waits for."""
    barriers = machine.state.get("barriers", {})
    waiting = [(group, item.text) for b in barriers.values() for group, item in b.waiting]
    waiting += [(group, item.text) for group, item in machine.held]
    waiting += [(group, machine.kernel.instructions[group.pc - 1].text) for group in machine.ready]
    if waiting:
        texts = []
        for group, text in waiting:
            warps = sorted({int(slot) // machine.ctas for slot in group.slots})
            texts.append(f"warps {warps} wait in {text}")
        machine.find("deadlock", "; ".join(texts), None, len(waiting))
        return
    for number, barrier in barriers.items():
        left = int(barrier.arrived.max())
        if left:
            machine.find("barrier", f"barrier {number}: {left} threads have arrived and nobody waits for them", None)
    if not machine.exited.all():
        lane = int((~machine.exited).nonzero()[0][0])
        text = f"{machine.lane_name(lane)} waits for lanes of warp {lane // LANES // machine.ctas} that never come"
        machine.find("deadlock", text, None)
