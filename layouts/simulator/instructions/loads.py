"""ld and st of every space: parameters, shared, global and local memory, and generic addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from layouts.simulator.access import GlobalAccess, SharedAccess, address_reader
from layouts.simulator.errors import UnknownInstructionError
from layouts.simulator.group import LANES, Group
from layouts.simulator.instructions.machine_code import Handler, instruction
from layouts.simulator.instructions.movement import GENERIC_SHARED
from layouts.simulator.operands import items, reader, writer
from layouts.simulator.ptx import Address, Instruction, Symbol

if TYPE_CHECKING:
    from layouts.simulator.machine import Machine

_TYPES = {f"{letter}{bits}": (letter, bits // 8) for letter in "busf" for bits in (8, 16, 32, 64)}
_IGNORED = {"volatile", "relaxed", "acquire", "release", "weak", "nc", "ca", "cg", "cs", "cv", "wb", "wt", "lu"}
_SCOPES = {"cta", "gpu", "sys", "cluster"}
_HINTS = ("L1::", "L2::")


class _Form:
    """An ld or st: ``space``, element ``size`` in bytes, ``count`` of elements, ``signed``."""

    def __init__(self, instruction: Instruction):
        self.space, self.count, kind = "generic", 1, None
        self.semantics: set[str] = set()
        for part in instruction.modifiers:
            if part.split("::")[0] in ("global", "shared", "local", "param"):
                self.space = part.split("::")[0]
            elif part in ("v2", "v4", "v8"):
                self.count = int(part[1:])
            elif part in _TYPES:
                kind = part
            elif part in _IGNORED | _SCOPES or part.startswith(_HINTS):
                self.semantics.add(part)
            else:
                raise UnknownInstructionError(f"{instruction.text}: .{part} is not modelled here")
        if kind is None:
            raise UnknownInstructionError(f"{instruction.text}: it has no type")
        letter, self.size = _TYPES[kind]
        self.dtype = np.dtype(f"{'i' if letter == 's' else 'u'}{self.size}")

    @property
    def width(self) -> int:
        return self.size * self.count


@instruction("ld", "ldu")
def load(machine: Machine, instruction: Instruction) -> Handler:
    """ld.space.vec.type."""
    form = _Form(instruction)
    target, address = instruction.operands[:2]
    writes = [writer(machine, instruction, part, form.dtype) for part in items(target)]
    if form.space == "param":
        return _load_parameter(machine, instruction, form, writes)
    if form.space == "local":
        return _load_local(machine, instruction, form, writes)
    values = {"shared": _shared_loader, "global": _global_loader}.get(form.space, _generic_loader)(
        machine, instruction, form, address
    )

    def run(group: Group) -> None:
        loaded = values(group).view(form.dtype)
        for i, write in enumerate(writes):
            write(group, loaded[:, i])

    return run


def _load_parameter(machine: Machine, instruction: Instruction, form: _Form, writes: list) -> Handler:
    address = instruction.operands[1]
    if not isinstance(address, Address) or not isinstance(address.base, Symbol):
        raise UnknownInstructionError(f"{instruction.text}: parameters are read at fixed places only")
    offset = next((p.offset for p in machine.kernel.parameters if p.name == address.base.name), None)
    if offset is None:
        raise UnknownInstructionError(f"{instruction.text}: {address.base.name} is no parameter")
    raw = machine.parameters[offset + address.offset : offset + address.offset + form.width]
    values = np.frombuffer(raw, form.dtype, form.count)

    def run(group: Group) -> None:
        for write, value in zip(writes, values, strict=True):
            write(group, value)

    return run


def _load_local(machine: Machine, instruction: Instruction, form: _Form, writes: list) -> Handler:
    addresses = address_reader(machine, instruction, instruction.operands[1], shared=False)

    def run(group: Group) -> None:
        lanes = np.arange(machine.num_lanes)[group.lanes]
        places = _local_places(machine, instruction, group, addresses(group), form.width)
        values = machine.local[lanes[:, None], places].view(form.dtype)
        for i, write in enumerate(writes):
            write(group, values[:, i])

    return run


def _local_places(machine: Machine, instruction: Instruction, group: Group, address: Any, width: int) -> Any:
    outside = (address < 0) | (address + width > machine.local.shape[1])
    for kind, wrong, what in (
        ("out_of_bounds", outside, f"is not in the thread's {machine.local.shape[1]} bytes"),
        ("misaligned", ~outside & (address & (width - 1) != 0), f"is not a multiple of {width}"),
    ):
        wrong = wrong if group.active is None else wrong & group.active
        if wrong.any():
            position = int(np.flatnonzero(wrong)[0])
            name = machine.lane_name(int(group.slots[position // LANES]) * LANES + position % LANES)
            text = f"{name}: {instruction.text}: local address {int(address[position]):#x} {what}"
            machine.find(kind, text, instruction, int(wrong.sum()))
    return np.clip(address, 0, machine.local.shape[1] - width)[:, None] + np.arange(width)


def _shared_loader(machine: Machine, instruction: Instruction, form: _Form, operand: Any) -> Any:
    access = SharedAccess(machine, instruction, operand, form.width)
    units, steps = machine.shared.units[form.size], np.arange(form.count)

    def values(group: Group) -> Any:
        lanes, flat, active = access.places(group)
        access.count(group, flat, active, loads=True)
        if machine.shadow is not None and len(flat):
            machine.shadow.read(lanes, flat, min(form.width, 16), instruction.index)
        loaded = units[(flat // form.size)[:, None] + steps]
        if active is None:
            return loaded
        spread = np.zeros((len(active), form.count), loaded.dtype)
        spread[active] = loaded
        return spread

    return values


def _global_loader(machine: Machine, instruction: Instruction, form: _Form, operand: Any) -> Any:
    return GlobalAccess(machine, instruction, operand, form.size, form.count).load


def _generic_loader(machine: Machine, instruction: Instruction, form: _Form, operand: Any) -> Any:
    of_shared = _shared_loader(machine, instruction, form, operand)
    of_global = _global_loader(machine, instruction, form, operand)
    return lambda group: (of_shared if _is_shared(machine, instruction, operand, group) else of_global)(group)


def _is_shared(machine: Machine, instruction: Instruction, operand: Any, group: Group) -> bool:
    address = address_reader(machine, instruction, operand, shared=False)(group)
    chosen = address if group.active is None else address[group.active]
    if (chosen >= GENERIC_SHARED).any():
        raise UnknownInstructionError(f"{instruction.text}: generic addresses of shared memory are not modelled")
    return False


@instruction("st")
def store(machine: Machine, instruction: Instruction) -> Handler:
    """st.space.vec.type."""
    form = _Form(instruction)
    address, source = instruction.operands[:2]
    dtype = np.dtype(f"u{form.size}")
    reads = [reader(machine, instruction, part, dtype) for part in items(source)]

    def values(group: Group) -> Any:
        stored = np.empty((len(group.slots) * LANES, form.count), dtype)
        for i, read in enumerate(reads):
            stored[:, i] = read(group)
        return stored

    if form.space == "local":
        addresses = address_reader(machine, instruction, address, shared=False)

        def store_local(group: Group) -> None:
            lanes = np.arange(machine.num_lanes)[group.lanes]
            places = _local_places(machine, instruction, group, addresses(group), form.width)
            raw = values(group).view(np.uint8)
            keep = slice(None) if group.active is None else group.active
            machine.local[lanes[keep][:, None], places[keep]] = raw[keep]

        return store_local
    if form.space == "shared":
        return _store_shared(machine, instruction, form, values)
    access = GlobalAccess(machine, instruction, address, form.size, form.count)

    def store_global(group: Group) -> None:
        if form.space == "generic":
            _is_shared(machine, instruction, address, group)
        access.store(group, values(group))
        machine.events += 1

    return store_global


def _store_shared(machine: Machine, instruction: Instruction, form: _Form, values: Any) -> Handler:
    access = SharedAccess(machine, instruction, instruction.operands[0], form.width)
    units, steps = machine.shared.units[form.size], np.arange(form.count)

    def run(group: Group) -> None:
        lanes, flat, active = access.places(group)
        if not len(flat):
            return
        access.count(group, flat, active)
        if machine.shadow is not None:
            machine.shadow.write(lanes, flat, min(form.width, 16), instruction.index)
        stored = values(group)
        units[(flat // form.size)[:, None] + steps] = stored if active is None else stored[active]
        machine.events += 1

    return run
