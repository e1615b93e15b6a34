"""Control flow of a kernel: basic blocks, and where lanes that parted at a branch meet again."""

from __future__ import annotations

from dataclasses import dataclass

from layouts.simulator.errors import PtxSyntaxError
from layouts.simulator.ptx import Instruction, Kernel, Symbol

EXIT = -1  # stands for the end of the kernel as a block


@dataclass(frozen=True)
class Block:
    """Instructions start .. end - 1, run one after the other; ``successors`` are the starts of blocks, or EXIT."""

    start: int
    end: int
    successors: tuple[int, ...]


def is_branch(instruction: Instruction) -> bool:
    return instruction.base == "bra"


def is_exit(instruction: Instruction) -> bool:
    return instruction.base in ("ret", "exit", "trap")


def branch_target(kernel: Kernel, instruction: Instruction) -> int:
    """The index of the instruction that a branch leads to."""
    (label,) = instruction.operands
    if not isinstance(label, Symbol) or label.name not in kernel.labels:
        raise PtxSyntaxError(f"{instruction.text}: there is no such label")
    return kernel.labels[label.name]


def blocks_of(kernel: Kernel, breaks: frozenset[str]) -> dict[int, Block]:
    """The basic blocks by their start.

    Args:
        breaks: base opcodes after which a block ends although no branch does: a warp may have to wait there.
    """
    instructions = kernel.instructions
    count = len(instructions)
    starts = {0, *kernel.labels.values()}
    for i, instruction in enumerate(instructions):
        if is_branch(instruction):
            starts |= {i + 1, branch_target(kernel, instruction)}
        elif is_exit(instruction) or instruction.base in breaks:
            starts |= {i, i + 1}  # what may wait is a block of its own: it can be tried again
    ordered = sorted(start for start in starts if start < count)
    blocks = {}
    for start, end in zip(ordered, [*ordered[1:], count], strict=True):
        last = instructions[end - 1]
        following = end if end < count else EXIT
        successors: tuple[int, ...] = (following,)
        if is_branch(last):
            target = branch_target(kernel, last)
            target = target if target < count else EXIT
            successors = (target, following) if last.guard else (target,)
        elif is_exit(last):
            successors = (following,) if last.guard else (EXIT,)  # nobody meets lanes that end
        blocks[start] = Block(start, end, successors)
    return blocks


def meeting_points(blocks: dict[int, Block]) -> dict[int, int]:
    """Of each block the nearest block that every way out of it passes (its immediate post-dominator), or EXIT.

    Cooper, Harvey and Kennedy, "A simple, fast dominance algorithm", on the reversed graph.
    """
    order = _postorder(blocks)
    number = {block: i for i, block in enumerate(order)}
    number[EXIT] = len(order)
    meeting = {EXIT: EXIT}
    changed = True
    while changed:
        changed = False
        for start in sorted(number, key=number.__getitem__, reverse=True):
            if start == EXIT:
                continue
            known = [successor for successor in blocks[start].successors if successor in meeting]
            if not known:
                continue
            nearest = known[0]
            for other in known[1:]:
                nearest = _common(nearest, other, meeting, number)
            if meeting.get(start) != nearest:
                meeting[start] = nearest
                changed = True
    return {start: meeting.get(start, EXIT) for start in blocks}


def _common(a: int, b: int, meeting: dict[int, int], number: dict[int, int]) -> int:
    while a != b:
        while number[a] < number[b]:
            a = meeting[a]
        while number[b] < number[a]:
            b = meeting[b]
    return a


def _postorder(blocks: dict[int, Block]) -> list[int]:
    """Every block before those that lead to it on the way to the exit: postorder of the graph read backwards."""
    before: dict[int, list[int]] = {start: [] for start in [*blocks, EXIT]}
    for start, each in blocks.items():
        for successor in each.successors:
            before[successor].append(start)
    seen, order = {EXIT}, []
    stack = [(EXIT, iter(before[EXIT]))]
    while stack:
        block, rest = stack[-1]
        following = next((b for b in rest if b not in seen), None)
        if following is None:
            order.append(block)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(before[following])))
    unreachable = [start for start in blocks if start not in seen]  # endless loops
    return [*unreachable, *(block for block in order if block != EXIT)]
