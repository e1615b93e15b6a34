"""Registers that may be read before they are written: which reads have to be watched while the kernel runs."""

from __future__ import annotations

from collections.abc import Iterator

from layouts.simulator.flow import EXIT, blocks_of
from layouts.simulator.ptx import Address, Instruction, Kernel, Negated, Operand, PredicatePair, Register, Vector

# Opcodes whose first operand is no destination.
_NO_DESTINATION = ("st", "bra", "ret", "exit", "bar", "barrier", "cp", "red", "stmatrix", "fence", "membar", "prefetch")
_NO_DESTINATION_FORMS = ("mbarrier.init", "mbarrier.inval", "mbarrier.expect_tx", "wgmma.fence", "wgmma.commit_group")


def registers_in(operand: Operand) -> Iterator[Register]:
    """Every register that an operand names."""
    if isinstance(operand, Register):
        yield operand
    elif isinstance(operand, Negated):
        yield operand.register
    elif isinstance(operand, Vector):
        for item in operand.items:
            yield from registers_in(item)
    elif isinstance(operand, Address):
        yield from registers_in(operand.base)
        for item in operand.coordinates:
            yield from registers_in(item)
    elif isinstance(operand, PredicatePair):
        yield from (register for register in (operand.first, operand.second) if register is not None)


def destinations(instruction: Instruction) -> list[Register]:
    """The registers that an instruction writes."""
    if instruction.base in _NO_DESTINATION or instruction.opcode.startswith(_NO_DESTINATION_FORMS):
        return []
    first = instruction.operands[:1]
    return [register for operand in first if not isinstance(operand, Address) for register in registers_in(operand)]


def sources(instruction: Instruction) -> list[Register]:
    """The registers that an instruction reads, its guard among them."""
    skip = 1 if destinations(instruction) else 0
    found = [register for operand in instruction.operands[skip:] for register in registers_in(operand)]
    if instruction.opcode.startswith("wgmma.mma_async"):
        found += destinations(instruction)
    return found + ([instruction.guard[0]] if instruction.guard else [])


def maybe_unwritten(kernel: Kernel) -> dict[int, list[Register]]:
    """By instruction, the registers that it may read before anything wrote them, on some way through the kernel."""
    blocks = blocks_of(kernel, frozenset())
    numbers: dict[Register, int] = {}

    def bit(register: Register) -> int:
        return 1 << numbers.setdefault(register, len(numbers))

    written = {}
    for start, block in blocks.items():
        written[start] = 0
        for instruction in kernel.instructions[block.start : block.end]:
            if instruction.guard is None:
                for register in destinations(instruction):
                    written[start] |= bit(register)
    everything = (1 << len(numbers)) - 1
    known = dict.fromkeys(blocks, everything)
    known[0] = 0
    work = [0]
    seen = {0}
    while work:
        start = work.pop()
        out = known[start] | written[start]
        for successor in blocks[start].successors:
            if successor == EXIT:
                continue
            narrowed = known[successor] & out
            if narrowed != known[successor] or successor not in seen:
                seen.add(successor)
                known[successor] = narrowed
                work.append(successor)
    reads: dict[int, list[Register]] = {}
    for start, block in blocks.items():
        now = known[start]
        for instruction in kernel.instructions[block.start : block.end]:
            missing = [register for register in dict.fromkeys(sources(instruction)) if not now & bit(register)]
            # Compilers put undefined bytes beside others with prmt, where nothing looks at them.
            if missing and instruction.base != "prmt":
                reads[instruction.index] = missing
            if instruction.guard is None:
                for register in destinations(instruction):
                    now |= bit(register)
    return reads
