"""Decode over all batch sizes up to 50 and lengths from 64 to 65536: whether the time makes a jump anywhere.

A step is the growth of the time from one point of the sweep to the next, in batch or in length, over the growth of the
work: 1 where time follows work, less where fixed costs rule, and more where a choice of splits goes wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.decode import DEVICE, HEAD_DIM, HEADS, HEADS_KV
from benchmarks.report import number, print_table, write_json
from benchmarks.timing import device_medians_ms

BATCHES = range(1, 51)
LENGTHS = sorted({length for power in range(6, 16) for length in (1 << power, 3 << (power - 1))} | {65536})
WINDOWS = (256, 1024, 4096, 16384)
WINDOW_BATCH = 8
ALLOWED_STEP = 1.5
BUDGET_MS = 1.0  # timed per point, in at least 10 rounds
SHOWN = 8  # of the largest steps

Point = tuple[int, int]  # batch, length


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="PATH",
                        help="the committed one is benchmarks/results/decode_sweep.json")  # fmt: skip


@dataclass(frozen=True)
class Step:
    """From one point to the next."""

    begin: Point
    end: Point
    microseconds: tuple[float, float]

    @property
    def growth(self) -> float:
        """Of the time over that of the work; of the fall of the time where it falls."""
        before, after = self.microseconds
        work = self.end[0] * self.end[1] / (self.begin[0] * self.begin[1])
        return max(after / before / work, before / after)


@dataclass
class Workload:
    """A cache for the largest point, of which every other point uses a part."""

    q: Tensor
    k: Tensor
    v: Tensor

    @staticmethod
    def make() -> Workload:
        batch, length = max(BATCHES), max(LENGTHS)
        q = torch.randn(batch, 1, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
        k, v = (torch.zeros(batch, length, HEADS_KV, HEAD_DIM, dtype=q.dtype, device=DEVICE) for _ in range(2))
        return Workload(q, k, v)

    def call(self, point: Point, window: int | None = None) -> partial[Any]:
        from cute_attn import ContiguousCache, decode

        batch, length = point
        lengths = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
        cache = ContiguousCache(self.k[:batch, :length], self.v[:batch, :length])
        return partial(decode, self.q[:batch], cache, lengths, window=window)


def run(arguments: argparse.Namespace) -> None:
    """Time the sweep, print its largest steps and what windows cost, and write what was asked for."""
    workload = Workload.make()
    times: dict[Point, float] = {}
    for length in tqdm(LENGTHS, disable=None, unit="length"):
        for batch in BATCHES:
            times[batch, length] = _microseconds(workload.call((batch, length)))
    windows = {window: _window_ratio(workload, window) for window in WINDOWS}
    steps = sorted(_steps(times), key=lambda step: -step.growth)
    _print(steps, windows)
    if arguments.json:
        write_json(arguments.json, "decode-sweep", _content(times, steps, windows))


def _microseconds(call: partial[Any]) -> float:
    return 1e3 * device_medians_ms({"decode": call}, BUDGET_MS)["decode"]


def _window_ratio(workload: Workload, window: int) -> float:
    """The time of a window in the longest sequences over that of sequences as long as the window."""
    whole = _microseconds(workload.call((WINDOW_BATCH, window)))
    return _microseconds(workload.call((WINDOW_BATCH, max(LENGTHS)), window)) / whole


def _steps(times: Mapping[Point, float]) -> Iterator[Step]:
    for batch, length in times:
        longer = [(batch, longer) for longer in LENGTHS if longer > length]
        for end in ((batch + 1, length), *longer[:1]):
            if end in times:
                yield Step((batch, length), end, (times[batch, length], times[end]))


def _print(steps: list[Step], windows: Mapping[int, float]) -> None:
    above = sum(step.growth > ALLOWED_STEP for step in steps)
    print(f"{len(steps)} steps, {above} of them above {ALLOWED_STEP}; the largest:")
    rows = [
        [f"{step.begin} to {step.end}", number(step.growth, 2), *(number(time, 1) for time in step.microseconds)]
        for step in steps[:SHOWN]
    ]
    print_table(["(batch, length)", "time / work", "us", "us"], rows)
    print(f"a window at ({WINDOW_BATCH}, {max(LENGTHS)}), over a sequence as long as the window:")
    print_table(["window", "ratio"], [[str(window), number(cost, 2)] for window, cost in windows.items()])


def _content(times: Mapping[Point, float], steps: list[Step], windows: Mapping[int, float]) -> dict[str, Any]:
    return {
        "unit": "microseconds, median",
        "batches": list(BATCHES),
        "microseconds": {length: [times[batch, length] for batch in BATCHES] for length in LENGTHS},
        "largest_steps": [{"from": step.begin, "to": step.end, "growth": step.growth} for step in steps[:SHOWN]],
        "steps_above_1_5": sum(step.growth > ALLOWED_STEP for step in steps),
        "window_ratios": windows,
    }
