"""Sizes at which 16-bit or 32-bit arithmetic, or a grid's limits, would give out."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.attend import attend, exact
from tests.gpu.cases import Case, plain
from tests.gpu.tensors import cumulative

HALF = torch.float16
# Relative error of norms: fp16's rounding of P and of the output gives 3e-4.
MAX_ERROR = 1e-3


def need_gib(amount: float) -> None:
    """Skips the calling test where the device has less free memory."""
    free, _ = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if free < amount * 2**30:
        pytest.skip(f"needs {amount} GiB of free device memory")


@pytest.fixture(autouse=True)
def _memory_given_back() -> None:
    """What earlier tests left cached may be too fragmented for one large tensor."""
    torch.cuda.empty_cache()


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=HALF)


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    error = (out.float() - expected).norm() / expected.norm()
    assert error < MAX_ERROR, f"relative error {error:.2g}"


@pytest.mark.kernels(Case(plain(96, bounded_right=True)), Case(plain(72, bounded_right=True)))
@pytest.mark.parametrize(("batch", "length", "head_dim"), [(1900, 736, 96), (1600, 729, 72)])
def test_more_elements_than_32_bits_count(batch: int, length: int, head_dim: int) -> None:
    """The first has 2^31 elements and more in each tensor, the second bytes."""
    need_gib(24)
    q, k, v = (normal(batch, 16, length, head_dim) for _ in range(3))
    out = attend(q, k, v, causal=True)
    for rows in (slice(0, 2), slice(batch // 2, batch // 2 + 2), slice(batch - 2, batch)):
        assert_close(out[rows], exact(q[rows], k[rows], v[rows], causal=True))


@pytest.mark.kernels(Case(plain(96, varlen=True, bounded_left=True, bounded_right=True)))
def test_wide_outer_stride() -> None:
    """Rows of q, k and v lie 9728 elements apart: the last row's offset is above 2^31."""
    need_gib(8)
    total, last = 230_000, 1000
    rows = torch.empty(total, 9728, device="cuda", dtype=HALF)
    q, k, v = (rows[:, i * 1536 : (i + 1) * 1536].unflatten(1, (16, 96)) for i in range(3))
    for tensor in (q, k, v):
        tensor.normal_()
    cu_seqlens = cumulative((total - last, last), "cuda")
    window = (200, 0)
    out = attend(q, k, v, window=window, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    tail = [t[-last:].transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
    expected = exact(*tail, window=window)
    assert_close(out[-last:].transpose(0, 1).unsqueeze(0), expected)


@pytest.mark.kernels(Case(plain(64)), Case(plain(64, bounded_right=True)))
@pytest.mark.parametrize(("batch", "length"), [(15_000, 1), (8_300, 3), (70_000, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_large_batch(batch: int, length: int, causal: bool) -> None:
    q, k, v = (normal(batch, heads, length, 64) for heads in (8, 2, 2))
    out = attend(q, k, v, causal=causal)
    k, v = (t.float().repeat_interleave(4, dim=1) for t in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k, v, is_causal=causal)
    assert_close(out, expected)


@pytest.mark.kernels(Case(plain(64, varlen=True, bounded_right=True)))
def test_large_packed_batch() -> None:
    batch = 15_000
    q, k, v = (normal(batch, heads, 64) for heads in (8, 2, 2))
    cu_seqlens = cumulative((1,) * batch, "cuda")
    out = attend(q, k, v, causal=True, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    assert torch.equal(out, v.repeat_interleave(4, dim=1))


@pytest.mark.kernels(Case(plain(64, bounded_right=True)), Case(plain(64)))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [33_728, 262_144])
def test_long_sequences(length: int, causal: bool) -> None:
    need_gib(4)
    q, k, v = (normal(1, 1, length, 64) for _ in range(3))
    out = attend(q, k, v, causal=causal)
    for start in (0, length // 2, length - 128):
        rows = slice(start, start + 128)
        keys = slice(0, start + 128 if causal else length)
        expected = exact(q[:, :, rows], k[:, :, keys], v[:, :, keys], causal=causal)
        assert_close(out[:, :, rows], expected)


@pytest.mark.kernels(Case(plain(64, bounded_right=True)), Case(plain(64)))
@pytest.mark.parametrize("causal", [False, True])
def test_long_sequence_of_zeros(causal: bool) -> None:
    zeros = torch.zeros(1, 1, 33_728, 64, device="cuda", dtype=HALF)
    assert (attend(zeros, zeros, zeros, causal=causal, out=torch.full_like(zeros, float("nan"))) == 0).all()
