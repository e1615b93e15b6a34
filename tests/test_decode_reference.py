"""The reference of decode and merge against what can be said without it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attn import reference
from cute_attn.caches import Cache, ContiguousCache, PagedCache
from cute_attn.reference import FLOAT64

F64 = torch.float64


def normal(*shape: int, dtype: torch.dtype = F64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def contiguous(batch: int = 3, capacity: int = 40, heads_kv: int = 2, head_dim: int = 16) -> ContiguousCache:
    """A 16-bit cache of small integers, which every dtype here holds exactly."""
    k, v = (torch.randint(-8, 9, (batch, capacity, heads_kv, head_dim)).half() for _ in range(2))
    return ContiguousCache(k, v)


def paged(cache: ContiguousCache, page_size: int = 8, split_tables: bool = False) -> PagedCache:
    """The same tokens in shuffled pages, surrounded by NaN."""
    pages = -(-cache.capacity // page_size)
    used = cache.batch * pages
    order = torch.randperm(2 * used + 3)[: 2 * used if split_tables else used]
    pool = torch.full((2 * used + 3, page_size, *cache.k.shape[2:]), math.nan, dtype=cache.k.dtype)
    pools = (pool, pool) if split_tables else (pool, pool.clone())
    tables = order.view(2, cache.batch, pages) if split_tables else order.view(1, cache.batch, pages).expand(2, -1, -1)
    for x, to, rows in zip((cache.k, cache.v), pools, tables, strict=True):
        padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pages * page_size - cache.capacity))
        to[rows.flatten()] = padded.reshape(used, page_size, *x.shape[2:])
    table = (tables.transpose(0, 1) if split_tables else tables[0]).to(torch.int32).contiguous()
    return PagedCache(*pools, table)


def one_by_one(q: Tensor, cache: ContiguousCache, lengths: list[int], **options: Any) -> tuple[Tensor, Tensor]:
    """From the definition, a query and a head at a time, in float64."""
    batch, q_len, heads, head_dim = q.shape
    group = heads // cache.k.shape[2]
    scale = options.get("scale") or 1 / math.sqrt(head_dim)
    out, lse = torch.zeros(q.shape, dtype=F64), torch.full(q.shape[:3], -math.inf, dtype=F64)
    for b in range(batch):
        for i in range(q_len):
            position = lengths[b] - q_len + i
            window = options.get("window") or position + 1
            tokens = list(range(max(0, position - window + 1), position + 1))
            for h in range(heads):
                scores = scale * (cache.k[b, tokens, h // group].double() @ q[b, i, h].double())
                if cap := options.get("softcap"):
                    scores = cap * torch.tanh(scores / cap)
                weights = torch.exp(scores)
                sink = options["sinks"][h].double().exp() if options.get("sinks") is not None else 0.0
                total = weights.sum() + sink
                if tokens:
                    out[b, i, h] = (weights / total) @ cache.v[b, tokens, h // group].double()
                lse[b, i, h] = torch.log(total)
    return out, lse


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.07},
    "window": {"window": 5},
    "window of one": {"window": 1},
    "wide window": {"window": 2**40},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.tensor([0.5, -2.0, 1.5, -math.inf])},
    "all": {"scale": 0.07, "window": 7, "softcap": 2.0, "sinks": torch.tensor([0.5, -2.0, 1.5, 3.0])},
}
LENGTHS = [0, 40, 3]


@pytest.mark.parametrize("q_len", [1, 2, 5])
@pytest.mark.parametrize("options", OPTIONS)
def test_definition(options: str, q_len: int) -> None:
    cache, q = contiguous(), normal(3, q_len, 4, 16, dtype=torch.float16) / 8
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    result = reference.decode(q, cache, lengths, **OPTIONS[options], return_lse=True, precision=FLOAT64)
    torch.testing.assert_close(result, one_by_one(q, cache, LENGTHS, **OPTIONS[options]))


@pytest.mark.parametrize("split_tables", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_pages_change_nothing(options: str, split_tables: bool) -> None:
    cache, q = contiguous(), normal(3, 2, 4, 16, dtype=torch.float16)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    expected = reference.decode(q, cache, lengths, **OPTIONS[options], return_lse=True)
    result = reference.decode(q, paged(cache, 8, split_tables), lengths, **OPTIONS[options], return_lse=True)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_agrees_with_attention() -> None:
    cache, q = contiguous(), normal(3, 3, 4, 16, dtype=torch.float16)
    lengths = torch.full((3,), 40, dtype=torch.int32)
    out, lse = reference.decode(q, cache, lengths, window=9, return_lse=True)
    expected, expected_lse = reference.attention(
        q, cache.k, cache.v, causal=True, window=(8, None), layout="bshd", return_lse=True
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse.transpose(1, 2))


def test_packed_rows() -> None:
    cache, q = contiguous(), normal(3, 2, 4, 16, dtype=torch.float16)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    out, lse = reference.decode(q, cache, lengths, return_lse=True)
    flat, flat_lse = reference.decode(q.flatten(0, 1), cache, lengths, return_lse=True)
    assert torch.equal(flat, out.flatten(0, 1))
    assert torch.equal(flat_lse, lse.flatten(0, 1))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_scales(dtype: torch.dtype) -> None:
    cache, q = contiguous(), normal(3, 2, 4, 16, dtype=torch.float16)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    exact = ContiguousCache((cache.k * 0.25).half(), (cache.v * 0.5).half())
    expected = reference.decode(q, exact, lengths, return_lse=True)
    quantised = cache.k.to(dtype), cache.v.to(dtype)
    scales: list[Any] = [(0.25, 0.5), (torch.tensor(0.25), torch.tensor([0.5])), (0.25, torch.tensor(0.5))]
    caches: list[Cache] = [ContiguousCache(*quantised, scale) for scale in scales]
    for one in caches:
        torch.testing.assert_close(reference.decode(q, one, lengths, return_lse=True), expected)


@pytest.mark.parametrize("sink", [0.5, 100.0, -math.inf])
@pytest.mark.parametrize("length", [0, 1])
def test_sinks_of_short_sequences(sink: float, length: int) -> None:
    cache, q = contiguous(1), normal(1, 1, 4, 16, dtype=torch.float16)
    lengths = torch.tensor([length], dtype=torch.int32)
    _, plain = reference.decode(q, cache, lengths, return_lse=True)
    out, lse = reference.decode(q, cache, lengths, sinks=torch.full((4,), sink), return_lse=True)
    torch.testing.assert_close(lse, torch.logaddexp(plain, torch.tensor(sink)))
    assert not out.isnan().any()
    assert length or (out == 0).all()


def test_tokens_that_no_query_sees_are_not_read() -> None:
    cache, q = contiguous(1), normal(1, 2, 4, 16, dtype=torch.float16)
    lengths = torch.tensor([30], dtype=torch.int32)
    clean = reference.decode(q, cache, lengths, window=4, return_lse=True)
    for x in (cache.k, cache.v):
        x[:, :25] = math.nan
        x[:, 30:] = math.nan
    torch.testing.assert_close(reference.decode(q, cache, lengths, window=4, return_lse=True), clean, rtol=0, atol=0)
    pages = paged(cache)
    pages.page_table[0, :3] = -5
    pages.page_table[0, 4:] = 2**30
    torch.testing.assert_close(reference.decode(q, pages, lengths, window=4, return_lse=True), clean, rtol=0, atol=0)


@pytest.mark.parametrize("length", [-1, 41])
def test_lengths_beyond_the_capacity_are_refused(length: int) -> None:
    cache, q = contiguous(), normal(3, 1, 4, 16, dtype=torch.float16)
    with pytest.raises(ValueError, match=f"lengths: its element 1 is {length}; allowed: 0 to 40, the capacity"):
        reference.decode(q, cache, torch.tensor([3, length, 0], dtype=torch.int32))


class TestMerge:
    def parts(self, cuts: list[int]) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
        cache, q = contiguous(2), normal(2, 1, 4, 16, dtype=torch.float16)
        whole = reference.decode(
            q, cache, torch.tensor([40, 40], dtype=torch.int32), return_lse=True, precision=FLOAT64
        )
        outs, lses = [], []
        for start, stop in zip([0, *cuts], [*cuts, 40], strict=True):
            part = ContiguousCache(cache.k[:, start:stop], cache.v[:, start:stop])
            count = torch.full((2,), stop - start, dtype=torch.int32)
            out, lse = reference.decode(q, part, count, return_lse=True, precision=FLOAT64)
            outs.append(out)
            lses.append(lse)
        return outs, lses, *whole

    @pytest.mark.parametrize("cuts", [[7], [7, 7, 20], [0], [40, 40], [1, 2, 3]])
    def test_parts_make_the_whole(self, cuts: list[int]) -> None:
        outs, lses, whole, whole_lse = self.parts(cuts)
        torch.testing.assert_close(reference.merge(outs, lses, FLOAT64), (whole, whole_lse))

    def test_empty_parts(self) -> None:
        out, lse = normal(2, 1, 4, 16), normal(2, 1, 4)
        nothing, none = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
        torch.testing.assert_close(
            reference.merge([nothing, out, nothing], [none, lse, none], FLOAT64), (out, lse), rtol=0, atol=0
        )
        merged, merged_lse = reference.merge([nothing, nothing], [none, none], FLOAT64)
        assert (merged == 0).all()
        assert (merged_lse == -math.inf).all()


def test_lengths_may_be_ints() -> None:
    q, cache, counts = torch.randn(3, 1, 4, 16).half(), contiguous(), [3, 0, 40]
    expected = reference.decode(q, cache, torch.tensor(counts, dtype=torch.int32), return_lse=True)
    for mine, one in zip(reference.decode(q, cache, counts, return_lse=True), expected, strict=True):
        assert torch.equal(mine, one)
