"""Runs a call with poisoned outputs and holds it against the float32 reference, row by row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from cute_attn import reference
from cute_attn.configs import PrefillConfig
from tests.gpu.attend import attend, attend_with_lse, exact_with_lse
from tests.gpu.cases import Case
from tests.gpu.tensors import Tensors, make_tensors

# Ours may err by so many times the error of torch's own arithmetic in the same dtype, and so many units in the last
# place of the row's largest output.
TORCH_ERRORS = 2
ULPS = 2
# lse is made of sums that were not rounded to 16 bits: only float32's own rounding is forgiven.
LSE_ABSOLUTE, LSE_RELATIVE = 1e-4, 2**-21


class Result(NamedTuple):
    """out, and lse where the call returns it."""

    out: torch.Tensor
    lse: torch.Tensor | None


def check(case: Case, device: str = "cuda") -> None:
    """Make the case's tensors, run it, and assert that every row is right and nothing else was written."""
    tensors = make_tensors(case, device)
    result = run(case, tensors)
    assert_nothing_written_beyond(tensors)
    assert_right(case, tensors, result)


def run(case: Case, tensors: Tensors) -> Result:
    """Call attention as the case says, into the poisoned output."""
    options = {**case.options, **tensors.lengths, "config": case.config, "out": tensors.out}
    lse = None
    if case.problem.return_lse:
        out, lse = attend_with_lse(tensors.q, tensors.k, tensors.v, **options)
    else:
        out = attend(tensors.q, tensors.k, tensors.v, **options)
    assert out.data_ptr() == tensors.out.data_ptr(), "the result is not the given output"
    return Result(out, lse)


def assert_nothing_written_beyond(tensors: Tensors) -> None:
    """The buffer around the output is still NaN."""
    written = int((~tensors.out_buffer.isnan()).sum())
    assert written <= tensors.out.numel(), f"{written - tensors.out.numel()} elements beyond the output were written"


def assert_right(case: Case, tensors: Tensors, result: Result) -> None:
    """Every row of out, and of lse, is within its bound."""
    expected, expected_lse = expected_of(case, tensors)
    rough = torch_in_input_dtype(case, tensors)
    bound = row_bounds(expected, rough, getattr(torch, case.problem.dtype)) + o16_bound(case, expected)
    assert_rows_within(case, (result.out.float() - expected).abs(), bound)
    if result.lse is not None:
        assert_lse_close(case, result.lse, expected_lse)


def expected_of(case: Case, tensors: Tensors) -> Result:
    """The float32 reference's results."""
    return Result(*exact_with_lse(tensors.q, tensors.k, tensors.v, **case.options, **tensors.lengths))


def row_bounds(expected: torch.Tensor, rough: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How far each row may be from ``expected``, given torch's result in ``dtype``."""
    error = (rough.float() - expected).abs().amax(-1)
    return TORCH_ERRORS * error + ULPS * row_ulps(expected, dtype)


def row_ulps(expected: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The unit in the last place of each row's largest output; 0 for a row of zeros."""
    scale = expected.abs().amax(-1)
    _, exponent = torch.frexp(scale)
    ulps = torch.ldexp(torch.full_like(scale, torch.finfo(dtype).eps), exponent - 1)
    return torch.where(scale > 0, ulps.clamp(min=torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps), 0.0)


def o16_bound(case: Case, expected: torch.Tensor) -> torch.Tensor | float:
    """What a config that keeps O in 16 bits between tiles may err more: one rounding for every tile of keys."""
    config = case.config
    if not isinstance(config, PrefillConfig) or config.o_fp32:
        return 0.0
    tiles = math.ceil(max(case.shape.k_lens, default=0) / config.tile_n)
    return tiles * row_ulps(expected, getattr(torch, case.problem.dtype))


def assert_rows_within(case: Case, errors: torch.Tensor, bound: torch.Tensor) -> None:
    """``errors`` (..., head_dim_v) are at most ``bound`` (...) in every row; NaN is not."""
    worst = errors.amax(-1)
    wrong = ~(worst <= bound)
    if not wrong.any():
        return
    places = wrong.nonzero()
    first = tuple(places[0].tolist())
    raise AssertionError(
        f"{len(places)} of {wrong.numel()} rows are wrong, the first at {first}: error {float(worst[first]):.3g}, "
        f"allowed {float(bound[first]):.3g}\n{case}"
    )


def assert_lse_close(case: Case, lse: torch.Tensor, expected: torch.Tensor | None) -> None:
    """-inf in the same rows, and close in the others."""
    assert expected is not None
    assert lse.dtype == torch.float32, f"lse is {lse.dtype}"
    assert lse.shape == expected.shape, f"lse has shape {tuple(lse.shape)}, expected {tuple(expected.shape)}"
    close = (lse - expected).abs() <= LSE_ABSOLUTE + LSE_RELATIVE * expected.abs()
    wrong = ~torch.where(expected.isinf(), lse == expected, close)
    if wrong.any():
        first = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} rows of lse are wrong, the first at {first}: "
            f"{float(lse[first])!r}, expected {float(expected[first])!r}\n{case}"
        )


def torch_in_input_dtype(case: Case, tensors: Tensors) -> torch.Tensor:
    """The same attention as plain torch operations on the 16-bit tensors: matmul, softmax, matmul."""
    out = torch.zeros_like(tensors.out)
    for rows, q, k, v in _sequences(case, tensors, out):
        rows.copy_(_torch_attention(case, q, k, v))
    return out


def _sequences(case: Case, tensors: Tensors, out: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """(batch, heads, length, dim) views: of the whole batch, or of one packed sequence after the other."""
    all_tensors = (out, tensors.q, tensors.k, tensors.v)
    if not case.problem.varlen:
        yield tuple(t.transpose(1, 2) for t in all_tensors) if case.layout == "bshd" else all_tensors
        return
    queries = reference.sequences("cu_seqlens_q", tensors.lengths["cu_seqlens_q"], tensors.q.shape[0])
    keys = reference.sequences("cu_seqlens_k", tensors.lengths["cu_seqlens_k"], tensors.k.shape[0])
    for q_rows, k_rows in zip(queries, keys, strict=True):
        rows = (q_rows, q_rows, k_rows, k_rows)
        yield tuple(t[r].transpose(0, 1).unsqueeze(0) for t, r in zip(all_tensors, rows, strict=True))


def _torch_attention(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if case.scale is None else case.scale
    q_len, k_len = q.shape[2], k.shape[2]
    positions = torch.arange(q_len, device=q.device) + (k_len - q_len)
    window = case.window[0] if case.problem.bounded_left else -1, case.window[1] if case.problem.bounded_right else -1
    seen = reference.visible_keys(positions, torch.arange(k_len, device=q.device), *window)
    weights = ((q @ k.transpose(2, 3)) * scale).masked_fill(~seen, -math.inf).softmax(dim=-1)
    return weights.nan_to_num(0.0) @ v
