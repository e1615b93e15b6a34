"""What a simulation gives back: the counters of every instruction, what the kernel did wrong, and views of both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from layouts.simulator import heatmap, report_text
from layouts.simulator.counters import InstructionCounts, SourceCounts, Totals

_TOTALS = (
    "warp_instructions",
    "shared_accesses",
    "shared_wavefronts",
    "ideal_shared_wavefronts",
    "excess_wavefronts",
    "global_accesses",
    "global_sectors",
    "ideal_sectors",
    "sector_efficiency",
    "instruction_mix",
)


@dataclass
class Finding:
    """Something that the kernel did wrong.

    Attributes:
        kind: "race", "uninitialized", "async", "out_of_bounds", "misaligned", "deadlock", "barrier", "register", ...
        message: about the first time it happened.
        instruction: index of the instruction, None where it is none in particular.
        source: "file.py:12" of the instruction, where the compiler gave it.
        count: how often it happened.
        details: more about the first time, by name. Kept as JSON values: arrays and tuples become lists, and what JSON
            does not know its text.
    """

    kind: str
    message: str
    instruction: int | None = None
    source: str | None = None
    count: int = 1
    details: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.details = _plain(self.details)

    def __str__(self) -> str:
        times = f" x{self.count:,}" if self.count > 1 else ""
        place = "" if self.instruction is None else f" at instruction {self.instruction}"
        source = "" if self.source is None else f" ({self.source})"
        return f"{self.kind}{times}{place}{source}: {self.message}"


def merge_findings(findings: Iterable[Finding]) -> list[Finding]:
    """One finding of each kind at each instruction: the first, with the sum of their counts. In order of appearance."""
    merged: dict[tuple[str, int | None], Finding] = {}
    for finding in findings:
        first = merged.setdefault((finding.kind, finding.instruction), replace(finding, count=0))
        first.count += finding.count
    return list(merged.values())


class SimulationError(Exception):
    """The kernel did something wrong while it ran: ``report`` says what."""

    def __init__(self, message: str, report: Report):
        super().__init__(message)
        self.report = report


@dataclass
class Report(Totals):
    """What one run of a kernel did.

    Attributes:
        kernel: its name.
        target: for instance "sm_80".
        grid: in CTAs.
        block: in threads.
        warps: how many ran, over all CTAs.
        schedule: in which order they ran.
        seconds: that the simulation took.
        instructions: the counters of every instruction of the kernel, in order, executed or not.
        findings: what it did wrong. Those of one kind at one instruction are merged.
        labels: for the listing, the index of the instruction that follows each label.
    """

    kernel: str
    target: str = ""
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    warps: int = 0
    schedule: str = "lockstep"
    seconds: float = 0.0
    instructions: list[InstructionCounts] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.findings = merge_findings(self.findings)

    def by_source(self) -> list[SourceCounts]:
        """The totals of each source line, in the order in which the lines first appear in the kernel."""
        lines: dict[str | None, SourceCounts] = {}
        for counts in self.instructions:
            lines.setdefault(counts.source, SourceCounts(counts.source)).instructions.append(counts)
        return list(lines.values())

    def memory_instructions(self) -> list[InstructionCounts]:
        """Those that took wavefronts or sectors: the most excess wavefronts first, then the most excess sectors."""
        moved = [counts for counts in self.instructions if counts.wavefronts or counts.sectors]
        return sorted(moved, key=lambda c: (c.ideal_wavefronts - c.wavefronts, c.ideal_sectors - c.sectors, c.index))

    def raise_for_findings(self) -> None:
        """Does nothing if there are no findings.

        Raises:
            SimulationError: there are; the message lists them all.
        """
        if self.findings:
            raise SimulationError(report_text.findings_text(self), self)

    def table(self, limit: int | None = 20) -> str:
        """Totals, the memory instructions with the most excess, and the findings.

        Args:
            limit: how many instructions to show; None shows all that moved memory.
        """
        return report_text.table(self, limit)

    def listing(self) -> str:
        """The kernel's instructions with their counters in the margin, and each finding below its instruction."""
        return report_text.listing(self)

    def __str__(self) -> str:
        return self.table()

    def heatmap(self, path: str | Path | None = None, by: str = "instruction") -> str:
        """An SVG picture: a row for each memory instruction or source line, coloured by its traffic over the ideal.

        Args:
            path: also write it there.
            by: "instruction" or "source".

        Raises:
            ValueError: ``by`` is neither.
        """
        if by not in ("instruction", "source"):
            raise ValueError(f'by is {by!r}: the rows stand for an "instruction" or a "source" line each')
        lines = self.by_source()
        if by == "instruction":
            lines = [SourceCounts(counts.source, [counts]) for counts in self.instructions]
        svg = heatmap.svg(f"Memory traffic of {report_text.shorten(self.kernel)}", lines)
        if path is not None:
            Path(path).write_text(svg, encoding="utf-8")
        return svg

    def to_json(self) -> dict[str, Any]:
        """Values that ``json.dumps`` takes: all fields, and the totals for those who read the file without us."""
        return _plain({**asdict(self), "totals": {name: getattr(self, name) for name in _TOTALS}})

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Report:
        """The report whose ``to_json`` gave these values.

        Raises:
            TypeError: a field is missing or unknown.
        """
        fields = {name: value for name, value in values.items() if name != "totals"}
        fields["grid"], fields["block"] = tuple(fields["grid"]), tuple(fields["block"])
        fields["instructions"] = [InstructionCounts(**counts) for counts in fields["instructions"]]
        fields["findings"] = [Finding(**finding) for finding in fields["findings"]]
        return cls(**fields)


def _plain(value: Any) -> Any:
    """The same in JSON's types."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return str(value)
