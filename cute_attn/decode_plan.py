"""From a call of decode on a GPU to its plan: the kernel that serves it and all that a launch needs beside the tensors.

Planning checks, chooses, compiles and loads. It runs once for each kind of call; ``decode_launch`` repeats only the
launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from cute_attn.arch import Arch
from cute_attn.caches import CACHE_DTYPES, Scale
from cute_attn.call import Shape
from cute_attn.checks import DTYPE_NAMES
from cute_attn.decode_call import DecodeCall, DecodeSizes, check_decode_call, guarded_tensors
from cute_attn.decode_configs import DecodeConfig, default_decode_config, parse_decode_config
from cute_attn.decode_options import MAX_SPLITS, NO_SOFTCAP, NO_WINDOW, UNSET, DecodeOptions
from cute_attn.decode_problem import DecodeProblem
from cute_attn.errors import argument_error
from cute_attn.guards import Guard, guard_of
from cute_attn.memory import MAX_BLOCKS, Allocate, allocator, check_addresses, check_own_memory, kernel_strides
from cute_attn.options import MAX_LENGTH
from cute_attn.plan import (
    SMALLEST_FLOAT32,
    Kernel,
    View,
    contiguous,
    device_arch,
    load_kernel,
    own_view,
    positive_scale,
)
from cute_attn.problem import KernelSpec
from cute_attn.splits import Work, choose_num_splits
from cute_attn.workspace import Workspace, lasting, prepare

LARGEST_SCALE = 1e38
SMALLEST_TILE_M = 8
MAX_BATCH = 65535  # what a grid's second dimension bears
MAX_ROWS = 2**24  # query heads x query tokens that share a head of the cache


class DecodePlan(NamedTuple):
    """What calls of one kind share.

    Attributes:
        kernel: takes the fields of ``DecodeArguments``; None where no query sees a token.
        device: of all tensors.
        allocate: makes the results.
        out: shape and strides; an out that was not given is contiguous.
        lse: of the log-sum-exp, contiguous; None where it is not wanted.
        views: how the kernel looks at q, k, v and out, and at lse; each None where as they are.
        signed_q: gives q for which ``scale_log2`` is positive; None where it is.
        k_scale: 1 on the device, for a quantised cache, unless it has a scale there; None for a 16-bit cache.
        v_scale: the same.
        scales_on_device: one of the cache's scales is a tensor.
        partials: float32 elements of the workspace; 0 with one split.
        semaphores: int32 elements of the workspace.
        nothing: stands for the workspace where there is one split.
        scalars: what ``DecodeArguments`` has after the tensors.
        one_device: there is no other device that could be the current one.
        guard: recognises the tensors of such calls.
    """

    kernel: Kernel | None
    device: torch.device
    allocate: Allocate
    out: View
    lse: View | None
    views: tuple[View | None, ...] | None
    signed_q: Callable[[Tensor], Tensor] | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    scales_on_device: bool
    partials: int
    semaphores: int
    nothing: Workspace | None
    scalars: tuple[float, float, float, int, int, int]
    one_device: bool
    guard: Guard | None


class DecodeKey(NamedTuple):
    """A kernel on a device: the problem, the config, and the device's index."""

    problem: DecodeProblem
    config: DecodeConfig
    device: int


class _Device(NamedTuple):
    """What launches on a device share.

    Attributes:
        one: a scale of 1.
        nothing: a workspace that is not used.
        multiprocessors: of the device.
    """

    one: Tensor
    nothing: Workspace
    multiprocessors: int


_kernels: dict[DecodeKey, Kernel] = {}
_devices: dict[int, _Device] = {}


def make_decode_plan(call: DecodeCall) -> DecodePlan:
    """The plan of a call, and of all calls with tensors of the same kinds and the same options.

    Raises:
        ValueError: an argument is wrong.
        RuntimeError: the kernel is not loaded, and a CUDA graph is being captured.
    """
    q, cache, options = call.q, call.cache, call.options
    sizes = check_decode_call(call)
    _check_limits(sizes)
    check_addresses(q=q)
    if call.lengths.stride(0) != 1 and call.lengths.shape[0] > 1:
        raise argument_error("lengths", "stride", call.lengths.stride(0), "1 (call .contiguous())")
    out = _out_view(call)
    lse = contiguous(tuple(q.shape[:-1])) if call.return_lse else None
    views = _views(call, sizes, out, lse)
    signed_q, scale_log2 = _positive_scale(options.scale, _host_scale(cache.k_scale), sizes.head_dim)
    one_device = torch.cuda.device_count() <= 1
    plan = DecodePlan(
        kernel=None,
        device=q.device,
        allocate=allocator(q.device, one_device),
        out=out,
        lse=lse,
        views=views,
        signed_q=signed_q,
        k_scale=None,
        v_scale=None,
        scales_on_device=isinstance(cache.k_scale, Tensor) or isinstance(cache.v_scale, Tensor),
        partials=0,
        semaphores=0,
        nothing=None,
        scalars=(
            scale_log2,
            _host_scale(cache.v_scale),
            float(options.softcap),
            _window(options, sizes),
            1,
            0,
        ),
        one_device=one_device,
        guard=guard_of(guarded_tensors(q, cache, call.lengths, options.sinks, call.out)),
    )
    return _with_kernel(plan, call, sizes) if sizes.sees_a_token() else plan


def _with_kernel(plan: DecodePlan, call: DecodeCall, sizes: DecodeSizes) -> DecodePlan:
    problem = decode_problem(call)
    index = call.q.get_device()
    config = decode_config(problem, call.options.config, sizes.kv_rows, device_arch(index))
    kernel = _load(DecodeKey(problem, config, index))
    device = _devices[index]
    splits, split_size = _splits(call.options, sizes, problem, config, device.multiprocessors)
    blocks = _blocks(sizes, config)
    return plan._replace(
        kernel=kernel,
        k_scale=device.one if problem.quantised else None,
        v_scale=device.one if problem.quantised else None,
        partials=config.partial_elements(sizes.head_dim) * blocks * splits if splits > 1 else 0,
        semaphores=blocks,
        nothing=device.nothing if splits == 1 else None,
        scalars=(*plan.scalars[:-2], splits, split_size),
    )


def _blocks(sizes: DecodeSizes, config: DecodeConfig) -> int:
    """Blocks of a launch without splits."""
    return -(-sizes.kv_rows // config.tile_m) * sizes.heads_kv * sizes.batch


def _splits(
    options: DecodeOptions, sizes: DecodeSizes, problem: DecodeProblem, config: DecodeConfig, multiprocessors: int
) -> tuple[int, int]:
    """(blocks that share a sequence, tokens of each; 0 tokens where they share the length evenly)."""
    tiles = -(-sizes.capacity // config.tile_tokens)
    seen = sizes.capacity
    if options.window != NO_WINDOW:
        seen = min(seen, options.window + sizes.q_len - 1)
    if options.split_size != UNSET:
        size = min(-(-options.split_size // config.tile_tokens), tiles) * config.tile_tokens
        # One more with a window, which starts anywhere in its first part.
        splits = min(-(-sizes.capacity // size), -(-seen // size) + 1)
        if splits > MAX_SPLITS:
            smallest = -(-sizes.capacity // MAX_SPLITS)
            raise argument_error("split_size", "it", options.split_size, f"at least {smallest} at this capacity")
        return splits, size
    if options.num_splits != UNSET:
        return min(options.num_splits, tiles), 0  # further ones would stay empty at any length
    tiles = min(tiles, -(-seen // config.tile_tokens) + 1)
    slots = multiprocessors * config.blocks_per_multiprocessor
    partial_tokens = 4 * config.partial_elements(problem.head_dim) / (2 * problem.row_bytes)
    work = Work(_blocks(sizes, config), tiles, config.tile_tokens, multiprocessors, slots, partial_tokens)
    return choose_num_splits(work), 0


def decode_problem(call: DecodeCall) -> DecodeProblem:
    """The problem of a call that was checked."""
    options = call.options
    return DecodeProblem(
        DTYPE_NAMES[call.q.dtype],
        CACHE_DTYPES[call.cache.k.dtype],
        call.q.shape[-1],
        call.cache.page_size,
        bounded_left=options.window != NO_WINDOW,
        softcap=options.softcap != NO_SOFTCAP,
        sinks=options.sinks is not None,
        return_lse=call.return_lse,
    )


def _check_limits(sizes: DecodeSizes) -> None:
    """Raises ValueError if the rows or blocks are too many to be numbered."""
    if sizes.kv_rows > MAX_ROWS:
        what = "query tokens x heads that share a head of the cache"
        raise argument_error("q", what, sizes.kv_rows, f"at most {MAX_ROWS}")
    if sizes.batch > MAX_BATCH:
        raise argument_error("lengths", "length", sizes.batch, f"at most {MAX_BATCH}")
    blocks = (sizes.kv_rows // SMALLEST_TILE_M + 1) * sizes.heads_kv
    if blocks > MAX_BLOCKS:
        raise argument_error(
            "q", "number of blocks (heads of the cache x tiles of rows)", blocks, f"at most {MAX_BLOCKS}"
        )


def _window(options: DecodeOptions, sizes: DecodeSizes) -> int:
    """A window beyond the capacity hides nothing, and would overflow the kernel's 32-bit positions."""
    return sizes.capacity if options.window == NO_WINDOW else min(options.window, max(sizes.capacity, 1), MAX_LENGTH)


def _host_scale(scale: Scale) -> float:
    """What the host knows of a scale, the rest being on the device."""
    return 1.0 if isinstance(scale, Tensor) else float(scale)


def _positive_scale(
    scale: float | None, k_scale: float, head_dim: int
) -> tuple[Callable[[Tensor], Tensor] | None, float]:
    """``positive_scale`` with the keys' scale, multiplied as a kernel does: either place gives the same bits."""
    signed_q, scale_log2 = positive_scale(scale, head_dim)
    with numpy.errstate(over="ignore"):
        product = float(numpy.float32(scale_log2) * numpy.float32(k_scale))
    if product < SMALLEST_FLOAT32:
        return positive_scale(0.0, head_dim)
    return signed_q, min(product, LARGEST_SCALE)


def _out_view(call: DecodeCall) -> View:
    if call.out is None:
        return contiguous(tuple(call.q.shape))
    check_addresses(out=call.out)
    check_own_memory(call.out)
    return own_view(call.out)


def _views(call: DecodeCall, sizes: DecodeSizes, out: View, lse: View | None) -> tuple[View | None, ...] | None:
    """``DecodePlan.views``."""
    own = {"q": own_view(call.q), "k": own_view(call.cache.k), "v": own_view(call.cache.v), "out": out}
    views = [_kernel_view(argument, view, sizes) for argument, view in own.items()]
    if lse is not None and len(lse.shape) == 2:
        batch, q_len, heads, _ = sizes.rows
        views.append(View((batch, q_len, heads), (q_len * heads, heads, 1)))
    else:
        views.append(None)
    return tuple(views) if any(views) else None


def _kernel_view(argument: str, view: View, sizes: DecodeSizes) -> View | None:
    """How the kernel looks at a tensor; None as it is."""
    if argument in ("k", "v"):
        element_strides = view.strides
        allowed = _any_multiple(view)
        return None if allowed == element_strides else View(view.shape, allowed)
    shape, strides = view
    if len(shape) == 3:
        shape, strides = sizes.rows, (sizes.q_len * strides[0], *strides)
    allowed = kernel_strides(argument, shape, strides)
    return None if (shape, allowed) == tuple(view) else View(shape, allowed)


def _any_multiple(view: View) -> Shape:
    """Strides that kernels allow: a dimension of size 1 may have any, which is never used, and gets an allowed one."""
    multiple = 16  # elements; of 8 bits this is what a 16-byte copy asks for, of 16 bits twice that
    return tuple(
        multiple if size == 1 and i < len(view.shape) - 1 and stride % multiple else stride
        for i, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True))
    )


def _load(key: DecodeKey) -> Kernel:
    if key not in _kernels:
        kernel = load_kernel(decode_kernel_spec(key), "warmup_decode")
        _add_device(key.device)
        _kernels[key] = kernel
    return _kernels[key]


def _add_device(index: int) -> None:
    """Makes what launches on a device share. Kernels load outside of captures, so it lies in no graph's pool."""
    if index in _devices:
        return
    device = torch.device("cuda", index) if index >= 0 else torch.device("cpu")
    prepare(device)
    _devices[index] = _Device(
        lasting(torch.ones, 1, torch.float32, device),
        Workspace(lasting(torch.zeros, 1, torch.float32, device), lasting(torch.zeros, 1, torch.int32, device)),
        torch.cuda.get_device_properties(index).multi_processor_count,
    )


def decode_kernel_spec(key: DecodeKey) -> KernelSpec:
    """The kernel of a key."""
    return KernelSpec(key.problem, key.config, device_arch(key.device))


def decode_config(problem: DecodeProblem, name: str | None, rows: int, arch: Arch) -> DecodeConfig:
    """The config of a name, or the tuned one for a problem.

    Args:
        rows: query rows of a head of the cache, ``DecodeSizes.kv_rows``.

    Raises:
        ValueError: there is no such config, or it does not fit.
    """
    if name is None:
        return default_decode_config(arch, problem, rows)
    config = parse_decode_config(name)
    config.check_fits(arch, problem)
    return config
