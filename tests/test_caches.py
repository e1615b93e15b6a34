"""The cache dataclasses: what they accept, what they derive, and every refusal."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_attn import caches
from cute_attn.caches import ContiguousCache, PagedCache

FP8 = torch.float8_e4m3fn


def pool(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def table(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def test_contiguous() -> None:
    k, v = pool(3, 100, 2, 64), pool(3, 100, 2, 64)
    cache = ContiguousCache(k, v)
    assert (cache.batch, cache.capacity, cache.page_size) == (3, 100, 0)
    assert (cache.k_scale, cache.v_scale) == (1.0, 1.0)
    assert cache.k is k
    assert cache.k_page_table is None
    assert cache.v_page_table is None


def test_paged_with_one_index() -> None:
    pages = table(3, 5)
    cache = PagedCache(pool(9, 16, 2, 64), pool(9, 16, 2, 64), pages)
    assert (cache.batch, cache.capacity, cache.page_size) == (3, 80, 16)
    assert cache.k_page_table is pages
    assert cache.v_page_table is pages


def test_paged_with_an_index_each() -> None:
    x, pages = pool(9, 16, 2, 64), torch.arange(30, dtype=torch.int32).reshape(3, 2, 5)
    cache = PagedCache(x, x, pages)
    assert (cache.batch, cache.capacity) == (3, 80)
    assert torch.equal(cache.k_page_table, pages[:, 0])
    assert torch.equal(cache.v_page_table, pages[:, 1])


def test_views_are_taken() -> None:
    k, v = pool(9, 2, 16, 3, 64).unbind(1)
    assert PagedCache(k, v, table(1, 4)).page_size == 16
    k = pool(9, 3, 16, 64).transpose(1, 2)
    assert PagedCache(k, k, table(1, 4)).page_size == 16
    odd = pool(1, 1, 5, 16).as_strided((1, 1, 5, 16), (3, 7, 16, 1))
    assert ContiguousCache(odd, odd).capacity == 1


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
def test_scales(dtype: torch.dtype) -> None:
    k, on_device = pool(3, 100, 2, 64, dtype=dtype), torch.tensor(0.5)
    assert ContiguousCache(k, k).k_scale == 1.0
    one = ContiguousCache(k, k, 0.25)
    assert (one.k_scale, one.v_scale) == (0.25, 0.25)
    each = ContiguousCache(k, k, (2, on_device))
    assert each.k_scale == 2
    for scale in (each.v_scale, ContiguousCache(k, k, on_device.reshape(1)).k_scale):
        assert isinstance(scale, Tensor)
        assert scale.shape == (1,)
        assert scale.data_ptr() == on_device.data_ptr()


def test_caches_of_one_kind_share_a_key() -> None:
    def cache(pages: int = 9, dtype: torch.dtype = torch.int8, scale: Any = 0.5, columns: int = 4) -> PagedCache:
        return PagedCache(
            pool(pages, 16, 2, 64, dtype=dtype), pool(pages, 16, 2, 64, dtype=dtype), table(3, columns), scale
        )

    key = cache().key
    assert cache().key is key
    for other in (cache(pages=8), cache(dtype=FP8), cache(scale=0.25), cache(scale=torch.ones(1)), cache(columns=5)):
        assert other.key is not key


def test_known_kinds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "_known", {})
    monkeypatch.setattr(caches, "MAX_KINDS", 3)
    keys = {ContiguousCache(pool(1, length, 1, 16), pool(1, length, 1, 16)).key for length in range(1, 9)}
    assert len(keys) == 8
    assert len(caches._known) <= 3


def test_fake_tensors() -> None:
    with FakeTensorMode():
        k = torch.empty(3, 100, 2, 64, dtype=torch.float16, device="cuda")
        cache = ContiguousCache(k, k)
        assert cache.capacity == 100
        assert cache.key is None
        odd = torch.empty(3, 100, 2, 63, dtype=torch.float16, device="cuda")
        with pytest.raises(ValueError, match="k: head_dim is 63"):
            ContiguousCache(odd, odd)


def test_fields_cannot_be_replaced() -> None:
    cache = ContiguousCache(pool(3, 100, 2, 64), pool(3, 100, 2, 64))
    with pytest.raises(AttributeError):
        cache.k = cache.v  # type: ignore[misc]


def misaligned(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].reshape(x.shape)


X, I8 = pool(9, 16, 2, 64), pool(9, 16, 2, 64, dtype=torch.int8)
TABLE = table(3, 5)
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "k no tensor": (lambda: ContiguousCache([1.0], X), "k: its type is list; allowed: torch.Tensor"),  # type: ignore[arg-type]
    "v no tensor": (lambda: ContiguousCache(X, None), "v: its type is NoneType; allowed: torch.Tensor"),  # type: ignore[arg-type]
    "table no tensor": (lambda: PagedCache(X, X, None), "page_table: its type is NoneType; allowed: torch.Tensor"),  # type: ignore[arg-type]
    "dtype": (lambda: ContiguousCache(X.float(), X.float()), "k: dtype is torch.float32; allowed: torch.float16, t"),
    "dtype of v": (lambda: ContiguousCache(X, X.bfloat16()), "v: dtype is torch.bfloat16; allowed: torch.float16, th"),
    "device of v": (lambda: ContiguousCache(X, X.to("meta")), "v: device is meta; allowed: cpu, that of k"),
    "3 dimensions": (lambda: ContiguousCache(X[0], X[0]),
                     "k: shape is (16, 2, 64); allowed: 4 dimensions, (batch, capacity, heads_kv, head_dim)"),
    "paged of 3": (lambda: PagedCache(X[0], X[0], TABLE), "4 dimensions, (pages, page_size, heads_kv, head_dim)"),
    "shape of v": (lambda: ContiguousCache(X, X[:, :8]), "v: shape is (9, 8, 2, 64); allowed: (9, 16, 2, 64), that of"),
    "no heads": (lambda: ContiguousCache(X[:, :, :0], X[:, :, :0]), "k: its number of heads is 0; allowed: at least 1"),
    "head_dim 40": (lambda: ContiguousCache(X[..., :40], X[..., :40]),
                    "k: head_dim is 40; allowed: a multiple of 16 from 16 to 256"),
    "head_dim 272": (lambda: ContiguousCache(pool(1, 4, 1, 272), pool(1, 4, 1, 272)), "k: head_dim is 272; allowed"),
    "head_dim 0": (lambda: ContiguousCache(X[..., :0], X[..., :0]), "k: head_dim is 0; allowed"),
    "page size": (lambda: PagedCache(X[:, :12], X[:, :12], TABLE), "k: its page size is 12; allowed: a multiple of 8"),
    "page size 0": (lambda: PagedCache(X[:, :0], X[:, :0], TABLE), "k: its page size is 0; allowed: a multiple of 8"),
    "heads first": (lambda: PagedCache(X.transpose(1, 2), X.transpose(1, 2), TABLE), "(is the pool to be transposed?)"),
    "table dtype": (lambda: PagedCache(X, X, TABLE.long()), "page_table: dtype is torch.int64; allowed: torch.int32"),
    "table device": (lambda: PagedCache(X, X, TABLE.to("meta")), "page_table: device is meta; allowed: cpu, that of k"),
    "table of 1": (lambda: PagedCache(X, X, TABLE[0]), "page_table: shape is (5,); allowed: (batch, max_pages), or (b"),
    "table of 3": (lambda: PagedCache(X, X, table(4, 3, 5)), "page_table: shape is (4, 3, 5); allowed: (batch, max_pa"),
    "table stride": (lambda: PagedCache(X, X, table(5, 3).T), "page_table: stride is (1, 3); allowed: 1 in the last"),
    "capacity": (lambda: PagedCache(X, X, table(1, 1).expand(1, 2**27)), "page_table: "),
    "last dimension": (lambda: ContiguousCache(X.mT.contiguous().mT, X), "k: stride is (2048, 128, 1, 2); allowed: 1"),
    "row stride": (lambda: ContiguousCache(X, torch.nn.functional.pad(X, (0, 4))[..., :64]),
                   "v: stride is (2176, 136, 68, 1); allowed: multiples of 8 elements before the last dimension"),
    "int8 row stride": (lambda: ContiguousCache(torch.nn.functional.pad(I8, (0, 8))[..., :64], I8),
                        "k: stride is (2304, 144, 72, 1); allowed: multiples of 16 elements"),
    "address": (lambda: ContiguousCache(X, misaligned(X)), "v: address of its first element is 0x"),
    "scale of 16 bits": (lambda: ContiguousCache(X, X, 0.06),
                         "scale: it is 0.06; allowed: None, as a cache of torch.float16 is not quantised"),
    "scale 1 of 16 bits": (lambda: ContiguousCache(X, X, 1.0), "scale: it is 1.0; allowed: None, as a cache of to"),
    "scale zero": (lambda: ContiguousCache(I8, I8, 0.0), "scale: it is 0.0; allowed: from 1e-30 to 1e30"),
    "scale negative": (lambda: ContiguousCache(I8, I8, (1.0, -1.0)), "scale: it is -1.0; allowed: from 1e-30 to 1e30"),
    "scale nan": (lambda: ContiguousCache(I8, I8, math.nan), "scale: it is nan; allowed: from 1e-30 to 1e30"),
    "scale bool": (lambda: ContiguousCache(I8, I8, True), "scale: its type is bool; allowed: None, a float, a tens"),
    "scale text": (lambda: ContiguousCache(I8, I8, "1"), "scale: its type is str; allowed: None, a float"),  # type: ignore[arg-type]
    "scale of 3": (lambda: ContiguousCache(I8, I8, (1.0, 1.0, 1.0)), "scale: its length is 3; allowed: 2"),  # type: ignore[arg-type]
    "scale dtype": (lambda: ContiguousCache(I8, I8, torch.ones(1).half()), "scale: dtype is torch.float16; allowed"),
    "scale device": (lambda: ContiguousCache(I8, I8, torch.ones(1, device="meta")), "scale: device is meta; allowed"),
    "scale per head": (lambda: ContiguousCache(I8, I8, torch.ones(2)), "scale: shape is (2,); allowed: one element"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_fields_are_named(case: str) -> None:
    make, message = WRONG[case]
    for _ in range(2):  # what was refused once is refused again
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            make()
        assert message in str(caught.value)


def test_a_known_kind_is_still_checked_for_its_address() -> None:
    x = pool(2, 4, 1, 16)
    ContiguousCache(x, x)
    with pytest.raises(ValueError, match="k: address of its first element"):
        ContiguousCache(misaligned(x), x)


def test_pickles_and_copies_look_at_their_own_memory() -> None:
    table = torch.zeros(2, 2, 4, dtype=torch.int32)
    pool = torch.zeros(9, 16, 2, 64, dtype=torch.int8)
    cache = PagedCache(pool, pool.clone(), table, torch.tensor(0.1))
    for other in (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
        other.page_table.fill_(3)
        assert isinstance(other.scale, Tensor)
        other.scale.fill_(2.0)
        assert other.k_page_table.eq(3).all()
        assert other.v_page_table.eq(3).all()
        assert isinstance(other.k_scale, Tensor)
        assert other.k_scale.item() == 2.0
    assert cache.k_page_table.eq(0).all()


def test_float8_caches_can_be_saved() -> None:
    k = torch.randn(2, 50, 2, 64).to(torch.float8_e4m3fn)
    buffer = io.BytesIO()
    torch.save(ContiguousCache(k, k.clone(), 0.1), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded.k_bits, k.view(torch.int8))
    assert loaded.k_bits.data_ptr() == loaded.k.data_ptr()


def test_sparse_tensors_are_refused() -> None:
    k = torch.zeros(2, 50, 2, 64)
    with pytest.raises(ValueError, match=r"k: layout is torch.sparse_coo; allowed: torch.strided"):
        ContiguousCache(k.to_sparse(), k)
