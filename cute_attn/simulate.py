"""A kernel run on this CPU by ``layouts.simulate``: its result held against the reference, its faults and traffic."""

from __future__ import annotations

import math
import shlex
import tempfile
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cute_attn import reference
from cute_attn.compiler.compiling import compile_spec
from cute_attn.configs import PrefillConfig
from cute_attn.errors import argument_error
from cute_attn.options import UNBOUNDED
from cute_attn.problem import KernelSpec, PrefillArguments

if TYPE_CHECKING:
    from layouts.simulator.report import Report

# A row may err by so many times the error of torch's own arithmetic in the same dtype, and so many units in the last
# place of its largest output.
TORCH_ERRORS = 2
ULPS = 2


@dataclass(frozen=True)
class Call:
    """A dense call of the prefill kernel, with random inputs.

    Attributes:
        batch, heads, kv_heads: how many; ``heads`` is a multiple of ``kv_heads``.
        q_len, k_len: rows of q, and of k and v.
        window_left, window_right: how many keys are seen on each side; negative is unbounded.
        seed: of the inputs.
    """

    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    q_len: int = 133
    k_len: int = 199
    window_left: int = UNBOUNDED
    window_right: int = UNBOUNDED
    seed: int = 0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise argument_error("kv_heads", "it", self.kv_heads, f"a divisor of heads, {self.heads}")


@dataclass(frozen=True)
class Run:
    """How warps run, and whether races are looked for: the arguments of ``layouts.simulate``."""

    schedule: str = "lockstep"
    seed: int = 0
    checked: bool = True


@dataclass(frozen=True)
class Outcome:
    """What a simulated call gave.

    Attributes:
        kernel: the name of its spec.
        call: what was run.
        report: the simulator's.
        rows: of out, (batch, head, query).
        wrong_rows: how many of them are further from the reference than allowed, or have NaN.
        largest_error: over all elements of out; NaN if one of them was not written.
        largest_allowed: of the rows' bounds, the largest.
    """

    kernel: str
    call: Call
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


def simulate_prefill(spec: KernelSpec, call: Call, run: Run | None = None) -> Outcome:
    """Compile a prefill kernel and simulate a call of it, into an output full of NaN.

    Args:
        spec: without varlen and return_lse; its bounds are those of the call's window.

    Raises:
        KernelCompileError: the kernel does not compile.
        RuntimeError: the simulator cannot run it.
    """
    from layouts.simulator.errors import SimulatorError
    from layouts.simulator.simulate import simulate

    with tempfile.TemporaryDirectory(prefix="cute_attn_simulate_") as folder:
        compiled = compile_spec(spec, f"--keep-ptx --generate-line-info --dump-dir {shlex.quote(folder)}")
        arguments = _arguments(spec, call)
        try:
            report = simulate(compiled, arguments, **asdict(run or Run()))
        except SimulatorError as error:
            raise RuntimeError(f"kernel {spec.name} cannot be simulated: {error}") from error
    errors, allowed = _errors_and_bounds(spec.config, call, arguments)
    return Outcome(
        kernel=spec.name,
        call=call,
        report=report,
        rows=errors.numel(),
        wrong_rows=int((~(errors <= allowed)).sum()),  # NaN is wrong
        largest_error=float(errors.max()),
        largest_allowed=float(allowed.max()),
    )


def _arguments(spec: KernelSpec, call: Call) -> PrefillArguments:
    problem, chance = spec.problem, torch.Generator().manual_seed(call.seed)
    dtype = getattr(torch, problem.dtype)

    def normal(heads: int, length: int, head_dim: int) -> Tensor:
        return torch.randn(call.batch, heads, length, head_dim, generator=chance).to(dtype)

    return PrefillArguments(
        q=normal(call.heads, call.q_len, problem.head_dim),
        k=normal(call.kv_heads, call.k_len, problem.head_dim),
        v=normal(call.kv_heads, call.k_len, problem.head_dim_v),
        out=torch.full((call.batch, call.heads, call.q_len, problem.head_dim_v), math.nan, dtype=dtype),
        lse=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        scale_log2=math.log2(math.e) / math.sqrt(problem.head_dim),
        window_left=max(call.window_left, 0),
        window_right=max(call.window_right, 0),
        heads_second=1,
    )


def _errors_and_bounds(config: PrefillConfig, call: Call, arguments: PrefillArguments) -> tuple[Tensor, Tensor]:
    """Of each row the largest error, and what is allowed."""

    def attention(precision: reference.Precision) -> Tensor:
        window = call.window_left, call.window_right
        out = reference.attention(arguments.q, arguments.k, arguments.v, window=window, precision=precision)
        assert isinstance(out, Tensor)
        return out.float()

    dtype = arguments.out.dtype
    expected = attention(reference.Precision(torch.float32, torch.float32))
    rough = attention(reference.Precision(dtype))
    ulps = _row_ulps(expected, dtype)
    # O in 16 bits between tiles is rounded once for every tile of keys.
    roundings = 0 if config.o_fp32 else math.ceil(call.k_len / config.tile_n)
    allowed = TORCH_ERRORS * (rough - expected).abs().amax(-1) + (ULPS + roundings) * ulps
    return (arguments.out.float() - expected).abs().amax(-1), allowed


def _row_ulps(expected: Tensor, dtype: torch.dtype) -> Tensor:
    """The unit in the last place of each row's largest output; 0 for a row of zeros."""
    largest = expected.abs().amax(-1)
    _, exponent = torch.frexp(largest)
    limits = torch.finfo(dtype)
    ulps = torch.ldexp(torch.full_like(largest, limits.eps), exponent - 1)
    return torch.where(largest > 0, ulps.clamp(min=limits.smallest_normal * limits.eps), 0.0)
