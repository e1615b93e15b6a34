"""The contenders: this project's kernels and the ones they are measured against."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.workload import Inputs


@dataclass(frozen=True)
class Contender:
    """An implementation bound to its inputs.

    Attributes:
        call: runs it once on the current stream, and returns what it returns.
        out: picks the output from that, as (batch, heads, length, head_dim).
        selected: the context in which ``call`` must run.
    """

    call: Callable[[], object]
    out: Callable[[object], torch.Tensor]
    selected: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext

    def run(self) -> object:
        """One call in its context."""
        with self.selected():
            return self.call()


@dataclass(frozen=True)
class Peer:
    """Someone else's attention. ``bind`` raises whatever makes it unavailable."""

    name: str
    description: str
    bind: Callable[[Inputs], Contender]


def ours(inputs: Inputs, config: str | None = None) -> Contender:
    """This project's attention, with a named config or the default one."""
    from cute_attn import attention

    q, k, v, causal = inputs
    return Contender(lambda: attention(q, k, v, causal=causal, config=config), as_tensor)


def _sdpa(backend: SDPBackend) -> Callable[[Inputs], Contender]:
    def bind(inputs: Inputs) -> Contender:
        q, k, v, causal = inputs
        return Contender(
            lambda: scaled_dot_product_attention(q, k, v, is_causal=causal),
            as_tensor,
            lambda: sdpa_kernel(backend),
        )

    return bind


def _flash_attn_4(inputs: Inputs) -> Contender:
    from flash_attn.cute import flash_attn_func

    # Its own layout is (batch, length, heads, head_dim), contiguous.
    q, k, v = (t.transpose(1, 2).contiguous() for t in inputs[:3])
    return Contender(lambda: flash_attn_func(q, k, v, causal=inputs.causal), _first_transposed)


def as_tensor(result: object) -> torch.Tensor:
    """A call's result that is the output itself."""
    assert isinstance(result, torch.Tensor)
    return result


def _first_transposed(result: object) -> torch.Tensor:
    out = result[0] if isinstance(result, tuple) else result
    return as_tensor(out).transpose(1, 2)


PEERS: tuple[Peer, ...] = (
    Peer("FA2", "torch SDPA FLASH_ATTENTION", _sdpa(SDPBackend.FLASH_ATTENTION)),
    Peer("cuDNN", "torch SDPA CUDNN_ATTENTION", _sdpa(SDPBackend.CUDNN_ATTENTION)),
    Peer("FA4", "flash-attn-4, flash_attn.cute", _flash_attn_4),
)


def select(names: list[str]) -> list[Peer]:
    """Peers by name.

    Raises:
        ValueError: a name is not known.
    """
    known = {peer.name.lower(): peer for peer in PEERS}
    unknown = [name for name in names if name.lower() not in known]
    if unknown:
        raise ValueError(f"--peers: unknown {', '.join(unknown)}; allowed: {', '.join(peer.name for peer in PEERS)}")
    return [known[name.lower()] for name in names]
