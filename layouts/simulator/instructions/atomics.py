"""atom and red, on global and shared memory, and fences. Lanes of one instruction take effect one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from layouts.simulator.access import GlobalAccess, SharedAccess
from layouts.simulator.errors import UnknownInstructionError
from layouts.simulator.group import Group
from layouts.simulator.instructions.elementwise import numpy_type
from layouts.simulator.instructions.formats import flush
from layouts.simulator.instructions.machine_code import Handler, instruction
from layouts.simulator.memory import AddressError
from layouts.simulator.operands import reader, writer
from layouts.simulator.ptx import Instruction

if TYPE_CHECKING:
    from layouts.simulator.machine import Machine

_ORDERS = {"relaxed", "acquire", "release", "acq_rel", "cta", "gpu", "sys", "noftz"}


def _flushed_sum(old: Any, b: Any, c: Any) -> Any:
    """Sums of float32 in global memory: subnormal sources and results become zeros."""
    return flush(flush(old) + flush(b))


_CHANGES: dict[str, Any] = {
    "add": lambda old, b, c: old + b,
    "min": lambda old, b, c: min(old, b),
    "max": lambda old, b, c: max(old, b),
    "and": lambda old, b, c: old & b,
    "or": lambda old, b, c: old | b,
    "xor": lambda old, b, c: old ^ b,
    "exch": lambda old, b, c: b,
    "cas": lambda old, b, c: c if old == b else old,
    "inc": lambda old, b, c: old + old.dtype.type(1) if old < b else old.dtype.type(0),
    "dec": lambda old, b, c: b if old == 0 or old > b else old - old.dtype.type(1),
}


@instruction("atom", "red")
def atomic(machine: Machine, instruction: Instruction) -> Handler:
    """atom.{order}.{scope}.space.op.type d, [a], b{, c}; red without d."""
    parts = instruction.modifiers
    space = next((part.split("::")[0] for part in parts if part.split("::")[0] in ("global", "shared")), None)
    change = next((part for part in parts if part in _CHANGES), None)
    rest = set(parts[:-1]) - _ORDERS - {change, "global", "shared", "shared::cta"}
    kind = parts[-1]
    if rest or space is None or change is None or kind not in ("b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64"):
        raise UnknownInstructionError(f"{instruction.text}: this form of {instruction.base} is not modelled")
    dtype = numpy_type(kind)
    target, address, *values = instruction.operands if instruction.base == "atom" else (None, *instruction.operands)
    write = writer(machine, instruction, target, dtype)
    reads = [reader(machine, instruction, value, dtype) for value in values]
    apply = _flushed_sum if (change, kind, space) == ("add", "f32", "global") else _CHANGES[change]
    locate = (_shared_cells if space == "shared" else _global_cells)(machine, instruction, address, dtype)

    def run(group: Group) -> None:
        places = np.flatnonzero(np.ones(len(group.slots) * 32, bool) if group.active is None else group.active)
        operands = [np.broadcast_to(read(group), (len(group.slots) * 32,)) for read in reads]
        before = np.zeros(len(group.slots) * 32, dtype)
        for place, (cells, index) in zip(places.tolist(), locate(group), strict=True):
            if cells is None:
                continue
            before[place] = cells[index]
            given = [operand[place] for operand in operands]
            cells[index] = apply(cells[index], given[0], given[1] if len(given) > 1 else None)
        write(group, before)
        machine.events += 1

    return run


def _shared_cells(machine: Machine, instruction: Instruction, operand: Any, dtype: np.dtype) -> Any:
    access = SharedAccess(machine, instruction, operand, dtype.itemsize)
    cells = machine.shared.units[dtype.itemsize].view(dtype)

    def locate(group: Group) -> list[Any]:
        lanes, flat, active = access.places(group)
        access.count(group, flat, active)
        if machine.shadow is not None and len(flat):
            machine.shadow.atomic(lanes, flat, dtype.itemsize, instruction.index)
        found = [(cells, place) for place in (flat // dtype.itemsize).tolist()]
        if active is None:
            return found
        right = iter(found)
        taking_part = active if group.active is None else active[group.active]
        return [next(right) if good else (None, 0) for good in taking_part.tolist()]

    return locate


def _global_cells(machine: Machine, instruction: Instruction, operand: Any, dtype: np.dtype) -> Any:
    access = GlobalAccess(machine, instruction, operand, dtype.itemsize, 1)

    def locate(group: Group) -> list[Any]:
        address = access.addresses(group)
        access.count(address, group.active)
        chosen = address if group.active is None else address[group.active]
        if machine.global_shadow is not None:
            lanes, width = group.lane_numbers(), dtype.itemsize
            machine.global_shadow.synchronise(lanes, chosen, width, access.order, reads=True, writes=True)
        found: list[Any] = []
        for lane, each in zip(group.lane_numbers(), chosen, strict=True):
            try:
                segment, _ = machine.memory.locate(np.array([each]), dtype.itemsize)[0]
                cells = segment.units[dtype.itemsize].view(dtype)
                found.append((cells, int(each - segment.base) // dtype.itemsize))
            except AddressError as error:
                machine.address_error(instruction, np.array([lane]), error)
                found.append((None, 0))
        return found

    return locate


@instruction("fence", "membar")
def fence(machine: Machine, instruction: Instruction) -> Handler:
    """Fences. Memory is sequentially consistent here; they change what the checkers know."""
    clocks, shadow = machine.clocks, machine.global_shadow
    if clocks is None or shadow is None:
        return lambda group: None
    if instruction.parts[1:3] == ("proxy", "async"):
        return lambda group: clocks.fence_proxy_async(group.slots)
    if {"gl", "gpu", "sys"} & set(instruction.parts):
        return lambda group: shadow.fence(group.slots)
    return lambda group: None
