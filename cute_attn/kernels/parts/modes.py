"""Both orders of a dense tensor's modes, told apart when a kernel is launched, so that one compile serves both."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.parts.tiles import CHUNK


@cute.jit
def heads_before_length(tensor: cute.Tensor, heads_second: Int32) -> cute.Tensor:
    """A dense tensor as (batch, heads, length, dim), whether its heads come second or, with ``heads_second`` 0, third.

    The host computes this at each launch. Strides stay known as multiples of 16 bytes, which a select would forget.
    """
    batch, second, third, dim = tensor.shape
    batch_stride, second_stride, third_stride, dim_stride = tensor.stride
    heads, length = (second, third) if heads_second != 0 else (third, second)
    heads_stride, length_stride = (second_stride, third_stride) if heads_second != 0 else (third_stride, second_stride)
    stride = (batch_stride, cute.assume(heads_stride, divby=CHUNK), cute.assume(length_stride, divby=CHUNK), dim_stride)
    return cute.make_tensor(tensor.iterator, cute.make_layout((batch, heads, length, dim), stride=stride))
