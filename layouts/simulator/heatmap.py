"""A heat map of memory traffic as SVG: one row for each instruction or source line, one column for each memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from layouts.simulator.counters import SourceCounts

ROW = 22  # heights and widths in pixels
CELL = 132
GAP = 4
MARGIN = 16
LETTER = 7.3  # of the 12 pixel monospaced font
MAX_LETTERS = 56

SATURATED = 8.0  # times the ideal
IDEAL_COLOUR = (222, 239, 229)
HEAT = ((255, 243, 205), (249, 180, 106), (222, 90, 61), (140, 20, 42))  # just above the ideal ... SATURATED and more
LEGEND = (1.0, 1.2, 2.0, 4.0, SATURATED)

STYLE = (
    "text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#24292f}"
    ".title{font-size:14px;font-weight:600}.head{fill:#57606a}.light{fill:#fff}.number{text-anchor:end}"
    ".value{text-anchor:middle}"
)


@dataclass(frozen=True)
class _Cell:
    """Traffic of one memory: ``total`` of wavefronts or sectors over so many warp accesses."""

    total: int
    ideal: int
    accesses: int

    @property
    def factor(self) -> float:
        return self.total / self.ideal if self.ideal else 1.0

    @property
    def text(self) -> str:
        return f"{self.total / self.accesses:.1f} / {self.ideal / self.accesses:.1f}"


def colour(factor: float) -> tuple[int, int, int]:
    """Red, green and blue for a traffic of ``factor`` times the ideal: pale green at 1, then yellow to dark red."""
    if factor <= 1.0:
        return IDEAL_COLOUR
    position = min(math.log(factor) / math.log(SATURATED), 1.0) * (len(HEAT) - 1)
    lower = min(int(position), len(HEAT) - 2)
    part = position - lower
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(HEAT[lower], HEAT[lower + 1], strict=True))
    return red, green, blue


def svg(title: str, lines: Sequence[SourceCounts]) -> str:
    """The picture.

    Args:
        title: stands above it.
        lines: a row each, in this order; those without memory traffic are left out.
    """
    lines = [line for line in lines if line.shared_accesses or line.global_accesses]
    labels = [_label(line) for line in lines]
    label_width = math.ceil(max(map(len, ["instruction", *labels])) * LETTER) + 12
    columns = [MARGIN + label_width + i * (CELL + GAP) for i in range(3)]
    width = max(columns[2] + CELL, math.ceil(len(title) * LETTER * 14 / 12) + 2 * MARGIN, 560)
    body = [_text(MARGIN, 28, title, "title")]
    body += [
        _text(MARGIN, 56, "instruction", "head"),
        _text(columns[0] + CELL / 2, 56, "wavefronts", "head value"),
        _text(columns[1] + CELL / 2, 56, "sectors", "head value"),
        _text(columns[2] + CELL - MARGIN, 56, "excess wavefronts", "head number"),
    ]
    top = 66
    for line, label in zip(lines, labels, strict=True):
        body += _row(line, label, top, columns)
        top += ROW + 2
    if not lines:
        body.append(_text(MARGIN, top + 15, "no access to shared or global memory"))
        top += ROW + 2
    body += _legend(top + 14)
    height = top + 14 + ROW + 26 + MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(title)}">\n<style>{STYLE}</style>\n'
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _label(line: SourceCounts) -> str:
    if len(line.instructions) == 1:
        counts = line.instructions[0]
        text = f"{counts.index:>5}  {counts.source + '  ' if counts.source else ''}{counts.opcode}"
    else:
        text = f"{line.source or 'no source line'}  ({len(line.instructions)} instructions)"
    return text if len(text) <= MAX_LETTERS else text[: MAX_LETTERS - 3] + "..."


def _row(line: SourceCounts, label: str, top: int, columns: Sequence[int]) -> list[str]:
    cells = (
        _Cell(line.shared_wavefronts, line.ideal_shared_wavefronts, line.shared_accesses),
        _Cell(line.global_sectors, line.ideal_sectors, line.global_accesses),
    )
    parts = [_text(MARGIN, top + 15, label)]
    for cell, left in zip(cells, columns[:2], strict=True):
        if cell.accesses:
            parts += _box(left, top, CELL, cell.factor, cell.text)
    if line.shared_accesses:
        parts.append(_text(columns[2] + CELL - MARGIN, top + 15, f"{line.excess_wavefronts:,}", "number"))
    tooltip = "; ".join(counts.text for counts in line.instructions[:4]) + (
        "; ..." if len(line.instructions) > 4 else ""
    )
    return [f"<g><title>{escape(tooltip)}</title>", *parts, "</g>"]


def _legend(top: int) -> list[str]:
    parts = [_text(MARGIN, top + 15, "times the ideal:", "head")]
    left, width = MARGIN + 17 * LETTER, 80
    for factor in LEGEND:
        text = f"{factor:g}" + (" or more" if factor == SATURATED else "")
        parts += _box(left, top, width, factor, text)
        left += width + GAP
    return [*parts, _text(MARGIN, top + ROW + 20, "a cell: mean per warp access / ideal", "head")]


def _box(left: float, top: float, width: float, factor: float, text: str) -> list[str]:
    red, green, blue = colour(factor)
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 140
    fill = f"#{red:02x}{green:02x}{blue:02x}"
    return [
        f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{ROW}" rx="3" fill="{fill}"/>',
        _text(left + width / 2, top + 15, text, "value light" if dark else "value"),
    ]


def _text(x: float, y: float, text: str, style: str = "") -> str:
    name = f' class="{style}"' if style else ""
    return f'<text x="{x:g}" y="{y:g}"{name} xml:space="preserve">{escape(text)}</text>'
