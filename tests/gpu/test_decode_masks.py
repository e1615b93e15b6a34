"""Decode's windows, sinks and numbers at their limits, where the right value is known exactly."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from cute_attn import ContiguousCache, decode, reference
from tests.gpu.decode_cases import DecodeCase, plain
from tests.gpu.decode_check import FLOAT32, check_decode

HALF = plain(128, "float16")
WINDOW = plain(128, "float16", bounded_left=True, return_lse=True)


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, device="cuda", dtype=torch.float16)


def counting(batch: int, capacity: int, heads_kv: int = 1) -> torch.Tensor:
    """v[t] = t, exact in fp16 up to 2048."""
    steps = torch.arange(capacity, device="cuda").to(torch.float16)
    return steps[None, :, None, None].expand(batch, capacity, heads_kv, 128).contiguous()


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window", [1, 2, 7, 8, 16, 63, 64, 65, 200, 5000])
@pytest.mark.parametrize("q_len", [1, 4, 9])
@pytest.mark.kernels(*(DecodeCase(WINDOW, q_len=q_len) for q_len in (1, 4, 9)))
def test_window_gives_the_mean_of_its_own_tokens(q_len: int, window: int, splits: int) -> None:
    lengths = (1, 8, 64, 65, 203, 515)
    v = counting(len(lengths), 515)
    k, q = torch.zeros_like(v), half(len(lengths), q_len, 4, 128)
    for row, length in zip(v, lengths, strict=True):
        row[length:] = math.nan
        row[: max(0, length - q_len + 1 - window)] = math.nan
    out, lse = decode(
        q, ContiguousCache(k, v), ints(*lengths), window=window, num_splits=splits, return_lse=True,
        out=torch.full_like(q, math.nan),
    )  # fmt: skip
    for i, length in enumerate(lengths):
        for j in range(q_len):
            position = length - q_len + j
            first = max(0, position - window + 1)
            if position < 0:
                assert (out[i, j] == 0).all()
                assert (lse[i, j] == -math.inf).all()
            else:
                assert (out[i, j] == torch.tensor((first + position) / 2).half()).all(), (length, j)
                assert (lse[i, j] - math.log(position - first + 1)).abs().max() < 1e-4


@pytest.mark.parametrize("length", [tile + step for tile in (16, 32, 64, 128, 256, 512) for step in (-1, 0, 1)])
@pytest.mark.parametrize("zero", ["q", "k"])
@pytest.mark.kernels(DecodeCase(HALF))
def test_equal_scores_give_the_exact_mean(length: int, zero: str) -> None:
    q, k = torch.randn(2, 1, 4, 128, device="cuda").half(), torch.randn(2, 600, 1, 128, device="cuda").half()
    # Symmetric around the means 1 to 5, in steps that fp16 holds exactly: one token too many or too few shows.
    means = 1.0 + torch.arange(128, device="cuda") % 5
    steps = torch.arange(length, device="cuda") - (length - 1) / 2
    v = torch.full((2, 600, 1, 128), math.nan, device="cuda", dtype=torch.float16)
    v[:, :length] = ((steps.sign() * (steps.abs() % 16.5))[:, None] + means).half()[None, :, None]
    k[:, length:] = math.nan
    q, k = (torch.zeros_like(q), k) if zero == "q" else (q, k.masked_fill(~k.isnan(), 0.0))
    for splits in (1, 2, 5):
        out = decode(q, ContiguousCache(k, v), ints(length, length), num_splits=splits)
        assert (out == means).all()


@pytest.mark.parametrize("window", [None, -1, 300, 301, 2**31, 2**40])
@pytest.mark.kernels(DecodeCase(HALF), DecodeCase(plain(128, "float16", bounded_left=True)))
def test_windows_that_hide_nothing(window: int | None) -> None:
    q, k = torch.randn(1, 1, 4, 128, device="cuda").half(), torch.randn(1, 300, 1, 128, device="cuda").half()
    cache = ContiguousCache(k, k.roll(1, 1))
    out = decode(q, cache, ints(300), window=window)
    expected = reference.decode(q, cache, ints(300), precision=FLOAT32)
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("window", [0, -2, -(2**40), (8, 0), 1.5, True])
def test_other_windows_are_refused(window: Any) -> None:
    with pytest.raises(ValueError, match="window"):
        decode(half(1, 1, 4, 128), ContiguousCache(half(1, 9, 1, 128), half(1, 9, 1, 128)), ints(9), window=window)


# (dtype, a): a^2 * 128 / sqrt(128) is 2e5, and a is exact in the dtype.
EXTREMES = (("float16", 133), ("bfloat16", 133))
EXTREME_OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "window": {"window": 40}, "splits": {"num_splits": 3}}


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("options", EXTREME_OPTIONS)
@pytest.mark.parametrize(("dtype", "a"), EXTREMES)
@pytest.mark.kernels(
    *(DecodeCase(plain(128, d, return_lse=True, bounded_left=w)) for d, _ in EXTREMES for w in (False, True))
)
def test_scores_of_2e5(dtype: str, a: int, options: str, sign: int) -> None:
    lengths = (203, 1, 65, 0)
    q = torch.full((4, 2, 4, 128), a, device="cuda", dtype=getattr(torch, dtype))
    k = torch.full((4, 203, 1, 128), sign * a, device="cuda", dtype=q.dtype)
    v = torch.ones_like(k)
    out, lse = decode(q, ContiguousCache(k, v), ints(*lengths), return_lse=True, **EXTREME_OPTIONS[options])
    for i, length in enumerate(lengths):
        for j in range(2):
            seen = min(length - 1 + j, 40 if options == "window" else 1000)
            if seen <= 0:
                assert (out[i, j] == 0).all()
                assert (lse[i, j] == -math.inf).all()
            else:
                assert (out[i, j] == 1).all()
                expected = sign * a * a * math.sqrt(128) + math.log(seen)
                assert (lse[i, j] - expected).abs().max() < 0.1  # float32 around 2e5 lies in steps of 0.016


@pytest.mark.parametrize("sink", [0.5, 100.0, -math.inf])
@pytest.mark.parametrize("length", [0, 1, 300])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.kernels(
    DecodeCase(plain(128, "float16", return_lse=True)), DecodeCase(plain(128, "float16", return_lse=True, sinks=True))
)
def test_sinks(sink: float, length: int, splits: int) -> None:
    q, k = torch.randn(1, 1, 4, 128, device="cuda").half(), torch.randn(1, 300, 1, 128, device="cuda").half()
    cache = ContiguousCache(k, k.roll(1, 1))
    plain_out, plain_lse = decode(q, cache, ints(length), return_lse=True, num_splits=splits)
    sinks = torch.full((4,), sink, device="cuda")
    out, lse = decode(q, cache, ints(length), return_lse=True, num_splits=splits, sinks=sinks)
    expected = torch.logaddexp(plain_lse, sinks)
    assert torch.equal(lse.isinf(), expected.isinf())
    torch.testing.assert_close(lse, expected, rtol=1e-5, atol=1e-4)
    weight = torch.exp(plain_lse - expected).nan_to_num(0.0)[..., None]
    torch.testing.assert_close(out.float(), weight * plain_out.float(), rtol=2e-3, atol=1e-3)


SINKS = [
    DecodeCase(plain(128, dtype, sinks=True, return_lse=True), (300,) * batch, q_len=q_len, num_splits=splits)
    for dtype, batch, q_len, splits in itertools.product(("float16", "bfloat16"), (1, 4), (2, 4), (1, 2))
]


@pytest.mark.parametrize("case", SINKS, ids=lambda c: f"{c.problem.name}-{c.batch}x{c.q_len}-{c.num_splits}")
def test_every_query_gets_the_sink(case: DecodeCase) -> None:
    check_decode(case)


@pytest.mark.kernels(DecodeCase(plain(128, "float16", softcap=True, return_lse=True)))
@pytest.mark.parametrize("cap", [0.5, 20.0, 1000.0])
def test_softcap_of_scores_far_beyond_it(cap: float) -> None:
    q = torch.full((1, 1, 4, 128), 133.0, device="cuda", dtype=torch.float16)
    k = torch.full((1, 200, 1, 128), 133.0, device="cuda", dtype=torch.float16)
    k[:, ::2] *= -1
    out, lse = decode(q, ContiguousCache(k, torch.ones_like(k)), ints(200), softcap=cap, return_lse=True)
    assert (out == 1).all()
    expected = torch.logaddexp(torch.tensor(cap), torch.tensor(-cap)) + math.log(100)
    assert (lse - expected.item()).abs().max() < 1e-4 * max(1.0, cap)


@pytest.mark.parametrize("place", [0, 350, 699])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.kernels(DecodeCase(plain(128, "float16", "float8_e4m3fn")), DecodeCase(plain(128, "float16")))
def test_one_large_score_among_many_small_ones(place: int, splits: int) -> None:
    """What is rescaled when the maximum changes must not be lost, nor the small weights' sum."""
    q = torch.randn(1, 1, 4, 128, device="cuda").half()
    k, v = torch.zeros(1, 700, 1, 128, device="cuda").half(), torch.ones(1, 700, 1, 128, device="cuda").half()
    k[0, place] = q[0, 0, 0] * 5 / float(q[0, 0, 0].norm())
    v[0, place] = -1.0
    for dtype, scale in ((torch.float16, None), (torch.float8_e4m3fn, 0.25)):
        cache = (
            ContiguousCache(k, v)
            if scale is None
            else ContiguousCache((k / scale).to(dtype), (v / scale).to(dtype), scale)
        )
        out = decode(q, cache, ints(700), num_splits=splits)
        expected = reference.decode(q, cache, ints(700), precision=FLOAT32)
        assert isinstance(expected, torch.Tensor)
        torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=1e-3)
