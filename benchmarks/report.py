"""What a benchmark leaves behind: a table on the terminal and a JSON file that says where it was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "flash-attn-4", "triton")


def environment() -> dict[str, Any]:
    """Device, versions and date of a measurement."""
    cudnn = torch.backends.cudnn.version()
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": _driver_version(),
        "cuda": torch.version.cuda,
        "cudnn": cudnn,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver_version() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no driver, or no NVML: the figure is only a note
        return None


def write_json(path: Path, benchmark: str, content: Mapping[str, Any]) -> None:
    """Write a benchmark's figures with the environment they came from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    payload = {"benchmark": benchmark, "environment": environment(), **content}
    path.write_text(json.dumps(payload, indent=1) + "\n")
    print(f"written: {path}")


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of the values that are there; None if there are none."""
    logs = [math.log(value) for value in values if value]
    return math.exp(sum(logs) / len(logs)) if logs else None


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], closing: Sequence[Sequence[str]] = ()) -> None:
    """The first column left-aligned, the others right-aligned; ``closing`` rows stand below a second rule."""
    columns = zip(header, *rows, *closing, strict=True)
    widths = [max(len(cell) for cell in column) for column in columns]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        aligned = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return "  ".join(aligned).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    print(line(header), rule, *map(line, rows), sep="\n")
    if closing:
        print(rule, *map(line, closing), sep="\n")


def ratio(mine: float | None, theirs: float | None) -> float | None:
    return mine / theirs if mine and theirs else None
