"""Masks and numbers at their limits, where the right value is known exactly."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from cute_attn import reference
from tests.gpu.attend import attend, attend_with_lse, exact, exact_with_lse, poison
from tests.gpu.cases import Case, Shape, plain
from tests.gpu.check import row_ulps
from tests.gpu.tensors import cumulative

# (dtype, head dim, a): a^2 * head_dim / sqrt(head_dim) is 2e5, and a is exact in the dtype.
EXTREMES = (("float16", 64, 158), ("bfloat16", 128, 133))
MASKS = {"none": {}, "causal": {"bounded_right": True}, "window": {"bounded_left": True, "bounded_right": True}}
OPTIONS: dict[str, dict[str, Any]] = {"none": {}, "causal": {"causal": True}, "window": {"window": (40, 0)}}
EXTREME_CASES = [
    Case(plain(head_dim, dtype, varlen=varlen, return_lse=True, **mask))
    for (dtype, head_dim, _), mask, varlen in itertools.product(EXTREMES, MASKS.values(), (False, True))
]


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("dtype", "head_dim", "a"), EXTREMES)
@pytest.mark.kernels(*EXTREME_CASES)
def test_logits_of_2e5(dtype: str, head_dim: int, a: int, mask: str, sign: int) -> None:
    length = 203
    q = torch.full((1, 2, length, head_dim), a, device="cuda", dtype=getattr(torch, dtype))
    k, v = q * sign, torch.ones_like(q)
    out, lse = attend_with_lse(q, k, v, out=poison(q), **OPTIONS[mask])
    seen = torch.arange(1, length + 1, device="cuda").clamp(max=41 if mask == "window" else length)
    seen = torch.full_like(seen, length) if mask == "none" else seen
    expected = sign * a * a * math.sqrt(head_dim) + seen.double().log()
    assert (out == 1).all()
    assert (lse - expected).abs().max() < 0.1  # float32 around 2e5 lies in steps of 0.016


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("dtype", "head_dim", "a"), EXTREMES)
@pytest.mark.kernels(*EXTREME_CASES)
def test_logits_of_minus_2e5_packed(dtype: str, head_dim: int, a: int, mask: str) -> None:
    lengths = (1, 65, 0, 127)
    q = torch.full((sum(lengths), 2, head_dim), a, device="cuda", dtype=getattr(torch, dtype))
    cu_seqlens = cumulative(lengths, "cuda")
    out, lse = attend_with_lse(
        q, -q, torch.ones_like(q), cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, out=poison(q),
        **OPTIONS[mask],
    )  # fmt: skip
    assert (out == 1).all()
    assert ((lse + a * a * math.sqrt(head_dim)).abs() < 6).all()  # log of 1 to 127 keys


MEAN_LENGTHS = [tile + step for tile in (16, 32, 64, 80, 128, 256) for step in (-1, 0, 1)]


@pytest.mark.parametrize("zero", ["q", "k"])
@pytest.mark.parametrize("length", MEAN_LENGTHS)
@pytest.mark.parametrize(
    "case", [Case(plain(64)), Case(plain(128, "bfloat16")), Case(plain(256))], ids=["64", "128", "256"]
)
def test_equal_logits_give_the_exact_mean(case: Case, length: int, zero: str) -> None:
    problem = case.problem
    q = torch.randn(2, 2, length, problem.head_dim, device="cuda").to(getattr(torch, problem.dtype))
    k, zeros = q.roll(1, dims=2), torch.zeros_like(q)
    # Symmetric around the means 1 to 5, in steps that the dtype holds exactly: one key too many or too few shows.
    means = 1.0 + torch.arange(problem.head_dim, device="cuda") % 5
    steps = torch.arange(length, device="cuda") - (length - 1) / 2
    v = (steps.sign() * (steps.abs() % 16.5))[:, None] + means
    v = v.to(q.dtype).expand_as(q).contiguous()
    out = attend(zeros if zero == "q" else q, zeros if zero == "k" else k, v, out=poison(q))
    assert (out == means).all()


@pytest.mark.kernels(Case(plain(64, bounded_left=True, bounded_right=True)))
@pytest.mark.parametrize("left", [0, 1, 7, 62, 64])
def test_window_gives_the_mean_of_its_own_keys(left: int) -> None:
    length = 203
    positions = torch.arange(length, device="cuda", dtype=torch.float64)
    zeros = torch.zeros(1, 1, length, 64, device="cuda", dtype=torch.float16)
    v = positions.to(torch.float16)[:, None].expand_as(zeros).contiguous()
    out = attend(zeros, zeros, v, window=(left, 0), out=poison(zeros))
    first = (positions - left).clamp(min=0)
    assert (out == ((first + positions) / 2).to(torch.float16)[:, None]).all()


# What the user writes, and (left, right) as the reference takes it: negative is unbounded.
SENTINELS = {
    None: -1,
    -1: -1,
    0: 0,
    5: 5,
    150: 150,
    10**6: -1,
    2**31: -1,
    2**40: -1,
}


@pytest.mark.parametrize("right", SENTINELS)
@pytest.mark.parametrize("left", SENTINELS)
@pytest.mark.kernels(*(Case(plain(64, bounded_left=a, bounded_right=b)) for a in (False, True) for b in (False, True)))
def test_window_sentinels(left: int | None, right: int | None) -> None:
    q, k, v = (torch.randn(1, 1, 150, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    out = attend(q, k, v, window=(left, right), out=poison(q))
    positions = torch.arange(150, device="cuda")
    seen = reference.visible_keys(positions, positions, SENTINELS[left], SENTINELS[right])
    weights = (q.float() @ k.float().mT / 8).masked_fill(~seen, -math.inf).softmax(-1)
    torch.testing.assert_close(out.float(), weights @ v.float(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("window", [(-2, 0), (0, -2), (-(2**40), 0), (0,), (0, 0, 0), (0.5, 0), 3])
def test_other_windows_are_refused(window: Any) -> None:
    q = torch.randn(1, 1, 150, 64, device="cuda", dtype=torch.float16)
    with pytest.raises(ValueError, match="window"):
        attend(q, q, q, window=window)


@pytest.mark.kernels(Case(plain(64, return_lse=True)))
def test_lse_is_natural() -> None:
    q, k, v = (torch.randn(2, 3, 150, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    _, lse = attend_with_lse(q, k, v)
    expected = torch.logsumexp(q.double() @ k.double().mT / 8, dim=-1)
    torch.testing.assert_close(lse.double(), expected, rtol=0, atol=5e-4)


@pytest.mark.kernels(Case(plain(64, return_lse=True)))
def test_one_large_logit_among_many_small_ones() -> None:
    """The maximum comes first, in the middle or last: what is rescaled when it changes must not be lost."""
    length, heads = 700, 3
    q, k, v = (torch.randn(1, heads, length, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    for head, place in enumerate((0, length // 2, length - 1)):
        k[0, head, place] = 4 * q[0, head, 5]
    out, lse = attend_with_lse(q, k, v, out=poison(q))
    expected, expected_lse = exact_with_lse(q, k, v)
    assert ((out - expected).abs().amax(-1) <= 4 * row_ulps(expected, out.dtype)).all()
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=5e-4)


@pytest.mark.parametrize("case", [Case(plain(64, bounded_right=True), Shape.dense(1, 300))], ids=["one query"])
def test_causal_query_alone_sees_every_key(case: Case) -> None:
    q = torch.randn(2, 2, 1, 64, device="cuda", dtype=torch.float16)
    k, v = (torch.randn(2, 2, 300, 64, device="cuda", dtype=torch.float16) for _ in range(2))
    expected = exact(q, k, v)
    torch.testing.assert_close(attend(q, k, v, causal=True).float(), expected, rtol=2e-3, atol=1e-3)
