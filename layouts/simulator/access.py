"""Accesses of a group to shared and global memory: addresses to bytes, checked and counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from layouts.simulator import traffic
from layouts.simulator.errors import UnknownInstructionError
from layouts.simulator.global_shadow import Order
from layouts.simulator.group import LANES, Group
from layouts.simulator.memory import AddressError
from layouts.simulator.operands import reader
from layouts.simulator.ptx import Address, Instruction, Operand, Symbol

if TYPE_CHECKING:
    from layouts.simulator.machine import Machine

IntArray = NDArray[np.int64]


def address_reader(
    machine: Machine, instruction: Instruction, operand: Operand, shared: bool
) -> Callable[[Group], Any]:
    """The addresses of the group's lanes, (n,) int64: in the CTA's window, or global."""
    if not isinstance(operand, Address):
        raise UnknownInstructionError(f"{instruction.text}: {operand} is no address")
    offset = operand.offset
    if operand.base is None or isinstance(operand.base, Symbol):
        base = machine.address_of(operand.base.name) if operand.base is not None else 0
        if base is None:
            raise UnknownInstructionError(f"{instruction.text}: the variable {operand.base} is not modelled")
        fixed = base + offset
        return lambda group: np.full(len(group.slots) * LANES, fixed, np.int64)
    if shared and operand.base.kind == "b32":
        # Compilers rely on the sum's wrapping around: a register below zero, and an offset that brings it back.
        read, added = reader(machine, instruction, operand.base, np.uint32), np.uint32(offset & 0xFFFFFFFF)
        return lambda group: (np.broadcast_to(read(group), (len(group.slots) * LANES,)) + added).astype(np.int64)
    read = reader(machine, instruction, operand.base, np.int64)
    return lambda group: np.broadcast_to(read(group), (len(group.slots) * LANES,)).astype(np.int64) + offset


def by_warp(flat: IntArray, active: NDArray[np.bool_] | None) -> tuple[IntArray, NDArray[np.bool_] | None]:
    """Addresses of active lanes as (warps, 32), and which lanes those are, None for all."""
    if active is None:
        return flat.reshape(-1, LANES), None
    spread = np.zeros(len(active), np.int64)
    spread[active] = flat
    return spread.reshape(-1, LANES), active.reshape(-1, LANES)


def order_of(instruction: Instruction) -> Order:
    """By the modifiers of a load, a store or an atomic. Those of a scope within the CTA order nothing beyond it."""
    parts = {*instruction.modifiers}
    wide = "cta" not in parts
    acquires, releases = (wide and bool(parts & {each, "acq_rel"}) for each in ("acquire", "release"))
    return Order(acquires or releases or bool(parts & {"relaxed", "volatile"}), acquires, releases)


class SharedAccess:
    """How an instruction accesses shared memory: finds the bytes, checks and counts."""

    def __init__(self, machine: Machine, instruction: Instruction, operand: Operand, width: int):
        self.machine, self.instruction, self.width = machine, instruction, width
        self.addresses = address_reader(machine, instruction, operand, shared=True)

    def places(self, group: Group) -> tuple[Any, IntArray, NDArray[np.bool_] | None]:
        """Of the lanes that take part, and whose address is right: lanes (a slice if all), flat byte indices; and of
        all the group's lanes which those are, None for all."""
        address = self.addresses(group)
        active = group.active
        machine = self.machine
        wrong = (address < 0) | (address + self.width > machine.smem_size) | (address & (self.width - 1) != 0)
        if active is not None:
            wrong &= active
        if wrong.any():
            self.complain(group, address, wrong)
            active = ~wrong if active is None else active & ~wrong
        if active is None:
            return group.lanes, address + machine.shared_base[group.lanes], None
        lanes = (group.slots[:, None] * LANES + np.arange(LANES)).ravel()[active]
        return lanes, address[active] + machine.shared_base[lanes], active

    def count(self, group: Group, flat: IntArray, active: NDArray[np.bool_] | None, loads: bool = False) -> None:
        """Add the wavefronts of an access of the whole group."""
        counters, index = self.machine.counters, self.instruction.index
        address, mask = by_warp(flat, active)
        wavefronts, ideal = traffic.shared_wavefronts(address, self.width, mask, merges=loads)
        counters.wavefronts[index] += wavefronts.sum()
        counters.ideal_wavefronts[index] += ideal.sum()
        counters.bytes[index] += len(flat) * self.width

    def complain(self, group: Group, address: IntArray, wrong: NDArray[np.bool_]) -> None:
        machine = self.machine
        position = int(np.flatnonzero(wrong)[0])
        value = int(address[position])
        inside = value >= 0 and value + self.width <= machine.smem_size
        kind = "misaligned" if inside else "out_of_bounds"
        what = f"is not a multiple of {self.width}" if inside else f"is not in the block's {machine.smem_size} bytes"
        lane = int(group.slots[position // LANES]) * LANES + position % LANES
        text = f"{machine.lane_name(lane)}: {self.instruction.text}: shared address {value:#x} {what}"
        machine.find(kind, text, self.instruction, int(wrong.sum()))


class GlobalAccess:
    """How an instruction accesses global memory."""

    def __init__(self, machine: Machine, instruction: Instruction, operand: Operand, size: int, count: int):
        self.machine, self.instruction = machine, instruction
        self.order = order_of(instruction)
        self.size, self.num = size, count
        self.width = size * count
        self.addresses = address_reader(machine, instruction, operand, shared=False)

    def load(self, group: Group, counts: bool = True) -> NDArray[Any]:
        """(lanes of the group, count) elements; zeros for lanes that take no part or whose address is wrong.

        Args:
            counts: add the access's sectors.
        """
        address, active = self.addresses(group), group.active
        if counts:
            self.count(address, active)
        chosen = address if active is None else address[active]
        lanes = group.lane_numbers()
        values = self._load(chosen, lanes)
        if active is None:
            return values
        spread = np.zeros((len(address), self.num), values.dtype)
        spread[active] = values
        return spread

    def _load(self, address: IntArray, lanes: IntArray) -> NDArray[Any]:
        try:
            values = self.machine.memory.load(address, self.size, self.num)
            self._check(address, lanes, stores=False)
            return values
        except AddressError as error:
            self.machine.address_error(self.instruction, lanes, error)
            good = self._good(address)
            values = np.full((len(address), self.num), 0xFF, np.uint8).astype(f"u{self.size}")
            values[...] = np.iinfo(values.dtype).max  # NaN in every format
            if good.any():
                values[good] = self.machine.memory.load(address[good], self.size, self.num)
            return values

    def store(self, group: Group, values: NDArray[Any]) -> None:
        """Store (lanes of the group, count) elements of the lanes that take part."""
        address, active = self.addresses(group), group.active
        self.count(address, active)
        if active is not None:
            address, values = address[active], values[active]
        try:
            self.machine.memory.store(address, values)
            self._check(address, group.lane_numbers(), stores=True)
        except AddressError as error:
            self.machine.address_error(self.instruction, group.lane_numbers(), error)
            good = self._good(address)
            if good.any():
                self.machine.memory.store(address[good], values[good])

    def _check(self, address: IntArray, lanes: IntArray, stores: bool) -> None:
        """Look for races, all addresses being right."""
        machine, shadow = self.machine, self.machine.global_shadow
        if shadow is None or not len(address):
            return
        if self.order.strong:
            shadow.synchronise(lanes, address, self.width, self.order, reads=not stores, writes=stores)
            if stores:
                return
        if stores:
            what, conflicts = "write", shadow.write(lanes, address, self.width, self.instruction.index)
        else:
            what, conflicts = "read", shadow.read(lanes, address, self.width)
        for conflict in conflicts:
            machine.global_race(self.instruction, what, int(lanes[conflict.position]), conflict)

    def _good(self, address: IntArray) -> NDArray[np.bool_]:
        good = np.zeros(len(address), bool)
        for i in range(len(address)):
            try:
                self.machine.memory.locate(address[i : i + 1], self.width)
                good[i] = True
            except AddressError:
                pass
        return good

    def count(self, address: IntArray, active: NDArray[np.bool_] | None) -> None:
        """Add the sectors of an access of the whole group."""
        counters, index = self.machine.counters, self.instruction.index
        mask = None if active is None else active.reshape(-1, LANES)
        sectors, ideal = traffic.global_sectors(address.reshape(-1, LANES), self.width, mask)
        counters.sectors[index] += sectors.sum()
        counters.ideal_sectors[index] += ideal.sum()
        counters.bytes[index] += (len(address) if active is None else int(active.sum())) * self.width
