"""Registers that wgmma may still be using: which instructions have to be watched while the kernel runs."""

from __future__ import annotations

from typing import NamedTuple

from layouts.simulator.definition import destinations, registers_in, sources
from layouts.simulator.flow import EXIT, blocks_of
from layouts.simulator.ptx import Immediate, Instruction, Kernel, Register, Vector


class EarlyUse(NamedTuple):
    """What an instruction does: the accumulators that it reads or writes, and the registers of A that it writes."""

    accumulators: list[Register]
    a: list[Register]


class _Busy:
    """Sets of registers that products under way use, as bits: two for a register, as an accumulator and as A's."""

    def __init__(self) -> None:
        self.numbers: dict[Register, int] = {}

    def bit(self, register: Register, of_a: bool) -> int:
        return 1 << 2 * self.numbers.setdefault(register, len(self.numbers)) + of_a

    def after(self, instruction: Instruction, busy: int) -> int:
        if instruction.opcode.startswith("wgmma.mma_async"):
            for operand, of_a in zip(instruction.operands[:2], (False, True), strict=True):
                for register in registers_in(operand) if isinstance(operand, Vector) else ():  # no descriptor
                    busy |= self.bit(register, of_a)
        elif instruction.opcode.startswith("wgmma.wait_group"):
            (pending,) = instruction.operands
            return 0 if isinstance(pending, Immediate) and pending.value == 0 else busy
        return busy

    def use(self, instruction: Instruction, busy: int) -> EarlyUse | None:
        if not busy or instruction.base == "wgmma":
            return None
        written = destinations(instruction)
        every = dict.fromkeys([*sources(instruction), *written])
        accumulators = [register for register in every if self.bit(register, False) & busy]
        a = [register for register in written if self.bit(register, True) & busy]
        return EarlyUse(accumulators, a) if accumulators or a else None


def early_uses(kernel: Kernel) -> dict[int, EarlyUse]:
    """By instruction, its uses of registers that a wgmma.mma_async may still be using, on some way through the kernel.

    Only a wait for all groups counts as their end here: where others wait for some, it has to be seen at run time.
    """
    if not any(instruction.opcode.startswith("wgmma.mma_async") for instruction in kernel.instructions):
        return {}
    blocks, busy = blocks_of(kernel, frozenset()), _Busy()
    before = dict.fromkeys(blocks, 0)
    work = list(blocks)
    while work:
        start = work.pop()
        now = before[start]
        for instruction in kernel.instructions[start : blocks[start].end]:
            now = busy.after(instruction, now)
        for successor in blocks[start].successors:
            if successor != EXIT and now & ~before[successor]:
                before[successor] |= now
                work.append(successor)
    found = {}
    for start, block in blocks.items():
        now = before[start]
        for instruction in kernel.instructions[start : block.end]:
            use = busy.use(instruction, now)
            if use is not None:
                found[instruction.index] = use
            now = busy.after(instruction, now)
    return found
