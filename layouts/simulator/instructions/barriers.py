"""Barriers: bar and barrier of the CTA, bar.warp.sync, and mbarriers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from layouts.simulator.access import SharedAccess
from layouts.simulator.clocks import Gate
from layouts.simulator.errors import UnknownInstructionError
from layouts.simulator.group import LANES, Group, by_slot
from layouts.simulator.instructions.exchange import check_members
from layouts.simulator.instructions.machine_code import Control, Handler, control, go_on, instruction
from layouts.simulator.operands import reader, writer
from layouts.simulator.ptx import Immediate, Instruction

if TYPE_CHECKING:
    from layouts.simulator.machine import Machine

IntArray = NDArray[np.int64]

BARRIERS = 16  # of a CTA


@dataclass
class NamedBarrier:
    """One of the 16 barriers of every CTA: threads that arrived, how many are expected (0: all that have not exited),
    the groups that wait, and the slots that only arrived."""

    arrived: IntArray
    expected: IntArray
    waiting: list[tuple[Group, Instruction]] = field(default_factory=list)
    gate: Gate | None = None
    passed_by: bool = False


def _barrier(machine: Machine, number: int) -> NamedBarrier:
    barriers = machine.state.setdefault("barriers", {})
    if number not in barriers:
        zeros = np.zeros(machine.ctas, np.int64)
        barriers[number] = NamedBarrier(zeros, np.full(machine.ctas, -1))
        barriers[number].gate = Gate(machine.clocks) if machine.clocks is not None else None
    return barriers[number]


@control("bar.sync", "bar.arrive", "bar.cta", "barrier")
def barrier(machine: Machine, instruction: Instruction) -> Control:
    """bar{.cta}.{sync,arrive} a{, b}, and barrier.{sync,arrive}, .aligned or not."""
    parts = [part for part in instruction.modifiers if part not in ("cta", "aligned")]
    if parts not in (["sync"], ["arrive"]) or instruction.guard is not None:
        raise UnknownInstructionError(f"{instruction.text}: this form of barrier is not modelled")
    waits = parts == ["sync"]
    first = instruction.operands[0]
    read = reader(machine, instruction, first, np.uint32)
    count = reader(machine, instruction, instruction.operands[1], np.uint32) if instruction.operands[1:] else None

    def run(group: Group) -> list[Group]:
        numbers = _of_warps(instruction, group, read(group))
        counts = _of_warps(instruction, group, 0 if count is None else count(group))
        pairs = sorted({*zip(numbers.tolist(), counts.tolist(), strict=True)})
        if len(pairs) == 1:
            return at_one(group, *pairs[0])
        parts = [(group.part((numbers == number) & (counts == expected)), number, expected)
                 for number, expected in pairs]  # fmt: skip
        return [after for part in parts for after in at_one(*part)]

    def at_one(group: Group, number: int, expected: int) -> list[Group]:
        if number >= BARRIERS or expected % LANES:
            text = f"{instruction.text}: barrier {number}, {expected} threads"
            allowed = f"allowed are barriers 0 to {BARRIERS - 1}, and multiples of {LANES} threads"
            machine.find("barrier", f"{text}; {allowed}", instruction)
        if group.active is not None and not (group.active | machine.exited[group.lanes]).all():
            text = f"{instruction.text}: only {group.num_lanes} lanes of {len(group.slots)} warps execute it"
            machine.find("divergence", text, instruction)
        named = _barrier(machine, number)
        _arrive(machine, named, group, instruction, expected)
        if waits:
            named.waiting.append((group, instruction))
        elif named.gate is not None:
            named.gate.arrive(group.slots)
            named.passed_by = True
        released = _release(machine, named)
        return released if waits else [*released, *go_on(machine, group, instruction.index + 1)]

    return run


def _of_warps(instruction: Instruction, group: Group, values: Any) -> IntArray:
    """The one value that the lanes of each warp have: (n,)."""
    rows = np.broadcast_to(np.asarray(values), (len(group.slots) * LANES,)).astype(np.int64).reshape(-1, LANES)
    here = group.rows()
    first = rows[np.arange(len(rows)), here.argmax(axis=1)]
    if ((rows != first[:, None]) & here).any():
        raise UnknownInstructionError(f"{instruction.text}: lanes of a warp name several barriers or counts")
    return first


def _arrive(machine: Machine, named: NamedBarrier, group: Group, instruction: Instruction, expected: int) -> None:
    ctas = group.slots % machine.ctas
    differs = (named.arrived[ctas] > 0) & (named.expected[ctas] != expected)
    if differs.any():
        other = int(named.expected[ctas[differs]][0])
        text = f"{instruction.text}: it expects {expected or 'all'} threads, another arrival {other or 'all'}"
        machine.find("barrier", text, instruction)
    named.expected[ctas] = expected
    named.arrived += np.bincount(ctas, minlength=machine.ctas) * LANES
    if expected and (named.arrived > expected).any():
        text = f"{instruction.text}: {int(named.arrived.max())} threads arrive where {expected} are expected"
        machine.find("barrier", text, instruction)


def _release(machine: Machine, named: NamedBarrier) -> list[Group]:
    """Groups whose CTAs are complete go on."""
    alive = (~machine.exited).reshape(-1, LANES).any(axis=1).reshape(machine.warps, machine.ctas).sum(axis=0) * LANES
    needed = np.where(named.expected == 0, alive, named.expected)
    complete = (named.arrived > 0) & (named.arrived >= needed)
    if not complete.any():
        return []
    machine.events += 1
    named.arrived[complete] = 0
    free: list[tuple[Group, Instruction]] = []
    still: list[tuple[Group, Instruction]] = []
    for group, where in named.waiting:
        goes = complete[group.slots % machine.ctas]
        if goes.all():
            free.append((group, where))
        elif goes.any():
            free.append((group.part(goes), where))
            still.append((group.part(~goes), where))
        else:
            still.append((group, where))
    named.waiting = still
    if free and machine.clocks is not None:
        slots = np.sort(np.concatenate([group.slots for group, _ in free]))
        _order(machine, named, slots, np.flatnonzero(complete))
    return [g for group, where in free for g in go_on(machine, group, where.index + 1)]


def _order(machine: Machine, named: NamedBarrier, slots: IntArray, ctas: IntArray) -> None:
    clocks, gate = machine.clocks, named.gate
    assert clocks is not None
    assert gate is not None
    if named.passed_by:
        gate.arrive(slots)
        gate.complete(ctas)
        gate.wait(slots)
    clocks.barrier(slots)


def threads_left(machine: Machine, group: Group) -> list[Group]:
    """Threads ended: barriers of whole CTAs expect fewer."""
    return [g for named in machine.state.get("barriers", {}).values() for g in _release(machine, named)]


@instruction("bar.warp.sync")
def warp_sync(machine: Machine, instruction: Instruction) -> Handler:
    """bar.warp.sync membermask."""
    members = reader(machine, instruction, instruction.operands[0], np.uint32)

    def run(group: Group) -> None:
        check_members(machine, instruction, group, members(group))
        if machine.clocks is not None:
            machine.clocks.warp_sync(group.slots)

    return run


@dataclass
class Mbarrier:
    """An mbarrier at one address of every CTA, by CTA: arrivals expected in a phase and missing in this one, bytes
    missing, how many phases are complete, and whether it is initialised."""

    expected: IntArray
    missing: IntArray
    bytes: IntArray
    phases: IntArray
    live: NDArray[np.bool_]
    gate: Gate | None


class Mbarriers:
    """The mbarriers of a batch, by their address in the CTA's shared memory."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.by_address: dict[int, Mbarrier] = {}

    def get(self, address: int, ctas: IntArray, instruction: Instruction) -> Mbarrier | None:
        found = self.by_address.get(address)
        if found is None or not found.live[ctas].all():
            text = f"{instruction.text}: there is no initialised mbarrier at shared address {address:#x}"
            self.machine.find("barrier", text, instruction)
            return None
        return found

    def init(self, lanes: IntArray, flat: IntArray, count: IntArray) -> None:
        machine = self.machine
        for address, some in self.at_addresses(lanes, flat):
            if address not in self.by_address:
                expected, missing, nbytes, phases = np.zeros((4, machine.ctas), np.int64)
                gate = Gate(machine.clocks) if machine.clocks is not None else None
                live = np.zeros(machine.ctas, bool)
                self.by_address[address] = Mbarrier(expected, missing, nbytes, phases, live, gate)
            mbarrier = self.by_address[address]
            ctas = machine.cta_of_lane[lanes[some]]
            mbarrier.expected[ctas] = mbarrier.missing[ctas] = count[some]
            mbarrier.bytes[ctas] = mbarrier.phases[ctas] = 0
            mbarrier.live[ctas] = True
        machine.events += 1

    def at_addresses(self, lanes: IntArray, flat: IntArray) -> list[tuple[int, Any]]:
        if not len(flat):
            return []
        address = flat - self.machine.shared_base[lanes]
        first = int(address[0])
        if (address == first).all():
            return [(first, slice(None))]
        return [(int(each), np.flatnonzero(address == each)) for each in np.unique(address)]

    def expect_more(self, lanes: IntArray, flat: IntArray, instruction: Instruction) -> None:
        """An arrival that is to come counts as one more expected in this phase."""
        for address, some in self.at_addresses(lanes, flat):
            ctas = self.machine.cta_of_lane[lanes[some]]
            mbarrier = self.get(address, ctas, instruction)
            if mbarrier is not None:
                np.add.at(mbarrier.missing, ctas, 1)

    def expect_bytes(self, lanes: IntArray, flat: IntArray, count: IntArray, instruction: Instruction) -> None:
        for address, some in self.at_addresses(lanes, flat):
            ctas = self.machine.cta_of_lane[lanes[some]]
            mbarrier = self.get(address, ctas, instruction)
            if mbarrier is not None:
                np.add.at(mbarrier.bytes, ctas, count[some])

    def arrive(
        self, lanes: IntArray, flat: IntArray, count: IntArray, instruction: Instruction, agents: Any = None
    ) -> None:
        """Lanes arrive.

        Args:
            agents: the slots that release what others are to see; None for the lanes' own warps.
        """
        machine = self.machine
        for address, some in self.at_addresses(lanes, flat):
            ctas = machine.cta_of_lane[lanes[some]]
            mbarrier = self.get(address, ctas, instruction)
            if mbarrier is None:
                continue
            if mbarrier.gate is not None:
                mbarrier.gate.arrive(*(by_slot(lanes[some]) if agents is None else (agents, None)))
            mbarrier.missing -= np.bincount(ctas, count[some], machine.ctas).astype(np.int64)
            if (mbarrier.missing < 0).any():
                cta = int(np.flatnonzero(mbarrier.missing < 0)[0])
                more = -int(mbarrier.missing[cta])
                text = f"{instruction.text}: {more} arrivals more than the {int(mbarrier.expected[cta])} expected"
                machine.find("barrier", f"{text} at {address:#x}", instruction)
            self._complete(mbarrier, np.unique(ctas))

    def complete_bytes(
        self, lanes: IntArray, flat: IntArray, count: IntArray, instruction: Instruction, agents: Any
    ) -> None:
        """Bulk copies have brought so many bytes; ``agents`` as in ``arrive``."""
        for address, some in self.at_addresses(lanes, flat):
            ctas = self.machine.cta_of_lane[lanes[some]]
            mbarrier = self.get(address, ctas, instruction)
            if mbarrier is None:
                continue
            if mbarrier.gate is not None:
                mbarrier.gate.arrive(agents)
            np.subtract.at(mbarrier.bytes, ctas, count[some])
            self._complete(mbarrier, np.unique(ctas))

    def _complete(self, mbarrier: Mbarrier, ctas: IntArray) -> None:
        done = ctas[(mbarrier.missing[ctas] <= 0) & (mbarrier.bytes[ctas] == 0)]
        if not len(done):
            return
        mbarrier.phases[done] += 1
        mbarrier.missing[done] = mbarrier.expected[done]
        if mbarrier.gate is not None:
            mbarrier.gate.complete(done)
        self.machine.events += 1


def mbarriers_of(machine: Machine) -> Mbarriers:
    if "mbarriers" not in machine.state:
        machine.state["mbarriers"] = Mbarriers(machine)
    return machine.state["mbarriers"]


class _Use:
    """How an instruction finds its mbarrier: the lanes that take part and have a right address, and the place of
    each. ``per_lane`` and ``spread`` go from the group's lanes to these and back."""

    def __init__(self, machine: Machine, instruction: Instruction, operand: Any, touches: bool = True):
        self.machine, self.instruction, self.touches = machine, instruction, touches
        self.access = SharedAccess(machine, instruction, operand, 8)
        self.chosen: NDArray[np.bool_] | None = None

    def find(self, group: Group) -> tuple[IntArray, IntArray]:
        machine = self.machine
        lanes, flat, self.chosen = self.access.places(group)
        if self.touches and machine.shadow is not None and len(flat):
            machine.shadow.touch(lanes, flat, 8, self.instruction.index)
        return machine.lane_numbers(lanes), flat

    def per_lane(self, group: Group, values: Any) -> IntArray:
        wide = np.broadcast_to(np.asarray(values), (len(group.slots) * LANES,)).astype(np.int64)
        return wide if self.chosen is None else wide[self.chosen]

    def spread(self, values: NDArray[Any], fill: Any) -> NDArray[Any]:
        if self.chosen is None:
            return values
        spread = np.full(len(self.chosen), fill, values.dtype)
        spread[self.chosen] = values
        return spread


@instruction("mbarrier.init")
def init(machine: Machine, instruction: Instruction) -> Handler:
    """mbarrier.init.shared.b64 [addr], count."""
    use = _Use(machine, instruction, instruction.operands[0], touches=False)
    count = reader(machine, instruction, instruction.operands[1], np.uint32)
    mbarriers = mbarriers_of(machine)

    def run(group: Group) -> None:
        lanes, flat = use.find(group)
        if machine.shadow is not None and len(flat):
            machine.shadow.write(lanes, flat, 8, instruction.index)
        mbarriers.init(lanes, flat, use.per_lane(group, count(group)))

    return run


@instruction("mbarrier.inval")
def invalidate(machine: Machine, instruction: Instruction) -> Handler:
    """mbarrier.inval.shared.b64 [addr]."""
    use = _Use(machine, instruction, instruction.operands[0])
    mbarriers = mbarriers_of(machine)

    def run(group: Group) -> None:
        lanes, flat = use.find(group)
        for address, some in mbarriers.at_addresses(lanes, flat):
            ctas = machine.cta_of_lane[lanes[some]]
            mbarrier = mbarriers.get(address, ctas, instruction)
            if mbarrier is not None:
                mbarrier.live[ctas] = False

    return run


@instruction("mbarrier.arrive")
def arrive(machine: Machine, instruction: Instruction) -> Handler:
    """mbarrier.arrive{.expect_tx}{.release}{.cta}.shared{::cta}.b64 state, [addr]{, count or bytes}."""
    known = {"arrive", "release", "relaxed", "cta", "shared", "shared::cta", "b64", "expect_tx"}
    if set(instruction.modifiers) - known:
        raise UnknownInstructionError(f"{instruction.text}: this form of mbarrier.arrive is not modelled")
    expects = "expect_tx" in instruction.parts
    state, operand, *more = instruction.operands
    use = _Use(machine, instruction, operand)
    number = reader(machine, instruction, more[0] if more else Immediate(1), np.uint32)
    write = writer(machine, instruction, state, np.uint64)
    mbarriers = mbarriers_of(machine)

    def run(group: Group) -> None:
        lanes, flat = use.find(group)
        if not len(lanes):
            return
        given = use.per_lane(group, number(group))
        if state is not None:
            phases = np.zeros(len(lanes), np.uint64)
            for address, some in mbarriers.at_addresses(lanes, flat):
                ctas = machine.cta_of_lane[lanes[some]]
                mbarrier = mbarriers.get(address, ctas, instruction)
                if mbarrier is not None:
                    phases[some] = mbarrier.phases[ctas]
            write(group, use.spread(phases, 0))
        if expects:
            mbarriers.expect_bytes(lanes, flat, given, instruction)
        mbarriers.arrive(lanes, flat, np.ones_like(given) if expects else given, instruction)

    return run


@instruction("mbarrier.expect_tx")
def expect_bytes(machine: Machine, instruction: Instruction) -> Handler:
    """mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [addr], bytes."""
    use = _Use(machine, instruction, instruction.operands[0])
    number = reader(machine, instruction, instruction.operands[1], np.uint32)
    mbarriers = mbarriers_of(machine)

    def run(group: Group) -> None:
        lanes, flat = use.find(group)
        mbarriers.expect_bytes(lanes, flat, use.per_lane(group, number(group)), instruction)

    return run


@control("mbarrier.test_wait", "mbarrier.try_wait")
def test_wait(machine: Machine, instruction: Instruction) -> Control:
    """mbarrier.{test,try}_wait{.parity}....b64 p, [addr], parity or state{, time}: whether the phase is complete.

    A completed phase may be seen late: where races are looked for, the first poll always fails, so that a kernel that
    goes on without having waited is found under every schedule.
    """
    known = {"test_wait", "try_wait", "parity", "acquire", "relaxed", "cta", "shared", "shared::cta", "b64"}
    if set(instruction.modifiers) - known or instruction.guard is not None:
        raise UnknownInstructionError(f"{instruction.text}: this form of mbarrier wait is not modelled")
    parity = "parity" in instruction.parts
    target, operand, which, *_ = instruction.operands
    use = _Use(machine, instruction, operand)
    wanted = reader(machine, instruction, which, np.uint32 if parity else np.uint64)
    write = writer(machine, instruction, target, bool)
    mbarriers = mbarriers_of(machine)

    def run(group: Group) -> list[Group]:
        lanes, flat = use.find(group)
        phase = use.per_lane(group, wanted(group))
        done = np.zeros(len(lanes), bool)
        if machine.clocks is not None and group.polled != instruction.index:
            group.polled = instruction.index
            write(group, np.zeros(len(group.slots) * LANES, bool))
            return go_on(machine, group, instruction.index + 1)
        group.polled = -1
        for address, some in mbarriers.at_addresses(lanes, flat):
            ctas = machine.cta_of_lane[lanes[some]]
            mbarrier = mbarriers.get(address, ctas, instruction)
            if mbarrier is None:
                done[some] = True
                continue
            now = mbarrier.phases[ctas]
            done[some] = (now & 1) != (phase[some] & 1) if parity else now > phase[some]
            if mbarrier.gate is not None and done[some].any():
                mbarrier.gate.wait(*by_slot(lanes[some][done[some]]))
        spread = use.spread(done, True)  # a wait at a wrong address is a finding already
        write(group, spread)
        if done.all():
            return go_on(machine, group, instruction.index + 1)
        return _stall(machine, group, spread, instruction.index + 1)

    return run


def _stall(machine: Machine, group: Group, done: Any, pc: int) -> list[Group]:
    """Warps with a lane that found its phase incomplete go on when something has happened."""
    rows = done.reshape(-1, LANES)
    here = group.rows()
    waits = (here & ~rows).any(axis=1)
    groups: list[Group] = []
    if (~waits).any():
        groups += go_on(machine, group.part(~waits), pc)
    for waiting in go_on(machine, group.part(waits), pc):
        again = group.stalled + 1 if group.seen == machine.events else 1
        waiting.stalled, waiting.seen = again, machine.events
        groups.append(waiting)
    return groups
