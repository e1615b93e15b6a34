"""How long a new process waits: its first attention call with a full cache, and the compile of one kernel."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.report import print_table, write_json
from cute_attn.arch import Arch, arch_by_name, arch_of

COMPILE_CORES = 2
COMPILED_HEAD_DIMS = (64, 128, 256)

# Times are printed by a process of its own, so that nothing is imported or initialised before.
FIRST_CALL = """
import json, time
marks = [("start", time.perf_counter())]
def mark(name):
    marks.append((name, time.perf_counter()))
import torch
mark("import torch")
import cutlass.cute, tvm_ffi
mark("import DSL")
q = torch.randn(1, 8, 1024, 128, device="cuda", dtype=torch.float16)
torch.cuda.synchronize()
mark("CUDA context and inputs")
import cute_attn
mark("import cute_attn")
cute_attn.attention(q, q, q, causal=True)
torch.cuda.synchronize()
mark("first call")
cute_attn.attention(q, q, q, causal=True)
torch.cuda.synchronize()
mark("second call")
print(json.dumps({name: end - start for (_, start), (name, end) in zip(marks, marks[1:])}))
"""

COMPILE = """
import json, os, sys, time
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
from cute_attn.arch import arch_by_name
from cute_attn.compiler.build import compile_kernel
from cute_attn.configs import default_config
from cute_attn.problem import KernelSpec, PrefillProblem
arch, seconds = arch_by_name(sys.argv[2]), {}
for head_dim in map(int, sys.argv[3:]):
    for causal in (False, True):
        problem = PrefillProblem("float16", head_dim, head_dim, bounded_right=causal)
        spec = KernelSpec(problem, default_config(arch, head_dim, head_dim), arch)
        wall, cpu = time.perf_counter(), time.process_time()
        compile_kernel(spec)
        seconds[spec.name] = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
print(json.dumps(seconds))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5, help="processes whose first call is timed")
    parser.add_argument("--arch", help="compile for this architecture, such as sm_80; default: the device's")
    parser.add_argument("--json", type=Path, metavar="PATH", help="the committed one is benchmarks/results/start.json")


def run(arguments: argparse.Namespace) -> None:
    """Time first calls (on a GPU) and compiles; print and write seconds."""
    content: dict[str, Any] = {"unit": "seconds", "first_call": None}
    if torch.cuda.is_available():
        content["first_call"] = _first_call(arguments.repeats)
    compiles = _compile_seconds(_arch(arguments.arch))
    slowest = max(seconds["wall"] for seconds in compiles.values())
    content["compile"] = {"cores": COMPILE_CORES, "slowest": slowest, "kernels": compiles}
    _print(content)
    if arguments.json:
        write_json(arguments.json, "start", content)


def _first_call(repeats: int) -> dict[str, Any]:
    """The run with the median sum. The first process, which fills the cache, does not count."""
    _run_script(FIRST_CALL)
    runs = [_run_script(FIRST_CALL) for _ in tqdm(range(repeats), disable=None, unit="process")]
    runs.sort(key=_beyond_imports)
    median = runs[len(runs) // 2]
    return {
        "beyond_imports": _beyond_imports(median),
        "beyond_imports_of_each": [_beyond_imports(steps) for steps in runs],
        "steps": median,
    }


def _beyond_imports(steps: dict[str, float]) -> float:
    """What importing this project and calling it adds to a process that uses torch on CUDA and the DSL anyway."""
    return steps["import cute_attn"] + steps["first call"]


def _compile_seconds(arch: Arch) -> dict[str, dict[str, float]]:
    """Of each kernel, one after the other in a new process: on the clock, and of the processor."""
    head_dims = [str(head_dim) for head_dim in COMPILED_HEAD_DIMS]
    return _run_script(COMPILE, str(COMPILE_CORES), arch.gpu_arch, *head_dims)


def _arch(name: str | None) -> Arch:
    if name is not None:
        return arch_by_name(name)
    return arch_of(torch.cuda.get_device_capability()) if torch.cuda.is_available() else arch_by_name("sm_90a")


def _run_script(script: str, *arguments: str) -> Any:
    """Run a script in a new process and read the JSON that it prints last."""
    done = subprocess.run([sys.executable, "-c", script, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _print(content: dict[str, Any]) -> None:
    rows = []
    if content["first_call"]:
        rows += [[name, f"{seconds:.3f}"] for name, seconds in content["first_call"]["steps"].items()]
        rows.append(["import cute_attn + first call", f"{content['first_call']['beyond_imports']:.3f}"])
    rows += [[f"compile {name}", f"{seconds['wall']:.2f}"] for name, seconds in content["compile"]["kernels"].items()]
    print_table(["step", "seconds"], rows)
