"""Moves between registers: mov, cvta, and what needs no model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from layouts.simulator.errors import UnknownInstructionError
from layouts.simulator.group import Group
from layouts.simulator.instructions.machine_code import Handler, instruction
from layouts.simulator.operands import items, reader, writer
from layouts.simulator.ptx import Instruction, Vector

if TYPE_CHECKING:
    from layouts.simulator.machine import Machine

_BITS = {f"{letter}{bits}": bits for letter in "busf" for bits in (16, 32, 64)} | {"pred": 1}

GENERIC_SHARED = 1 << 56  # where shared and local windows lie among generic addresses
GENERIC_LOCAL = 1 << 57


@instruction("mov")
def move(machine: Machine, instruction: Instruction) -> Handler:
    """mov, packing and unpacking of vectors among them."""
    if len(instruction.parts) != 2 or instruction.parts[1] not in _BITS:
        raise UnknownInstructionError(f"{instruction.text}: this form of mov is not modelled")
    bits = _BITS[instruction.parts[1]]
    target, source = instruction.operands
    if isinstance(source, Vector):
        return _pack(machine, instruction, bits)
    if isinstance(target, Vector):
        return _unpack(machine, instruction, bits)
    dtype = np.dtype(bool) if bits == 1 else np.dtype(f"u{bits // 8}")
    read, write = reader(machine, instruction, source, dtype), writer(machine, instruction, target, dtype)
    return lambda group: write(group, read(group))


def _pack(machine: Machine, instruction: Instruction, bits: int) -> Handler:
    target, source = instruction.operands
    parts = items(source)
    part_bits = bits // len(parts)
    whole = np.dtype(f"u{bits // 8}")
    reads = [reader(machine, instruction, part, f"u{part_bits // 8}") for part in parts]
    write = writer(machine, instruction, target, whole)

    def run(group: Group) -> None:
        value = np.asarray(reads[0](group)).astype(whole)
        for i, read in enumerate(reads[1:], 1):
            value = value | (np.asarray(read(group)).astype(whole) << whole.type(i * part_bits))
        write(group, value)

    return run


def _unpack(machine: Machine, instruction: Instruction, bits: int) -> Handler:
    target, source = instruction.operands
    parts = items(target)
    part_bits = bits // len(parts)
    whole, narrow = np.dtype(f"u{bits // 8}"), np.dtype(f"u{part_bits // 8}")
    read = reader(machine, instruction, source, whole)
    writes = [writer(machine, instruction, part, narrow) for part in parts]

    def run(group: Group) -> None:
        value = np.asarray(read(group))
        for i, write in enumerate(writes):
            write(group, (value >> whole.type(i * part_bits)).astype(narrow))

    return run


@instruction("cvta")
def convert_address(machine: Machine, instruction: Instruction) -> Handler:
    """cvta[.to].space.u64: between the address of a space and the generic one."""
    to_space = instruction.parts[1] == "to"
    space = instruction.parts[2 if to_space else 1].split("::")[0]
    if instruction.parts[-1] != "u64" or space not in ("global", "shared", "local", "param"):
        raise UnknownInstructionError(f"{instruction.text}: this form of cvta is not modelled")
    base = np.uint64({"shared": GENERIC_SHARED, "local": GENERIC_LOCAL}.get(space, 0))
    target, source = instruction.operands
    read, write = reader(machine, instruction, source, np.uint64), writer(machine, instruction, target, np.uint64)
    if to_space:
        return lambda group: write(group, read(group) - base)
    return lambda group: write(group, read(group) + base)


@instruction(
    "setmaxnreg", "nanosleep", "prefetch", "prefetchu", "applypriority", "discard", "pmevent", "griddepcontrol"
)
def no_effect(machine: Machine, instruction: Instruction) -> Handler:
    """Hints, and waits for what is always done here: the kernels before this one."""
    return lambda group: None
