"""One call of decode on its way from an op to what computes it: its sizes, and the check that its tensors fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cute_attn.caches import QUANTISED, Cache, PagedCache
from cute_attn.call import Shape
from cute_attn.checks import check_dtype
from cute_attn.decode_options import (
    MAX_SPLITS,
    NO_SOFTCAP,
    NO_WINDOW,
    UNSET,
    DecodeOptions,
    check_softcap,
    check_splits,
    check_window,
)
from cute_attn.errors import argument_error
from cute_attn.options import check_scale


class DecodeCall(NamedTuple):
    """A call's arguments as an op gets them.

    Attributes:
        lengths: int32 (batch,), tokens of each sequence.
        out: where the result goes; None to allocate it.
        return_lse: the log-sum-exp of each row is wanted.
    """

    q: Tensor
    cache: Cache
    lengths: Tensor
    options: DecodeOptions
    out: Tensor | None
    return_lse: bool


class DecodeSizes(NamedTuple):
    """The sizes of a call.

    Attributes:
        batch: sequences.
        q_len: queries of each.
        heads: of q and out.
        heads_kv: of the cache; divides ``heads``.
        head_dim: of all tensors.
        capacity: tokens that the cache holds for a sequence at most.
    """

    batch: int
    q_len: int
    heads: int
    heads_kv: int
    head_dim: int
    capacity: int

    @property
    def rows(self) -> Shape:
        """The shape of q and out, as kernels take them."""
        return self.batch, self.q_len, self.heads, self.head_dim

    @property
    def kv_rows(self) -> int:
        """Query rows of a sequence that read the same head of the cache."""
        return self.heads // self.heads_kv * self.q_len

    def sees_a_token(self) -> bool:
        """Something is left to compute: there are queries, and there is room for tokens."""
        return self.batch > 0 and self.q_len > 0 and self.heads > 0 and self.capacity > 0


def check_decode_call(call: DecodeCall) -> DecodeSizes:
    """The sizes of a call whose tensors fit together.

    Raises:
        ValueError: they do not; the message names the argument, what it was and what is allowed.
    """
    q, cache, lengths = call.q, call.cache, call.lengths
    check_dtype("q", "dtype", q.dtype)
    if q.device != cache.k.device:
        raise argument_error("cache", "device", cache.k.device, f"{q.device}, that of q")
    if cache.k.dtype not in QUANTISED and cache.k.dtype != q.dtype:
        allowed = f"{q.dtype}, that of q, or quantised"
        raise argument_error("cache", "dtype", cache.k.dtype, allowed)
    batch = _check_lengths(lengths, q)
    if q.dim() == 4:
        if q.shape[0] != batch:
            raise argument_error("lengths", "length", batch, f"{q.shape[0]}, the batch of q")
        _, q_len, heads, head_dim = q.shape
    elif q.dim() == 3:
        total, heads, head_dim = q.shape
        if total % max(batch, 1):
            raise argument_error("q", "its number of tokens", total, f"a multiple of {batch}, the length of lengths")
        q_len = total // max(batch, 1)
    else:
        allowed = "(batch, q_len, heads, head_dim) or (batch * q_len, heads, head_dim)"
        raise argument_error("q", "shape", tuple(q.shape), allowed)
    if cache.batch != batch:
        raise argument_error("cache", "batch", cache.batch, f"{batch}, the length of lengths")
    heads_kv, cache_head_dim = cache.k.shape[2:]
    if head_dim != cache_head_dim:
        raise argument_error("q", "head_dim", head_dim, f"{cache_head_dim}, that of the cache")
    if heads % heads_kv:
        raise argument_error("q", "its number of heads", heads, f"a multiple of the cache's {heads_kv}")
    sizes = DecodeSizes(batch, q_len, heads, heads_kv, head_dim, cache.capacity)
    _check_options(call.options, sizes, q)
    if call.out is not None:
        _check_out(call.out, q)
    return sizes


def _check_lengths(lengths: Tensor, q: Tensor) -> int:
    """The number of sequences. Values are not read: that would wait for the GPU."""
    if lengths.dtype != torch.int32:
        raise argument_error("lengths", "dtype", lengths.dtype, "torch.int32")
    if lengths.device != q.device:
        raise argument_error("lengths", "device", lengths.device, f"{q.device}, that of q")
    if lengths.dim() != 1:
        raise argument_error("lengths", "shape", tuple(lengths.shape), "(batch,)")
    return lengths.shape[0]


def _check_options(options: DecodeOptions, sizes: DecodeSizes, q: Tensor) -> None:
    check_window(options.window)
    check_softcap(options.softcap)
    if options.scale is not None:
        check_scale(options.scale)
    check_splits(
        None if options.num_splits == UNSET else options.num_splits,
        None if options.split_size == UNSET else options.split_size,
    )
    if options.num_splits > MAX_SPLITS:
        raise argument_error("num_splits", "it", options.num_splits, f"at most {MAX_SPLITS}")
    if options.sinks is not None:
        _check_sinks(options.sinks, sizes, q)


def _check_sinks(sinks: Tensor, sizes: DecodeSizes, q: Tensor) -> None:
    if sinks.dtype != torch.float32:
        raise argument_error("sinks", "dtype", sinks.dtype, "torch.float32")
    if sinks.device != q.device:
        raise argument_error("sinks", "device", sinks.device, f"{q.device}, that of q")
    if sinks.shape != (sizes.heads,):
        raise argument_error("sinks", "shape", tuple(sinks.shape), f"{(sizes.heads,)}, an element a head of q")


def _check_out(out: Tensor, q: Tensor) -> None:
    if out.dtype != q.dtype:
        raise argument_error("out", "dtype", out.dtype, f"{q.dtype}, that of q")
    if out.device != q.device:
        raise argument_error("out", "device", out.device, f"{q.device}, that of q")
    if out.shape != q.shape:
        raise argument_error("out", "shape", tuple(out.shape), f"{tuple(q.shape)}, that of q")


def reference_options(options: DecodeOptions) -> dict[str, object]:
    """The keyword arguments of ``reference.decode`` that say the same; how a sequence is split says nothing there."""
    return {
        "scale": options.scale,
        "window": None if options.window == NO_WINDOW else options.window,
        "softcap": None if options.softcap == NO_SOFTCAP else options.softcap,
        "sinks": options.sinks,
    }


def guarded_tensors(
    q: Tensor, cache: Cache, lengths: Tensor, sinks: Tensor | None, out: Tensor | None
) -> tuple[Tensor, ...]:
    """The tensors on whose kinds a call's plan depends, beside those of ``cache.key``; none twice."""
    kv = (cache.k,) if cache.v is cache.k else (cache.k, cache.v)
    if sinks is None and out is None:
        return q, *kv, lengths
    return (q, *kv, lengths, *(x for x in (sinks, out) if x is not None))


def check_counts(lengths: Sequence[int], capacity: int) -> None:
    """Raises ValueError unless a cache may hold so many tokens of each sequence."""
    for i, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            allowed = f"0 to {capacity}, the capacity of the cache"
            raise argument_error("lengths", f"its element {i}", length, allowed)


def check_values(cache: Cache, lengths: Tensor, window: int | None, q_len: int) -> None:
    """Raises ValueError unless lengths are within the cache and the page indices of their tokens within the pool.

    This reads them on the host, and so waits for the GPU.

    Args:
        window: tokens that a query sees; None or ``NO_WINDOW`` for all.
        q_len: query tokens of a sequence.
    """
    counts = lengths.tolist()
    check_counts(counts, cache.capacity)
    if not isinstance(cache, PagedCache):
        return
    pages = cache.k.shape[0]
    seen = None if window is None or window == NO_WINDOW else window + q_len - 1
    for table in (cache.k_page_table, cache.v_page_table):
        for sequence, (row, count) in enumerate(zip(table.tolist(), counts, strict=False)):
            first = 0 if seen is None else max(0, count - seen) // cache.page_size
            for i in range(first, -(-count // cache.page_size)):
                if not 0 <= row[i] < pages:
                    raise argument_error("page_table", f"page {i} of sequence {sequence}", row[i], f"0 to {pages - 1}")
