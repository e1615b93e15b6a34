"""Prefill against FlashAttention-2, cuDNN and flash-attn-4: TFLOP/s of 4 B H N^2 d, halved for causal."""

from __future__ import annotations

import argparse
import itertools
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import peers
from benchmarks.measure import Bind, Cell, measure
from benchmarks.prepare import compile_in_parallel
from benchmarks.report import geometric_mean, number, print_table, ratio, write_json
from benchmarks.workload import Workload

OURS = "cute_attn"
HEAD_DIMS = (64, 128, 256)
LENGTHS = (1024, 4096, 16384)
BF16_HEAD_DIM = 128  # the one head dim that is timed in bf16 too
QUICK_LENGTH = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS), metavar="D")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="N")
    parser.add_argument("--dtypes", nargs="+", choices=("float16", "bfloat16"), help="default: fp16, and bf16 at d 128")
    parser.add_argument("--quick", action="store_true", help=f"length {QUICK_LENGTH} alone, timed for a third as long")
    parser.add_argument(
        "--configs",
        type=lambda text: text.split(","),
        default=[],
        metavar="NAME,...",
        help="time these configs too: seed tilings such as seed_64x64_1stage, or full names",
    )
    parser.add_argument(
        "--peers",
        type=lambda text: text.split(","),
        default=[peer.name for peer in peers.PEERS],
        metavar="NAME,...",
        help=f"default: {','.join(peer.name for peer in peers.PEERS)}",
    )
    parser.add_argument("--budget-ms", type=float, default=100.0, help="timed milliseconds per contender and cell")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="the committed one is benchmarks/results/prefill.json"
    )
    parser.add_argument("--picture", type=Path, metavar="PATH", help="also draw the table: .svg or .png")


def run(arguments: argparse.Namespace) -> None:
    """Time the table, print it and write what was asked for."""
    binds = _binds(arguments)
    lengths = [QUICK_LENGTH] if arguments.quick else arguments.lengths
    budget_ms = arguments.budget_ms / 3 if arguments.quick else arguments.budget_ms
    workloads = _workloads(arguments.head_dims, lengths, arguments.dtypes)
    compile_in_parallel(workloads, [None, *arguments.configs])
    cells = []
    with tqdm(workloads, disable=None, unit="cell") as progress:
        for workload in progress:
            progress.set_postfix_str(f"d {workload.head_dim}, N {workload.length}")
            cells.append(measure(workload, binds, budget_ms))
    rivals = [name for name in binds if name != OURS]
    _print(cells, rivals)
    content = _content(cells, rivals)
    if arguments.json:
        write_json(arguments.json, "prefill", content)
    if arguments.picture:
        from benchmarks.picture import draw_prefill

        draw_prefill(content, arguments.picture)


def _binds(arguments: argparse.Namespace) -> dict[str, Bind]:
    binds: dict[str, Bind] = {OURS: peers.ours}
    binds |= {peer.name: peer.bind for peer in peers.select(arguments.peers)}
    return binds | {config: partial(peers.ours, config=config) for config in arguments.configs}


def _workloads(head_dims: list[int], lengths: list[int], dtypes: list[str] | None) -> list[Workload]:
    def dtypes_of(head_dim: int) -> list[str]:
        return dtypes or (["float16", "bfloat16"] if head_dim == BF16_HEAD_DIM else ["float16"])

    cells = itertools.product(head_dims, lengths, (False, True))
    workloads = [Workload(dtype, d, n, causal) for d, n, causal in cells for dtype in dtypes_of(d)]
    return sorted(workloads, key=lambda workload: workload.dtype != "float16")


def _print(cells: list[Cell], rivals: list[str]) -> None:
    header = ["dtype", "d", "N", "causal", *(f"/ {name}" for name in rivals), OURS, *rivals]
    means = [number(_mean_ratio(cells, name), 3) for name in rivals]
    closing = [["geometric mean", "", "", "", *means, "", *("" for _ in rivals)]]
    print_table(header, [_table_row(cell, rivals) for cell in cells], closing)
    for name, reasons in _missing(cells).items():
        for reason, where in reasons.items():
            print(f"{name}: no figure in {where} of {len(cells)} cells: {reason}")


def _table_row(cell: Cell, rivals: list[str]) -> list[str]:
    workload = cell.workload
    return [
        {"float16": "fp16", "bfloat16": "bf16"}[workload.dtype],
        str(workload.head_dim),
        str(workload.length),
        "yes" if workload.causal else "no",
        *(number(_ratio(cell, name), 2) for name in rivals),
        cell.shown(OURS),
        *(cell.shown(name) for name in rivals),
    ]


def _ratio(cell: Cell, rival: str) -> float | None:
    return ratio(cell.tflops.get(OURS), cell.tflops.get(rival))


def _mean_ratio(cells: list[Cell], rival: str) -> float | None:
    return geometric_mean(_ratio(cell, rival) for cell in cells)


def _missing(cells: list[Cell]) -> dict[str, dict[str, int]]:
    """How many cells lack each contender, by reason."""
    reasons: dict[str, dict[str, int]] = {}
    for cell in cells:
        for name, reason in cell.missing.items():
            by_reason = reasons.setdefault(name, {})
            by_reason[reason] = by_reason.get(reason, 0) + 1
    return reasons


def _content(cells: list[Cell], rivals: list[str]) -> dict[str, Any]:
    return {
        "unit": "TFLOP/s, median",
        "peers": {peer.name: peer.description for peer in peers.PEERS if peer.name in rivals},
        "geometric_mean_ratio": {name: _mean_ratio(cells, name) for name in rivals},
        "rows": [
            {
                "dtype": cell.workload.dtype,
                "head_dim": cell.workload.head_dim,
                "length": cell.workload.length,
                "causal": cell.workload.causal,
                "batch": cell.workload.batch,
                "heads": cell.workload.heads,
                "ratio": {name: _ratio(cell, name) for name in rivals},
                "tflops": cell.tflops,
                "relative_error": cell.errors,
                "missing": cell.missing,
            }
            for cell in cells
        ],
    }
