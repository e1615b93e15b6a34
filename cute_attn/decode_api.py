"""The public function ``decode``: attention of a few new tokens over a long cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Literal, overload

import torch
from torch import Tensor

from cute_attn import decode_launch, decode_ops
from cute_attn.api import Device, check_int, check_some, cuda_device, each
from cute_attn.caches import (
    CACHE_DTYPES,
    PAGE_SIZE_MULTIPLE,
    QUANTISED,
    Cache,
    ContiguousCache,
    PagedCache,
    check_cache_head_dim,
)
from cute_attn.checks import DTYPE_NAMES, check_dtype
from cute_attn.compiler import workers
from cute_attn.decode_call import DecodeCall, check_counts, check_decode_call, check_values
from cute_attn.decode_configs import DecodeConfig, parse_decode_config
from cute_attn.decode_options import (
    NO_SOFTCAP,
    NO_WINDOW,
    UNSET,
    DecodeOptions,
    check_softcap,
    check_splits,
    decode_config_name,
    window_tokens,
)
from cute_attn.decode_plan import DecodeKey, decode_config, decode_kernel_spec
from cute_attn.decode_problem import DecodeProblem
from cute_attn.errors import argument_error
from cute_attn.options import MAX_LENGTH, check_flag, check_scale
from cute_attn.plan import device_arch

Lengths = Tensor | Sequence[int] | int

MOST_ROWS = 64  # further ones choose no other tuned config


@overload
def decode(
    q: Tensor,
    cache: Cache,
    lengths: Lengths,
    *,
    scale: float | None = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    num_splits: int | None = ...,
    split_size: int | None = ...,
    return_lse: Literal[False] = ...,
    config: DecodeConfig | str | None = ...,
    out: Tensor | None = ...,
    check: bool = ...,
) -> Tensor: ...


@overload
def decode(
    q: Tensor,
    cache: Cache,
    lengths: Lengths,
    *,
    scale: float | None = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    num_splits: int | None = ...,
    split_size: int | None = ...,
    return_lse: Literal[True],
    config: DecodeConfig | str | None = ...,
    out: Tensor | None = ...,
    check: bool = ...,
) -> tuple[Tensor, Tensor]: ...


def decode(
    q: Tensor,
    cache: Cache,
    lengths: Lengths,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    return_lse: bool = False,
    config: DecodeConfig | str | None = None,
    out: Tensor | None = None,
    check: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each sequence's newest tokens, ``q``, over its cached keys and values, which include theirs.

    The last query of a sequence stands at the last of its ``lengths[b]`` cached tokens, the others before it, and each
    sees its own token and those before it. The cache is read once for all query heads that share a head of it.

    On a GPU this runs one kernel on torch's current stream; the first call of a kind compiles it, in seconds, unless
    import, ``warmup_decode`` or an earlier program did. On a CPU the reference computes it, slowly. Sizes, strides,
    lengths and numbers never compile anything anew.

    Args:
        q: (batch, q_len, heads, head_dim), or (batch * q_len, heads, head_dim), float16 or bfloat16. The last dimension
            is dense, every other stride a multiple of 8 elements, the first element at a multiple of 16 bytes.
        cache: a ``ContiguousCache`` or a ``PagedCache``, in q's dtype or quantised, whose heads_kv divides heads: each
            of its heads serves consecutive query heads.
        lengths: int32 (batch,), tokens of each sequence in the cache. A tensor on q's device is not looked at by the
            host: a length beyond the capacity counts as the capacity, unless ``check``. Ints, one or one a sequence,
            and tensors on the CPU are checked and then copied to q's device. With 0 tokens out is 0 and lse -inf; a
            query before the first token sees nothing either.
        scale: multiplies q k^T; a finite float, None for 1 / sqrt(head_dim).
        window: a query sees at most so many tokens, its own counted, from 1; None or -1 for all.
        softcap: scores become softcap * tanh(score / softcap); None or 0 for no cap.
        sinks: float32 (heads,): a logit of each head that takes part in its softmax and has no value; finite or -inf,
            which is none.
        num_splits: blocks that share a sequence's tokens; None has it chosen from the shapes and the GPU.
        split_size: instead, tokens of one block, rounded up to whole tiles: a row's bits then depend on nothing but its
            own query, tokens and this. Not together with ``num_splits``.
        return_lse: return the log-sum-exp of each query's scores as well, which makes results mergeable (``merge``).
        config: a ``StreamsConfig``, a ``RolesConfig`` or its name instead of the tuned one.
        out: where to write the result, like q and sharing no memory with an input; None allocates it.
        check: first wait for the GPU, and check lengths and page indices: for debugging, outside captures and compiled
            functions.

    Returns:
        out, of q's shape and dtype, or (out, lse) with ``return_lse``: lse is the natural logarithm, float32, of q's
        shape without the last dimension.

    Under autocast q is cast to the cache's dtype, or to autocast's where the cache is quantised. There is no
    derivative: an input that requires a gradient is refused unless gradients are disabled.

    Raises:
        ValueError: an argument is wrong; the message names it, what it was and what is allowed.
        KernelCompileError: the kernel does not compile.
        RuntimeError: a CUDA graph is being captured, and the kernel has not run before: call ``warmup_decode``.
    """
    if not isinstance(q, Tensor):
        raise argument_error("q", "its type", type(q).__name__, "torch.Tensor")
    if not isinstance(cache, (ContiguousCache, PagedCache)):
        raise argument_error("cache", "its type", type(cache).__name__, "ContiguousCache, PagedCache")
    if sinks is not None or out is not None:
        _check_optional_tensors(sinks=sinks, out=out)
    if scale is not None:
        check_scale(scale)
    if softcap is not None:
        check_softcap(softcap)
    if num_splits is not None or split_size is not None:
        check_splits(num_splits, split_size)
    if return_lse is not False:
        check_flag("return_lse", return_lse)
    if check is not False:
        check_flag("check", check)
    if not isinstance(lengths, Tensor) or (lengths.is_cpu and not q.is_cpu):
        lengths = _lengths_on_device(lengths, q, cache)
    options = (
        NO_WINDOW if window is None else window_tokens(window),
        scale,
        0.0 if softcap is None else softcap,  # no constant, which torch.compile would take for an input
        sinks,
        UNSET if num_splits is None else num_splits,
        UNSET if split_size is None else min(split_size, MAX_LENGTH),
        None if config is None else decode_config_name(config),
    )
    if check:
        _check_values(DecodeCall(q, cache, lengths, DecodeOptions(*options), out, return_lse))
    result, lse = decode_ops.decode(q, cache, lengths, options, out, return_lse)
    return result if lse is None else (result, lse)


def _check_values(call: DecodeCall) -> None:
    """What ``check`` asks for, once the tensors are known to fit together."""
    sizes = check_decode_call(call)
    if call.lengths.is_meta:
        raise argument_error("check", "it", True, "False for tensors without values")
    check_values(call.cache, call.lengths, call.options.window, sizes.q_len)


def _check_optional_tensors(**arguments: object) -> None:
    for argument, x in arguments.items():
        if x is not None and not isinstance(x, Tensor):
            raise argument_error(argument, "its type", type(x).__name__, "None, or torch.Tensor")


def _lengths_on_device(lengths: Lengths, q: Tensor, cache: Cache) -> Tensor:
    """Lengths that the host knows, checked and copied to q's device."""
    if isinstance(lengths, Tensor):
        if lengths.dtype != torch.int32:
            raise argument_error("lengths", "dtype", lengths.dtype, "torch.int32")
        if not torch.compiler.is_compiling() and type(lengths) is Tensor:
            check_counts(lengths.flatten().tolist(), cache.capacity)
        # A copy from pinned memory would run later, and see what the caller has made of it by then.
        return lengths.to(q.device, non_blocking=not lengths.is_pinned())
    if isinstance(lengths, int) and not isinstance(lengths, bool):
        check_counts([lengths], cache.capacity)
        return torch.full((cache.batch,), lengths, dtype=torch.int32, device=q.device)
    if not isinstance(lengths, (list, tuple)):
        raise argument_error("lengths", "its type", type(lengths).__name__, "torch.Tensor, an int, or a list of ints")
    for i, length in enumerate(lengths):
        if type(length) is not int:
            raise argument_error("lengths", f"its element {i}", repr(length), "an int")
    check_counts(lengths, cache.capacity)
    return torch.tensor(lengths, dtype=torch.int32, device=q.device)


def warmup_decode(
    head_dim: int | Sequence[int],
    *,
    dtypes: torch.dtype | Sequence[torch.dtype] = (torch.float16, torch.bfloat16),
    cache_dtypes: torch.dtype | Sequence[torch.dtype] | None = None,
    page_size: int | Sequence[int] = 0,
    window: bool | Sequence[bool] = False,
    softcap: bool | Sequence[bool] = False,
    sinks: bool | Sequence[bool] = False,
    return_lse: bool | Sequence[bool] = False,
    rows: int | Sequence[int] | None = None,
    config: DecodeConfig | str | None = None,
    devices: Device | Sequence[Device] | None = None,
) -> list[str]:
    """Have every decode kernel that a program will call compiled, loaded and run once, as ``warmup`` does for others.

    Lengths, capacities, batch sizes, strides, widths, scales and splits do not matter.

    Args:
        head_dim: of q and the cache; several for a kernel each.
        dtypes: of q; one or several.
        cache_dtypes: of the cache; None for that of q. 16-bit ones go with q's of the same dtype.
        page_size: tokens of a page; 0 for a contiguous cache.
        window: a window is given. Here and below, (False, True) prepares both.
        softcap: a soft cap is given.
        sinks: sinks are given.
        return_lse: as for ``decode``.
        rows: query heads that share a head of the cache x query tokens of a sequence, by which the tuned config is
            chosen; None prepares for every number.
        config: as for ``decode``.
        devices: a CUDA device, or several; None is the current one.

    Returns:
        The kernels' names, sorted.

    Raises:
        ValueError: an argument is wrong.
        KernelCompileError: a kernel does not compile; the others are ready.
    """
    _check_warmup(head_dim, dtypes, cache_dtypes, page_size, rows)
    flags = {"window": each(window), "softcap": each(softcap), "sinks": each(sinks), "return_lse": each(return_lse)}
    check_some(**flags, devices=devices)
    for argument, values in flags.items():
        for value in values:
            check_flag(argument, value)
    name = decode_config_name(config)
    if name is not None:
        parse_decode_config(name)
    several: Sequence[Device] = each("cuda" if devices is None else devices)
    named_devices = [cuda_device(device) for device in several]
    problems = [
        DecodeProblem(DTYPE_NAMES[dtype], CACHE_DTYPES[cache_dtype], dim, size, *chosen)
        for dim, dtype, size in product(each(head_dim), each(dtypes), each(page_size))
        for cache_dtype in ((dtype,) if cache_dtypes is None else each(cache_dtypes))
        if cache_dtype in QUANTISED or cache_dtype == dtype
        for chosen in product(*flags.values())
    ]
    if not problems:
        allowed = f"quantised ones, or one of {', '.join(map(str, each(dtypes)))}"
        raise argument_error("cache_dtypes", "it", cache_dtypes, allowed)
    if not torch.cuda.is_available():
        return []
    indices = [torch.cuda.current_device() if device.index is None else device.index for device in named_devices]
    keys = {
        DecodeKey(problem, decode_config(problem, name, count, device_arch(index)), index)
        for problem, index, count in product(problems, indices, range(1, MOST_ROWS + 1) if rows is None else each(rows))
    }
    specs = {decode_kernel_spec(key) for key in keys}
    workers.prepare(sorted(specs, key=lambda spec: spec.name))
    for key in keys:
        _run_once(key, torch.device("cuda", key.device))
    return sorted(spec.name for spec in specs)


def _check_warmup(
    head_dim: int | Sequence[int],
    dtypes: torch.dtype | Sequence[torch.dtype],
    cache_dtypes: torch.dtype | Sequence[torch.dtype] | None,
    page_size: int | Sequence[int],
    rows: int | Sequence[int] | None,
) -> None:
    check_some(head_dim=head_dim, dtypes=dtypes, cache_dtypes=cache_dtypes, page_size=page_size, rows=rows)
    for dim in each(head_dim):
        check_int("head_dim", dim)
        check_cache_head_dim("head_dim", dim)
    for dtype in each(dtypes):
        check_dtype("dtypes", "one of them", dtype)
    for dtype in () if cache_dtypes is None else each(cache_dtypes):
        if dtype not in CACHE_DTYPES:
            raise argument_error("cache_dtypes", "one of them", dtype, ", ".join(map(str, CACHE_DTYPES)))
    for count in () if rows is None else each(rows):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise argument_error("rows", "it", repr(count), "None, or ints from 1")
    for size in each(page_size):
        if not isinstance(size, int) or isinstance(size, bool) or size < 0 or size % PAGE_SIZE_MULTIPLE:
            allowed = f"0 (a contiguous cache), or a multiple of {PAGE_SIZE_MULTIPLE}"
            raise argument_error("page_size", "it", repr(size), allowed)


def _run_once(key: DecodeKey, device: torch.device) -> None:
    """One query over one token, which loads the kernel onto the device."""
    problem = key.problem
    dtype = getattr(torch, problem.dtype)
    q = torch.zeros(1, 1, 1, problem.head_dim, dtype=dtype, device=device)
    k = torch.zeros(1, problem.page_size or 1, 1, problem.head_dim, dtype=q.dtype, device=device)
    k = k.to(getattr(torch, problem.cache_dtype))
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    options = DecodeOptions(
        window=1 if problem.bounded_left else NO_WINDOW,
        softcap=1.0 if problem.softcap else NO_SOFTCAP,
        sinks=torch.zeros(1, dtype=torch.float32, device=device) if problem.sinks else None,
        config=key.config.name,
    )
    decode_launch.decode(
        q,
        PagedCache(k, k, table) if problem.page_size else ContiguousCache(k, k),
        torch.ones(1, dtype=torch.int32, device=device),
        options,
        return_lse=problem.return_lse,
    )
