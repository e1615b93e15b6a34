"""The access patterns run in the simulator with nothing found, and move what a GPU counted where that was recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cute_attn.configs import SEED_CONFIGS
from tests.simulator.recording import prefill
from tests.simulator.recording.patterns import KINDS, patterns
from tests.simulator.recording.profiler import read_csv
from tests.simulator.recording.traffic import differences, simulate_pattern

DATA = Path(__file__).parent / "data"

_UNSEEN = "ncu's patched code sees no .cg copies under a predicate"
_ZEROS = (
    "ncu's patched code takes lanes that store zeros for lanes that copy; the hardware counts as the simulator does"
)
_BOTH = "source and destination conflict in different lanes: the simulator counts the fewest wavefronts that could do"
_MASKS = ("low", "even", "third", "eighth", "two_of_four")
EXPLAINED = (
    {f"cp_async_ca_{width}_zeros": {"cached copies": _ZEROS} for width in (4, 8)}
    | {f"cp_async_cg_16_{which}_lanes": {"copies past L1": _UNSEEN} for which in _MASKS}
    | {f"cp_async_ca_{width}_scattered": {"cached copies": _BOTH} for width in (4, 8, 16)}
)
"""Patterns with counters that are known to differ on the GPU, and why."""

_SUNK = "ptxas moves loads of O's rows under the predicate of their store: those of rows past the end do not run"
_PREDICATED = (
    "ncu's patched code miscounts copies under predicates, by other numbers in each run; sectors from L2 agree"
)
_HITS = "the sequences' offsets are read several times, and hit L1"
_PADDED = set(SEED_CONFIGS) - {"seed_64x64_1stage"}
_D128 = {"d128 window", "d128 packed", "d128 transposed"}
EXPLAINED_CALLS = {
    "shared loads": (_D128 | {"d40"}, _SUNK),
    "copies past L1": (_D128 | {"d256", "d40"} | _PADDED, _PREDICATED),
    "sectors from L2": ({"d128 packed"}, _HITS),
}
"""Counters of the whole kernel that are known to differ on the GPU: in which calls, and why."""


def test_every_pattern_is_of_a_kind() -> None:
    assert all(name.startswith(KINDS) for name in patterns())


@pytest.mark.parametrize("kind", KINDS)
def test_patterns(kind: str) -> None:
    """Nothing is found, and the counters are those of every record there is."""
    names = [name for name in patterns() if name.startswith(kind)]
    for name in names:
        assert any(simulate_pattern(patterns()[name]).values())
    record = json.loads((DATA / "traffic.json").read_text(encoding="utf-8"))
    record["kernels"] = {name: record["kernels"][name] for name in names if name in record["kernels"]}
    assert len(record["kernels"]) == len(names)
    found = differences(record)
    assert {name: set(counters) for name, counters in found.items()} == {
        name: set(reasons) for name, reasons in EXPLAINED.items() if name in record["kernels"]
    }, found


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
    kernels = read_csv(_LONG.splitlines(True))
    assert list(kernels["ld_shared_4_plain"].values()) == [1260, 4]
    assert kernels["st_shared_4_plain"] == {}
    assert read_csv(_WIDE.splitlines(True))["ld_shared_4_plain"]["smsp__inst_executed.sum"] == 12
    with pytest.raises(ValueError, match="no table"):
        read_csv(["==ERROR== no permission\n"])


def test_a_difference_is_named() -> None:
    """A column of an unswizzled tile has 8-way conflicts, rows that follow each other none."""
    metrics = {"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": 16.0}
    record = {"kernels": {"ldmatrix_x4_rows": metrics, "ldmatrix_x4_plain": metrics}}
    assert differences(record) == {"ldmatrix_x4_rows": {"shared loads": (128, 16)}}


CALLS = ("d64", "d64 causal, ragged, lse", "d128 packed", "d40", "seed_64x64_1stage", "seed_128x128_2stage")


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_the_prefill_kernel(name: str) -> None:
    """What a whole kernel moves is what the GPU counted. ``recording.prefill compare`` takes all of its 18 calls."""
    record = json.loads((DATA / "prefill_traffic.json").read_text(encoding="utf-8"))
    found = prefill.differences(record, [name]).get(name, {})
    total = found.pop("shared memory", None)
    assert total is None or "copies past L1" in found, "the sum differs, but no part of it"
    assert set(found) == {counter for counter, (calls, _) in EXPLAINED_CALLS.items() if name in calls}, found
