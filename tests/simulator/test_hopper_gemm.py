"""TMA, mbarriers and wgmma in one kernel: right under every schedule, and every missing wait is noticed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from layouts.simulator.errors import SimulatorError
from layouts.simulator.launch import capture
from layouts.simulator.memory import GlobalMemory
from layouts.simulator.report import Report
from layouts.simulator.scheduler import SCHEDULES
from layouts.simulator.simulate import place, run_launch
from tests.simulator.hopper_gemm import compile_gemm

M, N, K = 128, 64, 64 * 5  # more steps than stages, and an odd number of them


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compile_gemm(tmp_path_factory.mktemp("dump"))


def run(compiled: Any, change: tuple[str, str, int] | None = None, schedule: str = "lockstep") -> tuple[Report, bool]:
    """The report, and whether the product is right."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((rows, K)).astype(np.float16) for rows in (M, N))
    c = np.full((M, N), np.nan, np.float32)
    arguments, memory = [a, b, c], GlobalMemory()
    (launch,) = capture(compiled, arguments, place(memory, arguments))
    if change is not None:
        pattern, instead, which = change
        found = list(re.finditer(pattern, launch.ptx))[which]
        ptx = launch.ptx[: found.start()] + found.expand(instead) + launch.ptx[found.end() :]
        launch = replace(launch, ptx=ptx)
    report = run_launch(launch, memory, schedule=schedule)
    exact = a.astype(np.float32) @ b.astype(np.float32).T
    return report, bool(np.allclose(c, exact, atol=1e-3))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_product(compiled: Any, schedule: str) -> None:
    report, right = run(compiled, schedule=schedule)
    assert right
    assert not report.findings


POLL = r"mbarrier.try_wait.parity.shared.b64 P1, (\[%r\d+\]), (%r\d+)[^\n]*\n\s*"
WAIT = POLL + r"@P1 bra.uni DONE;\s*\n\s*bra.uni\s+LAB_WAIT;"
PRODUCER, CONSUMER = 0, 1  # whose wait, in the order of the program

# What is left out or altered: a pattern of the PTX, what stands there instead, and which of several places.
CHANGES: dict[str, tuple[str, str, int]] = {
    "wait for a full stage": (WAIT, "", CONSUMER),
    "wait for an empty stage": (WAIT, "", PRODUCER),
    "parity of the full stages": (POLL, r"mbarrier.try_wait.parity.shared.b64 P1, \1, 0; ", CONSUMER),
    "arrival of the consumers": (r"mbarrier.arrive.shared.b64 [^\n]*", "", 0),
    "arrival at the other barriers": (r"(mbarrier.arrive.shared.b64 %rd\d+, \[%r\d+)\+32784\]", r"\1+32768]", 0),
    "bytes expected": (r"(mov.b32 \s*%r\d+), 16384;", r"\1, 8192;", 0),
    "a tile of a stage": (r"cp.async.bulk.tensor.2d[^\n]*", "", 1),
    "commit of the products": (r"wgmma.commit_group.sync.aligned;", "", 0),
    "wait for the products": (r"wgmma.wait_group.sync.aligned\s+0;", "", 0),
    "one product left under way": (r"wgmma.wait_group.sync.aligned\s+0;", "wgmma.wait_group.sync.aligned 1;", 0),
    "fence before the first product": (r"wgmma.fence.sync.aligned;", "", 0),
    "barrier after the mbarriers' initialisation": (r"bar.sync\s+0;", "", 0),
    "initialisation of an mbarrier": (r"mbarrier.init.shared.b64 [^\n]*", "", 2),
    "count of the consumers": (r"(mov.b32 \s*%r\d+), 128;", r"\1, 96;", 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_noticed(compiled: Any, change: str) -> None:
    noticed = []
    for schedule in ("lockstep", "reversed"):
        try:
            report, right = run(compiled, CHANGES[change], schedule)
        except SimulatorError:
            noticed.append(True)
        else:
            noticed.append(bool(report.findings) or not right)
    assert any(noticed)
