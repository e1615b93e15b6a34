"""The torch ops ``torch.ops.cute_attn.decode*``: their schemas, and their implementation for each kind of tensor.

    decode(q, k, v, lengths, cache, options) -> out             decode_out(..., lengths, out!, cache, options) -> ()
    decode_lse(q, k, v, lengths, cache, options) -> (out, lse)  decode_out_lse(..., lengths, out!, ...) -> lse

``cache`` is what ``ContiguousCache`` and ``PagedCache`` have beside k and v, ``DecodeOptions`` lists the options, and
``cute_attn.decode`` says what the ops compute. CUDA tensors go to the compiled kernel, CPU tensors to the reference,
fake tensors get results without values, and under autocast q is cast to the cache's dtype, or to autocast's where the
cache is quantised. There is no derivative: an input that requires a gradient or has a tangent is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_attn import decode_launch, reference
from cute_attn.caches import QUANTISED, Cache, ContiguousCache, PagedCache
from cute_attn.checks import check_plain
from cute_attn.decode_call import DecodeCall, check_decode_call, check_values, reference_options
from cute_attn.decode_configs import parse_decode_config
from cute_attn.decode_options import DECODE_OPTIONS_SCHEMA, DecodeOptions
from cute_attn.dispatch import Op, cast_to, register, watched
from cute_attn.memory import check_addresses, check_apart, check_own_memory, kernel_strides


class CacheParts(NamedTuple):
    """A cache as an op takes it, beside k and v.

    Attributes:
        page_table: of ``PagedCache``; None for a contiguous cache.
        k_scale: of a quantised cache, unless ``k_scale_tensor`` holds it.
        v_scale: the same of v.
        k_scale_tensor: float32, one element.
        v_scale_tensor: the same of v.
    """

    page_table: Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    k_scale_tensor: Tensor | None = None
    v_scale_tensor: Tensor | None = None

    @classmethod
    def of(cls, cache: Cache) -> CacheParts:
        """The parts of a cache."""
        table = cache.page_table if isinstance(cache, PagedCache) else None
        if cache.scale is None:
            return cls(table, 1.0, 1.0)  # a default would be an input of compiled functions, a literal is none
        k_scale, v_scale = cache.k_scale, cache.v_scale
        return cls(
            table,
            1.0 if isinstance(k_scale, Tensor) else k_scale,
            1.0 if isinstance(v_scale, Tensor) else v_scale,
            k_scale if isinstance(k_scale, Tensor) else None,
            v_scale if isinstance(v_scale, Tensor) else None,
        )

    def cache(self, k: Tensor, v: Tensor) -> Cache:
        """The cache of these parts.

        Raises:
            ValueError: they do not fit together.
        """
        k_scale = self.k_scale if self.k_scale_tensor is None else self.k_scale_tensor
        v_scale = self.v_scale if self.v_scale_tensor is None else self.v_scale_tensor
        plain = self.k_scale_tensor is None and self.v_scale_tensor is None and k_scale == v_scale == 1.0
        scale = None if plain else (k_scale, v_scale)
        return ContiguousCache(k, v, scale) if self.page_table is None else PagedCache(k, v, self.page_table, scale)


CACHE_SCHEMA = (
    "Tensor? page_table=None, float k_scale=1., float v_scale=1., Tensor? k_scale_tensor=None, "
    "Tensor? v_scale_tensor=None"
)
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor lengths"
_REST = f"{CACHE_SCHEMA}, {DECODE_OPTIONS_SCHEMA}"
SCHEMAS = {
    "decode": f"({_INPUTS}, {_REST}) -> Tensor",
    "decode_lse": f"({_INPUTS}, {_REST}) -> (Tensor, Tensor)",
    "decode_out": f"({_INPUTS}, Tensor(a!) out, {_REST}) -> ()",
    "decode_out_lse": f"({_INPUTS}, Tensor(a!) out, {_REST}) -> Tensor",
}

DIFFERENTIABLE = ("q", "k", "v", "out", "sinks", "k_scale_tensor", "v_scale_tensor")


def decode(
    q: Tensor,
    cache: Cache,
    lengths: Tensor,
    options: tuple[Any, ...],
    out: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) by the op that the arguments ask for.

    Args:
        options: the fields of ``DecodeOptions``.
        out: where the result goes; None allocates it.
    """
    # Tracing, too, must find the op: the first test is the one that the compiler decides.
    if not torch.compiler.is_compiling() and not watched():
        results = decode_launch.decode_directly(q, cache, lengths, options, out, return_lse)
        if results is not None:
            return results
        check_plain(q=q, lengths=lengths, out=out)
    rest = (*CacheParts.of(cache), *options)
    if out is None:
        if return_lse:
            return torch.ops.cute_attn.decode_lse.default(q, cache.k, cache.v, lengths, *rest)
        return torch.ops.cute_attn.decode.default(q, cache.k, cache.v, lengths, *rest), None
    if return_lse:
        return out, torch.ops.cute_attn.decode_out_lse.default(q, cache.k, cache.v, lengths, out, *rest)
    torch.ops.cute_attn.decode_out.default(q, cache.k, cache.v, lengths, out, *rest)
    return out, None


# decode(q, cache, lengths, options, out=None, return_lse=False) -> (out, lse); options are those of DecodeOptions.
Decode = Callable[..., tuple[Tensor, "Tensor | None"]]


class Implementation:
    """The ops on one kind of tensor, all through one function."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode

    def decode(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *rest: Any) -> Tensor:
        return self._call(q, k, v, lengths, rest)[0]

    def decode_lse(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None]:
        return self._call(q, k, v, lengths, rest, None, True)

    def decode_out(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, out: Tensor, *rest: Any) -> None:
        self._call(q, k, v, lengths, rest, out)

    def decode_out_lse(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, out: Tensor, *rest: Any
    ) -> Tensor | None:
        return self._call(q, k, v, lengths, rest, out, True)[1]

    def _call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Tensor,
        rest: tuple[Any, ...],
        out: Tensor | None = None,
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        parts = len(CacheParts._fields)
        cache = CacheParts(*rest[:parts]).cache(k, v)
        return self._decode(q, cache, lengths, DecodeOptions(*rest[parts:]), out, return_lse)


def decode_on_cpu(
    q: Tensor,
    cache: Cache,
    lengths: Tensor,
    options: DecodeOptions,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The reference, which refuses here what a kernel would refuse on any GPU."""
    call = DecodeCall(q, cache, lengths, options, out, return_lse)
    sizes = check_decode_call(call)
    if options.config is not None:
        parse_decode_config(options.config)
    check_values(cache, lengths, options.window, sizes.q_len)
    results = _results(call)
    for argument, x in (("q", q), ("out", results[0])):
        kernel_strides(argument, x.shape, x.stride())
    check_addresses(q=q, out=results[0])
    if out is not None:
        check_own_memory(out)
        check_apart(out, q=q, k=cache.k, v=cache.v)
    values = reference.decode(q, cache, lengths, **reference_options(options), return_lse=True)  # type: ignore[arg-type]
    for result, value in zip(results, values, strict=True):
        if result is not None:
            result.copy_(value)
    return results


def decode_on_fake(
    q: Tensor,
    cache: Cache,
    lengths: Tensor,
    options: DecodeOptions,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Results without values. Sizes may be symbols, so nothing here may depend on more than shapes."""
    call = DecodeCall(q, cache, lengths, options, out, return_lse)
    check_decode_call(call)
    return _results(call)


def _results(call: DecodeCall) -> tuple[Tensor, Tensor | None]:
    q, out, lse = call.q, call.out, None
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if call.return_lse:
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    return out, lse


def _cast(dtype: torch.dtype, q: Tensor, k: Tensor, *rest: Any) -> tuple[Any, ...]:
    return cast_to(dtype if k.dtype in QUANTISED else k.dtype, q), k, *rest


def _register() -> None:
    implementations = {"CUDA": Implementation(decode_launch.decode), "CPU": Implementation(decode_on_cpu)}
    fake = Implementation(decode_on_fake)
    for name, schema in SCHEMAS.items():
        devices = {key: getattr(implementation, name) for key, implementation in implementations.items()}
        register(name, Op(schema, devices, getattr(fake, name), _cast, DIFFERENTIABLE))


_register()
