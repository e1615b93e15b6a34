"""One call of decode, described: which kernel it needs, and everything to make its inputs from."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cute_attn.decode_configs import DecodeConfig, default_decode_config
from cute_attn.decode_problem import DecodeProblem
from cute_attn.problem import KernelSpec
from tests.gpu.cases import EDGE_LENGTHS, arch_under_test

STORAGES = ("contiguous", "heads first", "fused")
SCALE_PLACES = ("host", "device", "mixed")
PAGE_SIZES = (0, 8, 16, 32, 64, 128)
HEAD_DIMS = (64, 128, 80, 256, 16, 192)
CACHES = tuple(
    (dtype, cache_dtype) for dtype in ("float16", "bfloat16") for cache_dtype in (dtype, "int8", "float8_e4m3fn")
)
# (group, q_len) with up to 8, up to 16 and more rows a head of the cache, for which kernels have tiles of their own.
ROWS = (
    ((1, 1), (4, 1), (8, 1), (2, 4), (1, 8), (5, 1), (7, 1), (3, 2)),
    ((16, 1), (4, 4), (9, 1), (2, 8), (12, 1), (3, 5), (1, 13)),
    ((32, 1), (8, 4), (4, 8), (64, 1), (6, 7), (1, 40), (17, 1), (33, 2)),
)


@dataclass(frozen=True)
class DecodeCase:
    """One call.

    Attributes:
        problem: the kernel's problem; says which of the options below are in force.
        lengths: tokens of each sequence.
        q_len: queries of each.
        heads_kv: heads of the cache.
        group: query heads of each.
        spare: tokens of capacity beyond the longest sequence.
        window: in force where the problem is bounded.
        softcap: in force where the problem has one.
        scale: the softmax scale; None for the default.
        scales: of the keys and values of a quantised cache.
        scale_place: where they are given: on the "host", on the "device", or "mixed".
        storage: how the cache lies in memory: "contiguous"; "heads first" (before tokens); "fused" (k beside v).
        two_tables: k and v have page indices of their own, into one pool.
        packed: q is (batch * q_len, heads, head_dim).
        num_splits: None for the host's choice.
        split_size: None for none.
        config: None for the default.
        seed: of the random inputs.
    """

    problem: DecodeProblem
    lengths: tuple[int, ...] = (300,)
    q_len: int = 1
    heads_kv: int = 2
    group: int = 4
    spare: int = 0
    window: int = 1
    softcap: float = 3.0
    scale: float | None = None
    scales: tuple[float, float] = (0.05, 0.04)
    scale_place: str = "host"
    storage: str = "contiguous"
    two_tables: bool = False
    packed: bool = False
    num_splits: int | None = None
    split_size: int | None = None
    config: DecodeConfig | None = None
    seed: int = 0

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def heads(self) -> int:
        """Of q."""
        return self.heads_kv * self.group

    @property
    def capacity(self) -> int:
        """Tokens that the cache has room for in each sequence."""
        tokens = max(self.lengths, default=0) + self.spare
        page = self.problem.page_size or 1
        return max(-(-tokens // page), 1) * page

    @property
    def spec(self) -> KernelSpec:
        """The kernel that this call needs on the device under test."""
        arch = arch_under_test()
        config = self.config or default_decode_config(arch, self.problem, self.group * self.q_len)
        return KernelSpec(self.problem, config, arch)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of ``decode`` that the reference takes too and that are not tensors."""
        return {
            "scale": self.scale,
            "window": self.window if self.problem.bounded_left else None,
            "softcap": self.softcap if self.problem.softcap else None,
        }

    def first_seen(self, length: int) -> int:
        """The first token of a sequence that one of its queries sees."""
        return max(0, length - self.q_len + 1 - self.window) if self.problem.bounded_left else 0


def plain(head_dim: int = 128, dtype: str = "bfloat16", cache: str | None = None, **changes: Any) -> DecodeProblem:
    """A problem with few features; ``changes`` are its other fields."""
    return replace(DecodeProblem(dtype, cache or dtype, head_dim), **changes)


def covering_problems() -> list[tuple[DecodeProblem, int]]:
    """Problems, each with an index into ``ROWS``, in which any two values of any two features meet."""
    axes: list[Sequence[Any]] = [CACHES, PAGE_SIZES, HEAD_DIMS, (0, 1, 2), *[(False, True)] * 4]
    pairs = {(i, a, j, b) for (i, x), (j, y) in itertools.combinations(enumerate(axes), 2) for a in x for b in y}
    rng, chosen = random.Random(0), list[Any]()
    while pairs:
        drawn = [tuple(rng.choice(axis) for axis in axes) for _ in range(60)]
        i, a, j, b = min(pairs, key=repr)  # each round covers at least this one
        drawn = [(*d[:i], a, *d[i + 1 : j], b, *d[j + 1 :]) for d in drawn]
        best = max(drawn, key=lambda values: len(_pairs(values) & pairs))
        pairs -= _pairs(best)
        chosen.append(best)
    return [
        (DecodeProblem(dtype, cache, dim, page, window, softcap, sinks, lse), rows)
        for (dtype, cache), page, dim, rows, window, softcap, sinks, lse in chosen
    ]


def _pairs(values: tuple[Any, ...]) -> set[tuple[int, Any, int, Any]]:
    return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(values), 2)}


def draw(problem: DecodeProblem, rows: int, seed: int) -> DecodeCase:
    """A random call of one kernel; ``rows`` is an index into ``ROWS``."""
    rng = random.Random(f"{problem.name} {rows} {seed}")
    group, q_len = rng.choice(ROWS[rows])

    def length() -> int:
        return rng.choice(EDGE_LENGTHS) if rng.random() < 0.6 else rng.randint(1, 2000)

    splits: dict[str, Any] = rng.choice((
        {}, {}, {"num_splits": 1}, {"num_splits": rng.choice((2, 3, 7, 40))},
        {"split_size": rng.choice((1, 64, 100, 256, 1000))},
    ))  # fmt: skip
    return DecodeCase(
        problem,
        lengths=tuple(length() for _ in range(rng.randint(1, 5))),
        q_len=q_len,
        heads_kv=rng.choice((1, 2, 3)),
        group=group,
        spare=rng.choice((0, 0, 1, 100, 1000)),
        window=rng.choice((1, 2, 5, 64, 100, 300, 3000)),
        softcap=rng.choice((1.0, 5.0, 30.0)),
        scale=rng.choice((None, None, None, 0.3, -0.1)),
        scale_place=rng.choice(SCALE_PLACES),
        storage=rng.choice(STORAGES),
        two_tables=rng.random() < 0.4,
        packed=rng.random() < 0.3,
        seed=rng.randrange(2**31),
        **splits,
    )
