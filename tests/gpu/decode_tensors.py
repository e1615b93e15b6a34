"""Decode's inputs and outputs as they lie in memory: whatever no query sees is poisoned, and outputs are guarded."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cute_attn.caches import Cache, ContiguousCache, PagedCache
from tests.gpu.decode_cases import DecodeCase

GUARD = 64  # elements of NaN on both sides of the output; keeps 16-byte alignment
GARBAGE_PAGES = (-5, 2**30, -(2**31))  # in table entries of pages that no query sees
SPARE_PAGES = 3  # that nobody owns


@dataclass
class DecodeTensors:
    """A call's tensors. Everything in ``out_buffer`` that is not ``out`` must still be NaN after the call.

    Attributes:
        k, v: (batch, capacity, heads_kv, head_dim) as the cache holds them, page by page put together.
    """

    q: Tensor
    cache: Cache
    lengths: Tensor
    sinks: Tensor | None
    out: Tensor
    out_buffer: Tensor
    k: Tensor = field(repr=False)
    v: Tensor = field(repr=False)


def bits(x: Tensor) -> Tensor:
    """The same bytes in a dtype that torch can index."""
    return x.view(torch.int8) if x.element_size() == 1 else x


def make_decode_tensors(case: DecodeCase, device: str) -> DecodeTensors:
    """Random normal inputs and a NaN output; a quantised cache holds normal values divided by its scales."""
    generator = torch.Generator(device=device).manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    problem = case.problem
    dtype = getattr(torch, problem.dtype)
    rows = (case.batch * case.q_len,) if case.packed else (case.batch, case.q_len)
    q = normal(*rows, case.heads, problem.head_dim).to(dtype)
    shape = (case.batch, case.capacity, case.heads_kv, problem.head_dim)
    k, v = (to_cache(case, normal(*shape), scale) for scale in case.scales)
    poison(case, k, v)
    sinks = 2 * normal(case.heads) if problem.sinks else None
    if sinks is not None:
        sinks[0] = -math.inf
    buffer = torch.full((q.numel() + 2 * GUARD,), math.nan, dtype=dtype, device=device)
    return DecodeTensors(
        q=q,
        cache=cache_of(case, k, v, generator),
        lengths=torch.tensor(case.lengths, dtype=torch.int32, device=device),
        sinks=sinks,
        out=buffer[GUARD : buffer.numel() - GUARD].view(q.shape),
        out_buffer=buffer,
        k=k,
        v=v,
    )


def to_cache(case: DecodeCase, x: Tensor, scale: float) -> Tensor:
    """Values as the cache holds them."""
    problem = case.problem
    if problem.cache_dtype == "int8":
        x = (x / scale).round().clamp(-128, 127)
    elif problem.cache_dtype == "float8_e4m3fn":
        x = (x / scale).clamp(-448, 448)
    return x.to(getattr(torch, problem.cache_dtype))


def poison(case: DecodeCase, *caches: Tensor) -> None:
    """Fills the tokens that no query sees with NaN, or the largest number of int8."""
    for x in caches:
        for row, length in zip(bits(x), case.lengths, strict=True):
            row[length:] = poison_value(x.dtype)
            row[: case.first_seen(length)] = poison_value(x.dtype)


def poison_value(dtype: torch.dtype) -> float:
    """NaN as ``bits`` shows it, or the largest number of int8; both have the same bits."""
    return 127 if dtype.itemsize == 1 else math.nan


def cache_of(case: DecodeCase, k: Tensor, v: Tensor, generator: torch.Generator) -> Cache:
    """The cache of these tokens, stored as the case says."""
    scale = _scale(case, k.device)
    if case.problem.page_size == 0:
        return ContiguousCache(*_stored(case, k, v), scale=scale)
    return _paged(case, k, v, scale, generator)


def _scale(case: DecodeCase, device: torch.device) -> Any:
    if not case.problem.quantised:
        return None
    k_scale, v_scale = (torch.tensor([scale], device=device) for scale in case.scales)
    if case.scale_place == "device":
        return k_scale, v_scale
    return (case.scales[0], v_scale[0]) if case.scale_place == "mixed" else case.scales


def _stored(case: DecodeCase, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(.., tokens, heads, dim) tensors with the same values in the case's storage."""
    if case.storage == "contiguous":
        return k, v
    dtype = k.dtype
    k, v = bits(k), bits(v)
    if case.storage == "heads first":
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    else:
        k, v = torch.stack([k, v], dim=1).unbind(1)
    return k.view(dtype), v.view(dtype)


def _paged(case: DecodeCase, k: Tensor, v: Tensor, scale: Any, generator: torch.Generator) -> PagedCache:
    """Shuffled pages, among poisoned ones that nobody owns."""
    page = case.problem.page_size
    columns = case.capacity // page
    used = case.batch * columns
    pages = (2 if case.two_tables else 1) * used + SPARE_PAGES
    order = torch.randperm(pages, generator=generator, device=k.device)
    tables = [order[:used], order[used : 2 * used] if case.two_tables else order[:used]]
    pool = bits(torch.zeros(pages, page, *k.shape[2:], dtype=k.dtype, device=k.device))
    pools = [pool.fill_(poison_value(k.dtype)), pool if case.two_tables else pool.clone()]
    for x, to, table in zip((k, v), pools, tables, strict=True):
        to[table] = bits(x).reshape(used, page, *x.shape[2:])
    if case.two_tables:  # one pool for both: there is nothing to store beside each other
        stored = (
            _stored(case, pools[0].view(k.dtype), pools[1].view(k.dtype))[0]
            if case.storage == "heads first"
            else (pools[0].view(k.dtype))
        )
        k_pool = v_pool = stored
    else:
        k_pool, v_pool = _stored(case, pools[0].view(k.dtype), pools[1].view(k.dtype))
    rows = [table.view(case.batch, columns).to(torch.int32) for table in tables]
    for table in rows:
        _garble_unseen(case, table)
    return PagedCache(k_pool, v_pool, torch.stack(rows, dim=1) if case.two_tables else rows[0], scale)


def _garble_unseen(case: DecodeCase, table: Tensor) -> None:
    page = case.problem.page_size
    for i, length in enumerate(case.lengths):
        table[i, -(-length // page) :] = GARBAGE_PAGES[i % len(GARBAGE_PAGES)]
        table[i, : case.first_seen(length) // page] = GARBAGE_PAGES[(i + 1) % len(GARBAGE_PAGES)]
