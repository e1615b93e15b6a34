"""Sequences shared by several blocks: every number of them, empty parts, and bits that depend on nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from cute_attn import ContiguousCache, PagedCache, decode, merge, reference
from cute_attn.caches import Cache
from cute_attn.decode_problem import DecodeProblem
from tests.gpu.decode_cases import DecodeCase, plain
from tests.gpu.decode_check import FLOAT32, assert_semaphores_are_zero, check_decode, run_decode
from tests.gpu.decode_tensors import DecodeTensors, make_decode_tensors

CORE = plain(128, "float16", return_lse=True)
LENGTHS = (1, 63, 64, 65, 4096, 32_768)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def close(out: torch.Tensor, expected: Any) -> None:
    """Every row within 2 ulps of its largest element and fp16's rounding of the weights."""
    expected = expected.float()
    bound = 4 * 2**-11 * expected.abs().amax(-1, keepdim=True)
    assert ((out.float() - expected).abs() <= bound).all()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.kernels(DecodeCase(CORE))
def test_every_number_of_splits(length: int) -> None:
    """Up to twice the multiprocessors, more than there are tiles among them."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    q = torch.randn(1, 1, 4, 128, device="cuda", dtype=torch.float16)
    k, v = (torch.randn(1, length, 1, 128, device="cuda", dtype=torch.float16) for _ in range(2))
    cache = ContiguousCache(k, v)
    expected, expected_lse = reference.decode(q, cache, ints(length), return_lse=True, precision=FLOAT32)
    for splits in range(1, 2 * multiprocessors + 1):
        out, lse = decode(
            q, cache, ints(length), num_splits=splits, return_lse=True, out=torch.full_like(q, float("nan"))
        )
        close(out, expected)
        assert (lse - expected_lse).abs().max() < 2e-4, splits
    assert_semaphores_are_zero()


GROUPED = [
    DecodeCase(plain(128, dtype, return_lse=True), (1000, 0, 1, 64, 3000), heads_kv=8, group=2, q_len=q_len, seed=q_len)
    for dtype in ("float16", "bfloat16")
    for q_len in (1, 8)
]


@pytest.mark.parametrize("case", GROUPED, ids=lambda case: f"{case.problem.name}-{case.q_len}")
@pytest.mark.parametrize("splits", [1, 2, 3, 16, 32, 64, 1000])
def test_ragged_lengths(case: DecodeCase, splits: int) -> None:
    check_decode(replace(case, num_splits=splits))


@pytest.mark.kernels(DecodeCase(plain(128, "float16", page_size=16)))
def test_one_token_more_each_step() -> None:
    """As a program generates: 2000 steps of the host's own choice, each against one split."""
    case = DecodeCase(plain(128, "float16", page_size=16), (2000,), heads_kv=1, group=4)
    tensors = make_decode_tensors(case, "cuda")
    for length in range(1, 2001):
        lengths = ints(length)
        out = decode(tensors.q, tensors.cache, lengths)
        assert out.isfinite().all(), length
        close(out, decode(tensors.q, tensors.cache, lengths, num_splits=1))


FIXED = [
    DecodeCase(replace(CORE, page_size=page, bounded_left=window), window=300)
    for page in (0, 64)
    for window in (False, True)
]


@pytest.mark.parametrize("case", FIXED, ids=lambda case: case.problem.name)
@pytest.mark.parametrize("size", [64, 300, 1024])
def test_a_fixed_split_size_makes_rows_independent(case: DecodeCase, size: int) -> None:
    """The same bits alone and among 64, at any capacity and with any neighbours."""
    rng = random.Random(size)
    lengths = (1500, *(rng.randint(0, 3000) for _ in range(63)))
    many = replace(case, lengths=lengths, split_size=size)
    tensors = make_decode_tensors(many, "cuda")
    together = run_decode(many, tensors)
    alone_out = torch.full_like(tensors.out[:1], float("nan"))
    cache, alone = tensors.cache, list[Cache]()
    if isinstance(cache, PagedCache):
        columns = [None, -(-1500 // 64)]
        alone = [PagedCache(cache.k, cache.v, cache.page_table[:1, :n]) for n in columns]
    else:
        alone = [ContiguousCache(cache.k[:1, :n], cache.v[:1, :n]) for n in (None, 1500)]
    for one in alone:
        single = replace(tensors, q=tensors.q[:1], cache=one, lengths=tensors.lengths[:1], out=alone_out)
        result = run_decode(replace(many, lengths=lengths[:1]), single)
        assert torch.equal(result.out, together.out[:1])
        assert result.lse is not None
        assert together.lse is not None
        assert torch.equal(result.lse, together.lse[:1])


@pytest.mark.kernels(DecodeCase(CORE))
def test_the_number_of_splits_changes_between_calls() -> None:
    q = torch.randn(2, 1, 8, 128, device="cuda", dtype=torch.float16)
    k, v = (torch.randn(2, 3000, 2, 128, device="cuda", dtype=torch.float16) for _ in range(2))
    cache = ContiguousCache(k, v)
    first = {splits: decode(q, cache, [3000, 700], num_splits=splits) for splits in (2, 4, 1, 30)}
    for splits in (4, 2, 30, 1, 2, 4):
        assert torch.equal(decode(q, cache, [3000, 700], num_splits=splits), first[splits])


@pytest.mark.parametrize("cuts", [(500,), (0,), (1, 2, 999), (1000, 1000), (64, 128, 256, 512)])
@pytest.mark.kernels(DecodeCase(CORE), DecodeCase(plain(128, "float16")))
def test_merged_parts_are_the_whole(cuts: tuple[int, ...]) -> None:
    q = torch.randn(2, 1, 8, 128, device="cuda", dtype=torch.float16)
    k, v = (torch.randn(2, 1000, 2, 128, device="cuda", dtype=torch.float16) for _ in range(2))
    cache = ContiguousCache(k, v)
    whole, whole_lse = reference.decode(q, cache, ints(1000, 1000), return_lse=True, precision=FLOAT32)
    outs, lses = [], []
    for start, stop in zip((0, *cuts), (*cuts, 1000), strict=True):
        part = ContiguousCache(k[:, start:], v[:, start:])
        out, lse = decode(q, part, [stop - start] * 2, return_lse=True)
        outs.append(out)
        lses.append(lse)
    out, lse = merge(outs, lses)
    close(out, whole)
    assert (lse - whole_lse).abs().max() < 2e-4


def _out(case: DecodeCase, tensors: DecodeTensors) -> torch.Tensor:
    return run_decode(case, tensors).out


def _mixed_calls() -> list[Callable[[], torch.Tensor]]:
    """Calls of many shapes and kernels that use the same semaphores one after another."""
    kinds: list[tuple[DecodeProblem, tuple[int, ...], dict[str, Any]]] = [
        (plain(128, "float16", page_size=64), (514,), {"num_splits": 3}),
        (plain(128, "float16", page_size=64), (514, 3, 0, 2000), {}),
        (plain(128, "float16"), (514,) * 7, {"split_size": 128}),
        (plain(128, "bfloat16", "int8", page_size=16), (4000,), {"num_splits": 40}),
        (plain(128, "bfloat16", "float8_e4m3fn"), (100, 514), {"num_splits": 2}),
        (plain(64, "float16", bounded_left=True, sinks=True, return_lse=True), (777,), {"num_splits": 5}),
    ]
    calls: list[Callable[[], torch.Tensor]] = []
    for i, (problem, lengths, options) in enumerate(kinds):
        for q_len, group in ((1, 4), (3, 8)):
            case = DecodeCase(problem, lengths, q_len=q_len, group=group, window=300, seed=i, **options)
            tensors = make_decode_tensors(case, "cuda")
            calls.append(partial(_out, case, tensors))
    return calls


MIXED_KERNELS = [
    DecodeCase(problem, q_len=q_len, group=group)
    for problem in (
        plain(128, "float16", page_size=64),
        plain(128, "float16"),
        plain(128, "bfloat16", "int8", page_size=16),
        plain(128, "bfloat16", "float8_e4m3fn"),
        plain(64, "float16", bounded_left=True, sinks=True, return_lse=True),
    )
    for q_len, group in ((1, 4), (3, 8))
]


@pytest.mark.kernels(*MIXED_KERNELS)
def test_500_mixed_launches_give_the_same_bits() -> None:
    calls = _mixed_calls()
    expected = [call().clone() for call in calls]
    rng = random.Random(0)
    for _ in range(500):
        i = rng.randrange(len(calls))
        assert torch.equal(calls[i](), expected[i]), i
    assert_semaphores_are_zero()


NEIGHBOURS = [
    DecodeCase(problem, (515, 1, 0, 300, 64), num_splits=splits)
    for problem in (plain(128, "float16"), plain(128, "bfloat16", "int8", page_size=16))
    for splits in (1, 4)
]


@pytest.mark.parametrize("case", NEIGHBOURS, ids=lambda case: f"{case.problem.name}-{case.num_splits}")
def test_a_sequence_does_not_depend_on_its_neighbours(case: DecodeCase) -> None:
    """With a given number of splits, too."""
    tensors = make_decode_tensors(case, "cuda")
    together = run_decode(case, tensors).out.clone()
    cache = tensors.cache
    for i in range(5):
        rows = slice(i, i + 1)
        one: Any = (
            PagedCache(cache.k, cache.v, cache.page_table[rows], cache.scale)
            if isinstance(cache, PagedCache)
            else ContiguousCache(cache.k[rows], cache.v[rows], cache.scale)
        )
        alone = replace(
            tensors, q=tensors.q[rows], cache=one, lengths=tensors.lengths[rows], out=torch.empty_like(tensors.q[rows])
        )
        assert torch.equal(run_decode(case, alone).out, together[rows])
