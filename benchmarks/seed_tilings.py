"""The tilings of the CUDA kernel this work started from, as configs, beside that kernel's own figures."""

from __future__ import annotations

import argparse
import itertools
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from benchmarks import peers
from benchmarks.measure import Bind, Cell, measure
from benchmarks.prepare import compile_in_parallel
from benchmarks.report import number, print_table, ratio, write_json
from benchmarks.workload import Workload
from cute_attn import SEED_CONFIGS

DEFAULT = "default"
FA2 = peers.select(["FA2"])[0]


class Recorded(NamedTuple):
    """TFLOP/s of one earlier run on an H200: the CUDA kernel with 1 and 2 stages, and FA2 in the same process."""

    one_stage: float
    two_stages: float | None
    fa2: float


# The CUDA kernel built by nvcc -O3 --use_fast_math for sm_90a (driver 580, CUDA 13.0, torch 2.11.0), fp16, not causal,
# with its default tile: 128x64 at head dim 64, 128x32 above. It has no second stage at head dim 256.
RECORDED: dict[tuple[int, int], Recorded] = {
    (64, 1024): Recorded(204, 216, 286),
    (64, 4096): Recorded(225, 227, 298),
    (64, 16384): Recorded(235, 234, 300),
    (128, 1024): Recorded(116, 170, 317),
    (128, 4096): Recorded(137, 184, 335),
    (128, 16384): Recorded(151, 189, 340),
    (256, 1024): Recorded(133, None, 283),
    (256, 4096): Recorded(144, None, 306),
    (256, 16384): Recorded(150, None, 312),
}


def recorded_figure(config: str, workload: Workload) -> float | None:
    """What the CUDA kernel reached with this tiling, where that was recorded."""
    tile = "128x64" if workload.head_dim < 128 else "128x32"
    recorded = RECORDED.get((workload.head_dim, workload.length))
    if recorded is None or tile not in config:
        return None
    return recorded.one_stage if config.endswith("_1stage") else recorded.two_stages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256], metavar="D")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384], metavar="N")
    parser.add_argument("--budget-ms", type=float, default=50.0, help="timed milliseconds per contender and cell")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="the committed one is benchmarks/results/seed_tilings.json"
    )


def run(arguments: argparse.Namespace) -> None:
    """Time every tiling, the defaults and FA2; print and write the comparison."""
    binds: dict[str, Bind] = {DEFAULT: peers.ours, FA2.name: FA2.bind}
    binds |= {name: partial(peers.ours, config=name) for name in SEED_CONFIGS}
    workloads = [Workload("float16", d, n, False) for d, n in itertools.product(arguments.head_dims, arguments.lengths)]
    compile_in_parallel(workloads, [None, *SEED_CONFIGS])
    cells = [measure(workload, binds, arguments.budget_ms) for workload in tqdm(workloads, disable=None, unit="cell")]
    rows = [row for cell in cells for row in _rows(cell)]
    _print(rows)
    if arguments.json:
        write_json(arguments.json, "seed_tilings", {"unit": "TFLOP/s, median", "rows": rows})


def _rows(cell: Cell) -> list[dict[str, Any]]:
    return [_row(cell, name) for name in SEED_CONFIGS]


def _row(cell: Cell, name: str) -> dict[str, Any]:
    workload, tflops = cell.workload, cell.tflops.get(name)
    cuda = recorded_figure(name, workload)
    recorded = RECORDED.get((workload.head_dim, workload.length))
    pace = ratio(cell.tflops.get(FA2.name), recorded.fa2 if recorded else None)
    return {
        "head_dim": workload.head_dim,
        "length": workload.length,
        "config": name,
        "tflops": tflops,
        "cuda_tflops": cuda,
        "ratio_to_cuda": ratio(tflops, cuda),
        # The same, with the recorded figure moved by what FA2 gained or lost between that run and this one.
        "ratio_to_cuda_at_this_pace": ratio(tflops, cuda * pace if cuda and pace else None),
        "default_tflops": cell.tflops.get(DEFAULT),
        "default_to_tiling": ratio(cell.tflops.get(DEFAULT), tflops),
        "default_to_cuda": ratio(cell.tflops.get(DEFAULT), cuda),
        "missing": cell.missing.get(name),
    }


def _print(rows: list[dict[str, Any]]) -> None:
    header = ["d", "N", "tiling", "/ CUDA", "/ CUDA at FA2's pace", "default / tiling", "default / CUDA"]
    table = [
        [
            str(row["head_dim"]),
            str(row["length"]),
            row["config"],
            number(row["ratio_to_cuda"], 2),
            number(row["ratio_to_cuda_at_this_pace"], 2),
            number(row["default_to_tiling"], 2),
            number(row["default_to_cuda"], 2),
            number(row["tflops"], 0),
            number(row["cuda_tflops"], 0),
        ]
        for row in rows
    ]
    print_table([*header, "TFLOP/s", "CUDA"], table)
    for row in rows:
        if row["missing"]:
            print(f"{row['config']} at head dim {row['head_dim']}, length {row['length']}: {row['missing']}")
