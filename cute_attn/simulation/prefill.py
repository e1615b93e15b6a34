"""A dense call of the prefill kernel, simulated."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_attn import reference
from cute_attn.configs import PrefillConfig
from cute_attn.errors import argument_error
from cute_attn.options import UNBOUNDED
from cute_attn.problem import KernelSpec, PrefillArguments
from cute_attn.simulation.outcome import Outcome, Rows, Run, outcome_of, run_kernel


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


def simulate_prefill(spec: KernelSpec, call: Call, run: Run | None = None) -> Outcome:
    """Compile a prefill kernel and simulate a call of it, into an output full of NaN.

    Args:
        spec: without varlen and return_lse; its bounds are those of the call's window.

    Raises:
        KernelCompileError: the kernel does not compile.
        RuntimeError: the simulator cannot run it.
    """
    arguments = _arguments(spec, call)
    report = run_kernel(spec, arguments, run)
    return outcome_of(spec, call, report, _rows(spec.config, call, arguments))


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


def _rows(config: PrefillConfig, call: Call, arguments: PrefillArguments) -> Rows:
    def attention(precision: reference.Precision) -> Tensor:
        window = call.window_left, call.window_right
        out = reference.attention(arguments.q, arguments.k, arguments.v, window=window, precision=precision)
        assert isinstance(out, Tensor)
        return out.float()

    expected = attention(reference.Precision(torch.float32, torch.float32))
    rough = attention(reference.Precision(arguments.out.dtype))
    # O in 16 bits between tiles is rounded once for every tile of keys.
    roundings = 0 if config.o_fp32 else math.ceil(call.k_len / config.tile_n)
    return Rows.of(arguments.out, expected, rough, roundings)
