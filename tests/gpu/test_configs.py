"""Every tiling that can be asked for gives the right result: the seed's, each field's other values, small memories'."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from cute_attn import SEED_CONFIGS, PrefillConfig
from cute_attn.arch import arch_by_name
from cute_attn.configs import default_config, parse_config
from tests.gpu.attend import attend
from tests.gpu.cases import Case, Shape, arch_under_test, plain
from tests.gpu.check import check, run
from tests.gpu.tensors import make_tensors

SHAPES = (Shape.dense(301, 333, batch=2, heads_kv=2, group=2), Shape.dense(256, 256), Shape.dense(65, 1))
SEED_HEAD_DIMS = {1: (32, 64, 96, 128, 256), 2: (32, 64, 96, 128)}  # by stages


def _seed_cases() -> Iterator[tuple[str, Case]]:
    for name, config in SEED_CONFIGS.items():
        for head_dim in SEED_HEAD_DIMS[config.num_stages]:
            case = Case(plain(head_dim, bounded_right=True), config=parse_config(name, head_dim))
            if fits(case):
                yield name, case


def fits(case: Case) -> bool:
    """Whether the device has the shared memory for a case's config."""
    config, problem = case.config, case.problem
    assert isinstance(config, PrefillConfig)
    return config.smem_bytes(problem.head_dim, problem.head_dim_v) <= arch_under_test().smem_bytes


SEED_CASES = list(_seed_cases())


@pytest.mark.parametrize(("name", "case"), SEED_CASES, ids=[f"{n}-d{c.problem.head_dim}" for n, c in SEED_CASES])
def test_seed_tilings(name: str, case: Case) -> None:
    for shape in SHAPES:
        check(replace(case, shape=shape, storage="padded"))


@pytest.mark.parametrize(("name", "case"), SEED_CASES[:1], ids=["by name"])
def test_seed_tilings_by_name(name: str, case: Case) -> None:
    tensors = make_tensors(case, "cuda")
    by_value = run(case, tensors).out.clone()
    assert torch.equal(attend(tensors.q, tensors.k, tensors.v, causal=True, config=name), by_value)


# One field changed, then several together.
CHANGES: tuple[dict[str, object], ...] = (
    {},
    {"swizzle": False},
    {"q_in_regs": True},
    {"o_fp32": False},
    {"o_store": "shuffle"},
    {"num_stages": 1},
    {"num_stages": 4},
    {"tile_m": 64},
    {"tile_n": 16},
    {"tile_n": 32},
    {"tile_n": 80},
    {"tile_n": 96},
    {"tile_n": 112},
    {"tile_n": 128},
    {"num_warps": 8},
    {"num_warps": 8, "tile_m": 256},
    {"num_warps": 8, "tile_n": 32, "swizzle": False, "num_stages": 4},
    {"swizzle": False, "q_in_regs": True, "num_stages": 1, "o_store": "shuffle", "o_fp32": False},
    {"tile_m": 64, "q_in_regs": True, "num_stages": 1},
    {"tile_n": 48, "num_stages": 4, "o_fp32": False},
)


def _changed_cases() -> Iterator[Case]:
    for head_dim, dtype in ((64, "float16"), (128, "bfloat16")):
        for change in CHANGES:
            config = replace(PrefillConfig(), **change)  # type: ignore[arg-type]
            case = Case(plain(head_dim, dtype, bounded_right=True, return_lse=True), config=config)
            if fits(case):
                yield case
    for change in CHANGES[:6]:  # a head dim that tiles must pad, and a value head dim of its own
        config = replace(PrefillConfig(), **change)  # type: ignore[arg-type]
        yield Case(plain(72, head_dim_v=40, bounded_right=True, return_lse=True), config=config)


def _config_id(case: Case) -> str:
    assert isinstance(case.config, PrefillConfig)
    return f"d{case.problem.head_dim}-{case.config.name}"


CHANGED_CASES = list(_changed_cases())


@pytest.mark.parametrize("case", CHANGED_CASES, ids=_config_id)
def test_each_field(case: Case) -> None:
    for shape in SHAPES:
        check(replace(case, shape=shape, storage="padded"))


SMALL_MEMORY_CASES = [
    Case(plain(head_dim, bounded_right=True), SHAPES[0], config=default_config(arch_by_name(arch), head_dim, head_dim))
    for arch in ("sm_86", "sm_89", "sm_120")
    for head_dim in (64, 128, 192, 256)
]


@pytest.mark.parametrize("case", SMALL_MEMORY_CASES, ids=_config_id)
def test_defaults_of_architectures_with_99_kb(case: Case) -> None:
    check(case)


def test_config_that_does_not_fit_is_refused() -> None:
    q = torch.zeros(1, 1, 16, 256, device="cuda", dtype=torch.float16)
    with pytest.raises(ValueError, match=r"shared memory at head_dim 256"):
        attend(q, q, q, config=PrefillConfig(256, 256, 8, 4))
