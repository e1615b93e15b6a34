"""The reference against torch's own attention, and against what can be said without it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attn import reference
from cute_attn.reference import FLOAT64, Precision

F64 = torch.float64


def normal(*shape: int, dtype: torch.dtype = F64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def inputs(
    q_len: int, k_len: int, heads: tuple[int, int] = (2, 2), head_dims: tuple[int, int] = (16, 16)
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of 2 sequences."""
    q = normal(2, heads[0], q_len, head_dims[0], seed=1)
    k = normal(2, heads[1], k_len, head_dims[0], seed=2)
    v = normal(2, heads[1], k_len, head_dims[1], seed=3)
    return q, k, v


def mask(q_len: int, k_len: int, left: float, right: float) -> Tensor:
    """The keys that queries see, one by one from the definition."""
    rows = [[i + k_len - q_len - left <= j <= i + k_len - q_len + right for j in range(k_len)] for i in range(q_len)]
    return torch.tensor(rows).reshape(q_len, k_len)


def expected(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """out by torch, lse by torch.logsumexp, of float64 tensors; rows that see nothing get 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    lse = torch.logsumexp((factor * q @ k.mT).masked_fill(~seen, -math.inf), dim=-1)
    return out.masked_fill(~seen.any(-1, keepdim=True), 0), lse


@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (5, 5), (3, 8), (8, 3), (1, 40), (40, 1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.37, 0.0, -0.5])
def test_agrees_with_torch(q_len: int, k_len: int, causal: bool, scale: float | None) -> None:
    q, k, v = inputs(q_len, k_len)
    out, lse = reference.attention(q, k, v, causal=causal, scale=scale, return_lse=True)
    seen = mask(q_len, k_len, math.inf, 0 if causal else math.inf)
    torch.testing.assert_close((out, lse), expected(q, k, v, seen, scale))
    assert out.dtype == lse.dtype == F64


@pytest.mark.parametrize("heads", [(6, 1), (6, 2), (6, 3), (6, 6), (7, 1)])
@pytest.mark.parametrize("head_dims", [(8, 24), (24, 8), (5, 3)])
def test_grouped_heads_and_unequal_head_dims(heads: tuple[int, int], head_dims: tuple[int, int]) -> None:
    q, k, v = inputs(9, 11, heads, head_dims)
    result = reference.attention(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close(result, expected(q, k, v, mask(9, 11, math.inf, 0)))


WIDTHS = {None: math.inf, -1: math.inf, 0: 0, 1: 1, 4: 4, 12: 12, 2**31: 2**31, 2**70: 2**70}


@pytest.mark.parametrize("left", WIDTHS)
@pytest.mark.parametrize("right", WIDTHS)
def test_windows(left: int | None, right: int | None) -> None:
    for (q_len, k_len), causal in itertools.product([(12, 12), (5, 12), (12, 5)], (False, True)):
        q, k, v = inputs(q_len, k_len)
        result = reference.attention(q, k, v, causal=causal, window=(left, right), return_lse=True)
        seen = mask(q_len, k_len, WIDTHS[left], 0 if causal else WIDTHS[right])
        torch.testing.assert_close(result, expected(q, k, v, seen))


def test_window_counts_the_query_itself() -> None:
    q, k, v = torch.zeros(1, 1, 6, 8), torch.zeros(1, 1, 6, 8), torch.arange(6.0).reshape(1, 1, 6, 1)
    for left in range(7):
        out, _ = reference.attention(q, k, v, window=(left, 0), return_lse=True)
        means = [sum(range(max(0, i - left), i + 1)) / min(left + 1, i + 1) for i in range(6)]
        torch.testing.assert_close(out.flatten(), torch.tensor(means))


def test_rows_that_see_no_key() -> None:
    q, k, v = inputs(8, 3)
    out, lse = reference.attention(q, k, v, causal=True, return_lse=True)
    assert (out[:, :, :5] == 0).all()
    assert (lse[:, :, :5] == -math.inf).all()
    assert out[:, :, 5:].isfinite().all()
    assert lse[:, :, 5:].isfinite().all()


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e30])
def test_rows_that_see_no_key_at_any_scale(scale: float) -> None:
    q, k, v = inputs(4, 2)
    out, lse = reference.attention(q, k, v, causal=True, scale=scale, return_lse=True)
    assert (out[:, :, :2] == 0).all()
    assert (lse[:, :, :2] == -math.inf).all()
    assert not out.isnan().any()
    assert not lse.isnan().any()


@pytest.mark.parametrize(("q_len", "k_len"), [(0, 5), (5, 0), (0, 0)])
def test_zero_lengths(q_len: int, k_len: int) -> None:
    q, k, v = inputs(q_len, k_len)
    out, lse = reference.attention(q, k, v, return_lse=True)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert lse.shape == q.shape[:-1]
    assert (lse == -math.inf).all()


def test_no_sequences() -> None:
    out, lse = reference.attention(*(x[:0] for x in inputs(4, 4)), return_lse=True)
    assert out.shape == (0, 2, 4, 16)
    assert lse.shape == (0, 2, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sign", [1, -1])
def test_large_logits(dtype: torch.dtype, sign: int) -> None:
    """Scores of 200 000 in size, far beyond float16 and beyond any finite stand-in for -inf."""
    q = torch.full((1, 2, 7, 64), 56.0, dtype=dtype)
    v = torch.ones(1, 2, 9, 64, dtype=dtype)
    k = torch.full_like(v, sign * 56.0)
    out, lse = reference.attention(q, k, v, scale=1.0, return_lse=True)
    assert (out == 1).all()
    torch.testing.assert_close(lse, torch.full_like(lse, sign * 64 * 56**2 + math.log(9)))


def cumulative(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


@pytest.mark.parametrize(
    ("q_lens", "k_lens"),
    [((3, 1, 5), (3, 1, 5)), ((0, 3, 0), (2, 0, 4)), ((0, 0, 4), (0, 5, 9)), ((1,), (7,)), ((2, 9), (8, 3)), ((), ())],
)
@pytest.mark.parametrize("window", [None, (2, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_are_attended_each_alone(
    q_lens: tuple[int, ...], k_lens: tuple[int, ...], window: tuple[int, int] | None, causal: bool
) -> None:
    q, k, v = normal(sum(q_lens), 4, 8), normal(sum(k_lens), 2, 8, seed=1), normal(sum(k_lens), 2, 24, seed=2)
    out, lse = reference.attention(
        q, k, v, causal=causal, window=window, return_lse=True, cu_seqlens_q=cumulative(q_lens),
        cu_seqlens_k=cumulative(k_lens),
    )  # fmt: skip
    assert out.shape == (sum(q_lens), 4, 24)
    assert lse.shape == (4, sum(q_lens))
    for queries, keys, rows, row_lse in zip(
        q.split(q_lens), k.split(k_lens), out.split(q_lens), lse.split(q_lens, dim=1), strict=True
    ):
        values = v[keys.storage_offset() // (2 * 8) :][: keys.shape[0]]
        alone = reference.attention(
            queries[None], keys[None], values[None], causal=causal, window=window, return_lse=True, layout="bshd"
        )
        torch.testing.assert_close((rows[None], row_lse[None]), alone)


def test_nothing_beyond_packed_sequences_matters() -> None:
    q, k, v = normal(9, 2, 8), normal(12, 2, 8, seed=1), normal(12, 2, 8, seed=2)
    options: dict[str, Any] = {"cu_seqlens_q": cumulative((2, 3)), "cu_seqlens_k": cumulative((4, 5))}
    clean = reference.attention(q, k, v, return_lse=True, **options)
    q[5:] = k[9:] = v[9:] = math.nan
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    torch.testing.assert_close((out, lse), clean, rtol=0, atol=0)
    assert (out[5:] == 0).all()
    assert (lse[:, 5:] == -math.inf).all()


def test_layouts_differ_only_in_order() -> None:
    q, k, v = inputs(5, 7, (4, 2), (8, 24))
    out, lse = reference.attention(q, k, v, return_lse=True)
    swapped_out, swapped_lse = reference.attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), return_lse=True, layout="bshd"
    )
    assert torch.equal(swapped_out.transpose(1, 2), out)
    assert swapped_out.is_contiguous()
    assert torch.equal(swapped_lse, lse)


def test_long_queries_are_computed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(23, 31)
    whole = reference.attention(q, k, v, window=(3, 2), return_lse=True)
    monkeypatch.setattr(reference.prefill, "ROWS", 5)
    torch.testing.assert_close(reference.attention(q, k, v, window=(3, 2), return_lse=True), whole)


def test_precision_is_no_dtype() -> None:
    q = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ValueError, match=r"precision: it is torch\.float64; allowed: None, or a Precision"):
        reference.attention(q, q, q, precision=torch.float64)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "precision", "out_dtype", "lse_dtype"),
    [
        (torch.float16, None, torch.float16, torch.float32),
        (torch.bfloat16, Precision(), torch.bfloat16, torch.float32),
        (torch.float32, None, torch.float32, torch.float32),
        (torch.float64, None, torch.float64, torch.float64),
        (torch.float16, FLOAT64, torch.float64, torch.float64),
        (torch.float16, Precision(torch.float32, torch.float32), torch.float32, torch.float32),
    ],
)
def test_precision(
    dtype: torch.dtype, precision: Precision | None, out_dtype: torch.dtype, lse_dtype: torch.dtype
) -> None:
    q, k, v = (normal(1, 2, 9, 16, dtype=dtype, seed=seed) for seed in range(3))
    out, lse = reference.attention(q, k, v, return_lse=True, precision=precision)
    assert (out.dtype, lse.dtype) == (out_dtype, lse_dtype)
    exact, exact_lse = expected(q.double(), k.double(), v.double(), torch.ones(9, 9, dtype=torch.bool))
    tolerance = torch.finfo(out_dtype).eps * 4
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "bounds", [[1, 4], [0, 5, 3], [0, 11], [0, -1, 4]], ids=["start", "falls", "beyond", "negative"]
)
@pytest.mark.parametrize("argument", ["cu_seqlens_q", "cu_seqlens_k"])
def test_cumulative_lengths_must_say_sequences(argument: str, bounds: list[int]) -> None:
    lengths: dict[str, Any] = {name: cumulative((3, 4)[: len(bounds) - 1]) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    lengths[argument] = torch.tensor(bounds, dtype=torch.int32)
    x = normal(10, 2, 8)
    with pytest.raises(ValueError, match=rf"{argument}: it is .*allowed: .*to at most 10"):
        reference.attention(x, x, x, **lengths)


@pytest.mark.parametrize("given", ["cu_seqlens_q", "cu_seqlens_k"])
def test_both_cumulative_lengths_are_needed(given: str) -> None:
    x, lengths = normal(10, 2, 8), {given: cumulative((10,))}
    with pytest.raises(ValueError, match=r"cu_seqlens_.: it is None"):
        reference.attention(x, x, x, cu_seqlens_q=lengths.get("cu_seqlens_q"), cu_seqlens_k=lengths.get("cu_seqlens_k"))


def test_inputs_that_do_not_belong_together_are_refused() -> None:
    q, k = torch.zeros(1, 2, 5, 8), torch.zeros(2, 2, 5, 8)
    with pytest.raises(ValueError, match=r"k: shape is \(2, 2, 5, 8\); allowed: the rank and batch of q"):
        reference.attention(q, k, k)
    with pytest.raises(ValueError, match=r"q: dtype is torch.int32; allowed: a floating dtype"):
        reference.attention(q.int(), q, q)
