"""The kernel's choice between the two orders of modes, run on the host as it is at every launch."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.runtime import from_dlpack

from cute_attn.kernels.parts.modes import heads_before_length


@cute.jit
def read_layout(tensor: cute.Tensor, heads_second: cutlass.Int32, layout: cute.Tensor) -> None:
    """Writes the four sizes and the four strides of what the kernel sees of ``tensor`` into ``layout``."""
    seen = heads_before_length(tensor, heads_second)
    for mode in cutlass.range_constexpr(4):
        layout[mode] = cutlass.Int64(seen.shape[mode])
        layout[4 + mode] = cutlass.Int64(seen.stride[mode])


@pytest.mark.parametrize("heads_second", [1, 0])
def test_both_orders(heads_second: int) -> None:
    wide = torch.empty(2, 3, 5, 48, dtype=torch.float16)
    for x in (wide, wide[..., 16:32], wide.transpose(0, 2)):
        layout = torch.empty(8, dtype=torch.int64)
        tensor = from_dlpack(x, assumed_align=16).mark_layout_dynamic(leading_dim=3)
        read_layout(tensor, cutlass.Int32(heads_second), from_dlpack(layout))
        expected = x if heads_second else x.transpose(1, 2)
        assert layout.tolist() == [*expected.shape, *expected.stride()]
