"""A report as text: the table of totals, the annotated listing, the list of findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from layouts.simulator.counters import InstructionCounts, Totals

if TYPE_CHECKING:
    from layouts.simulator.report import Finding, Report

_NONE = "."


def shorten(text: str, length: int = 72) -> str:
    """The text, or its two ends if it is longer: the compiler's names of kernels have hundreds of letters."""
    if len(text) <= length:
        return text
    head = (length - 3) * 2 // 3
    return f"{text[:head]}...{text[len(text) - (length - 3 - head) :]}"


def average(total: int, accesses: int) -> str:
    """A mean per warp access, as text; "." where there was none."""
    return f"{total / accesses:.1f}" if accesses else _NONE


def table(report: Report, limit: int | None) -> str:
    """See ``Report.table``."""
    parts = [_heading(report), _totals(report)]
    if memory := report.memory_instructions():
        parts.append(_memory_table(memory, limit))
    if report.findings:
        parts.append(findings_text(report))
    return "\n\n".join(parts)


def listing(report: Report) -> str:
    """See ``Report.listing``."""
    findings: dict[int | None, list[Finding]] = {}
    for finding in report.findings:
        findings.setdefault(finding.instruction, []).append(finding)
    labels: dict[int, list[str]] = {}
    for name, index in report.labels.items():
        labels.setdefault(index, []).append(name)
    header = ("executions", "wavefronts", "ideal", "sectors", "ideal", "source")
    margins = _aligned([header, *(_margin(counts) for counts in report.instructions)], left=(5,))
    indent = " " * len(margins[0])
    lines = [_heading(report), f"{margins[0]}  instruction"]
    for counts, margin in zip(report.instructions, margins[1:], strict=True):
        lines += [f"{indent}  {name}:" for name in labels.pop(counts.index, ())]
        lines.append(f"{margin}      {counts.text.replace(report.kernel, shorten(report.kernel, 24))}")
        lines += [f"{indent}  !!! {finding}" for finding in findings.pop(counts.index, ())]
    # What is left belongs to the end of the kernel, or to no instruction of it.
    lines += [f"{indent}  {name}:" for names in labels.values() for name in names]
    lines += [f"{indent}  !!! {finding}" for left in findings.values() for finding in left]
    return "\n".join(lines)


def findings_text(report: Report) -> str:
    """All findings, with their instruction and their details."""
    texts = {counts.index: counts.text for counts in report.instructions}
    count = len(report.findings)
    lines = [f"{shorten(report.kernel)}: {count} finding{'' if count == 1 else 's'}"]
    for number, finding in enumerate(report.findings, 1):
        lines.append(f"  {number}. {finding}")
        if finding.instruction in texts:
            lines.append(f"       {shorten(texts[finding.instruction], 100)}")
        lines += [f"       {name}: {value}" for name, value in finding.details.items()]
    return "\n".join(lines)


def _heading(report: Report) -> str:
    grid, block = (" x ".join(map(str, shape)) for shape in (report.grid, report.block))
    target = f" for {report.target}" if report.target else ""
    speed = f", {report.warp_instructions / report.seconds:,.0f} a second" if report.seconds > 0 else ""
    return (
        f"{shorten(report.kernel)}{target}\n"
        f"grid {grid}, block {block}, {report.warps:,} warps, {report.schedule} schedule\n"
        f"{report.warp_instructions:,} warp instructions in {report.seconds:.2f} s{speed}"
    )


def _totals(report: Report) -> str:
    mix = report.instruction_mix
    shares = ", ".join(f"{group} {count / report.warp_instructions:.1%}" for group, count in mix.items())
    count, times = len(report.findings), sum(finding.count for finding in report.findings)
    return "\n".join(
        [
            f"shared memory  {_shared_total(report)}",
            f"global memory  {_global_total(report)}",
            f"instructions   {shares or 'none executed'}",
            f"findings       {f'{count:,}, seen {times:,} times in all' if count else 'none'}",
        ]
    )


def _shared_total(totals: Totals) -> str:
    if not totals.shared_accesses:
        return "no access"
    wavefronts, ideal, accesses = totals.shared_wavefronts, totals.ideal_shared_wavefronts, totals.shared_accesses
    return (
        f"{average(wavefronts, accesses)} wavefronts per warp access, ideal {average(ideal, accesses)} "
        f"({accesses:,} accesses, {wavefronts:,} wavefronts, ideal {ideal:,}, excess {wavefronts - ideal:,})"
    )


def _global_total(totals: Totals) -> str:
    if not totals.global_accesses:
        return "no access"
    sectors, ideal, accesses = totals.global_sectors, totals.ideal_sectors, totals.global_accesses
    return (
        f"{average(sectors, accesses)} sectors per warp access, ideal {average(ideal, accesses)} "
        f"({accesses:,} accesses, {sectors:,} sectors, ideal {ideal:,}, efficiency {totals.sector_efficiency:.1%})"
    )


def _memory_table(memory: Sequence[InstructionCounts], limit: int | None) -> str:
    shown = memory[:limit]
    header = (
        "index",
        "executions",
        "wavefronts",
        "excess",
        "per access",
        "sectors",
        "excess",
        "per access",
        "source",
        "",
    )
    lines = _aligned([header, *(_memory_row(counts) for counts in shown)], left=(8, 9))
    left_out = memory[len(shown) :]
    if left_out:
        excess = sum(counts.wavefronts - counts.ideal_wavefronts for counts in left_out)
        lines.append(f"... and {len(left_out)} more with {excess:,} excess wavefronts")
    return "\n".join(
        ["memory instructions, the most excess first (per access: mean / ideal)", *(line.rstrip() for line in lines)]
    )


def _memory_row(counts: InstructionCounts) -> tuple[str, ...]:
    return (
        str(counts.index),
        f"{counts.executions:,}",
        *_traffic_cells(counts.wavefronts, counts.ideal_wavefronts, counts.executions),
        *_traffic_cells(counts.sectors, counts.ideal_sectors, counts.executions),
        counts.source or _NONE,
        shorten(counts.text, 60),
    )


def _traffic_cells(total: int, ideal: int, executions: int) -> tuple[str, str, str]:
    if not total:
        return (_NONE, _NONE, _NONE)
    return f"{total:,}", f"{total - ideal:,}", f"{average(total, executions)} / {average(ideal, executions)}"


def _margin(counts: InstructionCounts) -> tuple[str, ...]:
    """Numbers of the listing: means per execution."""

    def mean(value: int, shown: int) -> str:
        return average(value, counts.executions) if shown else ""

    return (
        f"{counts.executions:,}" if counts.executions else "",
        mean(counts.wavefronts, counts.wavefronts),
        mean(counts.ideal_wavefronts, counts.wavefronts),
        mean(counts.sectors, counts.sectors),
        mean(counts.ideal_sectors, counts.sectors),
        counts.source or "",
    )


def _aligned(rows: Sequence[Sequence[str]], left: tuple[int, ...]) -> list[str]:
    """Rows of a table as lines; columns are flush right but for those in ``left``."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells))
    return lines
