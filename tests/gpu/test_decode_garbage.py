"""NaN beside the valid elements of a decode call, in memory and in shared memory, reaches no result."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cute_attn import ContiguousCache, decode
from tests.gpu.decode_cases import DecodeCase, plain
from tests.gpu.decode_check import check_decode, run_decode
from tests.gpu.decode_tensors import make_decode_tensors

SHORT = [
    DecodeCase(plain(128, "float16", cache, page_size=page), (1, 2, page - 1, page, page + 1), spare=page)
    for cache, page in (("float16", 16), ("float16", 64), ("float8_e4m3fn", 128), ("int8", 32))
]


@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.problem.name)
def test_sequences_around_one_page(case: DecodeCase) -> None:
    check_decode(case)


DIRTY = [
    DecodeCase(problem, (333, 65, 1), q_len=2, window=70)
    for problem in (
        plain(128, "float16"),
        plain(128, "float16", page_size=64),
        plain(80, "float16", page_size=16, bounded_left=True),
        plain(128, "float16", "float8_e4m3fn", page_size=128),
        plain(80, "float16", "int8", page_size=16, bounded_left=True),
    )
]


@pytest.mark.kernels(DecodeCase(plain(128, "float16"), group=4), DecodeCase(plain(80, "float16"), group=4))
@pytest.mark.parametrize("case", DIRTY, ids=lambda case: case.problem.name)
def test_shared_memory_full_of_nan(case: DecodeCase) -> None:
    """Launches over NaN alone fill every multiprocessor's shared memory; the next one must not see it."""
    tensors = make_decode_tensors(case, "cuda")
    clean = run_decode(case, tensors).out.clone()
    nan = torch.full((64, 600, 4, case.problem.head_dim), math.nan, device="cuda", dtype=torch.float16)
    q = torch.full((64, 1, 16, case.problem.head_dim), math.nan, device="cuda", dtype=torch.float16)
    for _ in range(3):
        decode(q, ContiguousCache(nan, nan), [600] * 64)
        tensors.out.fill_(math.nan)
        assert torch.equal(run_decode(case, tensors).out, clean)


@pytest.mark.kernels(DecodeCase(plain(128, "float16")))
def test_nan_in_one_sequence_or_query_stays_there() -> None:
    q, k = (torch.randn(3, n, h, 128, device="cuda", dtype=torch.float16) for n, h in ((2, 8), (200, 2)))
    cache = ContiguousCache(k, k.clone())
    clean = decode(q, cache, [200, 130, 70])
    q[1, 0, 3] = math.nan
    out = decode(q, cache, [200, 130, 70])
    assert out[1, 0, 3].isnan().all()
    rest = torch.ones(3, 2, 8, dtype=torch.bool, device="cuda")
    rest[1, 0, 3] = False
    assert torch.equal(out[rest], clean[rest])
    k[2] = math.nan
    out = decode(q, cache, [200, 130, 70])
    assert torch.equal(out[0], clean[0])


@pytest.mark.kernels(DecodeCase(plain(128, "float16", page_size=64)))
def test_lengths_from_0_to_a_few_pages() -> None:
    """Every length once, all in one launch, with and without splits."""
    case = DecodeCase(plain(128, "float16", page_size=64), tuple(range(0, 270)), heads_kv=1, group=4)
    check_decode(replace(case, num_splits=1))
    check_decode(replace(case, num_splits=3))
