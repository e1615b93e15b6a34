"""What can be said about the GPU tests of decode without a GPU: what they cover, what they cost, that they can fail."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cute_attn.problem import KernelSpec
from tests.gpu import decode_check
from tests.gpu.decode_cases import CACHES, HEAD_DIMS, PAGE_SIZES, DecodeCase, covering_problems, draw, plain
from tests.gpu.decode_tensors import make_decode_tensors

MAX_KERNELS = 130  # each is a compile of seconds, though on all cores at once
MODULES = [path.stem for path in sorted((Path(__file__).parent / "gpu").glob("test_decode*.py"))]


def _cases() -> Iterator[DecodeCase]:
    """The calls in the marks of all GPU tests of decode: what conftest compiles before the first test."""
    for name in MODULES:
        module = importlib.import_module(f"tests.gpu.{name}")
        marks = [mark for value in vars(module).values() for mark in getattr(value, "pytestmark", ())]
        for mark in marks:
            values = mark.args[1] if mark.name == "parametrize" else mark.args
            flat = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
            yield from (part for part in flat if isinstance(part, DecodeCase))


@pytest.fixture(scope="module")
def kernels() -> set[KernelSpec]:
    return {case.spec for case in _cases()}


def test_number_of_kernels_is_bounded(kernels: set[KernelSpec]) -> None:
    assert len(kernels) <= MAX_KERNELS


def test_every_head_dim_is_launched(kernels: set[KernelSpec]) -> None:
    assert {spec.problem.head_dim for spec in kernels} == set(range(16, 257, 16))


def test_every_config_fits_the_device(kernels: set[KernelSpec]) -> None:
    for spec in kernels:
        spec.check_fits()


def test_any_two_features_meet() -> None:
    """A page size, say, with sinks, or a head dim with a dtype of the cache."""
    features = [
        ((p.dtype, p.cache_dtype), p.page_size, p.head_dim, rows, p.bounded_left, p.softcap, p.sinks, p.return_lse)
        for p, rows in covering_problems()
    ]
    pairs = {(i, f[i], j, f[j]) for f in features for i in range(8) for j in range(i)}
    sizes = [len(CACHES), len(PAGE_SIZES), len(HEAD_DIMS), 3, 2, 2, 2, 2]
    assert len(pairs) == sum(sizes[i] * sizes[j] for i in range(8) for j in range(i))


@pytest.mark.parametrize("index", range(0, 40, 4))
def test_reference_passes(index: int) -> None:
    decode_check.check_decode(draw(*covering_problems()[index], seed=index), "cpu")


CASE = DecodeCase(plain(64, "float16", page_size=16, return_lse=True), (70, 33), q_len=2, spare=9)


def test_poisoned_cache_is_found_where_it_is_read() -> None:
    """One token too many is NaN, and so is the result."""
    tensors = make_decode_tensors(CASE, "cpu")
    tensors.cache.page_table.clamp_(0, 3)  # type: ignore[union-attr]
    tensors.lengths += 1
    result = decode_check.run_decode(CASE, tensors)
    tensors.lengths -= 1
    with pytest.raises(AssertionError, match="rows are wrong"):
        decode_check.assert_decode_right(CASE, tensors, result)


def test_one_wrong_element_is_found() -> None:
    tensors = make_decode_tensors(CASE, "cpu")
    result = decode_check.run_decode(CASE, tensors)
    decode_check.assert_decode_right(CASE, tensors, result)
    result.out[1, 1, 3, 5] += 8 * result.out[1, 1, 3].abs().max() * 2**-10
    with pytest.raises(AssertionError, match=r"1 of 32 rows are wrong, the first at \(1, 1, 3\)"):
        decode_check.assert_decode_right(CASE, tensors, result)


def test_unwritten_row_and_wrong_lse_are_found() -> None:
    tensors = make_decode_tensors(CASE, "cpu")
    result = decode_check.run_decode(CASE, tensors)
    assert result.lse is not None
    result.lse[0, 0, 1] *= math.log2(math.e)
    with pytest.raises(AssertionError, match="1 of 32 rows of lse are wrong"):
        decode_check.assert_decode_right(CASE, tensors, result)
    result.out[0, 1, 2] = math.nan
    with pytest.raises(AssertionError, match="1 of 32 rows are wrong"):
        decode_check.assert_decode_right(CASE, tensors, result)


@pytest.mark.parametrize("changes", [{"window": 7}, {"scale": 0.2}, {"softcap": 9.0}])
def test_another_option_than_asked_for_is_found(changes: dict[str, float]) -> None:
    problem = replace(CASE.problem, bounded_left="window" in changes, softcap="softcap" in changes)
    case = replace(CASE, problem=problem, window=6)
    tensors = make_decode_tensors(case, "cpu")
    other = replace(case, window=int(changes.get("window", 6)), scale=changes.get("scale"))
    other = replace(other, softcap=changes.get("softcap", 3.0))
    tensors.cache.page_table.clamp_(0, 3)  # type: ignore[union-attr]
    result = decode_check.run_decode(other, tensors)
    with pytest.raises(AssertionError, match="are wrong"):
        decode_check.assert_decode_right(case, tensors, result)
