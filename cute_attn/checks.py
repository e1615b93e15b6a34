"""What the tensors of an attention call must be: their types, shapes and devices, checked in one place for every op."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cute_attn.call import Shape, Sizes
from cute_attn.errors import argument_error
from cute_attn.options import Options, check_layout, check_scale

DTYPE_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}  # what kernels take, as problems name it
HEAD_DIM_MULTIPLE = 8  # 16 bytes, which one thread copies
MAX_HEAD_DIM = 256


def check_inputs(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Sizes:
    """The sizes of a call whose tensors fit together.

    Raises:
        ValueError: they do not; the message names the argument, what it was and what is allowed.
    """
    _check_kind("k", k, q)
    _check_kind("v", v, q)
    check_dtype("q", "dtype", q.dtype)
    if options.cu_seqlens_q is None and options.cu_seqlens_k is None:
        sizes = _dense_sizes(q, k, v, options.layout)
    else:
        sizes = _packed_sizes(q, k, v, options)
    if sizes.heads_kv <= 0 or sizes.heads % sizes.heads_kv:
        raise argument_error("k", "its number of heads", sizes.heads_kv, f"a divisor of q's {sizes.heads}")
    check_head_dim("q", "head_dim", sizes.head_dim)
    check_head_dim("v", "head_dim", sizes.head_dim_v)
    if options.scale is not None:
        check_scale(options.scale)
    return sizes


def check_dtype(argument: str, what: str, dtype: torch.dtype) -> None:
    """Raises ValueError unless kernels take ``dtype``."""
    if dtype not in DTYPE_NAMES:
        raise argument_error(argument, what, dtype, "torch.float16, torch.bfloat16 (cute_attn.reference takes others)")


def check_plain(**tensors: Tensor | None) -> None:
    """Raises ValueError if a tensor is sparse, nested or of torch's quantised kind."""
    for argument, x in tensors.items():
        if x is not None and (x.layout != torch.strided or x.is_nested or x.is_quantized):
            kind = "quantised" if x.is_quantized else "nested" if x.is_nested else x.layout
            raise argument_error(argument, "layout", kind, "torch.strided")


def check_head_dim(argument: str, what: str, head_dim: int) -> None:
    """Raises ValueError unless kernels take ``head_dim``."""
    if head_dim % HEAD_DIM_MULTIPLE or not 0 < head_dim <= MAX_HEAD_DIM:
        allowed = f"a multiple of {HEAD_DIM_MULTIPLE} from {HEAD_DIM_MULTIPLE} to {MAX_HEAD_DIM}"
        raise argument_error(argument, what, head_dim, allowed)


def check_out(out: Tensor, q: Tensor, sizes: Sizes, options: Options) -> None:
    """Raises ValueError unless attention's result fits into ``out``."""
    _check_kind("out", out, q)
    if out.shape != sizes.out_shape(options):
        raise argument_error("out", "shape", tuple(out.shape), f"{tuple(sizes.out_shape(options))}")


def _check_kind(argument: str, x: Tensor, q: Tensor) -> None:
    if x.dtype is not q.dtype:
        raise argument_error(argument, "dtype", x.dtype, f"{q.dtype}, that of q")
    if x.device != q.device:
        raise argument_error(argument, "device", x.device, f"{q.device}, that of q")


def _dense_sizes(q: Tensor, k: Tensor, v: Tensor, layout: str) -> Sizes:
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if not len(q_shape) == len(k_shape) == len(v_shape) == 4:
        names = "(batch, heads, length, head_dim)" if layout == "bhsd" else "(batch, length, heads, head_dim)"
        raise _dimensions_error((q_shape, k_shape, v_shape), 4, names)
    if layout == "bhsd":
        batch, heads, q_len, head_dim = q_shape
        k_batch, heads_kv, k_len, k_head_dim = k_shape
        v_batch, v_heads, v_len, head_dim_v = v_shape
    else:
        check_layout(layout)
        batch, q_len, heads, head_dim = q_shape
        k_batch, k_len, heads_kv, k_head_dim = k_shape
        v_batch, v_len, v_heads, head_dim_v = v_shape
    if k_batch != batch:
        raise argument_error("k", "batch", k_batch, f"{batch}, that of q")
    if v_batch != batch:
        raise argument_error("v", "batch", v_batch, f"{batch}, that of q")
    _check_keys((heads_kv, k_len, k_head_dim), (v_heads, v_len), head_dim)
    return Sizes(batch, heads, heads_kv, q_len, k_len, head_dim, head_dim_v)


def _packed_sizes(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Sizes:
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if not len(q_shape) == len(k_shape) == len(v_shape) == 3:
        raise _dimensions_error((q_shape, k_shape, v_shape), 3, "(total, heads, head_dim) with cu_seqlens")
    check_layout(options.layout)
    sequences_q = _check_cu_seqlens("cu_seqlens_q", options.cu_seqlens_q, q)
    sequences_k = _check_cu_seqlens("cu_seqlens_k", options.cu_seqlens_k, q)
    if sequences_k != sequences_q:
        allowed = f"{sequences_q + 1}, that of cu_seqlens_q"
        raise argument_error("cu_seqlens_k", "length", sequences_k + 1, allowed)
    q_len, heads, head_dim = q_shape
    k_len, heads_kv, k_head_dim = k_shape
    v_len, v_heads, head_dim_v = v_shape
    _check_keys((heads_kv, k_len, k_head_dim), (v_heads, v_len), head_dim)
    return Sizes(sequences_q, heads, heads_kv, q_len, k_len, head_dim, head_dim_v)


def _check_keys(k_sizes: Shape, v_sizes: Shape, head_dim: int) -> None:
    """Compares k's heads, length and head dim with v's heads and length, and q's head dim."""
    heads_kv, k_len, k_head_dim = k_sizes
    v_heads, v_len = v_sizes
    if k_head_dim != head_dim:
        raise argument_error("k", "head_dim", k_head_dim, f"{head_dim}, that of q")
    if v_heads != heads_kv:
        raise argument_error("v", "its number of heads", v_heads, f"{heads_kv}, that of k")
    if v_len != k_len:
        raise argument_error("v", "length", v_len, f"{k_len}, that of k")


def _check_cu_seqlens(argument: str, cu_seqlens: Tensor | None, q: Tensor) -> int:
    """The number of sequences. Values are not read: that would wait for the GPU."""
    if cu_seqlens is None:
        raise argument_error(argument, "it", None, "a tensor, as the other cumulative lengths are given")
    if cu_seqlens.dtype is not torch.int32:
        raise argument_error(argument, "dtype", cu_seqlens.dtype, "torch.int32")
    if cu_seqlens.device != q.device:
        raise argument_error(argument, "device", cu_seqlens.device, f"{q.device}, that of q")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise argument_error(argument, "shape", tuple(cu_seqlens.shape), "(batch + 1,)")
    if cu_seqlens.stride(0) != 1 and cu_seqlens.shape[0] > 1:
        raise argument_error(argument, "stride", cu_seqlens.stride(0), "1 (call .contiguous())")
    return cu_seqlens.shape[0] - 1


def check_no_gradient(**tensors: Tensor) -> None:
    """Raises ValueError if autograd expects a gradient of a tensor, or carries one forward: there is no derivative."""
    for argument, x in tensors.items():
        if x.requires_grad and torch.is_grad_enabled():
            allowed = f"False, as attention has no backward: use torch.no_grad() or {argument}.detach()"
            raise argument_error(argument, "requires_grad", True, allowed)
        if in_forward_mode() and forward_ad.unpack_dual(x).tangent is not None:
            allowed = f"None, as attention has no forward-mode derivative: use {argument}.detach()"
            raise argument_error(argument, "its tangent", "a tensor", allowed)


def in_forward_mode() -> bool:
    """Tensors may have tangents, of forward-mode differentiation."""
    return forward_ad._current_level >= 0


def _dimensions_error(shapes: tuple[Shape, Shape, Shape], dimensions: int, names: str) -> ValueError:
    argument, shape = next(pair for pair in zip("qkv", shapes, strict=True) if len(pair[1]) != dimensions)
    return argument_error(argument, "shape", tuple(shape), f"{dimensions} dimensions, {names}")
