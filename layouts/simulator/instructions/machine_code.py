"""From instructions to functions over groups: the registry that the other modules fill, and the linker.

A *builder* is called once for each instruction of a batch's program and returns the function that runs it. What may
suspend, part or end warps is a *control*: it ends its basic block, and returns the groups that go on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from layouts.simulator.errors import UnknownInstructionError
from layouts.simulator.flow import EXIT, Block
from layouts.simulator.group import Group
from layouts.simulator.instructions import elementwise as arithmetic
from layouts.simulator.operands import reader, writer
from layouts.simulator.ptx import Instruction, PredicatePair

if TYPE_CHECKING:
    from layouts.simulator.machine import Machine

Handler = Callable[[Group], None]
Control = Callable[[Group], "list[Group]"]
Builder = Callable[["Machine", Instruction], Handler]

BUILDERS: dict[str, Builder] = {}
CONTROLS: dict[str, Callable[[Machine, Instruction], Control]] = {}

_MODULES = (
    "movement", "loads", "exchange", "matrix", "asynchronous", "bulk", "wgmma", "atomics", "barriers", "branches",
)  # fmt: skip


def instruction(*opcodes: str) -> Callable[[Builder], Builder]:
    """Register a builder for opcodes, by as many of their parts as are written ("ld.shared" before "ld")."""

    def register(builder: Builder) -> Builder:
        BUILDERS.update(dict.fromkeys(opcodes, builder))
        return builder

    return register


def control(*opcodes: str) -> Callable[[Callable[[Machine, Instruction], Control]], Callable]:
    """Register a builder of controls, by base opcode or as many parts as are written."""

    def register(builder: Callable[[Machine, Instruction], Control]) -> Callable:
        CONTROLS.update(dict.fromkeys(opcodes, builder))
        return builder

    return register


class Code(NamedTuple):
    """What the registry offers the machine: ``controls``, base opcodes that end a block, and the linker."""

    controls: tuple[str, ...]
    link: Callable[[Machine, Block], tuple[list[Handler], Control]]


@cache
def load() -> Code:
    for module in _MODULES:
        import_module(f"layouts.simulator.instructions.{module}")
    return Code(tuple({opcode.split(".")[0] for opcode in CONTROLS} - {"bra", "ret", "exit", "trap"}), link)


def _find(table: dict, opcode: str) -> Callable | None:
    parts = opcode.split(".")
    for end in range(len(parts), 0, -1):
        found = table.get(".".join(parts[:end]))
        if found is not None:
            return found
    return None


def is_control(opcode: str) -> bool:
    return _find(CONTROLS, opcode) is not None


def link(machine: Machine, block: Block) -> tuple[list[Handler], Control]:
    """The functions of a block's instructions, and what follows the last."""
    from layouts.simulator.instructions.matrix import fused_runs

    handlers: list[Handler] = []
    instructions = machine.kernel.instructions[block.start : block.end]
    last = instructions[-1]
    ends_with_control = is_control(last.opcode)
    plain = instructions[:-1] if ends_with_control else instructions
    for run in fused_runs(machine, plain):
        handlers.append(run if callable(run) else _handler(machine, run))
    if ends_with_control:
        built = _find(CONTROLS, last.opcode)(machine, last)  # type: ignore[misc]
        return handlers, _checked_control(machine, last, built)
    following = block.end if block.end < len(machine.kernel.instructions) else EXIT
    return handlers, lambda group: go_on(machine, group, following)


def go_on(machine: Machine, group: Group, pc: int) -> list[Group]:
    """The group at another place: it ends there, or waits for lanes that it parted from, or runs."""
    from layouts.simulator.instructions.branches import arrive, leave

    group.pc = pc
    if pc == EXIT:
        return leave(machine, group)
    if group.frames and group.frames[-1].pc == pc:
        return arrive(machine, group)
    return [group]


def _checked_control(machine: Machine, instruction: Instruction, built: Control) -> Control:
    if not machine.reads_unwritten(instruction.index) or instruction.opcode.startswith("wgmma.mma_async"):
        return built  # wgmma checks for itself: it need not read its accumulators

    def checked(group: Group) -> list[Group]:
        machine.check_written(instruction.index, group)
        return built(group)

    return checked


def _handler(machine: Machine, instruction: Instruction) -> Handler:
    built = _build(machine, instruction)
    index = instruction.index
    guard = frozenset(instruction.guard[:1] if instruction.guard else ())
    if machine.reads_unwritten(index):
        inner = built

        def built(group: Group) -> None:
            machine.check_written(index, group, guard)
            inner(group)

    if index in machine.early_uses:
        from layouts.simulator.instructions.wgmma import watched

        built = watched(machine, instruction, built)
    return built if instruction.guard is None else _guarded(machine, instruction, built)


def _build(machine: Machine, instruction: Instruction) -> Handler:
    builder = _find(BUILDERS, instruction.opcode)
    if builder is not None:
        return builder(machine, instruction)
    if arithmetic.is_elementwise(instruction.opcode):
        return _elementwise(machine, instruction)
    raise UnknownInstructionError(f"{instruction.text}: the instruction {instruction.opcode} is not modelled")


def _guarded(machine: Machine, instruction: Instruction, handler: Handler) -> Handler:
    register, negated = instruction.guard  # type: ignore[misc]
    row = machine.row(register)
    left_out = machine.counters.lanes
    others = machine.registers_to_check(instruction.index) - {register}
    watched = len(others) < len(machine.registers_to_check(instruction.index))

    def run(group: Group) -> None:
        if watched:  # by all lanes, not only those that take part
            machine.check_written(instruction.index, group, others)
        takes_part = row[group.lanes]
        if negated:
            takes_part = ~takes_part
        before = group.active
        if before is not None:
            takes_part = takes_part & before
        taking_part = int(np.count_nonzero(takes_part))
        left_out[instruction.index] -= group.num_lanes - taking_part
        if taking_part == 0:
            return
        group.active = None if taking_part == len(takes_part) else takes_part
        handler(group)
        group.active = before

    return run


def _elementwise(machine: Machine, instruction: Instruction) -> Handler:
    first, *rest = instruction.operands
    results = (first.first, first.second) if isinstance(first, PredicatePair) else (first,)
    found = arithmetic.lookup(instruction.opcode, len(results), len(rest))
    kinds = found.result if isinstance(found.result, tuple) else (found.result,)
    reads = [
        reader(machine, instruction, s, arithmetic.numpy_type(kind))
        for s, kind in zip(rest, found.sources, strict=True)
    ]
    writes = [
        writer(machine, instruction, d, arithmetic.numpy_type(kind)) for d, kind in zip(results, kinds, strict=True)
    ]
    function, write = found.function, writes[0]
    if len(writes) > 1:

        def run_two(group: Group) -> None:
            for put, values in zip(writes, function(*[read(group) for read in reads]), strict=True):
                put(group, values)

        return run_two
    if len(reads) == 1:
        read = reads[0]
        return lambda group: write(group, function(read(group)))
    if len(reads) == 2:
        left, right = reads
        return lambda group: write(group, function(left(group), right(group)))
    return lambda group: write(group, function(*[read(group) for read in reads]))
