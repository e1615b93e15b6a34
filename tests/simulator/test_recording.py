"""The micro-kernels run in the simulator with nothing found, and give what a GPU gave where that was recorded."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from layouts.simulator.fragments import element_values
from tests.simulator.recording.micro import Tolerance
from tests.simulator.recording.operands import values
from tests.simulator.recording.replay import Record, compare, differs, read_record, replay, run_in_simulator
from tests.simulator.recording.table import digest, key, micro_kernels

_BASES = sorted({name.split(".")[0] for name in micro_kernels()})


@cache
def _record() -> Record:
    return read_record(Path(__file__).parent / "data" / "instructions.npz")


def test_every_micro_kernel_is_recorded() -> None:
    """None failed on the GPU; and docs/simulator.md says how many there are."""
    record, kernels = _record(), micro_kernels()
    assert not record.failures
    assert record.results.keys() == record.digests.keys() == kernels.keys()
    exact = sum(kernel.tolerance is None for kernel in kernels.values())
    document = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")
    assert f"{len(kernels):,} micro-kernels" in document
    assert f"{exact:,} agree bit for bit" in document
    assert f"{len(kernels) - exact} within a tolerance" in document


@pytest.mark.parametrize("base", _BASES)
def test_micro_kernels(base: str) -> None:
    """Nothing is found, the results are written, and they are those of the record."""
    mismatches = []
    for name in (name for name in micro_kernels() if name.split(".")[0] == base):
        kernel = micro_kernels()[name]
        results = run_in_simulator(kernel)
        for result in results:
            assert not (result == result.dtype.type(0xA5A5)).all(), f"{name} left its results as they were"
        if mismatch := compare(_record(), kernel, results):
            mismatches.append(mismatch)
    assert not mismatches, "\n".join(map(str, mismatches))


def test_names_for_files_are_different() -> None:
    kernels = micro_kernels().values()
    assert len({key(kernel) for kernel in kernels}) == len(kernels)


def test_a_changed_bit_is_noticed(tmp_path: Path) -> None:
    """What the simulator gives, recorded and read again, agrees; with one bit changed, or another text, not."""
    names = ["add.s32", "cvt.rn.f16x2.e4m3x2", "shfl.sync.bfly.b32 8", "ex2.approx.ftz.f32"]
    record = Record(about={"gpu": "none"})
    for name in names:
        record.results[name] = run_in_simulator(micro_kernels()[name])
        record.digests[name] = digest(micro_kernels()[name])
    record.save(tmp_path / "record.npz")
    record = read_record(tmp_path / "record.npz")
    assert record.about == {"gpu": "none"}
    assert not replay(record)
    record.results["add.s32"][0][77] ^= 4
    record.digests["shfl.sync.bfly.b32 8"] = "0"
    assert [mismatch.name for mismatch in replay(record)] == ["add.s32", "shfl.sync.bfly.b32 8"]


def test_what_counts_as_different() -> None:
    values = np.array([1.0, np.nan, 0.0, 1.0], np.float32).view(np.uint32)
    others = np.array([1.0 + 2**-23, -np.nan, -0.0, 1.001], np.float32).view(np.uint32)
    assert differs("f32", values, others).tolist() == [True, False, True, True]
    assert differs("b32", values, others).tolist() == [True, True, True, True]
    assert differs("f32", values, others, Tolerance(2.0**-22)).tolist() == [False, False, False, True]
    halves = np.array([0x3C007E00, 0x3C003C00], np.uint32)
    assert differs("f16x2", halves, np.array([0x3C007E01, 0x3C003C01], np.uint32)).tolist() == [False, True]


@pytest.mark.parametrize("kind", ["f16", "bf16", "tf32", "e4m3", "e5m2", "s8"])
def test_small_operands_are_integers_of_their_format(kind: str) -> None:
    numbers = element_values(values(f"small_{kind}", 256, "x"), kind)
    assert set(np.unique(numbers)) == set(range(-4, 5))


@pytest.mark.parametrize("kind", ["f16", "bf16", "tf32", "e4m3", "e5m2"])
def test_unit_operands_fill_their_range(kind: str) -> None:
    numbers = element_values(values(f"unit_{kind}", 256, "x"), kind)
    assert np.abs(numbers).max() <= 2
    assert len(np.unique(numbers)) > 50
    assert abs(float(numbers.mean())) < 0.2
