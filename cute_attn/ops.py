"""The torch ops ``torch.ops.cute_attn.*``: their schemas, and their implementation for each kind of tensor.

    prefill(q, k, v, options) -> out                prefill_out(q, k, v, out!, options) -> ()
    prefill_lse(q, k, v, options) -> (out, lse)     prefill_out_lse(q, k, v, out!, options) -> lse

``Options`` lists the options, and ``cute_attn.attention`` says what the ops compute. CUDA tensors go to the compiled
kernel, CPU tensors to the reference, fake tensors get results without values, and under autocast q, k and v are cast as
torch's own attention casts them. There is no derivative: an input that requires a gradient or has a tangent is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_attn import launch, reference
from cute_attn.call import Sizes
from cute_attn.checks import check_inputs, check_out, check_plain
from cute_attn.configs import parse_config
from cute_attn.dispatch import Op, cast_to, register, watched
from cute_attn.memory import check_addresses, check_apart, check_limits, check_own_memory, kernel_strides
from cute_attn.options import OPTIONS_SCHEMA, Options

SCHEMAS = {
    "prefill": f"(Tensor q, Tensor k, Tensor v, {OPTIONS_SCHEMA}) -> Tensor",
    "prefill_lse": f"(Tensor q, Tensor k, Tensor v, {OPTIONS_SCHEMA}) -> (Tensor, Tensor)",
    "prefill_out": f"(Tensor q, Tensor k, Tensor v, Tensor(a!) out, {OPTIONS_SCHEMA}) -> ()",
    "prefill_out_lse": f"(Tensor q, Tensor k, Tensor v, Tensor(a!) out, {OPTIONS_SCHEMA}) -> Tensor",
}

DIFFERENTIABLE = ("q", "k", "v", "out")


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], out: Tensor | None = None, return_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) by the op that the arguments ask for.

    Args:
        options: the fields of ``Options``.
        out: where the result goes; None allocates it.
    """
    # Tracing, too, must find the op: the first test is the one that the compiler decides.
    if not torch.compiler.is_compiling() and not watched():
        results = launch.attend_directly(q, k, v, options, out, return_lse)
        if results is not None:
            return results
        check_plain(q=q, k=k, v=v, out=out)
    if out is None:
        if return_lse:
            return torch.ops.cute_attn.prefill_lse.default(q, k, v, *options)
        return torch.ops.cute_attn.prefill.default(q, k, v, *options), None
    if return_lse:
        return out, torch.ops.cute_attn.prefill_out_lse.default(q, k, v, out, *options)
    torch.ops.cute_attn.prefill_out.default(q, k, v, out, *options)
    return out, None


# attend(q, k, v, options, out=None, return_lse=False) -> (out, lse); options are the fields of Options.
Attend = Callable[..., tuple[Tensor, Tensor | None]]


class Implementation:
    """The ops on one kind of tensor, all through one function."""

    def __init__(self, attend: Attend) -> None:
        self.attend = attend

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
        return self.attend(q, k, v, Options(*options))[0]

    def prefill_lse(self, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor | None]:
        return self.attend(q, k, v, Options(*options), None, True)

    def prefill_out(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *options: Any) -> None:
        self.attend(q, k, v, Options(*options), out)

    def prefill_out_lse(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *options: Any) -> Tensor | None:
        return self.attend(q, k, v, Options(*options), out, True)[1]


def attend_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, options: Options, out: Tensor | None = None, return_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The reference, which refuses here what a kernel would refuse on any GPU."""
    sizes = check_inputs(q, k, v, options)
    check_limits(sizes, options.packed)
    if options.config is not None:
        parse_config(options.config, sizes.head_dim)
    results = _results(q, options, sizes, out, return_lse)
    for argument, x in (("q", q), ("k", k), ("v", v), ("out", results[0])):
        kernel_strides(argument, x.shape, x.stride())
    check_addresses(q=q, k=k, v=v, out=results[0])
    if out is not None:
        check_own_memory(out)
        check_apart(out, q=q, k=k, v=v)
    values = reference.attention(
        q,
        k,
        v,
        window=(options.window_left, options.window_right),
        scale=options.scale,
        cu_seqlens_q=options.cu_seqlens_q,
        cu_seqlens_k=options.cu_seqlens_k,
        return_lse=True,
        layout=options.layout,
    )
    for result, value, row_dim in zip(results, values, (0, 1), strict=True):
        if result is not None:
            _rows_of_sequences(result, row_dim, options).copy_(_rows_of_sequences(value, row_dim, options))
    return results


def _rows_of_sequences(x: Tensor, row_dim: int, options: Options) -> Tensor:
    """The part of packed results that sequences own: like the kernel, nothing else is written."""
    return x if options.cu_seqlens_q is None else x.narrow(row_dim, 0, int(options.cu_seqlens_q[-1]))


def attend_on_fake(
    q: Tensor, k: Tensor, v: Tensor, options: Options, out: Tensor | None = None, return_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Results without values. Sizes may be symbols, so nothing here may depend on more than shapes."""
    return _results(q, options, check_inputs(q, k, v, options), out, return_lse)


def _results(
    q: Tensor, options: Options, sizes: Sizes, out: Tensor | None, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    if out is None:
        out = torch.empty(sizes.out_shape(options), dtype=q.dtype, device=q.device)
    else:
        check_out(out, q, sizes, options)
    lse = None
    if return_lse:
        lse = torch.empty(sizes.lse_shape(options), dtype=torch.float32, device=q.device)
    return out, lse


def _cast(dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Any, ...]:
    return cast_to(dtype, q), cast_to(dtype, k), cast_to(dtype, v), *rest


def _register() -> None:
    implementations = {"CUDA": Implementation(launch.attend), "CPU": Implementation(attend_on_cpu)}
    fake = Implementation(attend_on_fake)
    for name, schema in SCHEMAS.items():
        devices = {key: getattr(implementation, name) for key, implementation in implementations.items()}
        register(name, Op(schema, devices, getattr(fake, name), _cast, DIFFERENTIABLE))


_register()
