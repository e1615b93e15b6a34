"""Which tiling is fastest for a head dim: every sensible config, timed and sorted."""

from __future__ import annotations

import argparse
import contextlib
import itertools
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import peers
from benchmarks.measure import Bind, Cell, measure
from benchmarks.prepare import compile_in_parallel, device_arch
from benchmarks.report import geometric_mean, number, print_table, ratio, write_json
from benchmarks.workload import Workload
from cute_attn import PrefillConfig
from cute_attn.arch import Arch

FA2 = peers.select(["FA2"])[0]
DEFAULT = "default"
TILE_N = (32, 48, 64, 80, 96, 112, 128)
# fp32 accumulators of S and O that a thread may hold; the other registers of 255 go to fragments and addresses.
MAX_ACCUMULATORS = 208


def candidates(arch: Arch, head_dim: int, tile_n: list[int]) -> list[PrefillConfig]:
    """Configs that fit the architecture's shared memory and whose accumulators fit the registers."""
    choices = itertools.product((4, 8), (1, 2), tile_n, (1, 2, 4), (False, True))
    configs = []
    for warps, rows, n, stages, q_in_regs in choices:
        with contextlib.suppress(ValueError):  # not every tile_n goes with 8 warps
            configs.append(PrefillConfig(16 * warps * rows, n, warps, stages, q_in_regs=q_in_regs))
    return [config for config in configs if _fits(config, arch, head_dim)]


def _fits(config: PrefillConfig, arch: Arch, head_dim: int) -> bool:
    q_registers = config.tile_m * head_dim // 2 // config.num_threads if config.q_in_regs else 0
    accumulators = config.tile_m * (config.tile_n + head_dim) // config.num_threads
    return config.smem_bytes(head_dim, head_dim) <= arch.smem_bytes and accumulators + q_registers <= MAX_ACCUMULATORS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128], metavar="D")
    parser.add_argument("--length", type=int, default=4096, metavar="N")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--tile-n", type=int, nargs="+", default=list(TILE_N), metavar="KEYS")
    parser.add_argument("--configs", type=lambda text: text.split(","), metavar="NAME,...", help="these alone")
    parser.add_argument("--budget-ms", type=float, default=20.0, help="timed milliseconds per config and mask")
    parser.add_argument("--json", type=Path, metavar="PATH")


def run(arguments: argparse.Namespace) -> None:
    """Compile all configs with every core, time them full and causal, and print the fastest first."""
    arch = device_arch()
    rows = []
    for head_dim in arguments.head_dims:
        names = arguments.configs or [config.name for config in candidates(arch, head_dim, arguments.tile_n)]
        workloads = [Workload(arguments.dtype, head_dim, arguments.length, causal) for causal in (False, True)]
        compile_in_parallel(workloads, [None, *names])
        swept = _sweep(workloads, names, arguments.budget_ms)
        _print(swept)
        rows += swept
    if arguments.json:
        write_json(arguments.json, "prefill_configs", {"unit": "TFLOP/s, median", "rows": rows})


def _sweep(workloads: list[Workload], names: list[str], budget_ms: float) -> list[dict[str, Any]]:
    """One row per config, fastest first. Each is timed against the defaults and FA2 again: clocks drift."""
    rows = []
    for name in tqdm(names, disable=None, unit="config"):
        binds: dict[str, Bind] = {name: partial(peers.ours, config=name), DEFAULT: peers.ours, FA2.name: FA2.bind}
        rows.append(_row(name, [measure(workload, binds, budget_ms) for workload in workloads]))
    return sorted(rows, key=lambda row: row["ratio_to_fa2"] or 0.0, reverse=True)


def _row(name: str, cells: list[Cell]) -> dict[str, Any]:
    def mean_ratio(rival: str) -> float | None:
        ratios = [ratio(cell.tflops.get(name), cell.tflops.get(rival)) for cell in cells]
        return geometric_mean(ratios) if all(ratios) else None

    return {
        "head_dim": cells[0].workload.head_dim,
        "length": cells[0].workload.length,
        "dtype": cells[0].workload.dtype,
        "config": name,
        "ratio_to_fa2": mean_ratio(FA2.name),
        "ratio_to_default": mean_ratio(DEFAULT),
        "tflops": {"causal" if cell.workload.causal else "full": cell.tflops.get(name) for cell in cells},
        "missing": next((cell.missing[name] for cell in cells if name in cell.missing), None),
    }


def _print(rows: list[dict[str, Any]]) -> None:
    header = ["d", "N", "config", "/ FA2", "/ default", "full", "causal", ""]
    print_table(
        header,
        [
            [
                str(row["head_dim"]),
                str(row["length"]),
                row["config"],
                number(row["ratio_to_fa2"], 3),
                number(row["ratio_to_default"], 3),
                number(row["tflops"]["full"], 0),
                number(row["tflops"]["causal"], 0),
                row["missing"] or "",
            ]
            for row in rows
        ],
    )
