"""Memory traffic of access patterns: Nsight Compute's counters on a GPU against the simulator's.

    python -m tests.simulator.recording.traffic profile --output tests/simulator/data/traffic.json

runs ``ncu`` over ``... traffic launch``, which launches every pattern once, and prints where the two differ.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layouts.simulator.report import Report
from layouts.simulator.simulate import simulate
from tests.simulator.recording.gpu import Gpu
from tests.simulator.recording.patterns import KINDS, THREADS, Pattern, patterns
from tests.simulator.recording.profiler import Counters, Profiler, count_in_parts, merged, patches_code

_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_"
_COPIES = "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldgsts_cache_"
_SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_"


@dataclass(frozen=True)
class Counter:
    """Two numbers that ought to be equal.

    Attributes:
        kinds: of instructions, as ``simulated`` names them; their sum is the simulator's number.
        metric: the GPU's.
        unless: if the kernel has instructions of this kind, the metric counts something else.
    """

    kinds: tuple[str, ...]
    metric: str
    unless: str = ""


COUNTERS = {
    "shared loads": Counter(("wavefronts ld", "wavefronts ldmatrix"), f"{_WAVEFRONTS}ld.sum"),
    "shared stores": Counter(("wavefronts st", "wavefronts stmatrix"), f"{_WAVEFRONTS}st.sum"),
    "cached copies": Counter(("wavefronts cp.async.ca",), f"{_COPIES}access.sum"),
    "copies past L1": Counter(("wavefronts cp.async.cg",), f"{_COPIES}bypass.sum"),
    # Of copies past L1 this counts pairs of a line of global memory and 32 bytes of shared memory.
    "sectors of loads": Counter(("sectors ld", "sectors cp.async.ca"), f"{_SECTORS}ld.sum", unless="cp.async.cg"),
    "sectors of stores": Counter(("sectors st",), f"{_SECTORS}st.sum"),
    # No pattern loads anything twice, so that nothing hits L1.
    "sectors from L2": Counter(
        ("sectors ld", "sectors cp.async.ca", "sectors cp.async.cg"),
        "l1tex__m_xbar2l1tex_read_sectors_mem_lg_op_ld.sum",
    ),
}
"""Not among them is ``l1tex__data_pipe_lsu_wavefronts_mem_shared.sum``. It counts further wavefronts, in its part
"op_misc": one for each warp, one for each bar.sync of a block, and three more for each warp that copies."""

RECORDED = list(dict.fromkeys(counter.metric for counter in COUNTERS.values()))


def simulated(report: Report) -> dict[str, int]:
    """The simulator's counts by kind of instruction: "sectors ld", "wavefronts cp.async.ca", "executions ldmatrix"."""
    counts: dict[str, int] = {}
    for each in report.instructions:
        parts = each.opcode.split(".")
        kind = ".".join(parts[:3]) if parts[0] == "cp" else parts[0]
        counted = {"wavefronts": each.wavefronts, "sectors": each.sectors, "executions": each.executions}
        for what, count in counted.items():
            counts[f"{what} {kind}"] = counts.get(f"{what} {kind}", 0) + count
    return counts


def simulate_pattern(pattern: Pattern) -> dict[str, int]:
    """Raises AssertionError if the simulator finds something wrong with the kernel."""
    report = simulate(pattern.ptx(), pattern.arrays(), grid=1, block=THREADS, checked=not pattern.collides)
    if report.findings:
        raise AssertionError(f"{pattern.name}: {[str(finding) for finding in report.findings]}")
    return simulated(report)


def unequal(
    ours: dict[str, int], metrics: dict[str, float], counters: dict[str, Counter]
) -> dict[str, tuple[int, int]]:
    """The counters that differ, as (simulator's, GPU's); those whose metric is missing are left out."""
    found = {}
    for name, counter in counters.items():
        if counter.metric in metrics and not ours.get(f"sectors {counter.unless}"):
            pair = sum(ours.get(kind, 0) for kind in counter.kinds), round(metrics[counter.metric])
            if pair[0] != pair[1]:
                found[name] = pair
    return found


def differences(record: dict[str, Any]) -> dict[str, dict[str, tuple[int, int]]]:
    """Patterns that differ: by name, the counters that do, as (simulator's, GPU's).

    Raises:
        KeyError: the record has a kernel that is no pattern.
    """
    found = {}
    for name, metrics in record["kernels"].items():
        if wrong := unequal(simulate_pattern(patterns()[name]), metrics, COUNTERS):
            found[name] = wrong
    return found


def launch(names: str = "") -> None:
    """Every pattern, or those whose whole name the expression matches, once."""
    gpu = Gpu(keep_modules=True)
    for name, pattern in patterns().items():
        if re.fullmatch(names or ".*", name):
            gpu.run(pattern.ptx(), name, pattern.arrays(), 1, THREADS)


def count_patterns(profiler: Profiler, metrics: Sequence[str], names: Sequence[str]) -> Counters:
    """The counters of patterns. If ncu ends early, those that it left out are launched again, while some come.

    Raises:
        RuntimeError: there are none.
    """
    program = [sys.executable, "-m", "tests.simulator.recording.traffic", "launch", "--match"]
    found = profiler.count(metrics, [*program, "|".join(names)])
    while missing := [name for name in names if name not in found]:
        try:
            more = profiler.count(metrics, [*program, "|".join(missing)])
        except RuntimeError as error:
            print(f"FAILED {', '.join(missing)}: {error}", flush=True)
            break
        found = merged(found, more)
    return found


def profile(profiler: Profiler, metrics: Sequence[str], match: str, path: Path) -> dict[str, Any]:
    """Counters of the patterns whose name has a match, kind by kind; a record that stands at the path is completed.

    Metrics for which ncu patches the code have runs of their own. The record is written after each run.
    """
    record: dict[str, Any] = {"kernels": {}}
    if path.exists():
        record = json.loads(path.read_text(encoding="utf-8"))
    record["about"] = Gpu().about() | {"ncu": profiler.version()}
    patched = [metric for metric in metrics if patches_code(metric)]
    counted = [metric for metric in metrics if metric not in patched]
    path.parent.mkdir(parents=True, exist_ok=True)
    for kind, chosen in ((kind, chosen) for kind in KINDS for chosen in (counted, patched)):
        names = [name for name in patterns() if name.startswith(kind) and re.search(match, name)]
        if names and chosen:
            print(f"{kind}: ", end="")
            found = count_in_parts(lambda some, names=names: count_patterns(profiler, some, names), chosen)  # type: ignore[misc]
            record["kernels"] = merged(record["kernels"], found)
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts the memory traffic of access patterns on a GPU.")
    commands = parser.add_subparsers(dest="command", required=True)
    launching = commands.add_parser("launch", help="launch every pattern once")
    launching.add_argument("--match", default="", help="only patterns whose whole name this expression matches")
    profiling = commands.add_parser("profile", help="launch them under ncu and keep its counters")
    profiling.add_argument("--ncu", default="ncu", help="the command")
    profiling.add_argument("--timeout", type=float, default=120, help="of each run of ncu, in seconds")
    profiling.add_argument("--output", type=Path, required=True, help="the .json file to write, or to add to")
    profiling.add_argument("--match", default="", help="only patterns whose name has a match of this expression")
    profiling.add_argument("--metrics", nargs="+", help="without .sum; expressions stand for all that they match")
    comparing = commands.add_parser("compare", help="a record with the simulator")
    comparing.add_argument("record", type=Path)
    options = parser.parse_args()
    if options.command == "launch":
        launch(options.match)
    elif options.command == "profile":
        profiler = Profiler(options.ncu, options.timeout)
        metrics = profiler.choose(options.metrics) if options.metrics else RECORDED
        record = profile(profiler, metrics, options.match, options.output)
        print(", ".join(f"{name} {value}" for name, value in record["about"].items()))
    else:
        compare(json.loads(options.record.read_text(encoding="utf-8")))


def compare(record: dict[str, Any]) -> None:
    wrong = differences(record)
    print(f"{len(record['kernels'])} of {len(patterns())} patterns recorded, {len(wrong)} differ (simulator, GPU)")
    for name, counters in wrong.items():
        print(f"DIFFERS {name}: {counters}")


if __name__ == "__main__":
    main()
