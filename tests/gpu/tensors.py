"""Inputs and outputs as they lie in memory: strided, surrounded by NaN, and guarded against writes beyond them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tests.gpu.cases import Case

GUARD = 64  # elements of NaN on both sides of every buffer; keeps 16-byte alignment
ROW_PADDING = 24  # elements between the rows of "padded" storage, and rows after the last valid one


@dataclass(frozen=True)
class Tensors:
    """A call's tensors. Everything in ``out_buffer`` that is not ``out`` must still be NaN after the call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    out_buffer: torch.Tensor
    lengths: dict[str, Any]


def make_tensors(case: Case, device: str) -> Tensors:
    """Random normal inputs and a NaN output, stored as the case says.

    Storages: "contiguous"; "transposed" (heads and length the other way round in memory); "fused" (slices of one
    buffer that holds q, k and v side by side); "padded" (NaN between rows and after the last); "expanded" (one key
    and value head, shown as all of them).
    """
    problem, shape = case.problem, case.shape
    sizes = _Sizes(case, device)
    heads_kv = 1 if case.storage == "expanded" else shape.heads_kv
    k_length, q_length = sizes.length(shape.k_lens), sizes.length(shape.q_lens)
    if case.storage == "fused":
        q, k, v = _fused(sizes, q_length, k_length)
    else:
        q = sizes.empty(shape.heads_q, q_length, problem.head_dim)[0]
        k = sizes.empty(heads_kv, k_length, problem.head_dim)[0]
        v = sizes.empty(heads_kv, k_length, problem.head_dim_v)[0]
    generator = torch.Generator(device=device).manual_seed(case.seed)
    for tensor in (q, k, v):
        tensor.copy_(torch.randn(tensor.shape, generator=generator, device=device))
    if heads_kv != shape.heads_kv:
        k, v = (sizes.expand_heads(t, shape.heads_kv) for t in (k, v))
    out, out_buffer = sizes.empty(shape.heads_q, q_length, problem.head_dim_v)
    return Tensors(q, k, v, out, out_buffer, _cumulative_lengths(case, device))


class _Sizes:
    """Makes tensors of one case: (batch, heads, length, dim), (batch, length, heads, dim) or (total, heads, dim)."""

    def __init__(self, case: Case, device: str) -> None:
        self.case = case
        self.device = device
        self.dtype = getattr(torch, case.problem.dtype)
        packed, transposed = case.problem.varlen, case.storage == "transposed"
        self.heads_first_in_memory = (not packed and case.layout == "bhsd") != transposed
        self.heads_axis = 1 if packed or case.layout == "bhsd" else 2

    def length(self, lengths: tuple[int, ...]) -> int:
        return sum(lengths) if self.case.problem.varlen else lengths[0]

    def empty(self, heads: int, length: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A tensor of NaN, and the buffer in which it lies."""
        batch = 1 if self.case.problem.varlen else self.case.shape.batch
        padding = ROW_PADDING if self.case.storage == "padded" else 0
        inner = (heads, length + padding) if self.heads_first_in_memory else (length + padding, heads)
        shape = (batch, *inner, dim + padding)
        buffer = torch.full((math.prod(shape) + 2 * GUARD,), float("nan"), dtype=self.dtype, device=self.device)
        tensor = buffer[GUARD : buffer.numel() - GUARD].view(shape)
        # From here on (batch, length, heads, dim).
        tensor = tensor.transpose(1, 2) if self.heads_first_in_memory else tensor
        return self.as_argument(tensor[:, :length, :, :dim]), buffer

    def as_argument(self, tensor: torch.Tensor) -> torch.Tensor:
        """A (batch, length, heads, dim) tensor as the call takes it."""
        if self.case.problem.varlen:
            return tensor[0]
        return tensor.transpose(1, 2) if self.case.layout == "bhsd" else tensor

    def expand_heads(self, tensor: torch.Tensor, heads: int) -> torch.Tensor:
        sizes = list(tensor.shape)
        sizes[self.heads_axis] = heads
        return tensor.expand(sizes)


def _fused(sizes: _Sizes, q_length: int, k_length: int) -> tuple[torch.Tensor, ...]:
    shape, problem = sizes.case.shape, sizes.case.problem
    widths = (shape.heads_q * problem.head_dim, shape.heads_kv * problem.head_dim, shape.heads_kv * problem.head_dim_v)
    batch = 1 if problem.varlen else shape.batch
    buffer = torch.full(
        (batch, max(q_length, k_length), sum(widths)), float("nan"), dtype=sizes.dtype, device=sizes.device
    )
    q, k, v = buffer.split(widths, dim=2)
    return (
        sizes.as_argument(q[:, :q_length].unflatten(2, (shape.heads_q, problem.head_dim))),
        sizes.as_argument(k[:, :k_length].unflatten(2, (shape.heads_kv, problem.head_dim))),
        sizes.as_argument(v[:, :k_length].unflatten(2, (shape.heads_kv, problem.head_dim_v))),
    )


def cumulative(lengths: tuple[int, ...], device: str) -> torch.Tensor:
    """The lengths' running sums from 0, as int32."""
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def _cumulative_lengths(case: Case, device: str) -> dict[str, Any]:
    if not case.problem.varlen:
        return {}
    return {
        "cu_seqlens_q": cumulative(case.shape.q_lens, device),
        "cu_seqlens_k": cumulative(case.shape.k_lens, device),
        "max_seqlen_q": max(case.shape.q_lens),
        "max_seqlen_k": max(case.shape.k_lens),
    }
