"""The checks against an oracle: random programs."""

from __future__ import annotations

import numpy as np
import pytest

from layouts.simulator.clocks import LANES, Gate
from tests.simulator.happens_before import GATES, PLACES, Step, racy_places, random_program
from tests.simulator.shared_batch import SMEM, Batch


class TestRandomPrograms:
    """Against an oracle with a vector clock for every lane."""

    @staticmethod
    def racy(program: list[Step], warps: int) -> set[int]:
        """Runs the program as CTA 1 of 2 and returns the places that the findings name first."""
        batch = Batch(warps, ctas=2, granule=4)
        gates = [Gate(batch.clocks) for _ in range(GATES)]
        every = np.arange(2)
        start = (every[:, None] * SMEM + np.arange(PLACES) * 4).reshape(-1)
        batch.shadow.write(np.repeat(batch.slots(0) * LANES, PLACES), start, 4, 0)
        batch.sync(*range(warps))
        for number, step in enumerate(program, 1):
            slot = np.array([step.warp * 2 + 1])
            mask = np.isin(np.arange(LANES), step.lanes)[None]
            active = None if mask.all() else mask
            if step.what == "barrier":
                batch.clocks.barrier(np.arange(warps) * 2 + 1)
            elif step.what == "warp_sync":
                batch.clocks.warp_sync(slot)
            elif step.what == "arrive":
                gates[step.places[0]].arrive(slot, active)
                gates[step.places[0]].complete(np.array([1]))
            elif step.what == "wait":
                gates[step.places[0]].wait(slot, active)
            else:
                access = {"read": batch.shadow.read, "write": batch.shadow.write, "atomic": batch.shadow.atomic}
                access[step.what](slot * LANES + np.array(step.lanes), SMEM + np.array(step.places) * 4, 4, number)
        assert all(finding.cta == 1 for finding in batch.findings)
        return {finding.address // 4 for finding in batch.findings}

    @pytest.mark.parametrize("lone_lanes", [False, True])
    def test_agree_with_the_oracle(self, lone_lanes: bool) -> None:
        racy = 0
        for seed in range(300):
            rng = np.random.default_rng(seed)
            warps = int(rng.integers(1, 4))
            program = random_program(rng, int(rng.integers(2, 20)), warps, lone_lanes)
            expected, found = racy_places(program, warps), self.racy(program, warps)
            assert found <= expected, f"seed {seed}: false alarm at places {found - expected}"
            assert bool(found) == bool(expected), f"seed {seed}: missed a race at places {expected}"
            racy += bool(expected)
        assert 80 < racy < 220  # both kinds of programs occur

    def test_no_false_alarm_with_atomics(self) -> None:
        for seed in range(200):
            rng = np.random.default_rng(seed)
            program = random_program(rng, 20, 3, lone_lanes=True, atomics=4)
            assert self.racy(program, 3) <= racy_places(program, 3), f"seed {seed}"
