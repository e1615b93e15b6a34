"""How tensors must lie in memory: what 16-byte copies and 32-bit numbers ask for, and where out may lie; new ones.

These checks read strides and addresses, which fake tensors lack, so they run where a call is computed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy
import torch
from torch import Tensor

from cute_attn.call import Shape, Sizes
from cute_attn.configs import ELEMENT_BYTES
from cute_attn.errors import argument_error
from cute_attn.options import MAX_LENGTH

ALIGNMENT = 16  # bytes that one thread copies
STRIDE_MULTIPLE = ALIGNMENT // ELEMENT_BYTES
MAX_BLOCKS = 2**31 - 1  # of a launch
SMALLEST_TILE_M = 64
Allocate = Callable[[Shape, Shape, torch.dtype], Tensor]
OVERLAP_WORK = 10_000  # candidates that the search for a shared element may try


# On the current device. It is what torch's compiled functions call, and takes half as long as torch.empty_strided.
_empty_strided_cuda: Allocate | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def allocator(device: torch.device, one_device: bool) -> Allocate:
    """What makes tensors on a device, given their shape, strides (both exactly tuples) and dtype.

    Args:
        one_device: there is no other device that could be the current one.
    """
    if _empty_strided_cuda is not None and one_device and device.type == "cuda":
        return _empty_strided_cuda
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def check_limits(sizes: Sizes, packed: bool) -> None:
    """Raises ValueError if a length or the number of blocks is too large to be numbered."""
    if sizes.q_len > MAX_LENGTH:
        raise argument_error("q", "length", sizes.q_len, f"at most {MAX_LENGTH}")
    if sizes.k_len > MAX_LENGTH:
        raise argument_error("k", "length", sizes.k_len, f"at most {MAX_LENGTH}")
    tiles = sizes.q_len // SMALLEST_TILE_M
    tiles = tiles + sizes.batch if packed else (tiles + 1) * sizes.batch
    if tiles * sizes.heads > MAX_BLOCKS:
        what = f"number of blocks (heads x tiles of {SMALLEST_TILE_M} queries)"
        raise argument_error("q", what, tiles * sizes.heads, f"at most {MAX_BLOCKS}")


def kernel_strides(argument: str, shape: Shape, strides: Shape) -> Shape:
    """The strides by which kernels read a tensor: its own, multiples of 8 elements before the last dimension.

    A dimension of size 1 may have any stride, as it is never used; it gets an allowed one.

    Raises:
        ValueError: the last dimension is not dense, or another stride no multiple of 8 elements.
    """
    *outer, last = strides
    if last != 1:
        raise argument_error(argument, "stride", strides, "1 in the last dimension (call .contiguous())")
    for i, stride in enumerate(outer):
        if stride % STRIDE_MULTIPLE:
            if shape[i] != 1:
                allowed = f"multiples of {STRIDE_MULTIPLE} elements before the last dimension (call .contiguous())"
                raise argument_error(argument, "stride", strides, allowed)
            outer[i] = STRIDE_MULTIPLE
    return (*outer, 1)


def check_addresses(**tensors: Tensor) -> None:
    """Raises ValueError unless each tensor's first element lies at a multiple of 16 bytes."""
    for argument, x in tensors.items():
        if x.data_ptr() % ALIGNMENT:
            allowed = f"a multiple of {ALIGNMENT} (call .clone())"
            raise argument_error(argument, "address of its first element", hex(x.data_ptr()), allowed)


def check_own_memory(out: Tensor) -> None:
    """Raises ValueError if elements of ``out`` share memory, as those of an expanded tensor do."""
    reach = 0
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise argument_error("out", "stride", out.stride(), "strides that give each element its own memory")
        reach += stride * (size - 1)


def check_apart(out: Tensor, **inputs: Tensor) -> None:
    """Raises ValueError if ``out`` shares an element's memory with an input."""
    begin, end = _reach(out)
    for argument, x in inputs.items():
        other_begin, other_end = _reach(x)
        if other_begin < end and begin < other_end and _share_elements(out, x):
            raise argument_error("out", "its memory", f"shared with {argument}", "memory that no input uses")


def _reach(x: Tensor) -> tuple[int, int]:
    """The addresses between which a tensor's memory lies, with those of others that are views of the same."""
    storage = x.untyped_storage()
    begin = storage.data_ptr()
    return begin, begin + storage.nbytes()


def _share_elements(a: Tensor, b: Tensor) -> bool:
    try:
        # numpy's own types allow only two of the numbers that it takes.
        return numpy.shares_memory(_addresses(a), _addresses(b), max_work=OVERLAP_WORK)  # type: ignore[arg-type]
    except numpy.exceptions.TooHardError:
        return True


def _addresses(x: Tensor) -> numpy.ndarray:
    """A tensor's addresses as a numpy array, whose elements must not be read: they may lie on a GPU."""
    return numpy.asarray(_ArrayInterface(x))


class _ArrayInterface:
    def __init__(self, x: Tensor) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"<u{x.element_size()}",
            "shape": tuple(x.shape),
            "strides": tuple(stride * x.element_size() for stride in x.stride()),
            "data": (x.data_ptr(), True),
        }
