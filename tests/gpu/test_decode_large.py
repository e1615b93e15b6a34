"""Decode at sizes where 32-bit offsets, or a grid's limits, would give out."""

from __future__ import annotations

import pytest
import torch

from cute_attn import ContiguousCache, PagedCache, decode, reference
from tests.gpu.decode_cases import DecodeCase, plain
from tests.gpu.decode_check import FLOAT32
from tests.gpu.test_large import need_gib

PAGED = DecodeCase(plain(128, "float16", page_size=64))
CONTIGUOUS = DecodeCase(plain(128, "float16"))


@pytest.fixture(autouse=True)
def _memory_given_back() -> None:
    torch.cuda.empty_cache()


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float16)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def assert_right(out: torch.Tensor, expected: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> None:
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.kernels(PAGED)
def test_pool_beyond_4_gib(heads_first: bool) -> None:
    """5 GiB each for k and v: 40960 pages of 128 KiB, of which the last ones are used."""
    need_gib(14)
    pages = 40_960
    shape = (pages, 8, 64, 128) if heads_first else (pages, 64, 8, 128)
    k, v = (torch.zeros(shape, device="cuda", dtype=torch.float16) for _ in range(2))
    for x in (k, v):
        x[-8:].normal_()
    if heads_first:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    table = (pages - 1 - torch.arange(8, device="cuda")).to(torch.int32).view(1, 8)
    q, cache = half(1, 1, 32, 128), PagedCache(k, v, table)
    for splits in (1, 3):
        assert_right(
            decode(q, cache, ints(500), num_splits=splits), reference.decode(q, cache, ints(500), precision=FLOAT32)
        )


@pytest.mark.kernels(PAGED)
def test_page_stride_much_larger_than_a_page() -> None:
    """All layers in one record: pages of one layer lie 1 077 120 elements apart."""
    need_gib(6)
    stride, pages = 1_077_120, 2_100
    record = torch.zeros(stride * pages, device="cuda", dtype=torch.float16)
    k, v = (record[at:].as_strided((pages, 64, 2, 128), (stride, 256, 128, 1)) for at in (0, 64 * 256))
    k[-5:].normal_()
    v[-5:].normal_()
    table = ints(2_099, 2_096, 2_098, 2_095).view(1, 4)
    q, cache = half(1, 1, 8, 128), PagedCache(k, v, table)
    assert_right(decode(q, cache, ints(250)), reference.decode(q, cache, ints(250), precision=FLOAT32))


@pytest.mark.kernels(CONTIGUOUS)
def test_contiguous_cache_beyond_4_gib() -> None:
    need_gib(14)
    k, v = (torch.zeros(20, 131_072, 8, 128, device="cuda", dtype=torch.float16) for _ in range(2))
    for x in (k, v):
        x[-1, -300:].normal_()
    q, lengths = half(20, 1, 8, 128), ints(*[0] * 19, 131_072)
    cache = ContiguousCache(k, v)
    out = decode(q, cache, lengths)
    assert (out[:-1] == 0).all()
    last = ContiguousCache(k[-1:], v[-1:])
    assert_right(out[-1:], reference.decode(q[-1:], last, lengths[-1:], precision=FLOAT32))


@pytest.mark.parametrize("batch", [15_000, 65_535])
@pytest.mark.kernels(CONTIGUOUS)
def test_large_batch(batch: int) -> None:
    q, k, v = half(batch, 1, 8, 128), half(batch, 3, 2, 128), half(batch, 3, 2, 128)
    lengths = (torch.arange(batch, device="cuda") % 4).to(torch.int32)
    out = decode(q, ContiguousCache(k, v), lengths)
    assert (out[::4] == 0).all()
    assert torch.equal(out[1::4, 0], v[1::4, 0].repeat_interleave(4, dim=1))
    for rows in (slice(2, 8), slice(batch - 6, batch)):
        cache = ContiguousCache(k[rows], v[rows])
        assert_right(out[rows], reference.decode(q[rows], cache, lengths[rows], precision=FLOAT32))


@pytest.mark.kernels(DecodeCase(plain(128, "float16", return_lse=True)), CONTIGUOUS)
def test_long_sequence() -> None:
    need_gib(4)
    length = 1_000_003
    k, v = half(1, length, 1, 128), half(1, length, 1, 128)
    q, cache = half(1, 1, 4, 128) * 4, ContiguousCache(k, v)
    expected, expected_lse = reference.decode(q, cache, ints(length), return_lse=True, precision=FLOAT32)
    for num_splits, split_size in ((None, None), (1, None), (None, 4096)):
        out, lse = decode(q, cache, ints(length), return_lse=True, num_splits=num_splits, split_size=split_size)
        error = (out.float() - expected).norm() / expected.norm()
        assert error < 2e-3
        assert (lse - expected_lse).abs().max() < 1e-3
