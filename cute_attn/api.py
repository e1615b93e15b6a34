"""The public functions: ``attention``, and ``warmup`` to have its kernels ready before they are needed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import product
from typing import Literal, TypeVar, overload

import torch
from torch import Tensor

from cute_attn import launch, ops
from cute_attn.checks import DTYPE_NAMES, check_dtype, check_head_dim
from cute_attn.compiler import workers
from cute_attn.configs import PrefillConfig, parse_config
from cute_attn.errors import argument_error
from cute_attn.options import (
    LAYOUTS,
    UNBOUNDED,
    Options,
    Window,
    check_flag,
    check_layout,
    check_length,
    check_scale,
    config_name,
    window_widths,
)
from cute_attn.plan import KernelKey, kernel_spec
from cute_attn.problem import PrefillProblem

T = TypeVar("T")
Device = torch.device | str | int


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    return_lse: Literal[False] = ...,
    layout: str = ...,
    config: PrefillConfig | str | None = ...,
    out: Tensor | None = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    return_lse: Literal[True],
    layout: str = ...,
    config: PrefillConfig | str | None = ...,
    out: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    layout: str = "bhsd",
    config: PrefillConfig | str | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v for every batch and head, without forming q k^T in memory.

    Shapes, with layout "bhsd":

        q    (batch, heads, q_len, head_dim)         k    (batch, heads_kv, k_len, head_dim)
        out  (batch, heads, q_len, head_dim_v)       v    (batch, heads_kv, k_len, head_dim_v)

    With layout "bshd" the length comes before the heads. Sequences of different lengths are packed one after another,
    whatever the layout, as (total_q, heads, head_dim) and (total_k, heads_kv, ...), and ``cu_seqlens_q`` and
    ``cu_seqlens_k`` say where each starts.

    On a GPU this runs a kernel on torch's current stream; the first call of a kind compiles its kernel, in seconds,
    unless import, ``warmup`` or an earlier program did. On a CPU the reference computes it, slowly. Lengths, strides,
    batch sizes and head counts never compile anything anew. Any length may be 0.

    A query i stands at the key i + k_len - q_len, so that the last query and the last key meet (bottom-right aligned).
    A query that sees no key has out 0 and lse -inf.

    Args:
        q: float16 or bfloat16. As for k and v: the last dimension is dense, every other stride a multiple of 8
            elements, the first element at a multiple of 16 bytes. Transposed views, slices of a packed QKV and
            expanded heads are read without a copy. head_dim is a multiple of 8 up to 256.
        k: of q's dtype and device. heads_kv divides heads, and serves consecutive groups of query heads.
        v: of q's dtype and device. head_dim_v may differ from head_dim.
        causal: a query does not see keys after its own. It combines with ``window``, whose right width becomes 0.
        window: (left, right): beside its own key a query sees at most so many before and after it, each an int from
            0, or None or -1 for all. None is (None, None).
        scale: a finite float, which may be negative or 0; None is 1 / sqrt(head_dim).
        cu_seqlens_q: int32 (batch + 1,) on q's device, dense: sequence i has the queries from cu_seqlens_q[i] up to
            cu_seqlens_q[i + 1]. It starts at 0, never falls and ends at most at total_q. On a GPU these values are not
            checked, as that would wait for the device: wrong ones give wrong rows, never an access beyond the
            tensors. Rows of no sequence are left as they are in ``out``, and undefined without it.
        cu_seqlens_k: the same for keys; both or neither are given.
        max_seqlen_q: taken for compatibility and not needed: nothing depends on it. An int from 0, or None.
        max_seqlen_k: the same.
        return_lse: return the log-sum-exp of each query's scaled scores as well.
        layout: "bhsd" or "bshd", of q, k, v and out.
        config: a tiling instead of the tuned one: a ``PrefillConfig``, its ``name``, or a name in ``SEED_CONFIGS``.
        out: where to write the result, of q's dtype and device, with strides and address as q's may be, sharing no
            memory with q, k or v. None allocates a contiguous tensor.

    Returns:
        out, or (out, lse) with ``return_lse``: lse is the natural logarithm, float32, of shape (batch, heads, q_len),
        or (heads, total_q) when packed.

    Under autocast q, k and v are cast to its dtype first. There is no derivative: an input that requires a gradient is
    refused unless gradients are disabled, and one with a forward-mode tangent always.

    Raises:
        ValueError: an argument is wrong; the message names it, what it was and what is allowed.
        KernelCompileError: the kernel does not compile.
        RuntimeError: a CUDA graph is being captured, and the kernel has not run before: call ``warmup``.
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        _check_tensors(q=q, k=k, v=v)
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        _check_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if out is not None:
        _check_tensors(out=out)
    if layout not in LAYOUTS:
        check_layout(layout)
    if return_lse is not False:
        check_flag("return_lse", return_lse)
    if scale is not None:
        check_scale(scale)
    if max_seqlen_q is not None:
        check_length("max_seqlen_q", max_seqlen_q)
    if max_seqlen_k is not None:
        check_length("max_seqlen_k", max_seqlen_k)
    window_left, window_right = window_widths(causal, window)
    name = None if config is None else config_name(config)
    options = (window_right, window_left, scale, layout, name, cu_seqlens_q, cu_seqlens_k)
    result, lse = ops.attend(q, k, v, options, out, return_lse)
    return result if lse is None else (result, lse)


def _check_tensors(**arguments: object) -> None:
    for argument, x in arguments.items():
        required = argument in ("q", "k", "v")
        if not isinstance(x, Tensor) and (required or x is not None):
            allowed = "torch.Tensor" if required else "None, or torch.Tensor"
            raise argument_error(argument, "its type", type(x).__name__, allowed)


def warmup(
    head_dim: int | Sequence[int],
    head_dim_v: int | None = None,
    *,
    dtypes: torch.dtype | Sequence[torch.dtype] = (torch.float16, torch.bfloat16),
    causal: bool | Sequence[bool] = (False, True),
    window: Window | None = None,
    varlen: bool | Sequence[bool] = False,
    return_lse: bool | Sequence[bool] = False,
    config: PrefillConfig | str | None = None,
    devices: Device | Sequence[Device] | None = None,
) -> list[str]:
    """Have every kernel that a program will call compiled, loaded and run once.

    Kernels that the cache lacks are compiled in parallel. After this no call of these kinds compiles, and all may be
    captured into a CUDA graph. Lengths, batch sizes, head counts, strides and layouts do not matter, nor does the width
    of a window, only which sides it bounds. Without a GPU the arguments are checked, and nothing
    else is done.

    Args:
        head_dim: of q and k; several for a kernel each.
        head_dim_v: of v and out; None is head_dim.
        dtypes: of the tensors; one or several.
        causal: as for ``attention``. Here and below, (False, True) prepares both.
        window: as for ``attention``.
        varlen: cumulative lengths are given.
        return_lse: as for ``attention``.
        config: as for ``attention``.
        devices: a CUDA device, or several; None is the current one.

    Returns:
        The kernels' names, sorted.

    Raises:
        ValueError: an argument is wrong.
        KernelCompileError: a kernel does not compile; the others are ready.
    """
    check_some(head_dim=head_dim, dtypes=dtypes, causal=causal, varlen=varlen, return_lse=return_lse, devices=devices)
    for dim in each(head_dim):
        check_int("head_dim", dim)
        check_head_dim("head_dim", "it", dim)
    if head_dim_v is not None:
        check_int("head_dim_v", head_dim_v)
        check_head_dim("head_dim_v", "it", head_dim_v)
    for dtype in each(dtypes):
        check_dtype("dtypes", "one of them", dtype)
    for argument, flags in (("varlen", varlen), ("return_lse", return_lse)):
        for flag in each(flags):
            check_flag(argument, flag)
    name = config_name(config)
    if name is not None:
        for dim in each(head_dim):
            parse_config(name, dim)
    several: Sequence[Device] = each("cuda" if devices is None else devices)
    named_devices = [cuda_device(device) for device in several]
    problems = [
        PrefillProblem(
            DTYPE_NAMES[dtype],
            dim,
            dim if head_dim_v is None else head_dim_v,
            bounded_left=window_left >= 0,
            bounded_right=window_right >= 0,
            varlen=packed,
            return_lse=lse,
        )
        for dim, dtype, (window_left, window_right), packed, lse in product(
            each(head_dim),
            each(dtypes),
            [window_widths(one, window) for one in each(causal)],
            each(varlen),
            each(return_lse),
        )
    ]
    if not torch.cuda.is_available():
        return []
    indices = [torch.cuda.current_device() if device.index is None else device.index for device in named_devices]
    keys = [KernelKey(problem, name, index) for problem, index in product(problems, indices)]
    specs = {kernel_spec(key) for key in keys}
    workers.prepare(sorted(specs, key=lambda spec: spec.name))
    for key in keys:
        _run_once(key, torch.device("cuda", key.device))
    return sorted(spec.name for spec in specs)


def each(values: T | Sequence[T]) -> Sequence[T]:
    """The values of an argument that takes one or several."""
    return values if isinstance(values, Sequence) and not isinstance(values, str) else (values,)


def check_some(**arguments: object) -> None:
    """Raises ValueError if an argument that takes several is empty: nothing would be prepared."""
    for argument, values in arguments.items():
        if isinstance(values, Sequence) and not values:
            raise argument_error(argument, "its length", 0, "at least 1")


def check_int(argument: str, value: object) -> None:
    """Raises ValueError unless ``value`` is an int."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise argument_error(argument, "it", repr(value), "an int, or several")


def cuda_device(device: Device) -> torch.device:
    """A device as ``warmup`` takes it.

    Raises:
        ValueError: it is no CUDA device.
    """
    named = None
    if isinstance(device, (int, str, torch.device)) and not isinstance(device, bool):
        with contextlib.suppress(RuntimeError):  # of a name that torch does not know
            named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if named is None or named.type != "cuda":
        raise argument_error("devices", "one of them", repr(device), "CUDA devices")
    return named


def _run_once(key: KernelKey, device: torch.device) -> None:
    """Attention of one query and one key, which loads the kernel onto the device."""
    problem = key.problem
    shape = (1, 1) if problem.varlen else (1, 1, 1)
    dtype = getattr(torch, problem.dtype)
    q, k = (torch.zeros(*shape, problem.head_dim, dtype=dtype, device=device) for _ in range(2))
    v = torch.zeros(*shape, problem.head_dim_v, dtype=dtype, device=device)
    cu_seqlens = torch.arange(2, dtype=torch.int32, device=device) if problem.varlen else None
    options = Options(
        window_right=0 if problem.bounded_right else UNBOUNDED,
        window_left=0 if problem.bounded_left else UNBOUNDED,
        config=key.config,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
    )
    launch.attend(q, k, v, options, return_lse=problem.return_lse)
