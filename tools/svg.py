"""As much SVG as the pictures need: boxes, words and arrows on a white ground."""

from __future__ import annotations

from html import escape
from typing import NamedTuple

FONT = "font-family='Helvetica, Arial, sans-serif'"
INK = "#222222"


class Box(NamedTuple):
    """A rectangle in pixels."""

    x: float
    y: float
    width: float
    height: float


class Svg:
    """A picture of a given size in pixels."""

    def __init__(self, width: int, height: int):
        self.parts = [
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
            f"viewBox='0 0 {width} {height}'>",
            "<defs><marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' "
            f"orient='auto'><path d='M0 0L8 4L0 8z' fill='{INK}'/></marker></defs>",
            f"<rect width='{width}' height='{height}' fill='white'/>",
        ]

    def box(self, box: Box, fill: str, label: str = "", size: int = 12) -> None:
        """A filled rectangle with a label in its middle."""
        x, y, width, height = box
        self.parts.append(
            f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' fill='{fill}' stroke='{INK}' "
            "stroke-width='0.8'/>"
        )
        if label:
            self.text(x + width / 2, y + height / 2 + size * 0.35, label, size, "middle")

    def text(self, x: float, y: float, words: str, size: int = 12, anchor: str = "start", bold: bool = False) -> None:
        weight = " font-weight='bold'" if bold else ""
        self.parts.append(
            f"<text x='{x:g}' y='{y:g}' {FONT} font-size='{size}' text-anchor='{anchor}' fill='{INK}'{weight}>"
            f"{escape(words)}</text>"
        )

    def arrow(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        (x1, y1), (x2, y2) = start, end
        self.parts.append(
            f"<path d='M{x1:g} {y1:g}L{x2:g} {y2:g}' stroke='{INK}' stroke-width='1.4' fill='none' "
            "marker-end='url(#head)'/>"
        )

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])
