"""Races and uninitialised reads in shared memory, between warps and lanes: found where they are, and only there."""

from __future__ import annotations

import numpy as np
import pytest

from layouts.simulator.checks import RACE, UNINITIALIZED
from layouts.simulator.clocks import LANES, Clocks, Gate
from layouts.simulator.shadow import SharedShadow
from tests.simulator.shared_batch import SMEM, Batch


@pytest.fixture(params=[1, 3], ids=["one CTA", "three CTAs"])
def batch(request: pytest.FixtureRequest) -> Batch:
    return Batch(ctas=request.param)


class TestBarriers:
    @pytest.mark.parametrize("synced", [True, False])
    def test_read_after_write(self, batch: Batch, synced: bool) -> None:
        batch.write(0)
        if synced:
            batch.sync(0, 1)
        batch.read(1)
        assert batch.kinds == ([] if synced else [RACE])

    @pytest.mark.parametrize("synced", [True, False])
    def test_write_after_write(self, batch: Batch, synced: bool) -> None:
        batch.write(0)
        if synced:
            batch.sync(0, 1)
        batch.write(1, instruction=2)
        assert batch.kinds == ([] if synced else [RACE])

    @pytest.mark.parametrize("aligned", [True, False])
    @pytest.mark.parametrize("synced", [True, False])
    def test_write_after_read(self, batch: Batch, synced: bool, aligned: bool) -> None:
        batch.write(0)
        batch.sync(0, 1)
        (batch.ldmatrix if aligned else batch.read)(1)
        if synced:
            batch.sync(0, 1)
        batch.write(0, instruction=9)
        assert batch.kinds == ([] if synced else [RACE])

    def test_every_reader_counts(self, batch: Batch) -> None:
        """Warp 1 read last and is ordered; warp 0's read, before it, is not."""
        batch = Batch(warps=3)
        batch.write(0)
        batch.sync(0, 1, 2)
        batch.read(0)
        batch.read(1)
        batch.sync(1, 2)
        batch.write(2)
        (finding,) = batch.findings
        assert finding.other.startswith("read by warp 0")

    def test_barriers_join_each_cta_by_itself(self) -> None:
        batch = Batch(warps=2, ctas=2)
        batch.write(0)
        batch.clocks.barrier(np.array([1, 3]))  # CTA 1 only
        batch.read(1)
        (finding,) = batch.findings
        assert finding.cta == 0
        assert finding.count == LANES

    def test_order_is_transitive(self) -> None:
        batch = Batch(warps=3)
        batch.write(0)
        batch.sync(0, 1)
        batch.sync(1, 2)
        batch.read(2)
        assert not batch.findings

    def test_what_came_after_the_arrival_is_not_ordered(self) -> None:
        batch = Batch(warps=2)
        gate = Gate(batch.clocks)
        gate.arrive(batch.slots(0))
        batch.write(0)
        gate.complete(np.array([0]))
        gate.wait(batch.slots(1))
        batch.read(1)
        assert batch.kinds == [RACE]

    def test_a_message_names_both_sides(self) -> None:
        batch = Batch(warps=2, ctas=3)
        batch.write(0, instruction=41)
        batch.shadow.read(batch.lanes(1)[37:38], np.array([SMEM + 16 * 5]), 16, 77)
        (finding,) = batch.findings
        assert finding.message == (
            "race: read by warp 1 lane 5 at instruction 77, shared address 0x50 of CTA 1, "
            "not ordered after the write by warp 0 lane 5 at instruction 41"
        )


class TestInsideAWarp:
    @pytest.mark.parametrize("synced", [True, False])
    def test_lanes_exchange_through_memory(self, batch: Batch, synced: bool) -> None:
        batch.write(0)
        if synced:
            batch.clocks.warp_sync(batch.slots(0))
        batch.read(0, reverse=True)
        assert batch.kinds == ([] if synced else [RACE])

    def test_a_thread_may_use_its_own_place_again_and_again(self, batch: Batch) -> None:
        for _ in range(3):
            batch.write(0)
            batch.read(0)
        assert not batch.findings

    @pytest.mark.parametrize("synced", [True, False])
    def test_ldmatrix_reads_for_all_lanes(self, batch: Batch, synced: bool) -> None:
        batch.write(0)
        if synced:
            batch.clocks.warp_sync(batch.slots(0))
        batch.ldmatrix(0)
        assert batch.kinds == ([] if synced else [RACE])

    @pytest.mark.parametrize("aligned", [True, False])
    def test_overwriting_what_other_lanes_read(self, batch: Batch, aligned: bool) -> None:
        """ldmatrix converges the warp, so its lanes may overwrite at once; after plain reads they may not."""
        batch.write(0)
        batch.clocks.warp_sync(batch.slots(0))
        if aligned:
            batch.ldmatrix(0)
        else:
            batch.read(0, reverse=True)
        batch.write(0, instruction=9)
        assert batch.kinds == ([] if aligned else [RACE])

    @pytest.mark.parametrize("first", [0, 1])
    def test_several_lanes_read_and_one_of_them_writes(self, first: int) -> None:
        """Whichever lane's read is the last one that the shadow holds."""
        batch = Batch()
        batch.write(0)
        batch.sync(0, 1)
        place = np.zeros(2, np.int64)
        batch.shadow.read(np.array([first, 1 - first]), place, 16, 2)
        batch.shadow.write(np.array([0]), place[:1], 16, 3)
        assert batch.kinds == [RACE]

    def test_stmatrix_converges_the_warp(self, batch: Batch) -> None:
        batch.write(0)
        batch.clocks.warp_sync(batch.slots(0))
        batch.read(0, reverse=True)
        batch.shadow.write(batch.lanes(0), batch.places(0), 16, 9, aligned=True)
        assert not batch.findings

    def test_reads_that_one_lane_released(self) -> None:
        """Lane 0 reads and tells the warp so; then lane 2 is the only one with a read outstanding, and may write."""
        batch = Batch()
        gate = Gate(batch.clocks)
        place = np.zeros(1, np.int64)
        batch.write(0)
        batch.sync(0, 1)
        batch.shadow.read(np.array([5]), place + 16, 16, 2)
        batch.shadow.read(np.array([0]), place, 16, 2)
        gate.arrive(batch.slots(0), np.arange(LANES)[None] == 0)
        gate.complete(np.array([0]))
        gate.wait(batch.slots(0))
        batch.shadow.read(np.array([2]), place, 16, 3)
        batch.shadow.write(np.array([2]), place, 16, 4)
        assert not batch.findings

    @pytest.mark.parametrize("synced", [True, False])
    def test_stmatrix_writes_other_lanes_registers(self, batch: Batch, synced: bool) -> None:
        batch.shadow.write(batch.lanes(0), batch.places(0), 16, 1, aligned=True)
        if synced:
            batch.clocks.warp_sync(batch.slots(0))
        batch.read(0)
        assert batch.kinds == ([] if synced else [RACE])

    def test_an_mbarrier_orders_the_lanes_that_wait_for_it(self, batch: Batch) -> None:
        gate = Gate(batch.clocks)
        batch.write(0)
        gate.arrive(batch.slots(0))
        gate.complete(np.arange(batch.ctas))
        gate.wait(batch.slots(0))
        batch.read(0, reverse=True)
        assert not batch.findings


class TestSimultaneous:
    @pytest.mark.parametrize("aligned", [True, False])
    def test_two_lanes_write_one_place(self, aligned: bool) -> None:
        batch = Batch()
        place = batch.places(0)
        place[7] = place[3]
        batch.shadow.write(batch.lanes(0), place, 16, 1, aligned)
        (finding,) = batch.findings
        assert (finding.kind, finding.address, finding.count) == (RACE, 48, 1)

    def test_two_warps_write_one_place(self, batch: Batch) -> None:
        batch.shadow.write(batch.lanes(0, 1), batch.places(0, 1), 16, 1)
        assert batch.kinds == [RACE]

    def test_different_places(self) -> None:
        batch = Batch(granule=4)
        batch.shadow.write(batch.lanes(0), np.arange(LANES) * 4, 4, 1)
        batch.sync(0, 1)
        batch.shadow.write(batch.lanes(1), np.arange(LANES) * 4, 4, 2)
        assert not batch.findings

    def test_lanes_as_a_slice(self, batch: Batch) -> None:
        """All warps of the batch, without an index array."""
        everyone = slice(0, 2 * batch.ctas * LANES)
        places = batch.places(0, 1) + np.arange(2).repeat(batch.ctas * LANES) * 512
        batch.shadow.write(everyone, places, 16, 1)
        batch.shadow.read(everyone, places, 16, 2)
        assert not batch.findings
        batch.shadow.read(everyone, places ^ 16, 16, 3, aligned=True)
        assert set(batch.kinds) == {RACE}

    def test_all_warps_read_one_place(self, batch: Batch) -> None:
        batch.write(0)
        batch.sync(0, 1)
        batch.read(0, 1)
        batch.sync(0, 1)
        batch.write(1)
        assert not batch.findings


class TestWidths:
    @pytest.mark.parametrize("granule", [1, 2, 4, 8, 16])
    def test_wide_accesses_of_fine_granules(self, granule: int) -> None:
        batch = Batch(granule=granule)
        batch.write(0)
        batch.read(1, instruction=5)
        (finding,) = batch.findings
        assert finding.count == LANES * 16 // granule
        batch.sync(0, 1)
        batch.ldmatrix(1)
        batch.sync(0, 1)
        batch.write(1)
        assert len(batch.findings) == 1

    @pytest.mark.parametrize("offset", [0, 12])
    def test_neighbours_do_not_conflict(self, offset: int) -> None:
        """Warp 1 writes 4 bytes behind, or of, the 12 that warp 0 wrote."""
        batch = Batch(granule=4)
        for part in (0, 4, 8):
            batch.shadow.write(np.array([0]), np.array([part]), 4, 1)
        batch.shadow.write(batch.lanes(1)[:1], np.array([offset]), 4, 2)
        assert batch.kinds == ([RACE] if offset == 0 else [])

    @pytest.mark.parametrize(("granule", "smem"), [(3, 64), (32, 64), (4, 40)])
    def test_sizes_that_cannot_be(self, granule: int, smem: int) -> None:
        with pytest.raises(ValueError, match="must be"):
            SharedShadow(Clocks(1, 1), smem, granule, print)

    @pytest.mark.parametrize("width", [4, 24, 32])
    def test_widths_that_cannot_be(self, width: int) -> None:
        batch = Batch(granule=8)
        with pytest.raises(ValueError, match="width of instruction 6"):
            batch.shadow.read(np.array([0]), np.array([0]), width, 6)


class TestUninitialized:
    def test_nothing_wrote(self, batch: Batch) -> None:
        batch.read(0)
        assert batch.kinds == [UNINITIALIZED]
        assert "of what nothing has written" in batch.findings[0].message

    def test_partly(self) -> None:
        batch = Batch(granule=4)
        batch.shadow.write(np.array([0]), np.array([0]), 8, 1)
        batch.shadow.read(np.array([0]), np.array([0]), 16, 2)
        (finding,) = batch.findings
        assert (finding.kind, finding.address, finding.count) == (UNINITIALIZED, 8, 2)

    def test_of_an_mbarrier(self) -> None:
        batch = Batch()
        batch.shadow.touch(batch.lanes(0), np.full(LANES, 64), 16, 2)
        assert batch.kinds == [UNINITIALIZED]
