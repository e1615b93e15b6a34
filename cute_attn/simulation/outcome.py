"""What a simulated call of a kernel gave: its rows against their bounds, and the simulator's report."""

from __future__ import annotations

import math
import shlex
import tempfile
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cute_attn.compiler.compiling import compile_spec
from cute_attn.problem import KernelSpec

if TYPE_CHECKING:
    from layouts.simulator.report import Report

# A row may err by so many times the error of torch's own arithmetic in the same dtype, and so many units in the last
# place of its largest output.
TORCH_ERRORS = 2
ULPS = 2
# Log-sum-exps are made of sums that were not rounded to 16 bits.
LSE_ABSOLUTE, LSE_RELATIVE = 1e-4, 2**-21


@dataclass(frozen=True)
class Run:
    """How warps run, and whether races are looked for: the arguments of ``layouts.simulate``."""

    schedule: str = "lockstep"
    seed: int = 0
    checked: bool = True


@dataclass(frozen=True)
class Rows:
    """The result of a call, row by row.

    Attributes:
        errors: of each row the largest, NaN where an element was not written.
        allowed: of each row.
    """

    errors: Tensor
    allowed: Tensor

    @staticmethod
    def of(out: Tensor, expected: Tensor, rough: Tensor, roundings: int = 0) -> Rows:
        """Of a result in 16 bits.

        Args:
            expected: the same in float32.
            rough: the same, computed with results in out's dtype after every step, as torch would.
            roundings: of out on the way, beyond its last.
        """
        ulps = _row_ulps(expected, out.dtype)
        allowed = TORCH_ERRORS * (rough.float() - expected).abs().amax(-1) + (ULPS + roundings) * ulps
        return Rows((out.float() - expected).abs().amax(-1), allowed)

    def with_lse(self, lse: Tensor, expected: Tensor) -> Rows:
        """The same, where a row whose log-sum-exp is wrong has an infinite error."""
        near = (lse - expected).abs() <= LSE_ABSOLUTE + LSE_RELATIVE * expected.abs()
        return Rows(torch.where((lse == expected) | near, self.errors, math.inf), self.allowed)

    @property
    def wrong(self) -> int:
        return int((~(self.errors <= self.allowed)).sum())  # NaN is wrong


@dataclass(frozen=True)
class Outcome:
    """What a simulated call gave.

    Attributes:
        kernel: the name of its spec.
        call: what was run, a frozen dataclass.
        report: the simulator's.
        rows: of out: a head and a query each.
        wrong_rows: how many of them are further from the reference than allowed, or have NaN.
        largest_error: over all elements of out; NaN if one of them was not written.
        largest_allowed: of the rows' bounds, the largest.
    """

    kernel: str
    call: Any
    report: Report
    rows: int
    wrong_rows: int
    largest_error: float
    largest_allowed: float

    @property
    def ok(self) -> bool:
        """Whether the result is right and nothing was found."""
        return not self.wrong_rows and not self.report.findings

    def to_json(self) -> dict[str, Any]:
        """Values that ``json.dumps`` takes; the largest error is None where it is NaN."""
        error = None if math.isnan(self.largest_error) else self.largest_error
        values = {name: getattr(self, name) for name in ("kernel", "ok", "rows", "wrong_rows", "largest_allowed")}
        return {**values, "largest_error": error, "call": asdict(self.call), "report": self.report.to_json()}

    def __str__(self) -> str:
        verdict = (
            f"{self.wrong_rows} of {self.rows} rows are wrong" if self.wrong_rows else f"all {self.rows} rows right"
        )
        errors = f"largest error {self.largest_error:.3g}, largest allowed {self.largest_allowed:.3g}"
        return f"{self.kernel}\n{verdict}: {errors}\n\n{self.report.table()}"


def run_kernel(spec: KernelSpec, arguments: Any, run: Run | None) -> Report:
    """Compile a kernel and simulate a launch of it.

    Args:
        arguments: the kernel's, CPU tensors and numbers; the simulator writes to them.

    Raises:
        KernelCompileError: the kernel does not compile.
        RuntimeError: the simulator cannot run it.
    """
    from layouts.simulator.errors import SimulatorError
    from layouts.simulator.simulate import simulate

    with tempfile.TemporaryDirectory(prefix="cute_attn_simulate_") as folder:
        compiled = compile_spec(spec, f"--keep-ptx --generate-line-info --dump-dir {shlex.quote(folder)}")
        try:
            return simulate(compiled, arguments, **asdict(run or Run()))
        except SimulatorError as error:
            raise RuntimeError(f"kernel {spec.name} cannot be simulated: {error}") from error


def outcome_of(spec: KernelSpec, call: Any, report: Report, rows: Rows) -> Outcome:
    """Put together what a call gave."""
    return Outcome(
        kernel=spec.name,
        call=call,
        report=report,
        rows=rows.errors.numel(),
        wrong_rows=rows.wrong,
        largest_error=float(rows.errors.max()),
        largest_allowed=float(rows.allowed.max()),
    )


def _row_ulps(expected: Tensor, dtype: torch.dtype) -> Tensor:
    """The unit in the last place of each row's largest output; 0 for a row of zeros."""
    largest = expected.abs().amax(-1)
    _, exponent = torch.frexp(largest)
    limits = torch.finfo(dtype)
    ulps = torch.ldexp(torch.full_like(largest, limits.eps), exponent - 1)
    return torch.where(largest > 0, ulps.clamp(min=limits.smallest_normal * limits.eps), 0.0)
