"""Memory traffic of access patterns: Nsight Compute's counters on a GPU against the simulator's.

    python -m tests.simulator.recording.traffic profile --output tests/simulator/data/traffic.json

runs ``ncu`` over ``... traffic launch``, which launches every pattern once, and prints where the two differ.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from layouts.simulator.report import Report
from layouts.simulator.simulate import simulate
from tests.simulator.recording.gpu import Gpu
from tests.simulator.recording.patterns import KINDS, THREADS, Pattern, patterns

_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared"
_SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_"
_REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op_"
_COPIED = "sm__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_ldgsts_cache_"

COUNTERS: dict[str, tuple[str, ...]] = {
    "shared": (f"{_WAVEFRONTS}.sum",),
    "shared loads": (f"{_WAVEFRONTS}_op_ld.sum",),
    "shared stores": (f"{_WAVEFRONTS}_op_st.sum",),
    "shared copies": (f"{_WAVEFRONTS}_op_ldgsts.sum",),
    "global loads": (f"{_SECTORS}ld.sum",),
    "global stores": (f"{_SECTORS}st.sum",),
    "global copies": (f"{_COPIED}access.sum", f"{_COPIED}bypass.sum"),
}
"""What the simulator counts, and the metrics whose sum it is."""

FURTHER = (
    f"{_REQUESTS}ld.sum", f"{_REQUESTS}st.sum", "smsp__inst_executed.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
)  # fmt: skip
"""Recorded to explain differences."""

INSTRUMENTED = (
    *COUNTERS["global copies"], "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldgsts.sum",
    "sm__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldgsts_cache_bypass.sum",
)  # fmt: skip
"""Metrics for which ncu patches the code, which is slow: for the kernels with copies only."""


def simulated(report: Report) -> dict[str, int]:
    """The simulator's numbers, by the names of ``COUNTERS``."""
    counts = dict.fromkeys(COUNTERS, 0)
    for each in report.instructions:
        base = each.opcode.split(".")[0]
        kind = "copies" if base == "cp" else "loads" if base.startswith("ld") else "stores"
        counts["shared"] += each.wavefronts
        counts[f"shared {kind}"] += each.wavefronts
        counts[f"global {kind}"] += each.sectors
    return counts


def simulate_pattern(pattern: Pattern) -> dict[str, int]:
    """Raises AssertionError if the simulator finds something wrong with the kernel."""
    report = simulate(pattern.ptx(), pattern.arrays(), grid=1, block=THREADS)
    if report.findings:
        raise AssertionError(f"{pattern.name}: {[str(finding) for finding in report.findings]}")
    return simulated(report)


def measured(metrics: dict[str, float]) -> dict[str, int]:
    """The GPU's numbers, by the names of ``COUNTERS``; those whose metrics are all missing are left out."""
    counts = {}
    for name, parts in COUNTERS.items():
        known = [metrics[part] for part in parts if part in metrics]
        if known:
            counts[name] = round(sum(known))
    return counts


def differences(record: dict[str, Any]) -> dict[str, dict[str, tuple[int, int]]]:
    """Patterns that differ: by name, the counters that do, as (simulator's, GPU's).

    Raises:
        KeyError: the record has a kernel that is no pattern.
    """
    found = {}
    for name, metrics in record["kernels"].items():
        ours, theirs = simulate_pattern(patterns()[name]), measured(metrics)
        wrong = {counter: (ours[counter], theirs[counter]) for counter in theirs if ours[counter] != theirs[counter]}
        if wrong:
            found[name] = wrong
    return found


def read_csv(lines: Iterable[str], by: str = "Kernel Name") -> dict[str, dict[str, float]]:
    """The output of ``ncu --csv``, a row for each metric or for each kernel, as metrics by kernel.

    Args:
        by: the column that names kernels: "Kernel Name", or "ID" where one kernel is launched several times.

    Raises:
        ValueError: it holds no table.
    """
    kept = list(lines)
    start = next((i for i, line in enumerate(kept) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError("no table in ncu's output:\n" + "".join(kept)[-2000:])
    kernels: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(kept[start:]):
        name = (row.get(by) or "").split("(")[0]
        if not name:
            continue  # the row of units
        if "Metric Name" in row:
            cells = {row["Metric Name"]: row["Metric Value"]}
        else:
            cells = {column: value for column, value in row.items() if "__" in (column or "")}
        numbers = {metric: _number(value) for metric, value in cells.items()}
        kernels.setdefault(name, {}).update({metric: value for metric, value in numbers.items() if value is not None})
    return kernels


def _number(text: str | None) -> float | None:
    """None for what ncu calls n/a."""
    digits = (text or "").replace(",", "")
    return float(digits) if re.fullmatch(r"-?\d+(\.\d+)?(e[+-]?\d+)?", digits) else None


def launch(match: str = "") -> None:
    """Every pattern, or those whose name has a match of the expression, once."""
    gpu = Gpu()
    for name, pattern in patterns().items():
        if re.search(match, name):
            gpu.run(pattern.ptx(), name, pattern.arrays(), 1, THREADS)


def profile(ncu: str, metrics: Iterable[str], match: str, timeout: float) -> dict[str, dict[str, float]]:
    """The counters of the patterns that match, by kernel and metric.

    Raises:
        RuntimeError: ncu failed; the message has what it printed.
    """
    command = [ncu, "--csv", "--clock-control", "none", "--print-units", "base", "--metrics", ",".join(metrics)]
    command += [sys.executable, "-m", "tests.simulator.recording.traffic", "launch", "--match", match]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    try:
        found = read_csv(done.stdout.splitlines(True))
    except ValueError as error:
        raise RuntimeError(f"ncu ended with {done.returncode}: {error}\n{done.stderr[-2000:]}") from error
    if done.returncode:
        print(f"ncu ended with {done.returncode}: {done.stderr[-500:]}")
    return found


def profile_all(ncu: str, match: str, timeout: float, path: Path) -> dict[str, Any]:
    """All metrics of the patterns that match, kind by kind; the record is written after each, so that none is lost."""
    record: dict[str, Any] = {"about": Gpu().about(), "kernels": {}}
    version = subprocess.run([ncu, "--version"], capture_output=True, text=True).stdout
    record["about"]["ncu"] = "".join(re.findall(r"Version (\S+)", version)[:1])
    counted = [metric for parts in COUNTERS.values() for metric in parts if metric not in INSTRUMENTED]
    runs = [([*counted, *FURTHER], kind) for kind in KINDS] + [(list(INSTRUMENTED), "cp_async")]
    path.parent.mkdir(parents=True, exist_ok=True)
    for metrics, kind in runs:
        started = time.perf_counter()
        try:
            found = profile(ncu, metrics, f"^{kind}(?:.*({match}))" if match else f"^{kind}", timeout)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"FAILED {kind}: {error}", flush=True)
            continue
        print(f"{kind}: {len(found)} patterns in {time.perf_counter() - started:.1f} s", flush=True)
        for name, values in found.items():
            record["kernels"].setdefault(name, {}).update(values)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts the memory traffic of access patterns on a GPU.")
    commands = parser.add_subparsers(dest="command", required=True)
    launching = commands.add_parser("launch", help="launch every pattern once")
    profiling = commands.add_parser("profile", help="launch them under ncu and keep its counters")
    profiling.add_argument("--ncu", default="ncu", help="the command")
    profiling.add_argument("--timeout", type=float, default=120, help="of each run of ncu, in seconds")
    profiling.add_argument("--output", type=Path, required=True, help="the .json file to write")
    for each in (launching, profiling):
        each.add_argument("--match", default="", help="only patterns whose name has a match of this expression")
    options = parser.parse_args()
    if options.command == "launch":
        launch(options.match)
        return
    record = profile_all(options.ncu, options.match, options.timeout, options.output)
    print(", ".join(f"{name} {value}" for name, value in record["about"].items()))
    wrong = differences(record)
    print(f"{len(record['kernels'])} of {len(patterns())} patterns recorded, {len(wrong)} differ (simulator, GPU)")
    for name, counters in wrong.items():
        print(f"DIFFERS {name}: {counters}")


if __name__ == "__main__":
    main()
