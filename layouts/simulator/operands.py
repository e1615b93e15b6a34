"""Operands to functions: how an instruction reads its sources and writes its destinations for a group of warps."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from layouts.simulator.errors import UnknownInstructionError
from layouts.simulator.group import Group
from layouts.simulator.ptx import Immediate, Instruction, Negated, Operand, Register, Special, Symbol, Vector

if TYPE_CHECKING:
    from layouts.simulator.machine import Machine

Read = Callable[[Group], Any]
Write = Callable[[Group, Any], None]

RAW = {"pred": np.dtype(bool), "b16": np.dtype(np.uint16), "b32": np.dtype(np.uint32), "b64": np.dtype(np.uint64)}


def reader(machine: Machine, instruction: Instruction, operand: Operand, dtype: Any) -> Read:
    """The operand's values as ``dtype``: (lanes of the group,), or a scalar. Wider registers are cut."""
    dtype = np.dtype(dtype)
    if isinstance(operand, Register):
        row = machine.row(operand)
        if row.dtype.itemsize == dtype.itemsize and (row.dtype.kind == "b") is (dtype.kind == "b"):
            typed = row.view(dtype)
            return lambda group: typed[group.lanes]
        if row.dtype.itemsize > dtype.itemsize and row.dtype.kind != "b":
            narrow = np.dtype(f"u{dtype.itemsize}")
            return lambda group: row[group.lanes].astype(narrow).view(dtype)
        raise UnknownInstructionError(f"{instruction.text}: {operand.name} is too narrow for a {dtype.name}")
    if isinstance(operand, Negated):
        row = machine.row(operand.register)
        return lambda group: ~row[group.lanes]
    if isinstance(operand, Special):
        values = machine.special(operand.name)
        cut = values if values.dtype == dtype else values.astype(dtype)
        return (lambda group: cut[group.lanes]) if cut.ndim else (lambda group: cut)
    if isinstance(operand, (Immediate, Symbol)):
        constant = _constant(machine, instruction, operand, dtype)
        return lambda group: constant
    raise UnknownInstructionError(f"{instruction.text}: the operand {operand} is not modelled here")


def writer(machine: Machine, instruction: Instruction, operand: Operand, dtype: Any) -> Write:
    """Puts values of ``dtype`` into the operand for the active lanes. Narrower values are extended by their sign."""
    if operand is None:
        return lambda group, values: None
    if not isinstance(operand, Register):
        raise UnknownInstructionError(f"{instruction.text}: {operand} cannot be a destination")
    dtype, row = np.dtype(dtype), machine.row(operand)
    widen = None
    if row.dtype.itemsize == dtype.itemsize and (row.dtype.kind == "b") is (dtype.kind == "b"):
        row = row.view(dtype)
    elif row.dtype.itemsize > dtype.itemsize and dtype.kind != "b":
        widen = np.dtype(f"{'i' if dtype.kind == 'i' else 'u'}{row.dtype.itemsize}")
        row = row.view(widen)
    else:
        raise UnknownInstructionError(f"{instruction.text}: {operand.name} cannot hold a {dtype.name}")

    def write(group: Group, values: Any) -> None:
        if widen is not None:
            values = values.astype(widen)
        if group.active is None:
            row[group.lanes] = values
        elif isinstance(group.lanes, slice):
            np.copyto(row[group.lanes], values, where=group.active)
        else:
            row[group.lanes[group.active]] = np.broadcast_to(values, group.active.shape)[group.active]

    written = machine.tracked.get(operand)
    if written is None:
        return write

    def write_and_note(group: Group, values: Any) -> None:
        write(group, values)
        written[group.lane_numbers()] = True

    return write_and_note


def _constant(machine: Machine, instruction: Instruction, operand: Immediate | Symbol, dtype: np.dtype) -> Any:
    if isinstance(operand, Symbol):
        value = machine.address_of(operand.name)
        if value is None:
            raise UnknownInstructionError(f"{instruction.text}: the variable {operand.name} is not modelled")
    else:
        value = operand.value
        if operand.kind != "int" and (dtype.kind == "f" or (operand.kind, dtype.itemsize) != ("f32", 4)):
            bits = ("<I", "<f") if operand.kind == "f32" else ("<Q", "<d")
            number = struct.unpack(bits[1], struct.pack(bits[0], value))[0]
            if dtype.kind == "f":
                return dtype.type(number)
            return np.array(number, f"f{dtype.itemsize}").view(dtype)[()]
    if dtype.kind == "f":
        return dtype.type(value)
    if dtype.kind == "b":
        return np.bool_(value)
    masked = value & ((1 << (8 * dtype.itemsize)) - 1)
    return np.array(masked, f"u{dtype.itemsize}").view(dtype)[()]


def items(operand: Operand) -> tuple[Operand, ...]:
    """The operands in braces, or the operand itself."""
    return operand.items if isinstance(operand, Vector) else (operand,)
