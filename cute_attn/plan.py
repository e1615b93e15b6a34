"""From a call on a GPU to its plan: the kernel that serves it and all that a launch needs beside the tensors.

Planning checks, chooses, compiles and loads. It runs once for each kind of call; ``launch`` repeats only the launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_attn.arch import Arch, arch_of
from cute_attn.call import Call, Shape, Sizes, guarded_tensors
from cute_attn.checks import DTYPE_NAMES, check_inputs, check_out
from cute_attn.compiler import cache
from cute_attn.configs import default_config, parse_config
from cute_attn.errors import argument_error
from cute_attn.guards import Guard, guard_of
from cute_attn.memory import Allocate, allocator, check_addresses, check_limits, check_own_memory, kernel_strides
from cute_attn.problem import KernelSpec, PrefillProblem

Kernel = Callable[..., Any]

LOG2_E = math.log2(math.e)
SMALLEST_FLOAT32 = 2.0**-126  # a smaller scale would lose digits, or become 0


class View(NamedTuple):
    """How a tensor lies in memory, or is looked at."""

    shape: Shape
    strides: Shape


class Plan(NamedTuple):
    """What calls of one kind share.

    Attributes:
        kernel: takes the fields of ``PrefillArguments``; None where no query sees a key.
        device: of all tensors.
        allocate: makes the results.
        out: shape and strides; an out that was not given is contiguous.
        lse: of the log-sum-exp, contiguous; None where it is not wanted.
        views: strides for q, k, v and out that a kernel allows; None where it allows their own.
        signed_q: gives q for which ``scale_log2`` is positive; None where it is.
        scalars: what ``PrefillArguments`` has after the tensors.
        one_device: there is no other device that could be the current one.
        guard: recognises the tensors of such calls.
    """

    kernel: Kernel | None
    device: torch.device
    allocate: Allocate
    out: View
    lse: View | None
    views: tuple[View, ...] | None
    signed_q: Callable[[Tensor], Tensor] | None
    scalars: tuple[float, int, int, int]
    one_device: bool
    guard: Guard | None


class KernelKey(NamedTuple):
    """What chooses a kernel: the problem, a config's name or None for the default, and a device's index."""

    problem: PrefillProblem
    config: str | None
    device: int


_kernels: dict[KernelKey, Kernel] = {}


def make_plan(call: Call) -> Plan:
    """The plan of a call, and of all calls with tensors of the same kinds and the same options.

    Raises:
        ValueError: an argument is wrong.
        RuntimeError: the kernel is not loaded, and a CUDA graph is being captured.
    """
    q, options = call.q, call.options
    sizes = check_inputs(q, call.k, call.v, options)
    check_limits(sizes, options.packed)
    check_addresses(q=q, k=call.k, v=call.v)
    out = _out_view(call, sizes)
    views = _views(call, out)
    signed_q, scale_log2 = positive_scale(options.scale, sizes.head_dim)
    one_device = torch.cuda.device_count() <= 1
    return Plan(
        kernel=_kernel(call, sizes) if sizes.sees_a_key() else None,
        device=q.device,
        allocate=allocator(q.device, one_device),
        out=out,
        lse=contiguous(sizes.lse_shape(options)) if call.return_lse else None,
        views=views,
        signed_q=signed_q,
        # A width beyond the sequence hides nothing, and would overflow the kernel's 32-bit positions.
        scalars=(
            scale_log2,
            min(options.window_left, sizes.k_len),
            min(options.window_right, max(sizes.q_len - 1, 0)),
            int(options.layout == "bhsd"),
        ),
        one_device=one_device,
        guard=guard_of(guarded_tensors(q, call.k, call.v, options, call.out)),
    )


def _out_view(call: Call, sizes: Sizes) -> View:
    if call.out is not None:
        check_out(call.out, call.q, sizes, call.options)
        check_own_memory(call.out)
        return own_view(call.out)
    return contiguous(sizes.out_shape(call.options))


def contiguous(shape: Shape) -> View:
    """How a tensor lies that torch allocates."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return View(tuple(shape), tuple(reversed(strides)))


def _views(call: Call, out: View) -> tuple[View, ...] | None:
    own = {"q": own_view(call.q), "k": own_view(call.k), "v": own_view(call.v), "out": out}
    views = tuple(View(view.shape, kernel_strides(argument, *view)) for argument, view in own.items())
    return None if views == tuple(own.values()) else views


def own_view(x: Tensor) -> View:
    """How a tensor lies."""
    return View(tuple(x.shape), x.stride())


def positive_scale(scale: float | None, head_dim: int) -> tuple[Callable[[Tensor], Tensor] | None, float]:
    """``Plan.signed_q`` and ``scale_log2``: the same scores by a positive scale, which is what kernels take.

    ``scale`` None is 1 / sqrt(head_dim).
    """
    scale_log2 = LOG2_E / math.sqrt(head_dim) if scale is None else LOG2_E * scale
    if scale_log2 >= SMALLEST_FLOAT32:
        return None, scale_log2
    if scale_log2 <= -SMALLEST_FLOAT32:
        return (lambda q: (-q).contiguous()), -scale_log2
    return (lambda q: q.new_zeros(q.shape)), 1.0


def _kernel(call: Call, sizes: Sizes) -> Kernel:
    options = call.options
    problem = PrefillProblem(
        DTYPE_NAMES[call.q.dtype],
        sizes.head_dim,
        sizes.head_dim_v,
        bounded_left=options.window_left >= 0,
        bounded_right=options.window_right >= 0,
        varlen=options.packed,
        return_lse=call.return_lse,
    )
    key = KernelKey(problem, options.config, call.q.get_device())
    if key not in _kernels:
        _kernels[key] = load_kernel(kernel_spec(key))
    return _kernels[key]


def load_kernel(spec: KernelSpec, warmup: str = "warmup") -> Kernel:
    """The compiled kernel, loaded.

    Args:
        warmup: the function that does so ahead.

    Raises:
        RuntimeError: a CUDA graph is being captured.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{spec.name} is not loaded, and a kernel cannot be compiled or loaded while a CUDA graph is captured: "
            f"before the capture, call cute_attn.{warmup}(...) or run the same attention once"
        )
    return cache.load(spec)


def kernel_spec(key: KernelKey) -> KernelSpec:
    """The kernel that serves a key.

    Raises:
        ValueError: the device or the config cannot.
    """
    arch = device_arch(key.device)
    head_dims = key.problem.head_dim, key.problem.head_dim_v
    if key.config is None:
        return KernelSpec(key.problem, default_config(arch, *head_dims), arch)
    config = parse_config(key.config, key.problem.head_dim)
    config.check_fits(arch, *head_dims)
    return KernelSpec(key.problem, config, arch)


def device_arch(device: int) -> Arch:
    """The architecture of a CUDA device.

    Raises:
        ValueError: kernels do not compile for it.
    """
    major, minor = torch.cuda.get_device_capability(device)
    try:
        return arch_of((major, minor))
    except ValueError as error:
        raise argument_error("q", "device", f"cuda:{device}", f"a supported GPU, but {error}") from None
