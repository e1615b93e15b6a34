"""What a decode kernel is compiled for, and what it is called with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class DecodeProblem:
    """Everything about a call that changes the decode kernel's machine code.

    Sizes, strides, head counts, lengths, splits, widths and scales are not here: one compile serves them all.

    Attributes:
        dtype: "float16" or "bfloat16", of q and out.
        cache_dtype: of k and v: that of q, or "int8" or "float8_e4m3fn".
        head_dim: of all tensors, a multiple of 16 up to 256.
        page_size: tokens of a page, a multiple of 8; 0 for a contiguous cache.
        bounded_left: tokens before a query's window are hidden.
        softcap: scores are capped.
        sinks: each head has a sink.
        return_lse: the log-sum-exp of each row is written.
    """

    dtype: str
    cache_dtype: str
    head_dim: int
    page_size: int = 0
    bounded_left: bool = False
    softcap: bool = False
    sinks: bool = False
    return_lse: bool = False

    @property
    def quantised(self) -> bool:
        """The cache holds 8-bit elements, which stand for a scale times them."""
        return self.cache_dtype in ("int8", "float8_e4m3fn")

    @property
    def cache_bytes(self) -> int:
        """Bytes of an element of k and v."""
        return 1 if self.quantised else 2

    @property
    def row_bytes(self) -> int:
        """Bytes of a token of one head of k or v."""
        return self.head_dim * self.cache_bytes

    @property
    def name(self) -> str:
        """Short and unique: names the kernel in messages, tables and symbols."""
        short = {"float16": "fp16", "bfloat16": "bf16", "int8": "int8", "float8_e4m3fn": "fp8"}
        parts = ["decode", short[self.dtype], f"d{self.head_dim}"]
        if self.quantised:
            parts.append(short[self.cache_dtype])
        if self.page_size:
            parts.append(f"page{self.page_size}")
        flags = {"bounded_left": "window", "softcap": "softcap", "sinks": "sinks", "return_lse": "lse"}
        return "_".join([*parts, *(text for flag, text in flags.items() if getattr(self, flag))])


class DecodeArguments(NamedTuple):
    """The compiled decode kernel's arguments, in order.

    Rows are (batch, q_len, heads, head_dim); the last dimension is dense, every other stride a multiple of 16 bytes,
    every pointer 16-byte aligned.
    """

    q: Any  # 16-bit rows
    k: Any  # (batch, capacity, heads_kv, head_dim), or the pool (pages, page_size, heads_kv, head_dim); int8 for float8
    v: Any  # the same
    out: Any  # 16-bit rows
    lse: Any  # float32 (batch, q_len, heads); None without return_lse
    lengths: Any  # int32 (batch,); tokens beyond the capacity are not read
    k_page_table: Any  # int32 (batch, max_pages); None without pages
    v_page_table: Any  # the same; the same tensor where k and v share indices
    sinks: Any  # float32 (heads,); None without sinks
    k_scale: Any  # float32 (1,); None unless the cache is quantised
    v_scale: Any  # the same
    partials: Any  # float32, flat: partial results, laid out by the kernel
    semaphores: Any  # int32, flat, zero before and after
    scale_log2: float  # softmax scale x k's scale on the host x log2(e); positive
    v_factor: float  # v's scale on the host
    softcap: float  # used with softcap
    window: int  # tokens that a query sees, its own counted; used when bounded_left
    num_splits: int  # blocks that share a sequence
    split_size: int  # tokens of such a block, a multiple of the config's tile; 0 to share a length evenly
