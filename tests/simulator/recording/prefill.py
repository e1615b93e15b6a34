"""Memory traffic of the whole prefill kernel: Nsight Compute's counters on a GPU against the simulator's.

    python -m tests.simulator.recording.prefill profile --output tests/simulator/data/prefill_traffic.json

runs ``ncu`` over ``... prefill launch``, which makes each call once; ``... prefill compare`` runs the calls of a record
through the simulator and prints where the two differ.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from cute_attn.compiler import cache
from cute_attn.configs import SEED_CONFIGS
from cute_attn.problem import KernelSpec
from tests.gpu.cases import Case, Shape, arch_under_test, plain
from tests.gpu.tensors import make_tensors
from tests.simulator.prefill_cases import arguments, simulated, spec_of
from tests.simulator.recording.gpu import Gpu
from tests.simulator.recording.traffic import COUNTERS, FURTHER, measured, read_csv
from tests.simulator.recording.traffic import simulated as counters_of

_LSE = plain(64, bounded_right=True, return_lse=True)
_DENSE = Shape.dense(333, 500, batch=2, heads_kv=2, group=2)
CASES = {
    "d64": Case(plain(64), Shape.dense(256, 512, batch=2, heads_kv=2)),
    "d64 causal, ragged, lse": Case(_LSE, _DENSE),
    "d128 window": Case(plain(128, "bfloat16", bounded_left=True, bounded_right=True), _DENSE, (100, 5)),
    "d128 packed": Case(plain(128, varlen=True, bounded_right=True), Shape((70, 1, 0, 200), (70, 300, 9, 131))),
    "d128 transposed": Case(plain(128), Shape.dense(140, 300, heads_kv=2), storage="transposed"),
    "d256": Case(plain(256, bounded_right=True), Shape.dense(200, 300, group=2)),
    "d40": Case(plain(40), _DENSE),
    **{name: Case(plain(64), _DENSE, config=config) for name, config in SEED_CONFIGS.items()},
    "seed_64x64_2stage at d40": Case(plain(40), _DENSE, config=SEED_CONFIGS["seed_64x64_2stage"]),
}


def simulated_counters(case: Case, gpu_arch: str) -> dict[str, int]:
    """The simulator's numbers, by the names of ``COUNTERS``."""
    return counters_of(simulated(case, gpu_arch))


def differences(record: dict[str, Any]) -> dict[str, dict[str, tuple[int, int]]]:
    """Calls that differ: by name, the counters that do, as (simulator's, GPU's)."""
    found = {}
    for name, metrics in record["calls"].items():
        ours, theirs = simulated_counters(CASES[name], record["arch"]), measured(metrics)
        wrong = {counter: (ours[counter], theirs[counter]) for counter in theirs if ours[counter] != theirs[counter]}
        if wrong:
            found[name] = wrong
    return found


def launch() -> None:
    """Each call once, its tensors filled by copies, so that no other kernel runs."""
    for case in CASES.values():
        on_cpu = make_tensors(case, "cpu")
        given, _ = arguments(case, on_cpu)
        on_gpu = [_to_gpu(x) if isinstance(x, torch.Tensor) else x for x in given]
        cache.load(_spec(case))(*on_gpu)
        torch.cuda.synchronize()


def _to_gpu(x: torch.Tensor) -> torch.Tensor:
    """The tensor with its strides, at an address that is as well aligned."""
    copy = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).cuda()
    return torch.empty(0, dtype=x.dtype, device="cuda").set_(
        copy.untyped_storage(), x.storage_offset(), x.shape, x.stride()
    )


def _spec(case: Case) -> KernelSpec:
    return spec_of(case, arch_under_test().gpu_arch)


def profile(ncu: str, timeout: float) -> dict[str, Any]:
    """The counters of every call, by metric.

    Raises:
        RuntimeError: ncu did not see every call.
    """
    for case in CASES.values():
        cache.ensure(_spec(case))  # here, as ncu slows the compiler down
    metrics = [metric for parts in COUNTERS.values() for metric in parts]
    command = [ncu, "--csv", "--clock-control", "none", "--print-units", "base", "--kernel-name", "regex:PrefillKernel"]
    command += ["--metrics", ",".join([*metrics, *FURTHER]), sys.executable, "-m", __spec__.name, "launch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    calls = read_csv(done.stdout.splitlines(True), by="ID")
    if len(calls) != len(CASES):
        raise RuntimeError(f"ncu saw {len(calls)} of {len(CASES)} calls\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return {
        "about": Gpu().about(),
        "arch": arch_under_test().gpu_arch,
        "calls": dict(zip(CASES, calls.values(), strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts the memory traffic of calls of the prefill kernel on a GPU.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("launch", help="make every call once")
    profiling = commands.add_parser("profile", help="make them under ncu and keep its counters")
    profiling.add_argument("--ncu", default="ncu", help="the command")
    profiling.add_argument("--timeout", type=float, default=240, help="in seconds")
    profiling.add_argument("--output", type=Path, required=True, help="the .json file to write")
    comparing = commands.add_parser("compare", help="a record with the simulator")
    comparing.add_argument("record", type=Path)
    options = parser.parse_args()
    if options.command == "launch":
        launch()
    elif options.command == "profile":
        record = profile(options.ncu, options.timeout)
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"{len(record['calls'])} calls recorded")
    else:
        compare(json.loads(options.record.read_text(encoding="utf-8")))


def compare(record: dict[str, Any]) -> None:
    wrong = differences(record)
    print(f"{len(wrong)} of {len(record['calls'])} calls differ (simulator, GPU)")
    for name, counters in wrong.items():
        print(f"DIFFERS {name}: {counters}")


if __name__ == "__main__":
    main()
