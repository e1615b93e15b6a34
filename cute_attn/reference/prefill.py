"""Attention in plain torch, written for reading: the definition of every option that ``cute_attn.attention`` takes.

A query i of a sequence with q_len queries and k_len keys stands at the key i + k_len - q_len: the last query at the
last key ("bottom-right aligned"). It sees the keys from ``left`` before to ``right`` after that key, and

    scores = scale * q @ k^T,    lse = log(sum(exp(scores))),    out = exp(scores - lse) @ v

over the keys that it sees. A query that sees no key has out 0 and lse -inf.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cute_attn.errors import argument_error
from cute_attn.options import UNBOUNDED, Window, check_layout, check_scale, window_widths

# Queries whose scores are held at one time, which bounds the memory: heads x ROWS x k_len.
ROWS = 1024


class Precision(NamedTuple):
    """How the reference computes.

    Attributes:
        compute: float32 or float64; of every intermediate result, and of lse.
        out: of out; None for the dtype of q.
    """

    compute: torch.dtype = torch.float32
    out: torch.dtype | None = None


FLOAT32 = Precision()
FLOAT64 = Precision(torch.float64, torch.float64)


class _Scores(NamedTuple):
    """What scores depend on beside q and k."""

    scale: float
    window_left: int
    window_right: int


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    layout: str = "bhsd",
    precision: Precision | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v, on any device and in any floating dtype; slow.

    The arguments and results are those of ``cute_attn.attention``, except that inputs may be float32 or float64, that
    any head dim and stride will do, that rows of no packed sequence get out 0 and lse -inf, and:

    Args:
        precision: see ``Precision``; None computes in float32, or in float64 when q is float64.

    Raises:
        ValueError: an option is wrong, or cumulative lengths do not say sequences.
    """
    check_layout(layout)
    if scale is not None:
        check_scale(scale)
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    for argument, x in (("q", q), ("k", k), ("v", v)):
        if not x.is_floating_point():
            raise argument_error(argument, "dtype", x.dtype, "a floating dtype")
        if x.dim() != q.dim() or (not packed and x.shape[0] != q.shape[0]):
            raise argument_error(argument, "shape", tuple(x.shape), f"the rank and batch of q, {tuple(q.shape)}")
    scores = _Scores(
        1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        *window_widths(causal, window),
    )
    if not isinstance(precision, (Precision, type(None))):
        allowed = "None, or a Precision such as cute_attn.reference.FLOAT32 or FLOAT64"
        raise argument_error("precision", "it", repr(precision), allowed)
    if precision is None:
        precision = Precision(torch.float64) if q.dtype == torch.float64 else FLOAT32
    if packed:
        out, lse = _packed(q, k, v, (cu_seqlens_q, cu_seqlens_k), scores, precision)
    elif layout == "bhsd":
        out, lse = _dense(q, k, v, scores, precision)
    else:
        out, lse = _dense(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scores, precision)
        out = out.transpose(1, 2).contiguous()
    return (out, lse) if return_lse else out


def _dense(q: Tensor, k: Tensor, v: Tensor, scores: _Scores, precision: Precision) -> tuple[Tensor, Tensor]:
    """Attention of (batch, heads, length, head_dim) tensors."""
    out, lse = _empty_results(q, v, precision)
    for sequence in range(q.shape[0]):
        out[sequence], lse[sequence] = _sequence(q[sequence], k[sequence], v[sequence], scores, precision)
    return out, lse


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: tuple[Tensor | None, Tensor | None],
    scores: _Scores,
    precision: Precision,
) -> tuple[Tensor, Tensor]:
    """Attention of (total, heads, head_dim) tensors; rows of no sequence get 0 and -inf."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    out, lse = _empty_results(q, v, precision)
    queries = sequences("cu_seqlens_q", cu_seqlens[0], q.shape[1])
    keys = sequences("cu_seqlens_k", cu_seqlens[1], k.shape[1])
    for rows, columns in zip(queries, keys, strict=True):
        out[:, rows], lse[:, rows] = _sequence(q[:, rows], k[:, columns], v[:, columns], scores, precision)
    return out.transpose(0, 1).contiguous(), lse


def _empty_results(q: Tensor, v: Tensor, precision: Precision) -> tuple[Tensor, Tensor]:
    """out and lse as they are where no key is seen."""
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=precision.out or q.dtype)
    return out, q.new_full(q.shape[:-1], -math.inf, dtype=precision.compute)


def sequences(argument: str, cu_seqlens: Tensor | None, total: int) -> list[slice]:
    """The rows of each sequence.

    Raises:
        ValueError: cumulative lengths are absent, do not start at 0, fall, or end beyond ``total`` rows.
    """
    if cu_seqlens is None:
        raise argument_error(argument, "it", None, "a tensor, as the other cu_seqlens was given")
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] > total:
        raise argument_error(argument, "it", bounds, f"lengths summed up: from 0, never falling, to at most {total}")
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]


def _sequence(q: Tensor, k: Tensor, v: Tensor, scores: _Scores, precision: Precision) -> tuple[Tensor, Tensor]:
    """Attention of one sequence: (heads, length, head_dim) tensors."""
    k, v = (_per_query_head(x, q.shape[0]).to(precision.compute) for x in (k, v))
    out, lse = _empty_results(q, v, precision)
    keys = torch.arange(k.shape[1], device=q.device)
    positions = torch.arange(q.shape[1], device=q.device) + (k.shape[1] - q.shape[1])
    for rows in _blocks(q.shape[1]):
        seen = visible_keys(positions[rows], keys, scores.window_left, scores.window_right)
        logits = scores.scale * (q[:, rows].to(precision.compute) @ k.transpose(-1, -2))
        logits = logits.masked_fill(~seen, -math.inf)
        lse[:, rows] = torch.logsumexp(logits, dim=-1)
        # softmax is exp(logits - lse) without the rounding of lse. It is NaN in a row that sees no key.
        weights = torch.softmax(logits, dim=-1).masked_fill(~seen, 0)
        out[:, rows] = (weights @ v).to(out.dtype)
    return out, lse


def _per_query_head(x: Tensor, heads: int) -> Tensor:
    """Repeats each key or value head for the group of query heads that share it: consecutive ones."""
    return x.repeat_interleave(heads // x.shape[0], dim=0)


def _blocks(length: int) -> Iterator[slice]:
    return (slice(start, min(start + ROWS, length)) for start in range(0, length, ROWS))


def visible_keys(positions: Tensor, keys: Tensor, window_left: int, window_right: int) -> Tensor:
    """Which keys are seen from each position: bool (positions, keys). Negative widths are unbounded."""
    distance = keys[None, :] - positions[:, None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if window_left > UNBOUNDED:
        seen &= distance >= -window_left
    if window_right > UNBOUNDED:
        seen &= distance <= window_right
    return seen
