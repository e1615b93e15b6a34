"""Bulk copies: tiles by tensor map, runs of bytes in both directions, and what happens without their waits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from layouts.simulator.errors import SimulatorError
from layouts.simulator.report import Report
from layouts.simulator.simulate import simulate
from tests.simulator import kernels

BYTES = 512
HEAD = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry copy(.param .u64 source, .param .u64 target)
{
    .reg .pred %p<4>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<8>;
    .shared .align 128 .b8 tile[512];
    .shared .align 8 .b8 bar[8];
"""
BODY = """
    ld.param.b64 %rd1, [source];
    ld.param.b64 %rd2, [target];
    mov.u32 %r1, %tid.x;
    mov.b32 %r2, tile;
    mov.b32 %r3, bar;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra initialised;
    mbarrier.init.shared.b64 [%r3], 1;
    fence.mbarrier_init.release.cluster;
initialised:
    bar.sync 0;
    @%p1 bra issued;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 512;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 512, [%r3];
issued:
wait:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0;
    @!%p2 bra wait;
    shl.b32 %r4, %r1, 2;
    add.s32 %r4, %r4, %r2;
    ld.shared.b32 %r5, [%r4];
    add.s32 %r5, %r5, 1;
    st.shared.b32 [%r4], %r5;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p1 bra done;
    cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r2], 512;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
done:
    ret;
}
"""


def run(body: str, schedule: str = "lockstep") -> tuple[Report, bool]:
    source = np.arange(BYTES // 4, dtype=np.int32)
    target = np.full_like(source, -1)
    report = simulate(HEAD + body, [source, target], grid=3, block=128, schedule=schedule)
    return report, bool((target == source + 1).all())


@pytest.mark.parametrize("schedule", ["lockstep", "serial", "reversed", "random"])
def test_load_change_and_store(schedule: str) -> None:
    report, right = run(BODY, schedule)
    assert right
    assert not report.findings


@pytest.mark.parametrize(
    ("line", "instead", "kind"),
    [
        ("    @!%p2 bra wait;\n", "", "async"),
        ("    fence.proxy.async.shared::cta;\n", "", "async"),
        ("    fence.proxy.async.shared::cta;\n    bar.sync 0;\n", "    fence.proxy.async.shared::cta;\n", "race"),
        ("_, [%r3], 512", "_, [%r3], 1024", "deadlock"),
        ("[%rd1], 512, [%r3]", "[%rd1], 528, [%r3]", "out_of_bounds"),
    ],
)
def test_what_is_missing_is_found(line: str, instead: str, kind: str) -> None:
    assert line in BODY
    report, _ = run(BODY.replace(line, instead, 1))
    assert kind in {finding.kind for finding in report.findings}


def test_a_store_that_is_not_waited_for_is_not_there() -> None:
    _, right = run(BODY.replace("    cp.async.bulk.wait_group 0;\n", ""))
    assert not right


@pytest.mark.parametrize("schedule", ["lockstep", "random"])
def test_a_tile_by_tensor_map(tmp_path: Path, schedule: str) -> None:
    source = np.random.default_rng(0).standard_normal((128, 192)).astype(np.float16)
    out = np.full(64, np.nan, np.float16)
    report = simulate(kernels.compile_copy_by_tma(tmp_path), [source, out], schedule=schedule)
    (finding,) = report.findings  # the blocks of the grid write the same place
    assert "storage of argument 1" in finding.message
    rows = [source[i, j : j + 64] for i in (0, 64) for j in (0, 64, 128)]
    assert any((out == row).all() for row in rows)


def test_a_kernel_that_asks_for_its_place_in_a_cluster_is_refused() -> None:
    body = BODY.replace("    mov.u32 %r1, %tid.x;\n", "    mov.u32 %r1, %tid.x;\n    mov.u32 %r6, %cluster_ctarank;\n")
    text = HEAD + body
    assert run(body)[1]  # alone it is the first
    in_clusters = text.replace("{\n    .reg", ".reqnctapercluster 2, 1, 1\n{\n    .reg", 1)
    with pytest.raises(SimulatorError, match="%cluster_ctarank: clusters are not modelled"):
        simulate(in_clusters, [np.zeros(128, np.int32), np.zeros(128, np.int32)], grid=2, block=128)
