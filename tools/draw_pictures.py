"""Draws docs/pictures: the prefill kernel's tiles, and what its K/V buffers hide.

python -m tools.draw_pictures
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tools.svg import Box, Svg

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"

WARP_FILLS = ("#f4b6b6", "#f6d8a8", "#bfe3b4", "#b5d3ef")
SHARED_FILL = "#e4e4e4"
LOAD_FILLS = {"K": "#9ec5e8", "V": "#f2c28b"}
WORK_FILLS = {"S": "#cfe8c6", "softmax": "#f7e6a6", "O": "#e3c7ea"}


def pictures() -> dict[str, str]:
    """Every picture's file name and text."""
    return {"prefill_tiles.svg": str(tiles()), "prefill_pipeline.svg": str(pipeline())}


def tiles() -> Svg:
    """A block's matrices: who owns which rows, and what all warps share."""
    svg = Svg(860, 424)
    rows, unit = 8, 16  # 16-row strips of a tile of 128 rows; pixels to a strip
    top, height = 190, rows * unit
    svg.text(20, 26, "One block: 128 query rows, 4 warps, 64 keys at a time", 15, bold=True)

    _strips(svg, "Q", Box(60, top, 128, height))
    _shared(svg, "Kᵀ tile", Box(250, 50, 96, 116))
    _strips(svg, "S = Q Kᵀ", Box(250, top, 96, height))
    svg.arrow((192, top + height / 2), (246, top + height / 2))
    svg.arrow((298, 168), (298, top - 3))

    _strips(svg, "P = softmax", Box(420, top, 96, height))
    svg.arrow((350, top + height / 2), (416, top + height / 2))
    svg.text(383, top + height / 2 - 8, "registers", 10, "middle")
    _shared(svg, "V tile", Box(590, 82, 128, 84))
    _strips(svg, "O += P V", Box(590, top, 128, height))
    svg.arrow((520, top + height / 2), (586, top + height / 2))
    svg.arrow((654, 168), (654, top - 3))

    svg.text(60, 366, "Each warp owns whole query rows, two strips of 16: no reduction crosses warps.", 13)
    svg.text(60, 386, "S, P and O never leave a warp's registers; S's accumulators are P's operand as they stand.", 13)
    svg.text(60, 406, "Q, K and V pass through shared memory (grey: K and V are read by all warps).", 13)
    for warp, fill in enumerate(WARP_FILLS):
        svg.box(Box(745, top + warp * 26, 84, 20), fill, f"warp {warp}")
    return svg


def _strips(svg: Svg, name: str, box: Box) -> None:
    """A matrix whose 16-row strips belong to the warps in turn."""
    strips = 2 * len(WARP_FILLS)
    height = box.height / strips
    for strip in range(strips):
        fill = WARP_FILLS[strip % len(WARP_FILLS)]
        svg.box(Box(box.x, box.y + strip * height, box.width, height), fill)
    svg.text(box.x + box.width / 2, box.y + box.height + 18, name, 13, "middle", bold=True)


def _shared(svg: Svg, name: str, box: Box) -> None:
    svg.box(box, SHARED_FILL, name)


@dataclass
class Timeline:
    """What the copies and the tensor cores do in a run over a few tiles, in arbitrary units of time.

    The order is the kernel's. With one buffer for both, K and V are each asked for when the other has been used. With
    one buffer each, V is asked for when S begins and the next K when S is done. With two each, the next K and V are
    asked for when S begins.
    """

    stages: int
    tiles: int = 4
    load: float = 5
    durations: dict[str, float] = field(default_factory=lambda: {"S": 4.0, "softmax": 3.0, "O": 4.0})
    loads: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    work: list[tuple[str, int, float]] = field(default_factory=list)
    now: float = 0
    memory_free: float = 0

    def run(self) -> Timeline:
        self._ask("K", 0)
        if self.stages > 1:
            self._ask("V", 0)
        for tile in range(self.tiles):
            self._wait("K", tile)
            if self.stages == 2:
                self._ask("V", tile)
            if self.stages == 4:
                self._wait("V", tile)
                self._ask("K", tile + 1)
                self._ask("V", tile + 1)
            self._compute("S", tile)
            if self.stages == 1:
                self._ask("V", tile)
            if self.stages == 2:
                self._wait("V", tile)
                self._ask("K", tile + 1)
            self._compute("softmax", tile)
            self._wait("V", tile)
            self._compute("O", tile)
            if self.stages == 1:
                self._ask("K", tile + 1)
        return self

    def _ask(self, name: str, tile: int) -> None:
        if tile < self.tiles and (name, tile) not in self.loads:
            begin = max(self.now, self.memory_free)
            self.memory_free = begin + self.load
            self.loads[name, tile] = (begin, self.memory_free)

    def _wait(self, name: str, tile: int) -> None:
        self.now = max(self.now, self.loads[name, tile][1])

    def _compute(self, name: str, tile: int) -> None:
        self.work.append((name, tile, self.now))
        self.now += self.durations[name]


def pipeline() -> Svg:
    """Loads and work over time for 1, 2 and 4 K/V buffers."""
    svg = Svg(860, 400)
    left, unit = 196, 8.4
    svg.text(20, 26, "What the K/V buffers hide: the same four tiles with num_stages 1, 2 and 4", 15, bold=True)
    for index, stages in enumerate((1, 2, 4)):
        top = 50 + index * 108
        timeline = Timeline(stages).run()
        svg.text(20, top + 34, f"num_stages {stages}", 13, bold=True)
        svg.text(20, top + 52, ("K and V share one", "one K, one V", "two K, two V")[index], 11)
        svg.text(left - 10, top + 18, "load", 11, "end")
        svg.text(left - 10, top + 56, "compute", 11, "end")
        for (name, tile), (begin, end) in timeline.loads.items():
            svg.box(Box(left + begin * unit, top, (end - begin) * unit, 28), LOAD_FILLS[name], f"{name}{tile}", 11)
        for name, tile, begin in timeline.work:
            box = Box(left + begin * unit, top + 38, timeline.durations[name] * unit, 28)
            svg.box(box, WORK_FILLS[name], "" if name == "softmax" else f"{name}{tile}", 11)
        svg.text(left + timeline.now * unit + 6, top + 57, f"{timeline.now:g}", 11)
    svg.box(Box(left, 374, 14, 14), WORK_FILLS["softmax"])
    svg.text(
        left + 20, 385, "softmax. Gaps between the boxes of a compute row are waits; units of time are arbitrary.", 11
    )
    return svg


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pictures().items():
        (FOLDER / name).write_text(text)
        print(f"written: {FOLDER / name}")


if __name__ == "__main__":
    main()
