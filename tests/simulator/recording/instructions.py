"""Runs every micro-kernel on a GPU and keeps what it gave.

python -m tests.simulator.recording.instructions --output tests/simulator/data/instructions.npz [--match REGEX]
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path

from tests.simulator.recording.gpu import Gpu, GpuError
from tests.simulator.recording.micro import BLOCK, ENTRY, THREADS, MicroKernel
from tests.simulator.recording.replay import Record, replay
from tests.simulator.recording.table import digest, micro_kernels


def record(gpu: Gpu, kernels: list[MicroKernel]) -> Record:
    """Each kernel is a module of its own: one that fails costs no other its results."""
    result = Record(about=gpu.about())
    for kernel in kernels:
        outputs = kernel.results()
        try:
            gpu.run(kernel.ptx(), ENTRY, [*kernel.operands(), *outputs], THREADS // BLOCK, BLOCK)
        except GpuError as error:
            result.failures[kernel.name] = str(error)
            gpu.restart()
            continue
        result.digests[kernel.name] = digest(kernel)
        result.results[kernel.name] = outputs
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="the .npz file to write")
    parser.add_argument("--match", default="", help="only kernels whose name has a match of this expression")
    parser.add_argument("--no-replay", action="store_true", help="do not compare with the simulator at once")
    options = parser.parse_args()
    kernels = [kernel for name, kernel in micro_kernels().items() if re.search(options.match, name)]
    started = time.perf_counter()
    result = record(Gpu(), kernels)
    result.save(options.output)
    print(", ".join(f"{name} {value}" for name, value in result.about.items()))
    print(f"{len(result.results)} of {len(kernels)} kernels recorded in {time.perf_counter() - started:.1f} s")
    for name, failure in result.failures.items():
        print(f"FAILED {name}: {failure}")
    if not options.no_replay:
        mismatches = replay(result)
        print(f"{len(mismatches)} differ from the simulator")
        for mismatch in mismatches:
            print(f"DIFFERS {mismatch}")


if __name__ == "__main__":
    main()
