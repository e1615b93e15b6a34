"""``simulate``: run a kernel and report what it computed, moved and did wrong."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from layouts.simulator import scheduler
from layouts.simulator.analysis import analysis_of
from layouts.simulator.arguments import is_array, is_dsl_tensor, map_leaves
from layouts.simulator.counters import InstructionCounts
from layouts.simulator.errors import SimulatorError
from layouts.simulator.global_shadow import GlobalShadow
from layouts.simulator.launch import Launch, capture, launch_of_ptx
from layouts.simulator.machine import Counters, Machine
from layouts.simulator.memory import GlobalMemory
from layouts.simulator.ptx import Kernel, parse
from layouts.simulator.report import Finding, Report, merge_findings

WARPS_TOGETHER = 128  # numpy's cost of a call is small beside its work from about here on


def simulate(
    kernel: Any,
    arguments: Sequence[Any],
    *,
    grid: Any = None,
    block: Any = None,
    smem_bytes: int = 0,
    schedule: str = "lockstep",
    seed: int = 0,
    checked: bool = True,
    entry: str | None = None,
    max_steps: int = scheduler.MAX_STEPS,
) -> Report:
    """Run a compiled kernel on the CPU.

    Args:
        kernel: what ``cute.compile`` returned (compiled with ``--keep-ptx``), or PTX text.
        arguments: of the call: numpy arrays and torch tensors on the CPU, which the kernel reads and writes in place,
            numbers, None. For PTX, one for each parameter of the entry.
        grid, block, smem_bytes: of the launch, for PTX only; a compiled function's host code says them itself.
        schedule: "lockstep", "serial", "reversed" or "random": in which order the warps of a CTA run.
        seed: of the random schedule.
        checked: look for races and for use of what was never written.
        entry: the name of the kernel, where PTX has several.
        max_steps: after so many steps a kernel counts as endless: a step is a run of instructions without a branch, by
            the warps that stand there, of which up to 128 are simulated at a time.

    Returns:
        A Report. Of several launches of one function the counts of the last, and the findings of all.

    Raises:
        SimulatorError: the kernel cannot be run here, for instance for an instruction that is not modelled; it does
            not end; or the compiled function launches none.
    """
    memory = GlobalMemory()
    address_of = place(memory, arguments)
    if isinstance(kernel, str):
        launches = [launch_of_ptx(kernel, arguments, grid, block, smem_bytes, address_of, entry)]
    else:
        launches = capture(kernel, arguments, address_of)
    findings: list[Finding] = []
    report = None
    for launch in launches:
        report = run_launch(launch, memory, schedule=schedule, seed=seed, checked=checked, max_steps=max_steps)
        findings += report.findings
    if report is None:
        raise SimulatorError("the function launched no kernel")
    report.findings = merge_findings(findings)
    return report


def place(memory: GlobalMemory, arguments: Sequence[Any]) -> Any:
    """Gives each array a device address: returns the function from an array to it."""
    addresses: dict[int, int] = {}
    kept: list[Any] = []

    def address_of(array: Any) -> int:
        if id(array) not in addresses:
            addresses[id(array)] = memory.add(array, f"array {len(addresses)}")
            kept.append(array)
        return addresses[id(array)]

    for number, argument in enumerate(arguments):

        def add(value: Any, number: int = number) -> Any:
            if is_array(value) and not is_dsl_tensor(value) and id(value) not in addresses:
                addresses[id(value)] = memory.add(value, f"argument {number}")
                kept.append(value)
            return value

        map_leaves(argument, add)
    return address_of


@lru_cache(maxsize=16)
def _kernel(ptx: str, entry: str) -> Kernel:
    return parse(ptx, entry)


def _refuse_clusters(launch: Launch, kernel: Kernel) -> None:
    """CTAs run alone: a kernel may be launched in clusters only if it does not ask where in one it is."""
    if launch.cluster == (1, 1, 1):
        return
    for instruction in kernel.instructions:
        if "%cluster" in instruction.text or "%is_explicit_cluster" in instruction.text:
            raise SimulatorError(f"{instruction.text}: clusters are not modelled, and the launch has {launch.cluster}")


def run_launch(
    launch: Launch,
    memory: GlobalMemory,
    *,
    schedule: str = "lockstep",
    seed: int = 0,
    checked: bool = True,
    max_steps: int = scheduler.MAX_STEPS,
) -> Report:
    """Run one launch over memory whose addresses its parameters hold; the other arguments are those of ``simulate``."""
    started = time.perf_counter()
    kernel = _kernel(launch.ptx, launch.kernel)
    _refuse_clusters(launch, kernel)
    parameters = bytearray(kernel.parameter_bytes)
    for parameter, value in zip(kernel.parameters, launch.parameters, strict=True):
        parameters[parameter.offset : parameter.offset + parameter.size] = value[: parameter.size]
    counters, findings = Counters(len(kernel.instructions)), list[Finding]()
    x, y, z = launch.grid
    numbers = np.arange(x * y * z)
    coordinates = np.stack([numbers % x, numbers // x % y, numbers // (x * y)], axis=1)
    warps = -(-int(np.prod(launch.block)) // 32)
    together = max(1, WARPS_TOGETHER // warps)
    global_shadow = GlobalShadow(memory, analysis_of(kernel).global_granule) if checked else None
    with np.errstate(all="ignore"):
        for start in range(0, len(numbers), together):
            some = coordinates[start : start + together]
            machine = Machine(
                kernel, (launch.grid, launch.block), some, memory, bytes(parameters), launch.smem_bytes, counters,
                findings, global_shadow,
            )  # fmt: skip
            scheduler.run(machine, schedule, seed, max_steps)
    instructions = [
        InstructionCounts(
            index=i.index,
            text=i.text,
            opcode=i.opcode,
            source=i.source,
            executions=int(counters.executions[i.index]),
            lanes=int(counters.lanes[i.index]),
            wavefronts=int(counters.wavefronts[i.index]),
            ideal_wavefronts=int(counters.ideal_wavefronts[i.index]),
            sectors=int(counters.sectors[i.index]),
            ideal_sectors=int(counters.ideal_sectors[i.index]),
            bytes=int(counters.bytes[i.index]),
        )
        for i in kernel.instructions
    ]
    return Report(
        kernel=kernel.name,
        target=kernel.target,
        grid=launch.grid,
        block=launch.block,
        warps=warps * len(numbers),
        schedule=schedule,
        seconds=time.perf_counter() - started,
        instructions=instructions,
        findings=merge_findings(findings),
        labels=kernel.labels,
    )
