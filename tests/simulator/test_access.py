"""Addresses of shared memory: a 32-bit register and an offset, added as 32-bit numbers."""

from __future__ import annotations

import numpy as np

from tests.simulator.small import kinds, run

SOURCE = np.arange(32, dtype=np.int32)


def test_an_offset_brings_a_negative_register_back() -> None:
    """As in a ring of buffers: the compiler folds the base into the offset, which leaves the register below 0."""
    report, out = run("st.shared.b32 [%r7], %r5; sub.s32 %r8, %r7, 8192; ld.shared.b32 %r5, [%r8+8192];", SOURCE)
    assert not report.findings
    assert (out == SOURCE).all()


def test_a_sum_below_zero_is_out_of_bounds() -> None:
    """Of the first 4 threads the address is below the window, and so far above it as a 32-bit number."""
    report, _ = run("st.shared.b32 [%r7], %r5; bar.sync 0; ld.shared.b32 %r5, [%r7+-16];", SOURCE)
    assert kinds(report) == {"out_of_bounds"}
    assert report.findings[0].count == 4
    assert "shared address 0xfffffff0 is not in the block's" in str(report.findings[0])
