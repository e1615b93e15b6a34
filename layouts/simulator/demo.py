"""What the simulator shows on a small kernel: ``python -m layouts.simulator.demo``.

A block transposes a 32x32 tile of floats through shared memory, once with rows of 32 floats, once with rows padded to
33, and once with the barrier between writing and reading left out. (No ``from __future__ import annotations``: the
DSL reads these.)
"""

import argparse
import json
import tempfile
from collections import Counter
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from layouts.simulator.report import Report
from layouts.simulator.simulate import simulate

TILE = 32


class Transpose:
    """The kernel, with rows of ``pitch`` floats in shared memory, and a barrier or none."""

    def __init__(self, pitch: int, barrier: bool = True):
        self.pitch = pitch
        self.barrier = barrier

    @cute.kernel
    def kernel(self, source: cute.Tensor, target: cute.Tensor) -> None:
        """Warp w writes rows w, w + 4, ... and reads columns w, w + 4, ..."""
        thread = cute.arch.thread_idx()[0]
        warp, lane = thread // 32, thread % 32
        smem = cutlass.memory.SmemAllocator()
        tile = smem.allocate_tensor(cutlass.Float32, cute.make_layout((TILE, TILE), stride=(self.pitch, 1)), 16)
        for step in cutlass.range_constexpr(TILE // 4):
            tile[warp + 4 * step, lane] = source[warp + 4 * step, lane]
        if cutlass.const_expr(self.barrier):
            cute.arch.sync_threads()
        for step in cutlass.range_constexpr(TILE // 4):
            target[warp + 4 * step, lane] = tile[lane, warp + 4 * step]

    @cute.jit
    def __call__(self, source: cute.Tensor, target: cute.Tensor, stream: cuda.CUstream) -> None:
        self.kernel(source, target).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)


def compiled(kernel: Transpose, gpu_arch: str) -> Any:
    """The kernel as the simulator wants it: with its PTX, for any architecture."""
    fake = make_fake_tensor(cutlass.Float32, (TILE, TILE), stride=(TILE, 1), assumed_align=16)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--enable-tvm-ffi --gpu-arch {gpu_arch} --keep-ptx --dump-dir {folder}"
        return cute.compile(kernel, fake, fake, stream, options=options)


def transpose(kernel: Transpose, gpu_arch: str, schedule: str = "lockstep") -> tuple[Report, bool]:
    """What a run did, and whether its result is right."""
    source = np.arange(TILE * TILE, dtype=np.float32).reshape(TILE, TILE)
    target = np.full_like(source, np.nan)
    report = simulate(compiled(kernel, gpu_arch), [source, target], schedule=schedule)
    return report, bool((target == source.T).all())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m layouts.simulator.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="sm_80", help="what to compile for (default: sm_80)")
    parser.add_argument("--json", action="store_true", help="print numbers only, as JSON")
    options = parser.parse_args()
    variants = {
        "rows of 32 floats": Transpose(32),
        "rows of 33 floats": Transpose(33),
        "rows of 33, no barrier": Transpose(33, barrier=False),
    }
    rows = []
    for name, kernel in variants.items():
        report, right = transpose(kernel, options.arch)
        wavefronts = (report.shared_wavefronts, report.ideal_shared_wavefronts)
        rows.append((name, right, *wavefronts, [finding.kind for finding in report.findings]))
        if not options.json:
            found: Counter[str] = Counter()
            for finding in report.findings:
                found[finding.kind] += finding.count
            findings = ", ".join(f"{count} x {kind}" for kind, count in found.items()) or "no findings"
            counts = f"{wavefronts[0]} wavefronts, ideal {wavefronts[1]}"
            print(f"{name:<24}{'right' if right else 'wrong':<8}{counts:<32}{findings}")
            for finding in report.findings[:1]:
                print(f"    {finding.message}")
    if options.json:
        keys = ("variant", "right", "shared_wavefronts", "ideal_shared_wavefronts", "findings")
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=2))


if __name__ == "__main__":
    main()
