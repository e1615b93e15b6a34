"""Runs a decode call with poisoned outputs and holds it against the float32 reference, row by row."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cute_attn import decode, reference
from cute_attn.reference.decode import cached
from cute_attn.workspace import semaphores_in_use
from tests.gpu.check import LSE_ABSOLUTE, LSE_RELATIVE, Result, row_bounds
from tests.gpu.decode_cases import DecodeCase
from tests.gpu.decode_tensors import DecodeTensors, make_decode_tensors

FLOAT32 = reference.Precision(torch.float32, torch.float32)


def check_decode(case: DecodeCase, device: str = "cuda") -> None:
    """Make the case's tensors, run it, and assert that every row is right and nothing else was written."""
    tensors = make_decode_tensors(case, device)
    result = run_decode(case, tensors)
    written = int((~tensors.out_buffer.isnan()).sum())
    assert written <= tensors.out.numel(), f"{written - tensors.out.numel()} elements beyond the output were written"
    assert_semaphores_are_zero()
    assert_decode_right(case, tensors, result)


def run_decode(case: DecodeCase, tensors: DecodeTensors, **changes: Any) -> Result:
    """Call decode as the case says, into the poisoned output."""
    options = {
        **case.options,
        "sinks": tensors.sinks,
        "num_splits": case.num_splits,
        "split_size": case.split_size,
        "config": case.config,
        "out": tensors.out,
        **changes,
    }
    if case.problem.return_lse:
        return Result(*decode(tensors.q, tensors.cache, tensors.lengths, return_lse=True, **options))
    return Result(decode(tensors.q, tensors.cache, tensors.lengths, **options), None)


def assert_semaphores_are_zero() -> None:
    """As every launch leaves them for the next one."""
    assert not any(bool(semaphores.any()) for semaphores in semaphores_in_use()), "a semaphore is not zero"


def expected_of(case: DecodeCase, tensors: DecodeTensors) -> Result:
    """The float32 reference's results."""
    out, lse = reference.decode(
        tensors.q, tensors.cache, tensors.lengths, sinks=tensors.sinks, return_lse=True, precision=FLOAT32,
        **case.options,
    )  # fmt: skip
    return Result(out, lse)


def assert_decode_right(case: DecodeCase, tensors: DecodeTensors, result: Result) -> None:
    """Every row of out, and of lse, is within its bound."""
    expected, expected_lse = expected_of(case, tensors)
    rough = torch_in_input_dtype(case, tensors)
    bound = row_bounds(expected, rough, tensors.q.dtype)
    _assert_within(case, "rows", (result.out.float() - expected).abs().amax(-1), bound)
    if result.lse is not None:
        assert expected_lse is not None
        assert result.lse.dtype == torch.float32
        assert result.lse.shape == expected_lse.shape
        infinite = expected_lse.isinf()
        error = torch.where(infinite & (result.lse == expected_lse), 0.0, (result.lse - expected_lse).abs())
        bound = LSE_ABSOLUTE + LSE_RELATIVE * expected_lse.abs().masked_fill(infinite, 0.0)
        _assert_within(case, "rows of lse", error, bound)


def _assert_within(case: DecodeCase, what: str, errors: Tensor, bound: Tensor) -> None:
    wrong = ~(errors <= bound)  # NaN, too
    if wrong.any():
        first = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} {what} are wrong, the first at {first}: error "
            f"{float(errors[first]):.3g}, allowed {float(bound[first]):.3g}\n{case}\n{case.spec.name}"
        )


def torch_in_input_dtype(case: DecodeCase, tensors: DecodeTensors) -> Tensor:
    """The same as plain torch operations on 16-bit tensors, a quantised cache dequantised to these."""
    q = tensors.q.reshape(case.batch, case.q_len, case.heads, case.problem.head_dim)
    scale = 1 / math.sqrt(case.problem.head_dim) if case.scale is None else case.scale
    out = torch.zeros_like(q)
    for sequence, length in enumerate(case.lengths):
        tokens = torch.arange(case.first_seen(length), length, device=q.device)
        k, v = cached(tensors.cache, sequence, tokens, torch.float32)
        k, v = (x.to(q.dtype).repeat_interleave(case.group, dim=1).transpose(0, 1) for x in (k, v))
        positions = torch.arange(length - case.q_len, length, device=q.device)[:, None]
        seen = tokens <= positions
        if case.problem.bounded_left:
            seen &= tokens > positions - case.window
        scores = (q[sequence].transpose(0, 1) @ k.transpose(1, 2)) * scale
        if case.problem.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        scores = scores.masked_fill(~seen, -math.inf)
        if tensors.sinks is not None:
            sinks = tensors.sinks.to(q.dtype)[:, None, None].expand(-1, case.q_len, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(tokens)].nan_to_num(0.0)
        out[sequence] = (weights @ v).transpose(0, 1)
    return out.reshape(tensors.q.shape)
