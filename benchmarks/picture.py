"""The prefill table as a picture: a panel per head dim and mask, a group of bars per length."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS

# Okabe and Ito's colours, told apart by readers of every colour vision; the lightness falls too.
COLOURS = {"cute_attn": "#D55E00", "FA2": "#B8B8B8", "cuDNN": "#56B4E9", "FA4": "#0072B2"}
OTHER_COLOURS = ("#009E73", "#CC79A7", "#E69F00", "#F0E442")
INK, FAINT = "#222222", "#DDDDDD"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, default=RESULTS / "prefill.json", metavar="PATH", help="figures to draw")
    parser.add_argument("--picture", type=Path, default=RESULTS / "prefill.svg", metavar="PATH", help=".svg or .png")


def run(arguments: argparse.Namespace) -> None:
    """Draw figures that were written earlier.

    Raises:
        ValueError: there are none.
    """
    if not arguments.json.is_file():
        raise ValueError(f"no figures in {arguments.json}: python -m benchmarks prefill --json PATH writes them")
    draw_prefill(json.loads(arguments.json.read_text()), arguments.picture)


def draw_prefill(content: dict[str, Any], path: Path) -> None:
    """Draw what ``benchmarks.prefill`` measured; the suffix of ``path`` chooses the format."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("pictures need matplotlib: pip install 'cute-attn[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = content["rows"]
    groups = list(dict.fromkeys((row["dtype"], row["head_dim"]) for row in rows))
    names = list(dict.fromkeys(name for row in rows for name in row["tflops"]))
    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "prefill", "font.size": 10, "text.color": INK})
    figure, axes = pyplot.subplots(
        2, len(groups), figsize=(2.6 * len(groups) + 0.8, 5.6), sharey=True, squeeze=False, layout="constrained"
    )
    for column, (dtype, head_dim) in enumerate(groups):
        for row_of_axes, causal in enumerate((False, True)):
            panel = [r for r in rows if (r["dtype"], r["head_dim"], r["causal"]) == (dtype, head_dim, causal)]
            axis = axes[row_of_axes][column]
            _draw_panel(axis, panel, names)
            title = f"head dim {head_dim}, {'fp16' if dtype == 'float16' else 'bf16'}"
            axis.set_title(f"{title}{', causal' if causal else ''}", fontsize=10)
    for row_of_axes in axes:
        row_of_axes[0].set_ylabel("TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("length")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(names), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    print(f"written: {path}")


def _draw_panel(axis: Any, rows: list[dict[str, Any]], names: list[str]) -> None:
    width = 0.84 / len(names)
    others = iter(OTHER_COLOURS * len(names))
    for i, name in enumerate(names):
        left = [x - 0.42 + (i + 0.5) * width for x in range(len(rows))]
        heights = [row["tflops"].get(name, 0.0) for row in rows]
        bars = axis.bar(left, heights, width * 0.92, label=name, color=COLOURS.get(name) or next(others))
        labels = [f"{height:.0f}" if height else "" for height in heights]
        axis.bar_label(bars, labels, rotation=90, padding=2, fontsize=7.5, color=INK)
    axis.set_xticks(range(len(rows)), [str(row["length"]) for row in rows])
    axis.margins(y=0.16)
    axis.grid(axis="y", color=FAINT, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(length=0, colors=INK)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
