"""Sequences without queries or keys, and rows that see none."""

from __future__ import annotations

import math

import pytest
import torch

from tests.gpu.attend import attend, attend_with_lse
from tests.gpu.cases import Case, Shape, plain
from tests.gpu.check import check, run
from tests.gpu.tensors import cumulative, make_tensors

CAUSAL = plain(128, "bfloat16", bounded_right=True, return_lse=True)
WINDOW = plain(128, "bfloat16", bounded_left=True, bounded_right=True, return_lse=True)
PACKED = plain(64, varlen=True, bounded_right=True, return_lse=True)


@pytest.mark.parametrize("case", [Case(CAUSAL, Shape.dense(8, 3, batch=2, heads_kv=2, group=4))], ids=["8x3"])
def test_rows_that_see_no_key(case: Case) -> None:
    out, lse = run(case, make_tensors(case, "cuda"))
    assert lse is not None
    assert (out[:, :, :5] == 0).all()
    assert (lse[:, :, :5] == -math.inf).all()
    assert lse[:, :, 5:].isfinite().all()
    check(case)


@pytest.mark.parametrize("window", [None, (32, 64), (0, 0), (5, 0)])
@pytest.mark.parametrize(("q_len", "k_len"), [(129, 1), (799, 3), (64, 32), (300, 100)])
@pytest.mark.kernels(Case(CAUSAL), Case(WINDOW))
def test_more_queries_than_keys(q_len: int, k_len: int, window: tuple[int, int] | None) -> None:
    shape = Shape.dense(q_len, k_len, batch=2, heads_kv=2, group=4)
    check(Case(CAUSAL if window is None else WINDOW, shape, window or (0, 0)))


@pytest.mark.hang_after(10)
@pytest.mark.parametrize(
    "case",
    [
        Case(plain(64, varlen=True, bounded_right=causal, return_lse=True), Shape(q_lens, k_lens, heads_kv=2, group=2))
        for causal in (False, True)
        for q_lens, k_lens in (
            ((0, 0, 1208, 840, 0), (0, 2538, 1742, 840, 3072)),  # ends at 2048 and 8192
            ((0, 1, 0, 1), (0, 3, 0, 5)),  # at most one query: decoding, with finished sequences among them
            ((5, 7, 9), (0, 0, 0)),
            ((0, 0, 0), (5, 7, 9)),
            ((0, 0, 0), (0, 0, 0)),
            ((1,), (0,)),
            ((3, 0, 200), (0, 200, 1)),
        )
    ],
    ids=lambda case: f"{case.problem.name}-{case.shape.q_lens}-{case.shape.k_lens}",
)
def test_packed_sequences_of_no_length(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(("batch", "q_len", "k_len"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0), (0, 0, 0)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_empty_tensors(batch: int, q_len: int, k_len: int, layout: str) -> None:
    def tensor(heads: int, length: int, dim: int) -> torch.Tensor:
        shape = (batch, heads, length, dim) if layout == "bhsd" else (batch, length, heads, dim)
        return torch.randn(shape, device="cuda", dtype=torch.float16)

    q, k, v = tensor(4, q_len, 64), tensor(2, k_len, 64), tensor(2, k_len, 32)
    out, lse = attend_with_lse(q, k, v, layout=layout)
    assert out.shape == (*q.shape[:-1], 32)
    assert lse.shape == (batch, 4, q_len)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize(("q_total", "k_total"), [(0, 0), (0, 9), (9, 0)])
@pytest.mark.kernels(Case(PACKED))
def test_packed_totals_of_zero(q_total: int, k_total: int) -> None:
    q = torch.randn(q_total, 4, 64, device="cuda", dtype=torch.float16)
    k = torch.randn(k_total, 2, 64, device="cuda", dtype=torch.float16)
    out, lse = attend_with_lse(
        q, k, k, causal=True, cu_seqlens_q=cumulative((q_total,), "cuda"), cu_seqlens_k=cumulative((k_total,), "cuda"),
    )  # fmt: skip
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_no_packed_sequence() -> None:
    q = torch.randn(0, 4, 64, device="cuda", dtype=torch.float16)
    none = torch.zeros(1, dtype=torch.int32, device="cuda")
    assert attend(q, q, q, cu_seqlens_q=none, cu_seqlens_k=none).shape == q.shape
