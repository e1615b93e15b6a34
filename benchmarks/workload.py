"""What is timed: attention over equal lengths, always with the same number of tokens and the same model width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

TOKENS = 16384  # batch x length
WIDTH = 2048  # heads x head_dim
CHECKED_ROWS = 64  # in each of the blocks of query rows that are compared with the reference
# Relative error (of norms) above which a kernel is wrong and is not timed. The rounding of P and of the output gives
# 3e-4 in fp16 and 2.5e-3 in bf16.
MAX_ERROR = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


class Inputs(NamedTuple):
    """One call's arguments, each tensor (batch, heads, length, head_dim) and contiguous."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool


@dataclass(frozen=True)
class Workload:
    """One cell of the table."""

    dtype: str
    head_dim: int
    length: int
    causal: bool

    @property
    def batch(self) -> int:
        return TOKENS // self.length

    @property
    def heads(self) -> int:
        return WIDTH // self.head_dim

    @property
    def flops(self) -> float:
        """Two matrix products, half of the work if causal."""
        return 4 * TOKENS * self.length * WIDTH / (2 if self.causal else 1)

    def tflops(self, milliseconds: float) -> float:
        return self.flops / milliseconds * 1e-9

    def inputs(self, device: str = "cuda") -> Inputs:
        """Random normal inputs, the same for every contender."""
        generator = torch.Generator(device=device).manual_seed(0)
        shape = (self.batch, self.heads, self.length, self.head_dim)
        dtype = getattr(torch, self.dtype)
        q, k, v = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(3))
        return Inputs(q, k, v, self.causal)


def error(out: torch.Tensor, inputs: Inputs) -> float:
    """Largest relative error over batches and heads, on the first, a middle and the last block of query rows.

    NaN anywhere in ``out`` gives NaN.
    """
    from cute_attn import reference

    length = inputs.q.shape[2]
    size = min(CHECKED_ROWS, length)
    worst = (out.float() * 0).sum()
    for start in {0, (length - size) // 2, length - size}:
        rows = slice(start, start + size)
        # Causal is aligned to the last key, so a block of rows sees exactly the keys up to its own end.
        keys = slice(0, start + size if inputs.causal else length)
        q, k, v = (t.float() for t in (inputs.q[:, :, rows], inputs.k[:, :, keys], inputs.v[:, :, keys]))
        expected, _ = reference.attention(q, k, v, causal=inputs.causal, return_lse=True)
        distance = (out[:, :, rows].float() - expected).norm(dim=(2, 3)) / expected.norm(dim=(2, 3))
        worst = torch.maximum(worst, distance.max())
    return float(worst)
