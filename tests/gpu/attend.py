"""Attention and its reference with results of one type each, for tests that call them directly."""

from __future__ import annotations

from typing import Any

import torch

from cute_attn import attention, reference

FLOAT32 = reference.Precision(torch.float32, torch.float32)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """The output of attention."""
    out = attention(q, k, v, **options)
    assert isinstance(out, torch.Tensor)
    return out


def attend_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of attention and the log-sum-exp."""
    out, lse = attention(q, k, v, return_lse=True, **options)
    return out, lse


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """The reference's output, computed and returned in float32."""
    return exact_with_lse(q, k, v, **options)[0]


def exact_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's output and log-sum-exp, computed and returned in float32."""
    out, lse = reference.attention(q, k, v, return_lse=True, precision=FLOAT32, **options)
    return out, lse


def poison(like: torch.Tensor) -> torch.Tensor:
    """NaN of the same shape, to be written over."""
    return torch.full_like(like, float("nan"))
