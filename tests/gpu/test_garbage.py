"""NaN beside the valid elements, in memory and in shared memory, reaches no result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.attend import attend
from tests.gpu.cases import Case, Shape, plain
from tests.gpu.check import run
from tests.gpu.tensors import cumulative, make_tensors

SURROUNDED = [
    Case(plain(head_dim, dtype, bounded_right=causal), Shape.dense(q_len, k_len, batch=2, heads_kv=2, group=2))
    for head_dim, dtype in ((64, "float16"), (128, "bfloat16"), (40, "float16"), (72, "bfloat16"))
    for causal in (False, True)
    for q_len, k_len in ((129, 65), (65, 129), (1, 7))
]
SURROUNDED_IDS = [f"{c.problem.name}-{c.shape.q_lens[0]}x{c.shape.k_lens[0]}" for c in SURROUNDED]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("case", SURROUNDED, ids=SURROUNDED_IDS)
def test_nan_around_every_row(case: Case, layout: str) -> None:
    """After each row's last element, and after each sequence's last row."""
    case = replace(case, layout=layout)
    clean = run(case, make_tensors(case, "cuda")).out
    surrounded = replace(case, storage="padded")
    out = run(surrounded, make_tensors(surrounded, "cuda")).out
    assert out.isfinite().all()
    assert torch.equal(out, clean)


LENGTHS_Q, LENGTHS_K = (70, 129, 33), (129, 65, 100)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.kernels(*(Case(plain(128, "bfloat16", varlen=True, bounded_right=causal)) for causal in (False, True)))
def test_nan_in_the_neighbours_of_a_packed_sequence(causal: bool) -> None:
    clean = [
        torch.randn(sum(n), 4, 128, device="cuda", dtype=torch.bfloat16) for n in (LENGTHS_Q, LENGTHS_K, LENGTHS_K)
    ]
    dirty = [torch.full((t.shape[0] + 50, 4, 128), float("nan"), device="cuda", dtype=t.dtype) for t in clean]
    for to, source, lengths in zip(dirty, clean, (LENGTHS_Q, LENGTHS_K, LENGTHS_K), strict=True):
        middle = slice(lengths[0], lengths[0] + lengths[1])
        to[middle] = source[middle]
    cu_seqlens = {"cu_seqlens_q": cumulative(LENGTHS_Q, "cuda"), "cu_seqlens_k": cumulative(LENGTHS_K, "cuda")}
    expected = attend(*clean, causal=causal, **cu_seqlens)
    out = attend(*dirty, causal=causal, **cu_seqlens)
    middle = slice(LENGTHS_Q[0], LENGTHS_Q[0] + LENGTHS_Q[1])
    assert out[middle].isfinite().all()
    assert torch.equal(out[middle], expected[middle])


@pytest.mark.kernels(Case(plain(64, varlen=True)))
def test_rows_of_no_packed_sequence_stay_as_they_are() -> None:
    q = torch.randn(200, 2, 64, device="cuda", dtype=torch.float16)
    cu_seqlens = cumulative((60, 70), "cuda")
    out = torch.full_like(q, float("nan"))
    attend(q, q, q, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, out=out)
    assert out[:130].isfinite().all()
    assert out[130:].isnan().all()


@pytest.mark.parametrize("case", SURROUNDED, ids=SURROUNDED_IDS)
def test_shared_memory_full_of_nan(case: Case) -> None:
    """A launch over NaN alone fills every multiprocessor's shared memory; the next one must not see it."""
    tensors = make_tensors(case, "cuda")
    clean = run(case, tensors).out.clone()
    nan = torch.full((4, 64, 513, case.problem.head_dim), float("nan"), device="cuda", dtype=tensors.q.dtype)
    for _ in range(3):
        attend(nan, nan, nan, causal=case.problem.bounded_right)
        tensors.out.fill_(float("nan"))
        assert torch.equal(run(case, tensors).out, clean)


@pytest.mark.kernels(Case(plain(64)))
def test_nan_in_one_query_stays_there() -> None:
    q, k, v = (torch.randn(1, 2, 200, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    expected = attend(q, k, v)
    q[0, 1, 77, 3] = float("nan")
    out = attend(q, k, v)
    rest = torch.ones(1, 2, 200, dtype=torch.bool, device="cuda")
    rest[0, 1, 77] = False
    assert out[0, 1, 77].isnan().all()
    assert torch.equal(out[rest], expected[rest])
