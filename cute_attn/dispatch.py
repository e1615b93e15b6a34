"""What all torch ops of this package share: how they are registered, and when a call may go around torch's dispatcher.

Every op has an implementation for CUDA, for CPU and for fake tensors. Under autocast its inputs are cast first, and as
there is no derivative, an input that requires a gradient or has a tangent is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_attn.checks import check_no_gradient, in_forward_mode

AUTOCAST_DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # what autocast casts

library = torch.library.Library("cute_attn", "DEF")  # the ops live as long as it does


class Op(NamedTuple):
    """One op's definition.

    Attributes:
        schema: what torch's schema says after the op's name.
        devices: the implementation for each of "CUDA" and "CPU".
        fake: the implementation that computes no values.
        cast: casts the op's arguments to autocast's dtype, given as its first argument; None leaves them.
        differentiable: the arguments that must not require a gradient.
    """

    schema: str
    devices: Mapping[str, Callable[..., Any]]
    fake: Callable[..., Any]
    cast: Callable[..., tuple[Any, ...]] | None
    differentiable: Sequence[str]


def register(name: str, op: Op) -> None:
    """Make ``torch.ops.cute_attn.<name>``."""
    library.define(name + op.schema)
    overload = getattr(torch.ops.cute_attn, name).default
    for key, implementation in op.devices.items():
        library.impl(name, implementation, key)
        if op.cast is not None:
            library.impl(name, _under_autocast(overload, key.lower(), op.cast), f"Autocast{key}")
    library.impl(name, _under_autograd(overload, op.differentiable), "Autograd", with_keyset=True)
    torch.library.register_fake(f"cute_attn::{name}", op.fake, lib=library)


def cast_to(dtype: torch.dtype, x: Tensor) -> Tensor:
    """The tensor in autocast's dtype, if it has one that autocast casts."""
    return x.to(dtype) if x.dtype in AUTOCAST_DTYPES else x


def _under_autocast(
    op: torch._ops.OpOverload, device_type: str, cast: Callable[..., tuple[Any, ...]]
) -> Callable[..., Any]:
    """The op on inputs cast to autocast's dtype, where torch's own attention would be."""

    def call(*arguments: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        with torch.autocast(device_type, enabled=False):
            return op(*cast(dtype, *arguments))

    return call


def _under_autograd(op: torch._ops.OpOverload, differentiable: Sequence[str]) -> Callable[..., Any]:
    """The op with a check that nothing is differentiated, which torch would otherwise take for a derivative of 0."""

    def call(keyset: torch._C.DispatchKeySet, *arguments: Any) -> Any:
        named = zip(op._schema.arguments, arguments, strict=False)  # trailing defaults are left out
        for argument, value in named:
            if argument.name in differentiable and value is not None:
                for x in value if isinstance(value, (list, tuple)) else (value,):
                    check_no_gradient(**{argument.name: x})
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    return call


# Looked up once: finding them takes longer than calling them, and every call of an op asks all of them.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack
_tracer = torch._C._get_tracing_state
_autocast = torch._C._is_any_autocast_enabled
_profiler = torch._C._autograd._profiler_enabled


def watched() -> bool:
    """What guards do not see wants to see every op: a mode, forward differentiation, or a profiler."""
    return _dispatch_modes() > 0 or _function_modes() > 0 or in_forward_mode() or _profiler()


def intercepted() -> bool:
    """Anything wants to see every op: what ``watched`` asks for, a transform, a tracer, or autocast."""
    return watched() or _transform() is not None or _tracer() is not None or _autocast()
