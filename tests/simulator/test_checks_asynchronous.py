"""Pipelines in shared memory: cp.async, mbarriers, elected lanes, bulk copies, wgmma; each without one of its waits."""

from __future__ import annotations

import numpy as np
import pytest

from layouts.simulator.checks import ASYNC, RACE
from layouts.simulator.clocks import LANES, Gate, IntArray
from tests.simulator.shared_batch import ONE_LANE, SMEM, Batch


@pytest.fixture(params=[1, 3], ids=["one CTA", "three CTAs"])
def batch(request: pytest.FixtureRequest) -> Batch:
    return Batch(ctas=request.param)


class TestCpAsync:
    @pytest.mark.parametrize("missing", ["", "wait", "barrier"])
    def test_copy_for_another_warp(self, batch: Batch, missing: str) -> None:
        batch.shadow.begin_write(batch.lanes(0), batch.places(0), 16, 1)
        if missing != "wait":
            batch.shadow.end_write(batch.lanes(0), batch.places(0), 16)
        if missing != "barrier":
            batch.sync(0, 1)
        batch.ldmatrix(1)
        assert batch.kinds == {"": [], "wait": [ASYNC], "barrier": [RACE]}[missing]

    @pytest.mark.parametrize("reverse", [True, False])
    def test_a_wait_is_for_the_own_copies(self, batch: Batch, reverse: bool) -> None:
        batch.shadow.begin_write(batch.lanes(0), batch.places(0), 16, 1)
        batch.shadow.end_write(batch.lanes(0), batch.places(0), 16)
        batch.read(0, reverse=reverse)
        assert batch.kinds == ([RACE] if reverse else [])

    def test_overwriting_what_is_under_way(self, batch: Batch) -> None:
        batch.shadow.begin_write(batch.lanes(0), batch.places(0), 16, 1)
        batch.write(0)
        assert batch.kinds == [ASYNC]

    def test_two_copies_under_way(self, batch: Batch) -> None:
        batch.shadow.begin_write(batch.lanes(0), batch.places(0), 16, 1)
        batch.sync(0, 1)
        batch.shadow.begin_write(batch.lanes(1), batch.places(1), 16, 2)
        assert batch.kinds == [ASYNC]
        assert "under way: asynchronous write by warp 0 lane 0 at instruction 1" in batch.findings[0].message

    def test_simultaneous_copies(self, batch: Batch) -> None:
        batch.shadow.begin_write(batch.lanes(0, 1), batch.places(0, 1), 16, 1)
        assert batch.kinds == [RACE]

    @pytest.mark.parametrize("synced", [True, False])
    def test_copy_over_what_is_being_read(self, batch: Batch, synced: bool) -> None:
        batch.write(0)
        batch.sync(0, 1)
        batch.ldmatrix(0, 1)
        if synced:
            batch.sync(0, 1)
        batch.shadow.begin_write(batch.lanes(0), batch.places(0), 16, 5)
        assert batch.kinds == ([] if synced else [RACE])

    def test_some_lanes_wait(self) -> None:
        batch = Batch()
        batch.shadow.begin_write(batch.lanes(0), batch.places(0), 16, 1)
        batch.shadow.end_write(batch.lanes(0)[:16], batch.places(0)[:16], 16)
        batch.sync(0, 1)
        batch.read(1)
        (finding,) = batch.findings
        assert (finding.kind, finding.lane, finding.count) == (ASYNC, 16, 16)


class TestRing:
    """Warp 0 fills a ring of two stages, warp 1 uses it; both through mbarriers."""

    @staticmethod
    def run(batch: Batch, missing: str = "", elected: bool = False, tiles: int = 6) -> None:
        full, empty = ([Gate(batch.clocks) for _ in range(2)] for _ in range(2))
        every = np.arange(batch.ctas)
        producer, consumer = batch.slots(0), batch.slots(1)
        active = np.repeat(ONE_LANE, batch.ctas, axis=0) if elected else None
        for tile in range(tiles):
            stage = tile % 2
            if tile >= 2 and missing != "producer's wait":
                empty[stage].wait(producer)
            batch.write(0, instruction=10, base=512 * stage)
            if elected and missing != "producer's warp sync":
                batch.clocks.warp_sync(producer)
            full[stage].arrive(producer, active)
            full[stage].complete(every)
            if missing != "consumer's wait":
                full[stage].wait(consumer)
            batch.ldmatrix(1, instruction=20, base=512 * stage)
            if missing != "consumer's arrival":
                empty[stage].arrive(consumer, active)
            empty[stage].complete(every)

    @pytest.mark.parametrize("elected", [True, False])
    def test_complete(self, batch: Batch, elected: bool) -> None:
        self.run(batch, elected=elected)
        assert not batch.findings

    @pytest.mark.parametrize("missing", ["producer's wait", "consumer's wait", "consumer's arrival"])
    def test_incomplete(self, batch: Batch, missing: str) -> None:
        self.run(batch, missing)
        assert set(batch.kinds) == {RACE}

    def test_one_lane_arrives_for_all_without_a_warp_sync(self, batch: Batch) -> None:
        self.run(batch, "producer's warp sync", elected=True)
        assert set(batch.kinds) == {RACE}
        assert batch.findings[0].count == LANES * batch.ctas - batch.ctas  # all but the lane that arrived


class TestElectedLanes:
    @pytest.mark.parametrize("synced", [True, False])
    def test_one_lane_waits_for_all(self, synced: bool) -> None:
        batch = Batch()
        gate = Gate(batch.clocks)
        batch.write(0)
        gate.arrive(batch.slots(0))
        gate.complete(np.array([0]))
        gate.wait(batch.slots(1), ONE_LANE)
        if synced:
            batch.clocks.warp_sync(batch.slots(1))
        batch.read(1)
        assert [finding.count for finding in batch.findings] == ([] if synced else [LANES - 1])

    def test_what_one_lane_learned_it_passes_on(self) -> None:
        batch = Batch(warps=3)
        first, second = Gate(batch.clocks), Gate(batch.clocks)
        batch.write(0)
        first.arrive(batch.slots(0))
        first.complete(np.array([0]))
        first.wait(batch.slots(1), ONE_LANE)
        second.arrive(batch.slots(1), ONE_LANE)
        second.complete(np.array([0]))
        second.wait(batch.slots(2))
        batch.ldmatrix(2)
        assert not batch.findings

    def test_all_lanes_wait_one_after_the_other(self) -> None:
        batch = Batch()
        gate = Gate(batch.clocks)
        batch.write(0)
        gate.arrive(batch.slots(0))
        gate.complete(np.array([0]))
        for lane in range(LANES):
            gate.wait(batch.slots(1), np.arange(LANES)[None] == lane)
        batch.ldmatrix(1)
        assert not batch.findings

    def test_ldmatrix_then_one_lane_arrives(self) -> None:
        """All lanes have taken part in the ldmatrix when the elected one arrives, whatever else they read."""
        batch = Batch()
        gate = Gate(batch.clocks)
        batch.write(0)
        batch.write(0, base=512)
        batch.sync(0, 1)
        batch.read(1, base=512)
        batch.ldmatrix(1)
        gate.arrive(batch.slots(1), ONE_LANE)
        gate.complete(np.array([0]))
        gate.wait(batch.slots(0))
        batch.write(0)
        assert not batch.findings
        batch.write(0, base=512)
        assert batch.kinds == [RACE]


class TestAsynchronousAgents:
    """Bulk copies, wgmma and bulk stores: agents of their own."""

    @staticmethod
    def load(batch: Batch, agent: IntArray, gate: Gate, missing: str = "") -> None:
        """Lane 0 of warp 0 issues a bulk copy of 512 bytes, which completes the gate."""
        batch.clocks.pass_on(batch.slots(0), agent, np.repeat(ONE_LANE, batch.ctas, axis=0))
        lanes, places = np.repeat(agent * LANES, LANES), batch.places(0)
        batch.shadow.begin_write(lanes, places, 16, 30)
        if missing != "landing":
            batch.shadow.end_write(lanes, places, 16)
        gate.arrive(agent)
        gate.complete(np.arange(batch.ctas))

    @pytest.mark.parametrize("missing", ["", "wait", "landing"])
    def test_bulk_copy(self, batch: Batch, missing: str) -> None:
        agent = batch.clocks.add_agent("bulk copy")
        gate = Gate(batch.clocks)
        self.load(batch, agent, gate, missing)
        if missing != "wait":
            gate.wait(batch.slots(1))
        batch.ldmatrix(1)
        assert batch.kinds == {"": [], "wait": [RACE], "landing": [ASYNC]}[missing]
        assert all("bulk copy" in finding.message for finding in batch.findings)

    @pytest.mark.parametrize("released", [True, False])
    def test_bulk_copy_over_what_is_being_read(self, batch: Batch, released: bool) -> None:
        full, empty = Gate(batch.clocks), Gate(batch.clocks)
        agent = batch.clocks.add_agent("bulk copy")  # after the gates, which must grow
        for tile in range(3):
            if tile and released:
                empty.wait(batch.slots(0), np.repeat(ONE_LANE, batch.ctas, axis=0))
            self.load(batch, agent, full)
            full.wait(batch.slots(1))
            batch.ldmatrix(1)
            empty.arrive(batch.slots(1))
            empty.complete(np.arange(batch.ctas))
        assert set(batch.kinds) == (set() if released else {RACE})

    @pytest.mark.parametrize("missing", ["", "wait", "barrier"])
    def test_overwriting_the_operand_of_a_wgmma(self, batch: Batch, missing: str) -> None:
        wgmma = batch.clocks.add_agent("wgmma")
        lanes, places = np.repeat(wgmma * LANES, LANES), batch.places(0)
        batch.write(0)
        batch.clocks.fence_proxy_async(batch.slots(0))
        batch.sync(0, 1)
        batch.clocks.pass_on(batch.slots(0, 1), wgmma)
        number = batch.shadow.begin_read(lanes, places, 16, 40)
        if missing != "wait":
            batch.shadow.end_read(lanes, places, 16, number)
            batch.clocks.pass_on(wgmma, batch.slots(0))
        if missing != "barrier":
            batch.sync(0, 1)
        batch.write(1, instruction=50)
        assert batch.kinds == {"": [], "wait": [ASYNC], "barrier": [RACE]}[missing]

    def test_a_later_read_keeps_the_place_in_use(self) -> None:
        batch = Batch()
        wgmma = batch.clocks.add_agent("wgmma")
        lanes, places = np.repeat(wgmma * LANES, LANES), batch.places(0)
        batch.write(0)
        batch.clocks.fence_proxy_async(batch.slots(0))
        batch.clocks.pass_on(batch.slots(0), wgmma)
        first = batch.shadow.begin_read(lanes, places, 16, 40)
        batch.shadow.begin_read(lanes[:4], places[:4], 16, 41)
        batch.shadow.end_read(lanes, places, 16, first)
        batch.clocks.pass_on(wgmma, batch.slots(0))
        batch.write(0)
        (finding,) = batch.findings
        assert (finding.kind, finding.count) == (ASYNC, 4)

    @pytest.mark.parametrize("fence", ["writer", "issuer", "early", ""])
    def test_proxy_fence(self, batch: Batch, fence: str) -> None:
        store = batch.clocks.add_agent("bulk store")
        lanes, places = np.repeat(store * LANES, LANES), batch.places(0)
        if fence == "early":
            batch.clocks.fence_proxy_async(batch.slots(1))
        batch.write(1)
        if fence == "writer":
            batch.clocks.fence_proxy_async(batch.slots(1))
        batch.sync(0, 1)
        if fence == "issuer":
            batch.clocks.fence_proxy_async(batch.slots(0))
        batch.clocks.pass_on(batch.slots(0), store, np.repeat(ONE_LANE, batch.ctas, axis=0))
        batch.shadow.begin_read(lanes, places, 16, 60)
        assert batch.kinds == ([] if fence in ("writer", "issuer") else [ASYNC])
        assert all("without a fence.proxy.async" in finding.message for finding in batch.findings)

    @pytest.mark.parametrize("fenced", [True, False])
    def test_one_lane_waits_fences_and_stores(self, fenced: bool) -> None:
        """Of what others wrote, and of what it wrote itself while other lanes of its warp have writes outstanding."""
        batch = Batch()
        gate = Gate(batch.clocks)
        store = batch.clocks.add_agent("bulk store")
        batch.write(1)
        gate.arrive(batch.slots(1))
        gate.complete(np.array([0]))
        gate.wait(batch.slots(0), ONE_LANE)
        batch.write(0, base=512)
        if fenced:
            batch.clocks.fence_proxy_async(batch.slots(0))
        batch.clocks.pass_on(batch.slots(0), store, ONE_LANE)
        batch.shadow.begin_read(store * LANES, np.array([0]), 16, 60)
        batch.shadow.begin_read(store * LANES, np.array([512]), 16, 61)
        assert batch.kinds == ([] if fenced else [ASYNC, ASYNC])

    @pytest.mark.parametrize("copy", ["cp.async", "bulk"])
    def test_what_copies_brought_needs_no_fence(self, copy: str) -> None:
        batch = Batch()
        wgmma = batch.clocks.add_agent("wgmma")
        if copy == "bulk":
            gate = Gate(batch.clocks)
            self.load(batch, batch.clocks.add_agent("bulk copy"), gate)
            gate.wait(batch.slots(0))
        else:
            batch.shadow.begin_write(batch.lanes(0), batch.places(0), 16, 1)
            batch.shadow.end_write(batch.lanes(0), batch.places(0), 16)
        batch.clocks.pass_on(batch.slots(0), wgmma)
        batch.shadow.begin_read(np.repeat(wgmma * LANES, LANES), batch.places(0), 16, 40)
        assert not batch.findings

    def test_every_cta_needs_a_giver(self) -> None:
        batch = Batch(ctas=2)
        with pytest.raises(ValueError, match="needs a giver"):
            batch.clocks.pass_on(np.array([0]), batch.slots(1))


class TestSynchronisationObjects:
    @pytest.mark.parametrize("synced", [True, False])
    def test_initialisation_comes_first(self, batch: Batch, synced: bool) -> None:
        mbarrier = np.arange(batch.ctas) * SMEM + 64
        batch.shadow.write(batch.slots(0) * LANES, mbarrier, 16, 1)
        if synced:
            batch.sync(0, 1)
        batch.shadow.touch(batch.slots(0) * LANES, mbarrier, 16, 2)
        batch.shadow.touch(batch.slots(1) * LANES + 5, mbarrier, 16, 3)
        assert batch.kinds == ([] if synced else [RACE])

    def test_a_use_is_no_access_of_the_lanes(self) -> None:
        """All lanes test an mbarrier, then one of them arrives for the ldmatrix of all."""
        batch = Batch()
        gate = Gate(batch.clocks)
        batch.write(0)
        batch.shadow.write(np.array([0]), np.array([1024]), 16, 1)
        batch.sync(0, 1)
        batch.shadow.touch(batch.lanes(1), np.full(LANES, 1024), 16, 2)
        batch.ldmatrix(1)
        gate.arrive(batch.slots(1), ONE_LANE)
        gate.complete(np.array([0]))
        gate.wait(batch.slots(0))
        batch.write(0)
        assert not batch.findings

    @pytest.mark.parametrize("synced", [True, False])
    def test_atomics(self, batch: Batch, synced: bool) -> None:
        counter = np.arange(batch.ctas) * SMEM
        everyone = np.repeat(counter[None], 2, axis=0).reshape(-1).repeat(LANES)
        batch.shadow.write(batch.slots(0) * LANES, counter, 16, 1)
        batch.sync(0, 1)
        batch.shadow.atomic(batch.lanes(0, 1), everyone, 16, 2)
        batch.shadow.atomic(batch.lanes(1), everyone[: len(everyone) // 2], 16, 3)
        assert not batch.findings
        if synced:
            batch.sync(0, 1)
        batch.read(0)
        assert RACE in batch.kinds or synced

    def test_several_lanes_add_and_one_of_them_reads(self) -> None:
        """Whichever lane's atomic is the last one that the shadow holds."""
        batch = Batch()
        batch.write(0)
        batch.sync(0, 1)
        batch.shadow.atomic(batch.lanes(0)[:2], np.zeros(2, np.int64), 16, 2)
        batch.shadow.read(batch.lanes(0)[:1], np.zeros(1, np.int64), 16, 3)
        batch.shadow.read(batch.lanes(0)[1:2], np.zeros(1, np.int64), 16, 3)
        assert batch.kinds == [RACE, RACE]

    def test_a_write_after_the_atomics_of_several_warps(self) -> None:
        """Warp 1's, the last, is ordered; warp 0's is not."""
        batch = Batch(warps=3)
        batch.write(2)
        batch.sync(0, 1, 2)
        for warp in (0, 1):
            batch.shadow.atomic(batch.lanes(warp)[:1], np.zeros(1, np.int64), 16, 2)
        batch.sync(1, 2)
        batch.write(2, instruction=3)
        (finding,) = batch.findings
        assert "read by warp 0 lane 0" in finding.message
