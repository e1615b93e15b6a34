"""What is known of a kernel before it runs: found once, for every batch of CTAs and every launch."""

from __future__ import annotations

from functools import cached_property, lru_cache

from layouts.simulator.definition import maybe_unwritten
from layouts.simulator.flow import Block, blocks_of, meeting_points
from layouts.simulator.in_flight import EarlyUse, early_uses
from layouts.simulator.instructions import machine_code
from layouts.simulator.ptx import Instruction, Kernel, Register


class Analysis:
    """Facts about a kernel, each found when it is first asked for."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel

    @cached_property
    def blocks(self) -> dict[int, Block]:
        """The basic blocks by their start; an instruction that may have to wait ends one."""
        return blocks_of(self._kernel, frozenset(machine_code.load().controls))

    @cached_property
    def meeting(self) -> dict[int, int]:
        """Of each block the nearest that every way out of it passes."""
        return meeting_points(self.blocks)

    @cached_property
    def unwritten(self) -> dict[int, list[Register]]:
        """By instruction, the registers that it may read before anything wrote them."""
        return maybe_unwritten(self._kernel)

    @cached_property
    def early_uses(self) -> dict[int, EarlyUse]:
        """By instruction, its uses of registers that wgmma may still be using."""
        return early_uses(self._kernel)

    @cached_property
    def granule(self) -> int:
        """The smallest number of bytes that any instruction accesses in shared memory at once, at most 16."""
        return min((_shared_bytes(instruction) for instruction in self._kernel.instructions), default=16)

    @cached_property
    def global_granule(self) -> int:
        """The same of global memory."""
        return min((_global_bytes(instruction) for instruction in self._kernel.instructions), default=16)


@lru_cache(maxsize=16)
def analysis_of(kernel: Kernel) -> Analysis:
    """The analysis of a kernel, which must not change any more."""
    return Analysis(kernel)


def _shared_bytes(instruction: Instruction) -> int:
    """How many bytes of shared memory an instruction accesses at once; 16 if none."""
    parts = instruction.parts
    if parts[0] == "mbarrier":
        return 8
    if parts[0] not in ("ld", "st", "atom", "red", "cp"):
        return 16
    if not any(part.startswith("shared") for part in parts):
        generic = parts[0] in ("ld", "st") and not {"global", "param", "local", "const"} & set(parts)
        return 4 if generic else 16
    if parts[0] == "cp":
        return min([16, *(getattr(operand, "value", 16) for operand in instruction.operands[2:3])])
    return min(16, _bytes_of_type(parts))


def _global_bytes(instruction: Instruction) -> int:
    """How many bytes of global memory an instruction accesses at once; 16 if none."""
    parts = instruction.parts
    if parts[0] == "cp":
        return min([16, *(getattr(operand, "value", 16) for operand in instruction.operands[2:3])])
    elsewhere = any(part.split("::")[0] in ("shared", "param", "local", "const") for part in parts)
    return 16 if parts[0] not in ("ld", "ldu", "st") or elsewhere else min(16, _bytes_of_type(parts))


def _bytes_of_type(parts: tuple[str, ...]) -> int:
    bits = int("".join(letter for letter in parts[-1] if letter.isdigit()).removesuffix("x2") or 32)
    vector = next((int(part[1:]) for part in parts if part in ("v2", "v4", "v8")), 1)
    return bits // 8 * vector
