"""Options crossed with each other on every kind of kernel, against the float32 reference."""

from __future__ import annotations

import itertools
import os
import random

import pytest
import torch

from cute_attn.problem import PrefillProblem
from tests.gpu.attend import attend
from tests.gpu.cases import EDGE_LENGTHS, GROUP_SIZES, STORAGES, Case, Shape, draw, plain
from tests.gpu.check import check

SEED = int(os.environ.get("CUTE_ATTN_TEST_SEED", 0)) or random.SystemRandom().randrange(1, 2**31)
DRAWS = 4  # random calls of each kernel

HEAD_DIMS = range(8, 257, 8)
MASKS = tuple(itertools.product((False, True), (False, True)))  # (bounded_left, bounded_right)


def _problems() -> list[PrefillProblem]:
    """Every combination of mask, packing and lse at two head dims, a few of them at others, and every head dim."""
    dims = [("float16", 64, 64), ("bfloat16", 128, 128)]
    everything = [
        PrefillProblem(*head_dims, left, right, varlen, return_lse)
        for head_dims in dims
        for (left, right), varlen, return_lse in itertools.product(MASKS, (False, True), (False, True))
    ]
    other_dims = [
        *(("bfloat16", 64, 64), ("float16", 128, 128), ("float16", 256, 256), ("bfloat16", 256, 256)),
        *(("float16", 80, 80), ("bfloat16", 72, 72), ("float16", 40, 40)),
        *(("float16", 192, 128), ("bfloat16", 64, 256), ("float16", 96, 32), ("bfloat16", 16, 8)),
    ]
    # Each mask once, with packing and lse alternating, so that every pair of options meets somewhere.
    some = [
        PrefillProblem(*head_dims, left, right, varlen=(i + j) % 2 == 1, return_lse=(i + j) % 4 < 2)
        for i, head_dims in enumerate(other_dims)
        for j, (left, right) in enumerate(MASKS)
    ]
    return list(dict.fromkeys([*everything, *some]))


CROSSED = [draw(problem, SEED + i) for problem in _problems() for i in range(DRAWS)]


@pytest.mark.parametrize("case", CROSSED, ids=lambda case: case.problem.name)
def test_options_crossed(case: Case) -> None:
    check(case)


def _head_dim_case(head_dim: int) -> Case:
    """A call that leaves a remainder of every tile; dtype and lse alternate from one head dim to the next."""
    even = head_dim // 8 % 2 == 0
    problem = plain(head_dim, "float16" if even else "bfloat16", bounded_right=True, return_lse=even)
    return Case(problem, Shape.dense(q_len=301, k_len=333, batch=2, heads_kv=2, group=2), storage="padded")


@pytest.mark.parametrize("case", [_head_dim_case(d) for d in HEAD_DIMS], ids=lambda case: f"d{case.problem.head_dim}")
def test_every_head_dim(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("head_dim", [4, 12, 20, 100, 260, 264, 512])
@pytest.mark.parametrize("argument", ["q", "v"])
def test_other_head_dims_are_refused(head_dim: int, argument: str) -> None:
    good = torch.zeros(1, 1, 16, 64, device="cuda", dtype=torch.float16)
    wrong = torch.zeros(1, 1, 16, head_dim, device="cuda", dtype=torch.float16)
    q, k, v = (wrong, wrong, good) if argument == "q" else (good, good, wrong)
    with pytest.raises(ValueError, match=rf"{argument}.*head_dim.*{head_dim}"):
        attend(q, k, v)


LENGTH_PROBLEMS = (
    plain(64, return_lse=True),
    plain(64, bounded_right=True, return_lse=True),
    plain(128, "bfloat16", bounded_left=True, bounded_right=True, return_lse=True),
)


@pytest.mark.parametrize("q_len", EDGE_LENGTHS)
@pytest.mark.parametrize(
    "case",
    [Case(problem, window=(100 * problem.bounded_left, 0)) for problem in LENGTH_PROBLEMS],
    ids=lambda c: c.problem.name,
)
def test_every_pair_of_lengths(case: Case, q_len: int) -> None:
    for k_len in EDGE_LENGTHS:
        shape = Shape.dense(q_len, k_len, batch=2, heads_kv=1, group=2)
        check(Case(case.problem, shape, case.window, storage="padded", seed=k_len))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("case", [Case(plain(128, bounded_right=True))], ids=["causal"])
def test_layouts_and_strides(case: Case, layout: str, storage: str) -> None:
    shape = Shape.dense(q_len=200, k_len=200, batch=2, heads_kv=2, group=3)
    check(Case(case.problem, shape, layout=layout, storage=storage))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("case", [Case(plain(128, "bfloat16", bounded_right=True, varlen=True))], ids=["causal"])
def test_packed_strides(case: Case, storage: str) -> None:
    shape = Shape((70, 0, 129, 1), (129, 3, 64, 40), heads_kv=2, group=3)
    check(Case(case.problem, shape, storage=storage))


@pytest.mark.parametrize("group", GROUP_SIZES)
@pytest.mark.parametrize("heads_kv", [1, 2])
@pytest.mark.parametrize("case", [Case(plain(128, bounded_right=True, return_lse=True))], ids=["causal"])
def test_group_sizes(case: Case, heads_kv: int, group: int) -> None:
    check(Case(case.problem, Shape.dense(513, 513, batch=2, heads_kv=heads_kv, group=group)))


@pytest.mark.parametrize("scale", [None, 1.0, 0.01, 0, -0.25, 3])
@pytest.mark.parametrize("case", [Case(plain(64, bounded_right=True, return_lse=True))], ids=["causal"])
def test_scales(case: Case, scale: float | None) -> None:
    check(Case(case.problem, Shape.dense(130, 190, heads_kv=2), scale=scale))


@pytest.mark.parametrize("left", [0, 1, 63, 64, 65, 128, 199, 200, 1000])
@pytest.mark.parametrize("right", [0, 1, 63, 64, 65, 128, 199, 200, 1000])
@pytest.mark.parametrize(
    "case", [Case(plain(64, bounded_left=True, bounded_right=True, return_lse=True))], ids=["window"]
)
def test_window_widths(case: Case, left: int, right: int) -> None:
    for q_len, k_len in ((200, 200), (130, 200), (200, 130)):
        check(Case(case.problem, Shape.dense(q_len, k_len), window=(left, right)))
