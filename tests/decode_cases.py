"""Small decode calls on CPU tensors, for tests of everything around the kernel."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from cute_attn.caches import Cache, ContiguousCache, PagedCache

Arguments = dict[str, Any]

BATCH, Q_LEN, HEADS, HEADS_KV, HEAD_DIM, CAPACITY, PAGE_SIZE = 3, 2, 4, 2, 16, 40, 8


def normal(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def lengths(*values: int) -> Tensor:
    return torch.tensor(values or (0, CAPACITY, 5), dtype=torch.int32)


def quantised(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (20 * x).round().clamp(-127, 127).to(dtype)


def contiguous(dtype: torch.dtype = torch.float16, scale: Any = None, batch: int = BATCH) -> ContiguousCache:
    """A cache with room for 40 tokens."""
    k, v = (normal(batch, CAPACITY, HEADS_KV, HEAD_DIM + i)[..., :HEAD_DIM].contiguous() for i in range(2))
    if dtype.itemsize == 1:
        return ContiguousCache(quantised(k, dtype), quantised(v, dtype), scale)
    return ContiguousCache(k.to(dtype), v.to(dtype))


def paged(dtype: torch.dtype = torch.float16, scale: Any = None, two_tables: bool = False) -> PagedCache:
    """The same tokens in pages of 8, in shuffled order."""
    cache = contiguous(dtype, scale)
    pages = CAPACITY // PAGE_SIZE
    order = torch.randperm(2 * BATCH * pages, generator=torch.Generator().manual_seed(1))
    tables = order.view(2, BATCH, pages) if two_tables else order[: BATCH * pages].view(1, BATCH, pages).repeat(2, 1, 1)
    pools = []
    for x, table in zip((cache.k, cache.v), tables, strict=True):
        bits = torch.zeros(2 * BATCH * pages, PAGE_SIZE, HEADS_KV, HEAD_DIM, dtype=x.dtype).view(_bits(x))
        bits[table.flatten()] = x.view(_bits(x)).reshape(-1, PAGE_SIZE, HEADS_KV, HEAD_DIM)
        pools.append(bits.view(x.dtype))
    table = (tables.transpose(0, 1) if two_tables else tables[0]).to(torch.int32).contiguous()
    k, v = pools
    return PagedCache(k, v, table, cache.scale)


def _bits(x: Tensor) -> torch.dtype:
    return torch.int8 if x.element_size() == 1 else x.dtype


def call(cache: Cache | None = None, dtype: torch.dtype = torch.float16) -> Arguments:
    """q, cache and lengths of 3 sequences of 0, 40 and 5 tokens, with 2 queries each."""
    cache = contiguous(dtype) if cache is None else cache
    return {"q": normal(BATCH, Q_LEN, HEADS, HEAD_DIM, dtype=dtype), "cache": cache, "lengths": lengths()}


def sinks() -> Tensor:
    return torch.tensor([0.5, -2.0, 3.0, -math.inf])


FP8 = torch.float8_e4m3fn
INPUTS: dict[str, Any] = {
    "contiguous": call,
    "bf16": lambda: call(dtype=torch.bfloat16),
    "paged": lambda: call(paged()),
    "two tables": lambda: call(paged(two_tables=True)),
    "int8": lambda: call(contiguous(torch.int8, 0.05)),
    "fp8 paged": lambda: call(paged(FP8, (0.05, 0.04))),
    "scales on the device": lambda: call(paged(torch.int8, (torch.tensor(0.05), torch.tensor([0.04])))),
    "a scale each way": lambda: call(contiguous(FP8, (0.05, torch.tensor(0.04))), torch.bfloat16),
    "no scale": lambda: call(contiguous(torch.int8)),
    "packed rows": lambda: call() | {"q": normal(BATCH * Q_LEN, HEADS, HEAD_DIM)},
    "one query": lambda: call() | {"q": normal(BATCH, HEADS, HEAD_DIM)},
    "views": lambda: call(ContiguousCache(*normal(BATCH, HEADS_KV, CAPACITY, 2, HEAD_DIM).transpose(1, 2).unbind(3))),
}
OPTIONS: dict[str, Arguments] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -0.3},
    "zero scale": {"scale": 0.0},
    "window": {"window": 4},
    "window of one": {"window": 1},
    "no window": {"window": -1},
    "wide window": {"window": 2**40},
    "softcap": {"softcap": 2.0},
    "no softcap": {"softcap": 0},
    "sinks": {"sinks": sinks()},
    "splits": {"num_splits": 3},
    "split size": {"split_size": 100},
    "all": {"scale": 0.3, "window": 7, "softcap": 1.5, "sinks": sinks(), "num_splits": 2},
}
ALL = [f"{i}-{o}" for i, o in itertools.product(INPUTS, OPTIONS)]
NOT_IN_THE_REFERENCE = ("num_splits", "split_size", "config", "check", "out")


def make(case: str) -> Arguments:
    """The arguments of a case in ``ALL``."""
    inputs, options = case.split("-")
    return INPUTS[inputs]() | OPTIONS[options]


def for_reference(arguments: Arguments) -> Arguments:
    return {name: value for name, value in arguments.items() if name not in NOT_IN_THE_REFERENCE}
