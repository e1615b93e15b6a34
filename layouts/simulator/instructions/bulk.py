"""Bulk copies (TMA): tiles of tensors, and runs of bytes, between global and shared memory.

Loads complete an mbarrier's bytes, as late as the program allows; stores read shared memory until they are waited for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from layouts.simulator.access import SharedAccess, address_reader
from layouts.simulator.errors import UnknownInstructionError
from layouts.simulator.group import LANES, Group, by_slot
from layouts.simulator.instructions.barriers import mbarriers_of
from layouts.simulator.instructions.machine_code import Handler, instruction
from layouts.simulator.machine import PARAMETER_SPACE
from layouts.simulator.memory import AddressError
from layouts.simulator.operands import reader
from layouts.simulator.ptx import Address, Instruction
from layouts.simulator.tensor import (
    TENSOR_MAP_BYTES,
    TensorMap,
    Transfer,
    bulk_transfer,
    decode_tensor_map,
    tile_transfer,
)

if TYPE_CHECKING:
    from layouts.simulator.machine import Machine

IntArray = NDArray[np.int64]
CHUNK = 16  # bytes: the unit in which the checker follows bulk copies

_LOAD = re.compile(r"cp\.async\.bulk(?:\.tensor\.[1-5]d)?\.shared::(?:cta|cluster)\.global(?:\.tile)?"
                   r"\.mbarrier::complete_tx::bytes(?:\.L2::cache_hint)?")  # fmt: skip
_STORE = re.compile(
    r"cp\.async\.bulk(?:\.tensor\.[1-5]d)?\.global\.shared::cta(?:\.tile)?\.bulk_group(?:\.L2::cache_hint)?"
)


class _Side:
    """Where a bulk copy finds its global side: a tensor map and coordinates, or an address and a size."""

    def __init__(self, machine: Machine, instruction: Instruction, operand: Any, size: Any):
        self.machine, self.instruction = machine, instruction
        self.address = address_reader(machine, instruction, operand, shared=False)
        self.is_tensor = ".tensor." in instruction.opcode
        coordinates = operand.coordinates if isinstance(operand, Address) else ()
        self.coordinates = [reader(machine, instruction, each, np.int32) for each in coordinates]
        self.size = reader(machine, instruction, size, np.uint32) if size is not None else None

    def transfer(self, group: Group, shared: IntArray) -> tuple[Transfer, IntArray]:
        """What the copies of the lanes that take part move, and how many bytes each reports."""
        places = np.flatnonzero(np.ones(len(group.slots) * LANES, bool) if group.active is None else group.active)
        address = self.address(group)[places]
        if not self.is_tensor:
            assert self.size is not None
            sizes = np.broadcast_to(self.size(group), (len(group.slots) * LANES,))[places].astype(np.int64)
            return bulk_transfer(address, shared, sizes), sizes
        maps = np.unique(address)
        if len(maps) != 1:
            raise UnknownInstructionError(f"{self.instruction.text}: lanes of a group use different tensor maps")
        tensor_map = self._tensor_map(int(maps[0]))
        wide = (len(group.slots) * LANES,)
        corners = np.stack([np.broadcast_to(read(group), wide)[places] for read in self.coordinates], axis=1)
        return tile_transfer(tensor_map, corners, shared), np.full(len(places), tensor_map.box_bytes)

    def _tensor_map(self, address: int) -> TensorMap:
        if address >= PARAMETER_SPACE:
            start = address - PARAMETER_SPACE
            return decode_tensor_map(self.machine.parameters[start : start + TENSOR_MAP_BYTES])
        raw = self.machine.memory.load(np.array([address]), 1, TENSOR_MAP_BYTES)
        return decode_tensor_map(raw.tobytes())


@dataclass
class _Chunks:
    """The 16-byte chunks of shared memory that copies touch: of each the lane that issued its copy, its flat place."""

    lanes: IntArray
    flat: IntArray


def _chunks(transfer: Transfer, lanes: IntArray, base: IntArray) -> _Chunks:
    keys = np.unique(transfer.copies * (1 << 40) + transfer.shared_addresses // CHUNK)
    copies, chunk = keys >> 40, keys & ((1 << 40) - 1)
    return _Chunks(lanes[copies], chunk * CHUNK + base[copies])


def _agent(machine: Machine) -> IntArray:
    """The slots of the agent that carries out bulk copies, by CTA."""
    if "bulk agent" not in machine.state:
        assert machine.clocks is not None
        machine.state["bulk agent"] = machine.clocks.add_agent("bulk copies")
    return machine.state["bulk agent"]


def _issue(machine: Machine, group: Group, lanes: IntArray) -> None:
    """What the issuing threads did happens before the copy."""
    assert machine.clocks is not None
    slots, active = by_slot(lanes)
    machine.clocks.pass_on(slots, np.unique(_agent(machine)[machine.cta_of_lane[lanes]]), giving=active)


@instruction(
    "cp.async.bulk.tensor", "cp.async.bulk.shared::cta", "cp.async.bulk.shared::cluster", "cp.async.bulk.global"
)
def bulk_copy(machine: Machine, instruction: Instruction) -> Handler:
    """cp.async.bulk and cp.async.bulk.tensor, loads and stores of tiles. No multicast, im2col or gather."""
    if _LOAD.fullmatch(instruction.opcode):
        return _load(machine, instruction)
    if _STORE.fullmatch(instruction.opcode):
        return _store(machine, instruction)
    raise UnknownInstructionError(f"{instruction.text}: this form of bulk copy is not modelled")


def _load(machine: Machine, instruction: Instruction) -> Handler:
    target, source, *rest = instruction.operands
    size, barrier = (None, rest[0]) if ".tensor." in instruction.opcode else (rest[0], rest[1])
    near, gate = SharedAccess(machine, instruction, target, CHUNK), SharedAccess(machine, instruction, barrier, 8)
    far = _Side(machine, instruction, source, size)
    mbarriers = mbarriers_of(machine)

    def run(group: Group) -> None:
        found, flat, _ = near.places(group)
        lanes = machine.lane_numbers(found)
        _, flat_barrier, _ = gate.places(group)
        base = machine.shared_base[lanes]
        transfer, reported = far.transfer(group, flat - base)
        chunks = _chunks(transfer, lanes, base)
        data = _gather(machine, instruction, transfer, lanes)
        agent_lanes = None
        if machine.shadow is not None:
            _issue(machine, group, lanes)
            agent_lanes = _agent(machine)[machine.cta_of_lane[chunks.lanes]] * LANES
            machine.shadow.begin_write(agent_lanes, chunks.flat, CHUNK, instruction.index)

        def complete() -> None:
            place = (transfer.shared_addresses + base[transfer.copies]) // transfer.unit_bytes
            _units(machine, transfer.unit_bytes)[place] = data
            agents = None
            if machine.shadow is not None:
                machine.shadow.end_write(agent_lanes, chunks.flat, CHUNK)  # type: ignore[arg-type]
                agents = np.unique(_agent(machine)[machine.cta_of_lane[lanes]])
            mbarriers.complete_bytes(lanes, flat_barrier, reported, instruction, agents)

        machine.delayed.append(complete)

    return run


def _units(machine: Machine, size: int) -> NDArray[Any]:
    """Shared memory as units of a transfer: (units,), or (units, size) bytes where no integer is as wide."""
    return machine.shared.units[size] if size in (1, 2, 4, 8) else machine.shared.data.reshape(-1, size)


def _gather(machine: Machine, instruction: Instruction, transfer: Transfer, lanes: IntArray) -> NDArray[Any]:
    """The units' values; zeros outside of the tensor."""
    size = transfer.unit_bytes
    unit = min(size, 8)
    values = np.zeros((len(transfer.copies), size // unit), f"u{unit}")
    inside = transfer.inside
    try:
        values[inside] = machine.memory.load(transfer.global_addresses[inside], unit, size // unit)
    except AddressError as error:
        machine.address_error(instruction, lanes[transfer.copies[inside]], error)
    counters = machine.counters
    sectors = len(np.unique(transfer.copies[inside] * (1 << 50) + transfer.global_addresses[inside] // 32))
    counters.sectors[instruction.index] += sectors
    counters.ideal_sectors[instruction.index] += -(-int(inside.sum()) * size // 32)
    counters.bytes[instruction.index] += len(transfer.copies) * size
    return values[:, 0] if size in (1, 2, 4, 8) else values.view(np.uint8)


@dataclass
class _Read:
    """A store that may still read shared memory."""

    lanes: IntArray
    chunks: _Chunks
    number: int
    group: IntArray
    write: Any


def _stores(machine: Machine) -> tuple[list[_Read], IntArray]:
    """Stores under way, and how many bulk groups each lane has closed."""
    if "bulk stores" not in machine.state:
        machine.state["bulk stores"] = ([], np.zeros(machine.num_lanes, np.int64))
    return machine.state["bulk stores"]


def _store(machine: Machine, instruction: Instruction) -> Handler:
    target, source, *rest = instruction.operands
    near = SharedAccess(machine, instruction, source, CHUNK)
    far = _Side(machine, instruction, target, None if ".tensor." in instruction.opcode else rest[0])
    flying, closed = _stores(machine)

    def run(group: Group) -> None:
        found, flat, _ = near.places(group)
        lanes = machine.lane_numbers(found)
        base = machine.shared_base[lanes]
        transfer, _ = far.transfer(group, flat - base)
        chunks = _chunks(transfer, lanes, base)
        number = 0
        if machine.shadow is not None:
            _issue(machine, group, lanes)
            agent_lanes = _agent(machine)[machine.cta_of_lane[chunks.lanes]] * LANES
            number = machine.shadow.begin_read(agent_lanes, chunks.flat, CHUNK, instruction.index)

        def write() -> None:
            inside = transfer.inside
            place = (transfer.shared_addresses + base[transfer.copies])[inside] // transfer.unit_bytes
            values = _units(machine, transfer.unit_bytes)[place]
            wide = values.reshape(len(place), -1) if values.ndim > 1 else values[:, None]
            wide = np.ascontiguousarray(wide).view(f"u{min(transfer.unit_bytes, 8)}")
            try:
                machine.memory.store(transfer.global_addresses[inside], wide)
            except AddressError as error:
                machine.address_error(instruction, lanes[transfer.copies[inside]], error)

        flying.append(_Read(lanes, chunks, number, closed[lanes].copy(), write))

    return run


@instruction("cp.async.bulk.commit_group")
def commit(machine: Machine, instruction: Instruction) -> Handler:
    """cp.async.bulk.commit_group: the bulk stores so far are a group."""
    _, closed = _stores(machine)

    def run(group: Group) -> None:
        closed[group.lane_numbers()] += 1

    return run


@instruction("cp.async.bulk.wait_group")
def wait(machine: Machine, instruction: Instruction) -> Handler:
    """cp.async.bulk.wait_group{.read} n: all but the n latest groups of the thread have read (and written)."""
    flying, closed = _stores(machine)
    pending = instruction.operands[0].value  # type: ignore[union-attr]

    def run(group: Group) -> None:
        waiting = np.zeros(machine.num_lanes, bool)
        waiting[group.lane_numbers()] = True
        for read in list(flying):
            done = waiting[read.lanes] & (read.group < closed[read.lanes] - pending)
            if not done.all():
                if done.any():
                    raise UnknownInstructionError(f"{instruction.text}: lanes of one bulk store wait apart")
                continue
            flying.remove(read)
            finish(machine, read)

    return run


def finish(machine: Machine, read: _Read) -> None:
    """A bulk store ends: it reads shared memory at the last moment."""
    read.write()
    if machine.shadow is None or machine.clocks is None:
        return
    agents = _agent(machine)
    agent_lanes = agents[machine.cta_of_lane[read.chunks.lanes]] * LANES
    machine.shadow.end_read(agent_lanes, read.chunks.flat, CHUNK, read.number)
    slots, active = by_slot(read.lanes)
    machine.clocks.pass_on(np.unique(agents[machine.cta_of_lane[read.lanes]]), slots, taking=active)
