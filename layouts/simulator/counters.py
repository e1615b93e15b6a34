"""What is counted while a kernel runs, instruction by instruction, and the totals over any set of instructions."""

from __future__ import annotations

from dataclasses import dataclass, field

# The first group with a fitting beginning counts.
_GROUPS = (
    ("tensor cores", ("mma", "wgmma.mma_async")),
    ("asynchronous copies", ("cp",)),
    ("matrix moves", ("ldmatrix", "stmatrix", "movmatrix")),
    ("barriers", ("bar", "barrier", "mbarrier", "fence", "membar", "wgmma", "griddepcontrol", "elect", "setmaxnreg")),
    ("atomics", ("atom", "red")),
    ("warp exchange", ("shfl", "vote", "match", "redux", "activemask")),
    ("conversions", ("cvt", "cvta")),
    ("control flow", ("bra", "brx", "call", "ret", "exit", "trap", "nanosleep")),
    ("moves and selects", ("mov", "selp", "prmt", "mapa", "ld.param", "ld.const")),
    ("shared memory", ("ld.shared", "st.shared", "ld.shared::cta", "st.shared::cta")),
    ("global memory", ("ld.global", "st.global")),
    ("other memory", ("ld", "st", "ldu", "prefetch")),
)
_FLOATS = ("f16", "f16x2", "f32", "f32x2", "f64", "bf16", "bf16x2")


def opcode_group(opcode: str) -> str:
    """The kind of work that an opcode does, as the instruction mix names it."""
    for group, beginnings in _GROUPS:
        if any(f"{opcode}.".startswith(f"{beginning}.") for beginning in beginnings):
            return group
    return "floating point" if any(part in _FLOATS for part in opcode.split(".")) else "integers and logic"


@dataclass
class InstructionCounts:
    """The counters of one instruction, summed over all warps.

    Attributes:
        index: its place in the kernel.
        text: as it was written.
        opcode: in full.
        source: "file.py:12" where the compiler gave it.
        executions: how many times a warp executed it.
        lanes: how many lanes took part, summed over the executions.
        wavefronts: of shared memory.
        ideal_wavefronts: how many those were without bank conflicts.
        sectors: of global memory, 32 bytes each.
        ideal_sectors: as many as the bytes would fill.
        bytes: that the lanes loaded or stored.
    """

    index: int
    text: str
    opcode: str
    source: str | None = None
    executions: int = 0
    lanes: int = 0
    wavefronts: int = 0
    ideal_wavefronts: int = 0
    sectors: int = 0
    ideal_sectors: int = 0
    bytes: int = 0


class Totals:
    """Sums over ``instructions``. An access is one execution by a warp of an instruction that moved memory."""

    instructions: list[InstructionCounts]

    @property
    def warp_instructions(self) -> int:
        return sum(counts.executions for counts in self.instructions)

    @property
    def shared_accesses(self) -> int:
        return sum(counts.executions for counts in self.instructions if counts.wavefronts)

    @property
    def shared_wavefronts(self) -> int:
        return sum(counts.wavefronts for counts in self.instructions)

    @property
    def ideal_shared_wavefronts(self) -> int:
        return sum(counts.ideal_wavefronts for counts in self.instructions)

    @property
    def excess_wavefronts(self) -> int:
        return self.shared_wavefronts - self.ideal_shared_wavefronts

    @property
    def global_accesses(self) -> int:
        return sum(counts.executions for counts in self.instructions if counts.sectors)

    @property
    def global_sectors(self) -> int:
        return sum(counts.sectors for counts in self.instructions)

    @property
    def ideal_sectors(self) -> int:
        return sum(counts.ideal_sectors for counts in self.instructions)

    @property
    def excess_sectors(self) -> int:
        return self.global_sectors - self.ideal_sectors

    @property
    def sector_efficiency(self) -> float:
        """Ideal sectors over sectors; 1 where there are none."""
        return self.ideal_sectors / self.global_sectors if self.global_sectors else 1.0

    @property
    def instruction_mix(self) -> dict[str, int]:
        """Warp instructions of each group of opcodes, the largest first."""
        mix: dict[str, int] = {}
        for counts in self.instructions:
            if counts.executions:
                group = opcode_group(counts.opcode)
                mix[group] = mix.get(group, 0) + counts.executions
        return dict(sorted(mix.items(), key=lambda item: (-item[1], item[0])))


@dataclass
class SourceCounts(Totals):
    """The totals of one source line: ``source`` is "file.py:12", or None for instructions without one."""

    source: str | None
    instructions: list[InstructionCounts] = field(default_factory=list)
