"""Memory traffic of the whole prefill kernel: Nsight Compute's counters on a GPU against the simulator's.

    python -m tests.simulator.recording.prefill profile --output tests/simulator/data/prefill_traffic.json

runs ``ncu`` over ``... prefill launch``, which makes each call once; ``... prefill compare`` runs the calls of a record
through the simulator and prints where the two differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
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
from tests.simulator.recording.profiler import Counters, Profiler, count_in_parts, merged, patches_code
from tests.simulator.recording.traffic import Counter, unequal
from tests.simulator.recording.traffic import simulated as counts_of

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


_PATCHED = "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_"
COUNTERS = {
    "shared loads": Counter(("wavefronts ld",), f"{_PATCHED}ld.sum"),
    "ldmatrix executed": Counter(("executions ldmatrix",), "smsp__inst_executed_op_ldsm.sum"),
    "shared stores": Counter(("wavefronts st",), f"{_PATCHED}st.sum"),
    "copies past L1": Counter(("wavefronts cp.async.cg",), f"{_PATCHED}ldgsts.sum"),
    "shared memory": Counter(
        ("wavefronts ld", "wavefronts ldmatrix", "wavefronts st", "wavefronts cp.async.cg"),
        "memory_l1_wavefronts_shared",
    ),
    "global loads": Counter(("sectors ld",), "smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_ld.sum"),
    "global stores": Counter(("sectors st",), "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum"),
    "sectors from L2": Counter(
        ("sectors ld", "sectors cp.async.cg"), "l1tex__m_xbar2l1tex_read_sectors_mem_lg_op_ld.sum"
    ),
}
"""Wavefronts are those for which ncu patches the code. In a whole kernel the plain counters of shared memory are up to
2% above them, or more where there are few stores, and differ from run to run: what waits for another warp's access, or
for copies that arrive, counts again."""

RECORDED = list(dict.fromkeys(counter.metric for counter in COUNTERS.values()))


def differences(record: dict[str, Any], names: Iterable[str] | None = None) -> dict[str, dict[str, tuple[int, int]]]:
    """Calls that differ, of those given or all: by name, the counters that do, as (simulator's, GPU's)."""
    found = {}
    for name in names or record["calls"]:
        ours = counts_of(simulated(CASES[name], record["arch"]))
        if wrong := unequal(ours, record["calls"][name], COUNTERS):
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


def profile(profiler: Profiler, metrics: Sequence[str], path: Path) -> None:
    """Write the counters of every call, by metric; those for which ncu patches the code come from runs of their own.

    A record that stands at the path is completed.
    """
    for case in CASES.values():
        cache.ensure(_spec(case))  # here, as ncu slows the compiler down
    record: dict[str, Any] = {"calls": {}}
    if path.exists():
        record = json.loads(path.read_text(encoding="utf-8"))
    record |= {"about": Gpu().about() | {"ncu": profiler.version()}, "arch": arch_under_test().gpu_arch}
    patched = [metric for metric in metrics if patches_code(metric)]
    for chosen in ([metric for metric in metrics if metric not in patched], patched):
        if chosen:
            found = count_in_parts(lambda some: count_calls(profiler, some), chosen)
            both = merged(record["calls"], found)
            record["calls"] = {name: both[name] for name in CASES if name in both}
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def count_calls(profiler: Profiler, metrics: Sequence[str]) -> Counters:
    """The counters of all calls.

    Raises:
        RuntimeError: ncu did not see every call.
    """
    program = [sys.executable, "-m", "tests.simulator.recording.prefill", "launch"]
    calls = profiler.count(metrics, program, by="ID", kernels="PrefillKernel")
    if len(calls) != len(CASES):
        raise RuntimeError(f"ncu saw {len(calls)} of {len(CASES)} calls")
    return dict(zip(CASES, calls.values(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts the memory traffic of calls of the prefill kernel on a GPU.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("launch", help="make every call once")
    profiling = commands.add_parser("profile", help="make them under ncu and keep its counters")
    profiling.add_argument("--ncu", default="ncu", help="the command")
    profiling.add_argument("--timeout", type=float, default=240, help="in seconds")
    profiling.add_argument("--output", type=Path, required=True, help="the .json file to write, or to add to")
    profiling.add_argument("--metrics", nargs="+", help="without .sum; expressions stand for all that they match")
    comparing = commands.add_parser("compare", help="a record with the simulator")
    comparing.add_argument("record", type=Path)
    options = parser.parse_args()
    if options.command == "launch":
        launch()
    elif options.command == "profile":
        profiler = Profiler(options.ncu, options.timeout)
        profile(profiler, profiler.choose(options.metrics) if options.metrics else RECORDED, options.output)
    else:
        compare(json.loads(options.record.read_text(encoding="utf-8")))


def compare(record: dict[str, Any]) -> None:
    wrong = differences(record)
    print(f"{len(wrong)} of {len(record['calls'])} calls differ (simulator, GPU)")
    for name, counters in wrong.items():
        print(f"DIFFERS {name}: {counters}")


if __name__ == "__main__":
    main()
