"""The access patterns run in the simulator with nothing found, and move what a GPU counted where that was recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.simulator.recording.patterns import KINDS, patterns
from tests.simulator.recording.traffic import differences, measured, read_csv, simulate_pattern

EXPLAINED: dict[str, str] = {}
"""Patterns whose counters on the GPU are known to differ, and why."""


def test_every_pattern_is_of_a_kind() -> None:
    assert all(name.startswith(KINDS) for name in patterns())


@pytest.mark.parametrize("kind", KINDS)
def test_patterns(kind: str) -> None:
    """Nothing is found, and the counters are those of every record there is."""
    names = [name for name in patterns() if name.startswith(kind)]
    for name in names:
        assert any(simulate_pattern(patterns()[name]).values())
    for path in sorted((Path(__file__).parent / "data").glob("traffic*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        record["kernels"] = {name: record["kernels"][name] for name in names if name in record["kernels"]}
        assert set(differences(record)) <= set(EXPLAINED), f"{path.name}: {differences(record)}"


_LONG = """==PROF== Connected to process 7
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","ld_shared_4_plain","l1tex__data_pipe_lsu_wavefronts_mem_shared.sum","","1,260"
"0","ld_shared_4_plain","l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum","","4"
"1","st_shared_4_plain","l1tex__data_pipe_lsu_wavefronts_mem_shared.sum","","n/a"
"""
_WIDE = """==PROF== Disconnected
"ID","Kernel Name","l1tex__data_pipe_lsu_wavefronts_mem_shared.sum","smsp__inst_executed.sum"
"","","",""
"0","ld_shared_4_plain(void)","260","12"
"""


def test_the_profilers_tables_are_read() -> None:
    assert measured(read_csv(_LONG.splitlines(True))["ld_shared_4_plain"]) == {"shared": 1260, "shared loads": 4}
    assert measured(read_csv(_LONG.splitlines(True))["st_shared_4_plain"]) == {}
    assert read_csv(_WIDE.splitlines(True))["ld_shared_4_plain"]["smsp__inst_executed.sum"] == 12
    with pytest.raises(ValueError, match="no table"):
        read_csv(["==ERROR== no permission\n"])


def test_a_difference_is_named() -> None:
    """A column of an unswizzled tile has 8-way conflicts, rows that follow each other none."""
    metrics = {"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": 16.0}
    record = {"kernels": {"ldmatrix_x4_rows": metrics, "ldmatrix_x4_plain": metrics}}
    assert differences(record) == {"ldmatrix_x4_rows": {"shared loads": (128, 16)}}
