"""Decode's options crossed with each other on every kind of kernel, against the float32 reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_attn import ContiguousCache, PagedCache, decode, decode_api
from cute_attn.decode_problem import DecodeProblem
from tests.gpu.decode_cases import HEAD_DIMS, DecodeCase, covering_problems, draw, plain
from tests.gpu.decode_check import check_decode
from tests.gpu.test_prefill import SEED

DRAWS = 5  # random calls of each kernel

CROSSED = [draw(problem, rows, SEED + i) for problem, rows in covering_problems() for i in range(DRAWS)]


@pytest.mark.parametrize("case", CROSSED, ids=lambda case: case.problem.name)
def test_options_crossed(case: DecodeCase) -> None:
    check_decode(case)


def _head_dim_case(head_dim: int) -> DecodeCase:
    """Two sequences that leave a remainder of every tile; dtype, pages and lse alternate."""
    even = head_dim // 16 % 2 == 0
    problem = plain(head_dim, "float16" if even else "bfloat16", page_size=16 if even else 0, return_lse=not even)
    return DecodeCase(problem, (333, 70), storage="fused", num_splits=3)


@pytest.mark.parametrize(
    "case",
    [_head_dim_case(d) for d in range(16, 257, 16) if d not in HEAD_DIMS],
    ids=lambda c: f"d{c.problem.head_dim}",
)
def test_every_other_head_dim(case: DecodeCase) -> None:
    check_decode(case)


LSE = plain(return_lse=True)
GROUPS = [
    DecodeCase(LSE, (515, 17), group=group, heads_kv=1 if group > 16 else 2)
    for group in (*range(1, 17), 32, 33, 64, 128)
]


@pytest.mark.parametrize("case", GROUPS, ids=lambda case: f"group{case.group}")
def test_every_group(case: DecodeCase) -> None:
    check_decode(case)


QUERIES = [DecodeCase(LSE, (515, 17, 3, 0), q_len=q_len) for q_len in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33, 100)]


@pytest.mark.parametrize("case", QUERIES, ids=lambda case: f"q_len{case.q_len}")
def test_several_queries(case: DecodeCase) -> None:
    """Causal among themselves; where there are more queries than tokens the first ones see nothing."""
    check_decode(case)
    check_decode(replace(case, num_splits=4, packed=True))


QUANTISED = [
    DecodeCase(plain(128, dtype, cache), (513, 100), q_len=4, group=2, scales=scales)
    for dtype, cache in (("float16", "int8"), ("bfloat16", "int8"), ("float16", "float8_e4m3fn"))
    for scales in ((0.03, 0.03), (1.0, 1.0), (0.5, 0.002))
]


@pytest.mark.parametrize("case", QUANTISED, ids=lambda case: f"{case.problem.name}-{case.scales[0]}")
def test_late_queries_are_as_exact_as_early_ones_on_a_quantised_cache(case: DecodeCase) -> None:
    """Bounds are held row by row."""
    check_decode(case)


PLACES = [DecodeCase(plain(128, "float16", cache), (300,)) for cache in ("int8", "float8_e4m3fn")]


@pytest.mark.parametrize("case", PLACES, ids=lambda case: case.problem.name)
def test_a_scale_gives_the_same_bits_from_host_and_device(case: DecodeCase) -> None:
    from tests.gpu.decode_check import run_decode
    from tests.gpu.decode_tensors import make_decode_tensors

    outs = []
    for place in ("host", "device", "mixed"):
        one = replace(case, scale_place=place, scales=(0.0371, 0.0219))
        outs.append(run_decode(one, make_decode_tensors(one, "cuda")).out)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


PAGES = [
    DecodeCase(plain(head_dim, "float16", page_size=page), (515, 1, 64), heads_kv=1, num_splits=splits)
    for head_dim, page in ((128, 16), (128, 64), (256, 16), (256, 128))
    for splits in (1, 3)
]


@pytest.mark.kernels(DecodeCase(plain(128, "float16")), DecodeCase(plain(256, "float16")))
@pytest.mark.parametrize("case", PAGES, ids=lambda case: f"{case.problem.name}-{case.num_splits}")
def test_pages_give_what_a_contiguous_cache_gives(case: DecodeCase) -> None:
    from tests.gpu.decode_check import run_decode
    from tests.gpu.decode_tensors import make_decode_tensors

    tensors = make_decode_tensors(case, "cuda")
    paged = run_decode(case, tensors).out
    contiguous = replace(case, problem=replace(case.problem, page_size=0))
    cache = ContiguousCache(tensors.k, tensors.v)
    same = run_decode(contiguous, replace(tensors, cache=cache, out=torch.empty_like(paged))).out
    torch.testing.assert_close(paged, same, rtol=2e-2, atol=1e-3)


@pytest.mark.kernels(DecodeCase(plain(128, "float16", page_size=64)))
def test_interleaved_pool() -> None:
    """[pages, 2, page size, heads, dim], unbound, and the same with heads before tokens."""
    q = torch.randn(2, 1, 8, 128, device="cuda", dtype=torch.float16)
    pool = torch.randn(9, 2, 64, 2, 128, device="cuda", dtype=torch.float16)
    table = torch.randperm(8, device="cuda").to(torch.int32).view(2, 4)
    lengths = torch.tensor([250, 130], device="cuda", dtype=torch.int32)
    k, v = pool.unbind(1)
    out = decode(q, PagedCache(k, v, table), lengths)
    dense = PagedCache(k.contiguous(), v.contiguous(), table)
    assert torch.equal(decode(q, dense, lengths), out)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    assert torch.equal(decode(q, PagedCache(k, v, table), lengths), out)


@pytest.mark.kernels(DecodeCase(plain(128, "float16", page_size=16)))
def test_check_mode() -> None:
    q = torch.zeros(2, 1, 4, 128, device="cuda", dtype=torch.float16)
    pool = torch.zeros(5, 16, 1, 128, device="cuda", dtype=torch.float16)
    table = torch.tensor([[0, 1, 99], [2, -1, 3]], device="cuda", dtype=torch.int32)

    def lengths(*values: int) -> torch.Tensor:
        return torch.tensor(values, device="cuda", dtype=torch.int32)

    decode(q, PagedCache(pool, pool, table), lengths(32, 16), check=True)
    with pytest.raises(ValueError, match="page_table: page 2 of sequence 0 is 99; allowed: 0 to 4"):
        decode(q, PagedCache(pool, pool, table), lengths(33, 16), check=True)
    with pytest.raises(ValueError, match="lengths: its element 1 is 49; allowed: 0 to 48, the capacity"):
        decode(q, PagedCache(pool, pool, table), lengths(32, 49), check=True)
    with pytest.raises(ValueError, match="lengths: its element 1 is 49; allowed: 0 to 48, the capacity"):
        decode(q, PagedCache(pool, pool, table), [32, 49])
    decode(q, PagedCache(pool, pool, table), torch.tensor([32, 16], dtype=torch.int32))


@pytest.mark.kernels(DecodeCase(plain(128, "float16", page_size=16)))
def test_lengths_and_page_tables_that_start_anywhere() -> None:
    """Slices of a program's own lists: multiples of 4 bytes, rows of any length."""
    q = torch.randn(2, 1, 4, 128, device="cuda", dtype=torch.float16)
    pool = torch.randn(40, 16, 1, 128, device="cuda", dtype=torch.float16)
    tables = torch.randperm(33, device="cuda").to(torch.int32).view(3, 11)
    lengths = torch.tensor([1, 170, 33], device="cuda", dtype=torch.int32)
    expected = decode(q, PagedCache(pool, pool, tables[1:].clone()), lengths[1:].clone(), num_splits=2)
    out = decode(q, PagedCache(pool, pool, tables[1:]), lengths[1:], num_splits=2)
    assert torch.equal(out, expected)
    assert torch.equal(decode(q[1:], PagedCache(pool, pool, tables[2:]), lengths[2:], num_splits=2), expected[1:])


@pytest.mark.kernels(DecodeCase(plain(128, "float16", return_lse=True)))
def test_lengths_beyond_the_capacity_count_as_the_capacity() -> None:
    q, k = (torch.randn(3, n, 1, 128, device="cuda", dtype=torch.float16) for n in (1, 100))
    cache = ContiguousCache(k, k.clone())
    expected = decode(q, cache, [100, 100, 0], return_lse=True)
    lengths = torch.tensor([101, 2**31 - 1, -7], device="cuda", dtype=torch.int32)
    for splits in (1, 2):
        got = decode(q, cache, lengths, return_lse=True, num_splits=splits)
        torch.testing.assert_close(got, expected, rtol=2e-3, atol=1e-3)


def test_public_defaults_are_those_of_the_ops() -> None:
    assert decode_api.DecodeOptions() == (-1, None, 0.0, None, 0, 0, None)
    assert isinstance(plain(), DecodeProblem)
