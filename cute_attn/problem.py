"""What a kernel is compiled for, and what it is called with: one description for fake tensors, cache key and call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from cute_attn.arch import Arch
from cute_attn.configs import PrefillConfig
from cute_attn.decode_configs import DecodeConfig
from cute_attn.decode_problem import DecodeProblem

ProblemT = TypeVar("ProblemT", "PrefillProblem", DecodeProblem)
ConfigT = TypeVar("ConfigT", PrefillConfig, DecodeConfig)


@dataclass(frozen=True)
class PrefillProblem:
    """Everything about a call that changes the prefill kernel's machine code.

    Sizes, strides, head counts, window widths and the scale are not here: one compile serves them all.

    Attributes:
        dtype: "float16" or "bfloat16", of q, k, v and out.
        head_dim: of q and k, a multiple of 8 up to 256.
        head_dim_v: of v and out, a multiple of 8 up to 256.
        bounded_left: keys further left than ``window_left`` are hidden.
        bounded_right: keys further right than ``window_right`` are hidden (causal is ``window_right == 0``).
        varlen: sequences are packed as (total, heads, head_dim) and delimited by cumulative lengths.
        return_lse: the log-sum-exp of each row is written.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    bounded_left: bool = False
    bounded_right: bool = False
    varlen: bool = False
    return_lse: bool = False

    @property
    def name(self) -> str:
        """Short and unique: names the kernel in messages, tables and symbols."""
        dims = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}v{self.head_dim_v}"
        dtype = {"float16": "fp16", "bfloat16": "bf16"}[self.dtype]
        flags = [flag for flag in ("bounded_left", "bounded_right", "varlen", "return_lse") if getattr(self, flag)]
        short = [flag.removeprefix("bounded_").removeprefix("return_") for flag in flags]
        return "_".join(["prefill", dtype, dims, *short])


class PrefillArguments(NamedTuple):
    """The compiled prefill kernel's arguments, in order.

    Dense tensors are (batch, heads, length, dim) with ``heads_second``, else (batch, length, heads, dim); with
    ``varlen`` they are (total, heads, dim). The last dimension is dense, every other stride is a multiple of 8
    elements, every pointer is 16-byte aligned.
    """

    q: Any  # 16-bit
    k: Any  # 16-bit
    v: Any  # 16-bit
    out: Any  # 16-bit
    lse: Any  # float32 (batch, heads, q_len) or (heads, total_q); None without return_lse
    cu_seqlens_q: Any  # int32 (batch + 1,); None without varlen
    cu_seqlens_k: Any  # int32 (batch + 1,); None without varlen
    scale_log2: float  # softmax scale x log2(e); positive
    window_left: int  # used when bounded_left
    window_right: int  # used when bounded_right
    heads_second: int  # 1 or 0: the order of dense tensors; unused with varlen


@dataclass(frozen=True)
class KernelSpec(Generic[ProblemT, ConfigT]):
    """A kernel to compile: the problem, the tiling that solves it and the architecture that runs it."""

    problem: ProblemT
    config: ConfigT
    arch: Arch

    @property
    def name(self) -> str:
        return f"{self.problem.name}-{self.config.name}-{self.arch.gpu_arch}"

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one block."""
        if isinstance(self.config, DecodeConfig):
            assert isinstance(self.problem, DecodeProblem)
            return self.config.smem_bytes(self.problem)
        assert isinstance(self.problem, PrefillProblem)
        return self.config.smem_bytes(self.problem.head_dim, self.problem.head_dim_v)

    def check_fits(self) -> None:
        """Raises ValueError if a block would need more shared memory than the architecture has."""
        if isinstance(self.config, DecodeConfig):
            assert isinstance(self.problem, DecodeProblem)
            self.config.check_fits(self.arch, self.problem)
        else:
            assert isinstance(self.problem, PrefillProblem)
            self.config.check_fits(self.arch, self.problem.head_dim, self.problem.head_dim_v)
