"""cp.async: copies from global to shared memory that land as late as the program allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from layouts.simulator.access import GlobalAccess, SharedAccess, by_warp
from layouts.simulator.copy_traffic import copy_traffic
from layouts.simulator.errors import UnknownInstructionError
from layouts.simulator.group import LANES, Group
from layouts.simulator.instructions.machine_code import Handler, instruction
from layouts.simulator.operands import reader
from layouts.simulator.ptx import Address, Immediate, Instruction
from layouts.simulator.traffic import WAVEFRONT_BYTES

if TYPE_CHECKING:
    from layouts.simulator.machine import Machine


@dataclass
class Copy:
    """Copies of one cp.async that have not landed: by entry its lane, place, bytes and group's number; and when it was
    issued, as a number."""

    lanes: NDArray[np.int64]
    flat: NDArray[np.int64]
    data: NDArray[np.uint8]
    group: NDArray[np.int64]
    issued: int

    def split(self, landed: NDArray[np.bool_]) -> tuple[Copy, Copy]:
        first, second = (
            replace(self, lanes=self.lanes[k], flat=self.flat[k], data=self.data[k], group=self.group[k])
            for k in (landed, ~landed)
        )
        return first, second


class Copies:
    """What is under way in a batch; ``committed`` counts each lane's closed groups, ``issued`` the cp.async."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.flying: list[Copy] = []
        self.committed = np.zeros(machine.num_lanes, np.int64)
        self.issued = 0

    def add(self, lanes: NDArray[np.int64], flat: NDArray[np.int64], data: NDArray[np.uint8]) -> None:
        self.flying.append(Copy(lanes, flat, data, self.committed[lanes], self.issued))
        self.issued += 1

    def land(self, is_due: Callable[[Copy], NDArray[np.bool_]], signalled: bool = False) -> None:
        """Copies land.

        Args:
            is_due: says of each entry of a copy whether it lands now.
            signalled: an mbarrier tells of it, not the wait of the lanes themselves.
        """
        still: list[Copy] = []
        for copy in self.flying:
            landed = is_due(copy)
            if landed.all():
                self._write(copy, signalled)
            elif landed.any():
                now, later = copy.split(landed)
                self._write(now, signalled)
                still.append(later)
            else:
                still.append(copy)
        self.flying = still

    def agent(self) -> NDArray[np.int64]:
        """The slots of the agent that completes copies whose end an mbarrier signals, by CTA."""
        state = self.machine.state
        if "copy agent" not in state:
            assert self.machine.clocks is not None
            state["copy agent"] = self.machine.clocks.add_agent("cp.async")
        return state["copy agent"]

    def _write(self, copy: Copy, signalled: bool) -> None:
        machine, width = self.machine, copy.data.shape[1]
        machine.shared.data.reshape(-1, width)[copy.flat // width] = copy.data
        if machine.shadow is not None:
            lanes = self.agent()[machine.cta_of_lane[copy.lanes]] * LANES if signalled else copy.lanes
            machine.shadow.end_write(lanes, copy.flat, width)


def copies_of(machine: Machine) -> Copies:
    if "copies" not in machine.state:
        machine.state["copies"] = Copies(machine)
    return machine.state["copies"]


@instruction("cp.async.ca", "cp.async.cg")
def copy(machine: Machine, instruction: Instruction) -> Handler:
    """cp.async.{ca,cg}.shared.global [dst], [src], size{, src_size}: bytes beyond src_size become zero."""
    known = ("shared", "shared::cta", "global", "L2::cache_hint", "L2::64B", "L2::128B", "L2::256B")
    unknown = [part for part in instruction.parts[3:] if part not in known]
    target, source, size, *more = instruction.operands
    width = size.value if isinstance(size, Immediate) else 0
    hinted = "L2::cache_hint" in instruction.parts
    more = more[:-1] if hinted else more
    allowed = (16,) if instruction.parts[2] == "cg" else (4, 8, 16)
    if unknown or width not in allowed or len(more) > 1:
        raise UnknownInstructionError(f"{instruction.text}: this form of cp.async is not modelled")
    shared = SharedAccess(machine, instruction, target, width)
    unit = min(width, 8)
    far = GlobalAccess(machine, instruction, source, unit, width // unit)
    read_bytes = reader(machine, instruction, more[0], np.uint32) if more else None
    copies = copies_of(machine)

    traffic = _Traffic(machine, instruction, width, bypass=instruction.parts[2] == "cg")

    def run(group: Group) -> None:
        lanes, flat, active = shared.places(group)
        if not len(flat):
            return
        reads = None
        if read_bytes is not None:
            kept = np.broadcast_to(read_bytes(group), (len(group.slots) * LANES,))
            reads = None if (kept == width).all() else kept > 0
        traffic.count((flat, active), far.addresses(group), reads)
        data = far.load(group, counts=False).view(np.uint8) if reads is None else _partial(far, group, kept, width)
        numbers = machine.lane_numbers(lanes)
        if active is not None:
            data = data[active]
        if machine.shadow is not None:
            machine.shadow.begin_write(lanes, flat, width, instruction.index)
        copies.add(numbers, flat, data)

    return run


class _Traffic:
    """Adds the traffic of one instruction's copies to the counters.

    It depends on the places of the copies and, from the first cache line on, their sources; loops come back to the same
    ones, once for each stage of a pipeline.
    """

    KEPT = 4

    def __init__(self, machine: Machine, instruction: Instruction, width: int, bypass: bool):
        self.counters, self.index = machine.counters, instruction.index
        self.width, self.bypass = width, bypass
        self.kept: dict[tuple[bytes, ...], tuple[int, ...]] = {}

    def count(self, places: Any, source: Any, reads: Any) -> None:
        """Args:
        places: the shared addresses of the lanes that take part, and which those are, None for all.
        source: the global addresses of all lanes.
        reads: of all lanes, whether they read anything; None if they do.
        """
        place, active = by_warp(*places)
        source, reads = source.reshape(-1, LANES), None if reads is None else reads.reshape(-1, LANES)
        source = source - source.min(axis=1, keepdims=True) // WAVEFRONT_BYTES * WAVEFRONT_BYTES
        key = tuple(b"" if x is None else x.tobytes() for x in (place, active, source, reads))
        found = self.kept.get(key)
        if found is None:
            shared, far = copy_traffic(place, source, self.width, self.bypass, active, reads)
            if len(self.kept) == self.KEPT:
                self.kept.clear()
            found = self.kept[key] = tuple(int(x.sum()) for x in (*shared, *far))
        counters, index = self.counters, self.index
        counters.wavefronts[index] += found[0]
        counters.ideal_wavefronts[index] += found[1]
        counters.sectors[index] += found[2]
        counters.ideal_sectors[index] += found[3]
        written = len(places[0])
        read = written if reads is None else np.count_nonzero(reads if active is None else reads & active)
        counters.bytes[index] += (written + read) * self.width


def _partial(far: GlobalAccess, group: Group, kept: Any, width: int) -> NDArray[np.uint8]:
    """Lanes with nothing to read touch no memory; the others read what they copy, and zeros follow it."""
    before = group.active
    some = kept > 0 if before is None else before & (kept > 0)
    group.active = some
    data = far.load(group, counts=False).view(np.uint8) if some.any() else np.zeros((len(kept), width), np.uint8)
    group.active = before
    data = data.copy()
    data[np.arange(width) >= kept[:, None]] = 0
    return data


@instruction("cp.async.commit_group")
def commit(machine: Machine, instruction: Instruction) -> Handler:
    """cp.async.commit_group: the copies so far are a group."""
    copies = copies_of(machine)

    def run(group: Group) -> None:
        copies.committed[group.lane_numbers()] += 1

    return run


@instruction("cp.async.wait_group", "cp.async.wait_all")
def wait(machine: Machine, instruction: Instruction) -> Handler:
    """cp.async.wait_group n: all but the n latest groups have landed; wait_all: everything has."""
    copies = copies_of(machine)
    everything = instruction.parts[2] == "wait_all"
    pending = 0 if everything else instruction.operands[0].value  # type: ignore[union-attr]

    def run(group: Group) -> None:
        if not copies.flying:
            return
        waits = np.zeros(machine.num_lanes, bool)
        waits[group.lane_numbers()] = True
        limit = copies.committed + 1 if everything else copies.committed - pending
        copies.land(lambda copy: waits[copy.lanes] & (copy.group < limit[copy.lanes]))

    return run


@instruction("cp.async.mbarrier.arrive")
def signal(machine: Machine, instruction: Instruction) -> Handler:
    """cp.async.mbarrier.arrive[.noinc].shared.b64 [mbarrier]: arrive once the lane's copies so far have landed."""
    from layouts.simulator.instructions.barriers import Mbarriers, mbarriers_of

    address = instruction.operands[0]
    if not isinstance(address, Address):
        raise UnknownInstructionError(f"{instruction.text}: {address} is no address")
    counted = "noinc" not in instruction.parts
    place = SharedAccess(machine, instruction, address, 8)
    copies = copies_of(machine)
    mbarriers: Mbarriers = mbarriers_of(machine)

    def run(group: Group) -> None:
        lanes, flat, _ = place.places(group)
        numbers = machine.lane_numbers(lanes)
        waits = np.zeros(machine.num_lanes, bool)
        waits[numbers] = True
        issued = copies.issued
        if counted:
            mbarriers.expect_more(numbers, flat, instruction)

        def complete() -> None:
            copies.land(lambda copy: waits[copy.lanes] & (copy.issued < issued), signalled=True)
            slots = None if machine.clocks is None else np.unique(copies.agent()[machine.cta_of_lane[numbers]])
            mbarriers.arrive(numbers, flat, np.ones(len(numbers), np.int64), instruction, slots)

        machine.delayed.append(complete)

    return run
