"""One call of attention, described: which kernel it needs, and everything to make its inputs from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cute_attn import PrefillConfig
from cute_attn.arch import Arch, arch_by_name, arch_of
from cute_attn.configs import default_config
from cute_attn.problem import KernelSpec, PrefillProblem

# Around the tile sizes, the mma's 16 rows and 8 keys, and nothing at all.
EDGE_LENGTHS = (0, 1, 2, 7, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 513)
GROUP_SIZES = (1, 2, 3, 4, 8)
STORAGES = ("contiguous", "transposed", "fused", "padded", "expanded")


def arch_under_test() -> Arch:
    """The first device's architecture; without a device sm_90a, for which kernels are then only counted."""
    return arch_of(torch.cuda.get_device_capability(0)) if torch.cuda.is_available() else arch_by_name("sm_90a")


@dataclass(frozen=True)
class Shape:
    """Sizes of a call.

    Attributes:
        q_lens: queries of each sequence; all equal unless the call is packed.
        k_lens: keys of each sequence, likewise.
        heads_kv: key and value heads.
        group: query heads per key head.
    """

    q_lens: tuple[int, ...] = (128,)
    k_lens: tuple[int, ...] = (128,)
    heads_kv: int = 1
    group: int = 1

    @property
    def batch(self) -> int:
        return len(self.q_lens)

    @property
    def heads_q(self) -> int:
        return self.heads_kv * self.group

    @classmethod
    def dense(cls, q_len: int, k_len: int, batch: int = 1, heads_kv: int = 1, group: int = 1) -> Shape:
        """Every sequence as long as every other."""
        return cls((q_len,) * batch, (k_len,) * batch, heads_kv, group)


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        problem: the kernel's problem; says which of the options below are in force.
        shape: sizes.
        window: (left, right) widths, in force where the problem is bounded.
        scale: the softmax scale; None for the default.
        layout: "bhsd" or "bshd" (packed calls have their own).
        storage: how the tensors lie in memory, see ``tests.gpu.tensors``.
        config: the tiling; None for the default.
        seed: of the random inputs.
    """

    problem: PrefillProblem
    shape: Shape = Shape()
    window: tuple[int, int] = (0, 0)
    scale: float | None = None
    layout: str = "bhsd"
    storage: str = "contiguous"
    config: PrefillConfig | str | None = None
    seed: int = 0

    @property
    def spec(self) -> KernelSpec:
        """The kernel that this call needs on the device under test."""
        arch, problem = arch_under_test(), self.problem
        config = self.config or default_config(arch, problem.head_dim, problem.head_dim_v)
        assert isinstance(config, PrefillConfig), "give configs by value where the kernel has to be known"
        return KernelSpec(problem, config, arch)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of ``attention`` that the reference takes too and that are not tensors."""
        left = self.window[0] if self.problem.bounded_left else None
        right = self.window[1] if self.problem.bounded_right else None
        mask = {"causal": True, "window": (left, None)} if right == 0 else {"window": (left, right)}
        return {**mask, "scale": self.scale, "layout": self.layout}


def draw(problem: PrefillProblem, seed: int, config: PrefillConfig | None = None) -> Case:
    """A random call of one kernel."""
    rng = random.Random(f"{problem.name} {seed}")
    sequences = rng.randint(1, 5 if problem.varlen else 3)
    return Case(
        problem,
        Shape(
            q_lens=_draw_lengths(rng, sequences, problem.varlen),
            k_lens=_draw_lengths(rng, sequences, problem.varlen),
            heads_kv=rng.choice((1, 2, 3)),
            group=rng.choice(GROUP_SIZES),
        ),
        window=(rng.choice((0, 1, 7, 64, 100, 300)), rng.choice((0, 0, 1, 5, 64, 200))),
        scale=rng.choice((None, None, None, 0.5, -0.1)),
        layout=rng.choice(("bhsd", "bshd")),
        storage=rng.choice(STORAGES),
        config=config,
        seed=rng.randrange(2**31),
    )


def _draw_lengths(rng: random.Random, sequences: int, ragged: bool) -> tuple[int, ...]:
    def length() -> int:
        return rng.choice(EDGE_LENGTHS) if rng.random() < 0.6 else rng.randint(1, 1100)

    return tuple(length() for _ in range(sequences)) if ragged else (length(),) * sequences


def plain(head_dim: int, dtype: str = "float16", **changes: Any) -> PrefillProblem:
    """A problem with equal head dims; ``changes`` are its other fields."""
    return replace(PrefillProblem(dtype, head_dim, head_dim), **changes)


def kernels(cases: Sequence[Case]) -> set[KernelSpec]:
    """The distinct kernels of some calls."""
    return {case.spec for case in cases}
