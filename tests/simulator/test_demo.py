"""The demo: what it says of a kernel with bank conflicts, and of one without its barrier."""

from __future__ import annotations

from layouts.simulator.demo import Transpose, transpose


def test_wavefronts_of_a_transpose() -> None:
    report, right = transpose(Transpose(32), "sm_80")
    assert right
    assert not report.findings
    assert (report.shared_wavefronts, report.ideal_shared_wavefronts) == (32 + 32 * 32, 64)


def test_padding_removes_the_conflicts_and_a_missing_barrier_is_found() -> None:
    report, right = transpose(Transpose(33), "sm_90a", schedule="random")
    assert right
    assert not report.findings
    assert report.excess_wavefronts == 0
    report, right = transpose(Transpose(33, barrier=False), "sm_90a", schedule="serial")
    assert not right
    assert {finding.kind for finding in report.findings} == {"race", "uninitialized"}
