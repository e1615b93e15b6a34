"""Key and value caches as users describe them: contiguous or paged, 16-bit or quantised, checked once when made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from cute_attn.checks import check_plain
from cute_attn.errors import argument_error
from cute_attn.memory import ALIGNMENT

# What a cache may hold, as problems name it. The last two are quantised: element x stands for scale * x.
CACHE_DTYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int8: "int8",
    torch.float8_e4m3fn: "float8_e4m3fn",
}
QUANTISED = (torch.int8, torch.float8_e4m3fn)
HEAD_DIM_MULTIPLE = 16
MAX_HEAD_DIM = 256
PAGE_SIZE_MULTIPLE = 8  # tokens
MAX_CAPACITY = 2**30  # tokens of a sequence: what the kernels' 32-bit arithmetic bears
MAX_KINDS = 4096  # of about 1 KB each

Scale = float | Tensor


class CacheKey:
    """Stands for a kind of cache, everything about it that plans depend on; caches of one kind share it."""

    __slots__ = ()


_known: dict[tuple[Any, ...], CacheKey] = {}  # kinds that passed the checks


@dataclass(frozen=True, eq=False)
class ContiguousCache:
    """Keys and values of each sequence in one piece.

    Attributes:
        k: (batch, capacity, heads_kv, head_dim): token t of sequence b is k[b, t]. float16, bfloat16, int8 or
            float8_e4m3fn. The last dimension is dense, every other stride and the address a multiple of 16 bytes;
            views, such as slices of one tensor for both or ``x.transpose(1, 2)`` of (batch, heads_kv, capacity,
            head_dim), are read without a copy. head_dim is a multiple of 16 up to 256.
        v: of k's shape, dtype and device.
        scale: of a quantised (int8 or float8) cache, whose element x stands for scale * x: a positive float, or a
            float32 tensor of one element on k's device, which may change from call to call; a pair of them is (that of
            k, that of v). None is 1, and all that a 16-bit cache takes.

    Raises:
        ValueError: a field is wrong; the message names it, what it was and what is allowed.
    """

    page_size: ClassVar[int] = 0  # there are no pages
    k_page_table: ClassVar[None] = None
    v_page_table: ClassVar[None] = None

    k: Tensor
    v: Tensor
    scale: Scale | tuple[Scale, Scale] | None = None
    k_scale: Scale = field(init=False, repr=False)
    v_scale: Scale = field(init=False, repr=False)
    k_bits: Tensor = field(init=False, repr=False)
    v_bits: Tensor = field(init=False, repr=False)
    key: CacheKey | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _set_scales(self)
        _set_key(self, ())

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are made anew: what was derived from the fields must look at the copies' own memory."""
        return type(self), (self.k, self.v, self.scale)

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.k.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens that a sequence may have."""
        return self.k.shape[1]


@dataclass(frozen=True, eq=False)
class PagedCache:
    """Keys and values in pages of a pool, found through a table.

    Token t of sequence b is k[page_table[b, t // page_size], t % page_size].

    Attributes:
        k: the pool (pages, page_size, heads_kv, head_dim), of the dtypes, strides and head dims of
            ``ContiguousCache.k``. page_size is a multiple of 8. A pool of shape (pages, heads_kv, page_size, head_dim)
            is given as ``pool.transpose(1, 2)``, and one of shape (pages, 2, page_size, heads_kv, head_dim), for both,
            as ``*pool.unbind(1)``.
        v: of k's shape, dtype and device; the same tensor where pages of keys and values share one pool.
        page_table: int32, on k's device, dense in the last dimension: (batch, max_pages) with one page index for both,
            or (batch, 2, max_pages) with those of k and those of v. Entries of pages in which no query sees a token
            may hold anything. The others lie in the pool, which is not checked on a GPU unless a call asks for it.
        scale: as of ``ContiguousCache``.

    Raises:
        ValueError: a field is wrong; the message names it, what it was and what is allowed.
    """

    k: Tensor
    v: Tensor
    page_table: Tensor
    scale: Scale | tuple[Scale, Scale] | None = None
    k_scale: Scale = field(init=False, repr=False)
    v_scale: Scale = field(init=False, repr=False)
    k_bits: Tensor = field(init=False, repr=False)
    v_bits: Tensor = field(init=False, repr=False)
    k_page_table: Tensor = field(init=False, repr=False)
    v_page_table: Tensor = field(init=False, repr=False)
    key: CacheKey | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _set_scales(self)
        table = self.page_table
        if not isinstance(table, Tensor):
            raise argument_error("page_table", "its type", type(table).__name__, "torch.Tensor")
        _set_key(self, (table.shape, table.stride(), table.dtype, table.device))
        k_table, v_table = (table.select(1, 0), table.select(1, 1)) if table.dim() == 3 else (table, table)
        object.__setattr__(self, "k_page_table", k_table)
        object.__setattr__(self, "v_page_table", v_table)

    def __reduce__(self) -> tuple[Any, ...]:
        """As of ``ContiguousCache``."""
        return type(self), (self.k, self.v, self.page_table, self.scale)

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.page_table.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens that a sequence may have."""
        return self.page_table.shape[-1] * self.k.shape[1]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.k.shape[1]


Cache = ContiguousCache | PagedCache


def _set_scales(cache: Cache) -> None:
    scale = cache.scale
    k_scale: Scale
    v_scale: Scale
    if scale is None:
        k_scale = v_scale = 1.0
    elif isinstance(scale, (tuple, list)):
        if len(scale) != 2:
            raise argument_error("scale", "its length", len(scale), "2: (that of k, that of v)")
        k_scale, v_scale = scale
    else:
        k_scale = v_scale = scale
    object.__setattr__(cache, "k_scale", _flat(k_scale))
    object.__setattr__(cache, "v_scale", _flat(v_scale))


def _flat(scale: Scale) -> Scale:
    """A scalar on the device as kernels take it: of shape (1,)."""
    return scale.reshape(1) if isinstance(scale, Tensor) and scale.numel() == 1 else scale


def _set_key(cache: Cache, table_kind: tuple[Any, ...]) -> None:
    """Checks the cache unless one like it has passed, and gives it its key; None while it has no memory."""
    k, v = cache.k, cache.v
    if not (isinstance(k, Tensor) and isinstance(v, Tensor)):
        argument, x = ("v", v) if isinstance(k, Tensor) else ("k", k)
        raise argument_error(argument, "its type", type(x).__name__, "torch.Tensor")
    if not torch.compiler.is_compiling():
        check_plain(k=k, v=v)
    if torch.compiler.is_compiling() or not (_has_memory(k) and _has_memory(v)):
        _check(cache)
        _set_bits(cache)
        object.__setattr__(cache, "key", None)
        return
    kind = (
        k.shape, v.shape, k.stride(), v.stride(), k.dtype, v.dtype, k.device, v.device,
        cache.scale is None, _scale_kind(cache.k_scale), _scale_kind(cache.v_scale), *table_kind,
    )  # fmt: skip
    key = _known.get(kind)
    if key is None:
        _check(cache)
        _check_strides("k", k)
        _check_strides("v", v)
        if cache.capacity > MAX_CAPACITY:  # here, as a compiled function would be made to guard it
            argument = "page_table" if isinstance(cache, PagedCache) else "k"
            raise argument_error(argument, "capacity", cache.capacity, f"at most {MAX_CAPACITY}")
        key = CacheKey()
        if len(_known) >= MAX_KINDS:
            _known.clear()
        _known[kind] = key
    for argument, x in (("k", k), ("v", v)):
        if x.data_ptr() % ALIGNMENT:
            allowed = f"a multiple of {ALIGNMENT} (call .clone())"
            raise argument_error(argument, "address of its first element", hex(x.data_ptr()), allowed)
    object.__setattr__(cache, "key", key)
    _set_bits(cache)


def _set_bits(cache: Cache) -> None:
    """``k_bits`` and ``v_bits``: k and v as kernels take them, which know of no float8."""
    for name, x in (("k_bits", cache.k), ("v_bits", cache.v)):
        object.__setattr__(cache, name, x.view(torch.int8) if x.dtype == torch.float8_e4m3fn else x)


def _has_memory(x: Tensor) -> bool:
    """Strides and address say where it lies: it is no fake tensor, and no transform's stand-in for several."""
    return type(x) in (Tensor, torch.nn.Parameter) and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _scale_kind(scale: Scale) -> Any:
    """A float that is 1.0 may come as an int, True or 1.0, which are the same key but not the same type."""
    if isinstance(scale, Tensor):
        return scale.shape, scale.dtype, scale.device
    return type(scale), scale


def _check(cache: Cache) -> None:
    """Raises ValueError unless the fields fit together, as far as shapes, dtypes, devices and numbers say."""
    k, v = cache.k, cache.v
    pages = isinstance(cache, PagedCache)
    if k.dtype not in CACHE_DTYPES:
        raise argument_error("k", "dtype", k.dtype, ", ".join(map(str, CACHE_DTYPES)))
    if v.dtype != k.dtype:
        raise argument_error("v", "dtype", v.dtype, f"{k.dtype}, that of k")
    if v.device != k.device:
        raise argument_error("v", "device", v.device, f"{k.device}, that of k")
    if k.dim() != 4:
        names = "(pages, page_size, heads_kv, head_dim)" if pages else "(batch, capacity, heads_kv, head_dim)"
        raise argument_error("k", "shape", tuple(k.shape), f"4 dimensions, {names}")
    if v.shape != k.shape:
        raise argument_error("v", "shape", tuple(v.shape), f"{tuple(k.shape)}, that of k")
    _, length, heads_kv, head_dim = k.shape
    if heads_kv < 1:
        raise argument_error("k", "its number of heads", heads_kv, "at least 1")
    check_cache_head_dim("k", head_dim, "head_dim")
    if isinstance(cache, PagedCache):
        if length % PAGE_SIZE_MULTIPLE or length < PAGE_SIZE_MULTIPLE:
            allowed = f"a multiple of {PAGE_SIZE_MULTIPLE} from {PAGE_SIZE_MULTIPLE} (is the pool to be transposed?)"
            raise argument_error("k", "its page size", length, allowed)
        _check_page_table(cache.page_table, k)
    _check_scale(cache.k_scale, cache)
    _check_scale(cache.v_scale, cache)


def check_cache_head_dim(argument: str, head_dim: int, what: str = "it") -> None:
    """Raises ValueError unless decode kernels take ``head_dim``."""
    if head_dim % HEAD_DIM_MULTIPLE or not 0 < head_dim <= MAX_HEAD_DIM:
        allowed = f"a multiple of {HEAD_DIM_MULTIPLE} from {HEAD_DIM_MULTIPLE} to {MAX_HEAD_DIM}"
        raise argument_error(argument, what, head_dim, allowed)


def _check_page_table(table: Tensor, k: Tensor) -> None:
    if table.dtype != torch.int32:
        raise argument_error("page_table", "dtype", table.dtype, "torch.int32")
    if table.device != k.device:
        raise argument_error("page_table", "device", table.device, f"{k.device}, that of k")
    if table.dim() not in (2, 3) or (table.dim() == 3 and table.shape[1] != 2):
        allowed = "(batch, max_pages), or (batch, 2, max_pages) with an index each for k and v"
        raise argument_error("page_table", "shape", tuple(table.shape), allowed)
    if table.stride(-1) != 1 and table.shape[-1] > 1:
        raise argument_error("page_table", "stride", table.stride(), "1 in the last dimension (call .contiguous())")


def _check_scale(scale: Scale, cache: Cache) -> None:
    if cache.scale is not None and cache.k.dtype not in QUANTISED:
        raise argument_error("scale", "it", repr(cache.scale), f"None, as a cache of {cache.k.dtype} is not quantised")
    if isinstance(scale, Tensor):
        if scale.dtype != torch.float32:
            raise argument_error("scale", "dtype", scale.dtype, "torch.float32")
        if scale.device != cache.k.device:
            raise argument_error("scale", "device", scale.device, f"{cache.k.device}, that of k")
        if scale.numel() != 1:
            raise argument_error("scale", "shape", tuple(scale.shape), "one element")
    elif not isinstance(scale, (float, int)) or isinstance(scale, bool):
        raise argument_error("scale", "its type", type(scale).__name__, "None, a float, a tensor, or a pair of them")
    elif not 1e-30 <= scale <= 1e30:  # also refuses NaN; products with other scales stay finite in float32
        raise argument_error("scale", "it", scale, "from 1e-30 to 1e30")


def _check_strides(argument: str, x: Tensor) -> None:
    """Raises ValueError unless 16-byte copies can read the rows."""
    if x.numel() == 0:
        return  # strides of nothing are arbitrary
    multiple = ALIGNMENT // x.element_size()
    *outer, last = x.stride()
    if last != 1:
        raise argument_error(argument, "stride", x.stride(), "1 in the last dimension (call .contiguous())")
    if any(stride % multiple and size > 1 for stride, size in zip(outer, x.shape, strict=False)):
        allowed = f"multiples of {multiple} elements before the last dimension (call .contiguous())"
        raise argument_error(argument, "stride", x.stride(), allowed)
