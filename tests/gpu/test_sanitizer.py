"""compute-sanitizer finds no bad access, no race and no bad barrier in a small matrix of launches."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.sanitizer_matrix import CASES, DECODE_CASES, ROLES_CASES

# racecheck takes an mbarrier to order the accesses of the lanes that arrive at it. In the arrangement of roles one lane
# arrives for its warp, and it reports the handing over of P. The simulator, which knows what a warp's barrier and one
# lane's arrival order together, finds nothing (tests/simulator/test_decode.py).
TOOLS = {
    "memcheck": ("prefill", "decode", "roles"),
    "racecheck": ("prefill", "decode"),
    "synccheck": ("prefill", "decode", "roles"),
}
OPTIONS = ("--error-exitcode", "9", "--report-api-errors", "no")
ROOT = Path(__file__).parents[2]
# What it prints where the device cannot be instrumented, under some virtual machines say.
UNSUPPORTED = ("Device not supported", "Failed to initialize", "not supported on this")


@pytest.fixture(scope="module")
def running() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All tools at once, each in its own process: most of their time is one core's work on the host."""
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    # Every tensor is an allocation of its own, so that a read beyond it is seen.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    processes = {
        tool: subprocess.Popen(
            [sanitizer, "--tool", tool, *OPTIONS, sys.executable, "-m", "tests.gpu.sanitizer_matrix", *names],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for tool, names in TOOLS.items()
    }
    yield processes
    for process in processes.values():
        process.kill()


@pytest.mark.hang_after(240)
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.kernels(*CASES, *DECODE_CASES, *ROLES_CASES)
def test_sanitizer_is_content(tool: str, running: dict[str, subprocess.Popen[str]]) -> None:
    output, _ = running[tool].communicate()
    if any(message in output for message in UNSUPPORTED):
        pytest.skip(f"compute-sanitizer cannot work here: {output.strip().splitlines()[-1]}")
    assert running[tool].returncode == 0, output[-4000:]
    assert f"launched {' '.join(TOOLS[tool])}" in output
    assert "SUMMARY: 0 " in output, output[-2000:]
