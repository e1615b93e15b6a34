"""What can be said about the GPU tests without a GPU: what they cover, what they cost, and that they can fail."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cute_attn.problem import KernelSpec
from tests.gpu import check
from tests.gpu.cases import STORAGES, Case, Shape, draw, plain
from tests.gpu.tensors import make_tensors

MAX_KERNELS = 240  # each is a compile of seconds, though on all cores at once
MODULES = [path.stem for path in sorted((Path(__file__).parent / "gpu").glob("test_*.py"))]


def _cases() -> Iterator[Case]:
    """The calls in the marks of all GPU tests: what conftest compiles before the first test."""
    for name in MODULES:
        module = importlib.import_module(f"tests.gpu.{name}")
        marks = [mark for value in vars(module).values() for mark in getattr(value, "pytestmark", ())]
        for mark in marks:
            values = mark.args[1] if mark.name == "parametrize" else mark.args
            flat = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
            yield from (part for part in flat if isinstance(part, Case))


@pytest.fixture(scope="module")
def kernels() -> set[KernelSpec]:
    return {case.spec for case in _cases()}


def test_number_of_kernels_is_bounded(kernels: set[KernelSpec]) -> None:
    assert len(kernels) <= MAX_KERNELS


def test_every_head_dim_is_launched(kernels: set[KernelSpec]) -> None:
    assert {spec.problem.head_dim for spec in kernels} == set(range(8, 257, 8))


def test_every_config_fits_the_device(kernels: set[KernelSpec]) -> None:
    for spec in kernels:
        spec.config.check_fits(spec.arch, spec.problem.head_dim, spec.problem.head_dim_v)


CHECKED = [
    draw(replace(plain(64), bounded_left=left, bounded_right=right, varlen=varlen, return_lse=True), seed)
    for left, right, varlen in ((False, False, False), (False, True, True), (True, True, False), (True, False, True))
    for seed in range(3)
]


@pytest.mark.parametrize("case", CHECKED, ids=lambda case: case.problem.name)
def test_reference_passes(case: Case) -> None:
    check.check(case, "cpu")


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("varlen", [False, True])
def test_storages_hold_the_same_values(storage: str, layout: str, varlen: bool) -> None:
    case = Case(plain(40, varlen=varlen), Shape.dense(5, 7, batch=2, heads_kv=2, group=3), layout=layout)
    plainly, stored = (make_tensors(c, "cpu") for c in (case, replace(case, storage=storage)))
    for name in ("q", "k", "v"):
        a, b = getattr(plainly, name), getattr(stored, name)
        assert a.shape == b.shape
        assert b.stride(-1) == 1
        assert all(stride % 8 == 0 for stride in b.stride()[:-1])
        assert b.isfinite().all()
        assert storage == "expanded" or torch.equal(a, b)


CASE = Case(plain(64, bounded_right=True, return_lse=True), Shape.dense(70, 90, heads_kv=2, group=2))


def _result(case: Case = CASE) -> tuple[check.Tensors, check.Result]:
    tensors = make_tensors(case, "cpu")
    return tensors, check.run(case, tensors)


def test_wrong_mask_is_found() -> None:
    tensors, _ = _result()
    shifted = replace(CASE, problem=replace(CASE.problem, bounded_left=True), window=(60, 0))
    with pytest.raises(AssertionError, match="rows are wrong"):
        check.assert_right(CASE, tensors, check.run(shifted, tensors))


def test_one_wrong_element_is_found() -> None:
    tensors, result = _result()
    result.out[0, 1, 33, 5] += 4 * result.out[0, 1, 33].abs().max() * 2**-10
    with pytest.raises(AssertionError, match=r"1 of 280 rows are wrong, the first at \(0, 1, 33\)"):
        check.assert_right(CASE, tensors, result)


def test_unwritten_row_is_found() -> None:
    tensors, result = _result()
    result.out[0, 3, 69] = math.nan
    with pytest.raises(AssertionError, match="1 of 280 rows are wrong"):
        check.assert_right(CASE, tensors, result)


def test_wrong_lse_is_found() -> None:
    tensors, result = _result()
    assert result.lse is not None
    result.lse.mul_(math.log2(math.e))
    with pytest.raises(AssertionError, match="rows of lse are wrong"):
        check.assert_right(CASE, tensors, result)


@pytest.mark.parametrize("storage", ["contiguous", "padded"])
def test_write_beyond_the_output_is_found(storage: str) -> None:
    tensors, _ = _result(replace(CASE, storage=storage))
    check.assert_nothing_written_beyond(tensors)
    tensors.out_buffer[tensors.out.storage_offset() + 70 * tensors.out.stride(2) * 4] = 0
    with pytest.raises(AssertionError, match="1 elements beyond the output"):
        check.assert_nothing_written_beyond(tensors)
