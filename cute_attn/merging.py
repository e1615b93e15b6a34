"""Merging partial results of attention, as over a shared prefix and its continuation, or over several devices' tokens.

Each part is attention over its own set of tokens: (out, lse). With the largest lse of all parts as m,

    weight_i = exp(lse_i - m),    out = sum(weight_i * out_i) / sum(weight_i),    lse = m + log(sum(weight_i))

(Milakov and Gimelshein, arXiv:1805.02867). A part that saw no token has lse -inf and so a weight of exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cute_attn.dispatch import Op, register
from cute_attn.errors import argument_error

OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over all tokens, from its results over two or more disjoint sets of them.

    Rows are merged one by one, in float32. A row that only one part saw tokens for is that part's, bit by bit; a row
    that no part did has out 0 and lse -inf. ``outs`` of such rows and parts are not looked at. Sinks belong into one
    part only, as each part counts its own.

    Args:
        outs: of each part, (..., heads, head_dim): float16, bfloat16 or float32, all of one shape, dtype and device.
        lses: of each part, the natural log-sum-exp, float32 (..., heads), finite or -inf.

    Returns:
        out, contiguous, of the parts' dtype, and lse, float32.

    Raises:
        ValueError: an argument is wrong; the message names it, what it was and what is allowed.
    """
    for argument, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (list, tuple)) or not all(isinstance(x, Tensor) for x in parts):
            raise argument_error(argument, "its type", type(parts).__name__, "a list or tuple of torch.Tensor")
    if not outs:  # which torch's dispatcher could not send anywhere
        raise argument_error("outs", "its length", 0, "at least 1")
    out, lse = torch.ops.cute_attn.merge.default(list(outs), list(lses))
    return out, lse


def _merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    _check(outs, lses)
    largest = lses[0]
    for lse in lses[1:]:
        largest = torch.maximum(largest, lse)
    # Where every part is empty, -inf - -inf would be NaN.
    base = largest.masked_fill(largest == -math.inf, 0.0)
    total = torch.zeros_like(largest)
    # -0 + x is x for every x, also for -0.
    merged = torch.full(outs[0].shape, -0.0, dtype=torch.float32, device=outs[0].device)
    for out, lse in zip(outs, lses, strict=True):
        weight = torch.exp(lse - base)
        total += weight
        weight = weight[..., None]
        merged = torch.where(weight == 0, merged, merged + weight * out)
    total = total[..., None]
    merged = torch.where(total == 0, 0.0, merged / total)
    total = total[..., 0]
    return merged.to(outs[0].dtype), (largest + torch.log(total)).contiguous()


def _merge_fake(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    _check(outs, lses)
    return torch.empty(outs[0].shape, dtype=outs[0].dtype, device=outs[0].device), torch.empty(
        lses[0].shape, dtype=torch.float32, device=outs[0].device
    )


def _check(outs: list[Tensor], lses: list[Tensor]) -> None:
    if len(lses) != len(outs):
        raise argument_error("lses", "its length", len(lses), f"{len(outs)}, that of outs")
    first = outs[0]
    if first.dtype not in OUT_DTYPES:
        raise argument_error("outs", "dtype", first.dtype, ", ".join(map(str, OUT_DTYPES)))
    if first.dim() < 1:
        raise argument_error("outs", "shape", tuple(first.shape), "(..., heads, head_dim)")
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.dtype != first.dtype:
            raise argument_error("outs", f"dtype of part {i}", out.dtype, f"{first.dtype}, that of part 0")
        if out.shape != first.shape:
            raise argument_error("outs", f"shape of part {i}", tuple(out.shape), f"{tuple(first.shape)}, that of 0")
        if lse.dtype != torch.float32:
            raise argument_error("lses", f"dtype of part {i}", lse.dtype, "torch.float32")
        if lse.shape != first.shape[:-1]:
            allowed = f"{tuple(first.shape[:-1])}, that of outs without the last dimension"
            raise argument_error("lses", f"shape of part {i}", tuple(lse.shape), allowed)
        for argument, x in (("outs", out), ("lses", lse)):
            if x.device != first.device:
                raise argument_error(argument, f"device of part {i}", x.device, f"{first.device}, that of outs' part 0")


register(
    "merge",
    Op(
        "(Tensor[] outs, Tensor[] lses) -> (Tensor, Tensor)",
        {"CUDA": _merge, "CPU": _merge},
        _merge_fake,
        cast=None,
        differentiable=("outs", "lses"),
    ),
)
