"""Decode in plain torch: queries at the end of cached sequences, and how partial results are merged.

A sequence of ``length`` cached tokens has q_len queries, the last of which stands at the last token: query i stands at
token length - q_len + i. It sees that token and those before it, at most ``window`` in all, and

    scores = softcap * tanh(scale * q @ k^T / softcap)          (without softcap: scale * q @ k^T)
    lse    = log(exp(sink) + sum(exp(scores)))                  (without sinks: log(sum(exp(scores))))
    out    = exp(scores - lse) @ v

over the tokens that it sees, with the keys and values of a quantised cache multiplied by its scales. A query that sees
no token has out 0 and lse -inf, or its head's sink.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cute_attn.caches import Cache, PagedCache, Scale
from cute_attn.decode_options import check_softcap, check_window
from cute_attn.errors import argument_error
from cute_attn.options import check_scale
from cute_attn.reference.prefill import FLOAT32, Precision


class _Scores(NamedTuple):
    """What scores depend on beside q and k."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


def decode(
    q: Tensor,
    cache: Cache,
    lengths: Tensor | Sequence[int],
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    precision: Precision | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a few queries over a long cache, on any device and in any floating dtype; slow.

    The arguments and results are those of ``cute_attn.decode``, except that q may be float32 or float64, and:

    Args:
        precision: see ``Precision``; None computes in float32, or in float64 when q is float64.

    Raises:
        ValueError: an option is wrong, or a length is negative or beyond the cache's capacity.
    """
    check_window(window)
    check_softcap(softcap)
    if scale is not None:
        check_scale(scale)
    if precision is None:
        precision = Precision(torch.float64) if q.dtype == torch.float64 else FLOAT32
    scores = _Scores(
        1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        None if window == -1 else window,
        softcap or None,
        sinks,
    )
    counts = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
    for sequence, count in enumerate(counts):
        if not 0 <= count <= cache.capacity:
            allowed = f"0 to {cache.capacity}, the capacity of the cache"
            raise argument_error("lengths", f"its element {sequence}", count, allowed)
    rows = q if q.dim() == 4 else q.unflatten(0, (len(counts), q.shape[0] // max(len(counts), 1)))
    out = rows.new_zeros(rows.shape, dtype=precision.out or q.dtype)
    lse = rows.new_full(rows.shape[:-1], -math.inf, dtype=precision.compute)
    for sequence, count in enumerate(counts):
        out[sequence], lse[sequence] = _sequence(rows[sequence], cache, (sequence, count), scores, precision)
    out, lse = out.reshape(q.shape), lse.reshape(q.shape[:-1])
    return (out, lse) if return_lse else out


def _sequence(
    q: Tensor, cache: Cache, place: tuple[int, int], scores: _Scores, precision: Precision
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the queries (q_len, heads, head_dim) of one sequence; ``place`` is its number and its length."""
    sequence, length = place
    q_len, heads, _ = q.shape
    positions = torch.arange(length - q_len, length, device=q.device)
    first = 0 if scores.window is None else max(0, length - q_len + 1 - scores.window)
    tokens = torch.arange(first, length, device=q.device)
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in cached(cache, sequence, tokens, precision.compute))

    seen = tokens <= positions[:, None]
    if scores.window is not None:
        seen &= tokens > positions[:, None] - scores.window
    logits = scores.scale * torch.einsum("qhd,thd->hqt", q.to(precision.compute), k)
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    logits = logits.masked_fill(~seen, -math.inf)
    # A sink is one more score, of a token whose value is 0.
    sinks = q.new_full((heads,), -math.inf, dtype=precision.compute) if scores.sinks is None else scores.sinks
    sinks = sinks.to(precision.compute)[:, None, None].expand(-1, q_len, 1)
    logits = torch.cat([logits, sinks], dim=-1)
    # softmax is exp(logits - lse) without the rounding of lse. It is NaN in a row that sees nothing.
    weights = torch.softmax(logits, dim=-1)[..., :-1].masked_fill(~seen, 0)
    out = torch.einsum("hqt,thd->qhd", weights, v)
    return out.to(precision.out or q.dtype), torch.logsumexp(logits, dim=-1).T


def cached(cache: Cache, sequence: int, tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The keys and values (tokens, heads_kv, head_dim) of some tokens of a sequence, dequantised, in ``dtype``."""
    if isinstance(cache, PagedCache):
        page, slot = tokens // cache.page_size, tokens % cache.page_size
        k = cache.k.view(_bits(cache.k))[cache.k_page_table[sequence, page].long(), slot]
        v = cache.v.view(_bits(cache.v))[cache.v_page_table[sequence, page].long(), slot]
    else:
        k, v = cache.k.view(_bits(cache.k))[sequence, tokens], cache.v.view(_bits(cache.v))[sequence, tokens]
    k, v = k.view(cache.k.dtype), v.view(cache.v.dtype)
    return k.to(dtype) * _scale(cache.k_scale, dtype), v.to(dtype) * _scale(cache.v_scale, dtype)


def _bits(x: Tensor) -> torch.dtype:
    """A dtype of the same size that torch can index: it cannot index float8."""
    return torch.int8 if x.element_size() == 1 else x.dtype


def _scale(scale: Scale, dtype: torch.dtype) -> Scale:
    return scale.to(dtype).reshape(()) if isinstance(scale, Tensor) else scale


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor], precision: Precision = FLOAT32) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint sets of tokens, from the results over each set.

        lse = log(sum of exp(lse_i)),    out = sum of exp(lse_i - lse) * out_i

    The arguments and results are those of ``cute_attn.merge``.
    """
    parts = torch.stack([lse.to(precision.compute) for lse in lses])
    lse = torch.logsumexp(parts, dim=0)
    # Softmax over the parts is exp(lse_i - lse); NaN where all are empty. An empty part's out counts nothing.
    weights = torch.softmax(parts, dim=0).nan_to_num(0.0)[..., None]
    terms = torch.stack([out.to(precision.compute) for out in outs])
    out = (weights * terms).masked_fill(weights == 0, 0.0).sum(dim=0)
    return out.to(precision.out or outs[0].dtype), lse
