"""A record of what a GPU computed, against the simulator: ``replay(record)``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layouts.simulator.simulate import simulate
from tests.simulator.recording.micro import BLOCK, THREADS, MicroKernel, Tolerance
from tests.simulator.recording.table import digest, key, micro_kernels

_FLOATS = {"bf16": "f4", "bf16x2": "f4", "f16": "f2", "f16x2": "f2", "f32": "f4", "tf32": "f4", "f64": "f8"}


@dataclass
class Record:
    """What the micro-kernels gave on a GPU.

    Attributes:
        about: the GPU, the driver and so on.
        digests: by the kernel's name, the text and operands that the results belong to.
        failures: by the kernel's name, why there are no results.
        results: by the kernel's name, its results: raw bits, (THREADS,) each.
    """

    about: dict[str, Any] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    results: dict[str, list[NDArray]] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """As one .npz: the results by name, and all else as JSON in "record"."""
        arrays = {
            f"{key(micro_kernels()[name])}-{i}": values
            for name, results in self.results.items()
            for i, values in enumerate(results)
        }
        text = json.dumps({"about": self.about, "digests": self.digests, "failures": self.failures})
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, record=np.array(text), **arrays)  # type: ignore[arg-type]


def read_record(path: Path) -> Record:
    with np.load(path) as file:
        record = Record(**json.loads(str(file["record"])))
        for name in record.digests:
            if name in micro_kernels():
                kernel = micro_kernels()[name]
                record.results[name] = [file[f"{key(kernel)}-{i}"] for i in range(len(kernel.outputs))]
    return record


@dataclass(frozen=True)
class Mismatch:
    """A kernel whose results differ: in how many values, and the first of them."""

    name: str
    message: str
    count: int = 0

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"


def run_in_simulator(kernel: MicroKernel, schedule: str = "lockstep") -> list[NDArray]:
    """The results of a kernel.

    Raises:
        AssertionError: the simulator finds something wrong with it.
    """
    operands, results = kernel.operands(), kernel.results()
    report = simulate(kernel.ptx(), [*operands, *results], grid=THREADS // BLOCK, block=BLOCK, schedule=schedule)
    if report.findings:
        raise AssertionError(f"{kernel.name}: {[str(finding) for finding in report.findings]}")
    return results


def replay(record: Record, names: Iterable[str] | None = None) -> list[Mismatch]:
    """Run recorded kernels through the simulator.

    Args:
        record: of a GPU.
        names: of the kernels; all of the record, if left out.

    Returns:
        one entry for each kernel that differs, or whose record is of another text or other operands.
    """
    found = []
    for name in record.results if names is None else names:
        kernel = micro_kernels().get(name)
        if kernel is None:
            found.append(Mismatch(name, "there is no such kernel any more"))
        elif mismatch := compare(record, kernel, run_in_simulator(kernel)):
            found.append(mismatch)
    return found


def compare(record: Record, kernel: MicroKernel, results: list[NDArray]) -> Mismatch | None:
    """The simulator's results of a kernel against the record's: None if they agree."""
    if record.digests[kernel.name] != digest(kernel):
        return Mismatch(kernel.name, "the record is of another version of this kernel: record it again")
    recorded = record.results[kernel.name]
    wrong = [
        differs(kind, ours, theirs, kernel.tolerance)
        for kind, ours, theirs in zip(kernel.outputs, results, recorded, strict=True)
    ]
    count = int(sum(each.sum() for each in wrong))
    if not count:
        return None
    place = next(i for i, each in enumerate(wrong) if each.any())
    thread = int(wrong[place].argmax())
    operands = ", ".join(f"{int(values[thread]):#x}" for values in kernel.operands())
    ours, theirs = int(results[place][thread]), int(recorded[place][thread])
    message = (
        f"{count} values differ; thread {thread}, result {place}: {ours:#x}, on the GPU {theirs:#x}, of {operands}"
    )
    return Mismatch(kernel.name, message, count)


def differs(kind: str, ours: NDArray, theirs: NDArray, tolerance: Tolerance | None = None) -> NDArray[np.bool_]:
    """Which values of a type differ, given as raw bits. Any NaN equals any other; a tolerance widens the rest."""
    same = ours == theirs
    if kind in _FLOATS:
        left, right = _numbers(kind, ours), _numbers(kind, theirs)
        close = (np.isnan(left) & np.isnan(right)) | (_raw_parts(kind, ours) == _raw_parts(kind, theirs))
        if tolerance is not None:
            with np.errstate(invalid="ignore", over="ignore"):
                close |= np.abs(left - right) <= tolerance.relative * np.abs(right) + tolerance.absolute
        same = close.reshape(len(ours), -1).all(axis=1)
    return ~same


def _raw_parts(kind: str, raw: NDArray) -> NDArray:
    return np.ascontiguousarray(raw).view(np.uint16) if kind.endswith("x2") else raw


def _numbers(kind: str, raw: NDArray) -> NDArray[np.float64]:
    parts = _raw_parts(kind, raw)
    if kind.startswith("bf16"):
        parts = (parts.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return parts.view(_FLOATS[kind]).astype(np.float64)
