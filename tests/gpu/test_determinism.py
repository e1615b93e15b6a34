"""The same bits from launch to launch, and for a sequence whatever else is in its batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_attn import PrefillConfig
from tests.gpu.cases import Case, Shape, plain
from tests.gpu.check import run
from tests.gpu.tensors import make_tensors

LAUNCHES = 20
BASE = PrefillConfig()
CAUSAL_LSE = plain(64, bounded_right=True, return_lse=True)

PATHS = {
    "full": Case(plain(64, return_lse=True)),
    "causal": Case(CAUSAL_LSE),
    "window": Case(plain(128, "bfloat16", bounded_left=True, bounded_right=True, return_lse=True), window=(100, 30)),
    "head dim 256": Case(plain(256, bounded_right=True)),
    "padded head dim": Case(plain(72, "bfloat16", bounded_right=True)),
    "1 stage": Case(CAUSAL_LSE, config=replace(BASE, num_stages=1)),
    "4 stages": Case(CAUSAL_LSE, config=replace(BASE, num_stages=4)),
    "rows padded": Case(CAUSAL_LSE, config=replace(BASE, swizzle=False)),
    "q in registers": Case(CAUSAL_LSE, config=replace(BASE, q_in_regs=True)),
    "o in 16 bits": Case(CAUSAL_LSE, config=replace(BASE, o_fp32=False)),
    "stores by shuffles": Case(CAUSAL_LSE, config=replace(BASE, o_store="shuffle")),
    "8 warps": Case(CAUSAL_LSE, config=replace(BASE, num_warps=8)),
}
PACKED_PATHS = {
    "packed": Case(plain(128, "bfloat16", bounded_right=True, varlen=True, return_lse=True)),
    "packed window": Case(
        plain(64, bounded_left=True, bounded_right=True, varlen=True, return_lse=True), window=(100, 30)
    ),
}
ALL_PATHS = PATHS | PACKED_PATHS


@pytest.mark.parametrize("case", ALL_PATHS.values(), ids=ALL_PATHS)
def test_every_launch_gives_the_same_bits(case: Case) -> None:
    case = replace(case, shape=Shape((700,) * 4, (1030,) * 4, heads_kv=4, group=4))
    tensors = make_tensors(case, "cuda")
    first = run(case, tensors)
    out, lse = first.out.clone(), first.lse
    for _ in range(LAUNCHES):
        tensors.out.fill_(float("nan"))
        again = run(case, tensors)
        assert torch.equal(again.out, out)
        if lse is not None and again.lse is not None:
            assert torch.equal(again.lse, lse)


@pytest.mark.parametrize("case", PATHS.values(), ids=PATHS)
def test_a_sequence_does_not_depend_on_its_batch(case: Case) -> None:
    case = replace(case, shape=Shape.dense(200, 333, batch=5, heads_kv=2, group=3))
    tensors = make_tensors(case, "cuda")
    together = run(case, tensors).out.clone()
    for row in range(5):
        rows = slice(row, row + 1)
        alone = replace(tensors, q=tensors.q[rows], k=tensors.k[rows], v=tensors.v[rows], out=tensors.out[rows])
        assert torch.equal(run(case, alone).out, together[rows])


@pytest.mark.parametrize("case", PACKED_PATHS.values(), ids=PACKED_PATHS)
def test_a_packed_sequence_does_not_depend_on_its_neighbours(case: Case) -> None:
    shape = Shape((70, 200, 1, 129), (333, 90, 65, 129), heads_kv=2, group=3)
    together_case = replace(case, shape=shape)
    tensors = make_tensors(together_case, "cuda")
    together = run(together_case, tensors).out.clone()
    q_start = k_start = 0
    for q_len, k_len in zip(shape.q_lens, shape.k_lens, strict=True):
        q_rows, k_rows = slice(q_start, q_start + q_len), slice(k_start, k_start + k_len)
        alone_case = replace(case, shape=replace(shape, q_lens=(q_len,), k_lens=(k_len,)))
        alone = replace(
            tensors,
            q=tensors.q[q_rows],
            k=tensors.k[k_rows],
            v=tensors.v[k_rows],
            out=tensors.out[q_rows],
            lengths=make_tensors(alone_case, "cuda").lengths,
        )
        assert torch.equal(run(alone_case, alone).out, together[q_rows])
        q_start, k_start = q_start + q_len, k_start + k_len
