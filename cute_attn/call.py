"""One call of attention on its way from an op to what computes it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from cute_attn.options import NUM_PLAIN_OPTIONS, Options

Shape = tuple[int, ...]


class Sizes(NamedTuple):
    """The sizes of a call.

    Attributes:
        batch: sequences.
        heads: of q and out.
        heads_kv: of k and v; divides ``heads``.
        q_len: queries of a sequence; of all together when packed.
        k_len: keys of a sequence; of all together when packed.
        head_dim: of q and k.
        head_dim_v: of v and out.
    """

    batch: int
    heads: int
    heads_kv: int
    q_len: int
    k_len: int
    head_dim: int
    head_dim_v: int

    def sees_a_key(self) -> bool:
        """Something is left to compute: there are queries, and there are keys."""
        return self.batch > 0 and self.heads > 0 and self.q_len > 0 and self.k_len > 0

    def out_shape(self, options: Options) -> Shape:
        if options.packed:
            return self.q_len, self.heads, self.head_dim_v
        if options.layout == "bshd":
            return self.batch, self.q_len, self.heads, self.head_dim_v
        return self.batch, self.heads, self.q_len, self.head_dim_v

    def lse_shape(self, options: Options) -> Shape:
        if options.packed:
            return self.heads, self.q_len
        return self.batch, self.heads, self.q_len


class Call(NamedTuple):
    """A call's arguments as an op gets them.

    Attributes:
        out: where the result goes; None to allocate it.
        return_lse: the log-sum-exp of each row is wanted.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    options: Options
    out: Tensor | None
    return_lse: bool


def guarded_tensors(
    q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], out: Tensor | None
) -> tuple[Tensor, ...]:
    """The tensors on whose kinds a call's plan depends; cumulative lengths for both only once."""
    cu_seqlens_q, cu_seqlens_k = options[NUM_PLAIN_OPTIONS:]
    if cu_seqlens_q is None and cu_seqlens_k is None and out is None:
        return q, k, v
    if cu_seqlens_k is cu_seqlens_q:
        cu_seqlens_k = None
    return (q, k, v, *(x for x in (cu_seqlens_q, cu_seqlens_k, out) if x is not None))
