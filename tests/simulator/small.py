"""Small kernels as PTX text: a body with the usual registers, and a run of it over int32 or float32 arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from layouts.simulator.report import Report
from layouts.simulator.simulate import simulate

HEAD = """
.version 8.0
.target {target}
.address_size 64
.visible .entry small(.param .u64 source, .param .u64 target)
{{
    .reg .pred %p<16>;
    .reg .b16 %h<16>;
    .reg .b32 %r<64>;
    .reg .b64 %rd<16>;
    .shared .align 16 .b8 tile[{shared}];
    ld.param.b64 %rd1, [source];
    ld.param.b64 %rd2, [target];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mad.lo.s32 %r4, %r2, %r3, %r1;
    mul.wide.s32 %rd3, %r4, 4;
    add.s64 %rd1, %rd1, %rd3;
    add.s64 %rd2, %rd2, %rd3;
    ld.global.b32 %r5, [%rd1];
    mov.b32 %r6, tile;
    shl.b32 %r7, %r1, 2;
    add.s32 %r7, %r7, %r6;
"""
TAIL = """
    st.global.b32 [%rd2], %r5;
    ret;
}
"""


def run(
    body: str,
    source: NDArray,
    *,
    grid: int = 1,
    schedule: str = "lockstep",
    shared: int = 4096,
    tail: str = TAIL,
    target: str = "sm_80",
) -> tuple[Report, NDArray]:
    """Each thread has source[its number] in %r5 and stores %r5 to the same place of the result.

    The body may use %r1 (thread), %r2 (CTA), %r5, %r6 (address of the tile), %r7 (of the thread's word in it), and
    %r8 and up.
    """
    out = np.full_like(source, -1)
    text = HEAD.format(shared=shared, target=target) + body + tail
    report = simulate(text, [source, out], grid=grid, block=len(source) // grid, schedule=schedule)
    return report, out


def kinds(report: Report) -> set[str]:
    return {finding.kind for finding in report.findings}
