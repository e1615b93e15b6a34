"""One cell of a table: every contender bound, checked for correctness, and timed in turns with the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from benchmarks.peers import Contender
from benchmarks.timing import Call, device_medians_ms
from benchmarks.workload import MAX_ERROR, Inputs, Workload, error

Bind = Callable[[Inputs], Contender]


@dataclass
class Cell:
    """Figures of one workload: TFLOP/s by contender, and why a contender has none."""

    workload: Workload
    tflops: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def shown(self, name: str) -> str:
        """The contender's figure as a table shows it."""
        if name in self.tflops:
            return f"{self.tflops[name]:.0f}"
        return "WRONG" if self.missing.get(name, "").startswith("WRONG") else "-"


def measure(workload: Workload, binds: Mapping[str, Bind], budget_ms: float) -> Cell:
    """Time every contender that can run this workload and gives the right result."""
    cell = Cell(workload)
    inputs = workload.inputs()
    calls: dict[str, Call] = {}
    for name, bind in binds.items():
        try:
            contender = bind(inputs)
            cell.errors[name] = _checked_error(contender, inputs)
        # A contender that cannot run, for whatever reason of its own, must not end the others' measurement.
        except Exception as exception:
            cell.missing[name] = _reason(exception)
            continue
        if cell.errors[name] <= MAX_ERROR[inputs.q.dtype]:
            calls[name] = contender.run
        else:
            cell.missing[name] = f"WRONG: relative error {cell.errors[name]:.2g}"
    if calls:
        medians = device_medians_ms(calls, budget_ms)
        cell.tflops = {name: workload.tflops(milliseconds) for name, milliseconds in medians.items()}
    return cell


def _checked_error(contender: Contender, inputs: Inputs) -> float:
    # The allocator hands this block of NaN to the output, so rows that are never written show.
    poison = torch.full_like(inputs.q, float("nan"))
    del poison
    return error(contender.out(contender.run()), inputs)


def _reason(exception: Exception) -> str:
    lines = str(exception).strip().splitlines() or [""]
    return f"{type(exception).__name__}: {lines[0][:200]}"
