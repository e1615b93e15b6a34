"""CTAs whose warps access shared memory as the tests of the checks tell them to, and what is found."""

from __future__ import annotations

import numpy as np

from layouts.simulator.checks import Finding
from layouts.simulator.clocks import LANES, Clocks, IntArray
from layouts.simulator.shadow import SharedShadow

SMEM = 4096
ONE_LANE = np.arange(LANES)[None] == 0  # lane 0 is active


class Batch:
    """CTAs whose warps access 16 bytes a lane: warp w's lane l at base + (w * 32 + l) * 16, or all warps at base."""

    def __init__(self, warps: int = 2, ctas: int = 1, granule: int = 16) -> None:
        self.clocks = Clocks(warps, ctas)
        self.findings: list[Finding] = []
        self.shadow = SharedShadow(self.clocks, SMEM, granule, self.findings.append)
        self.ctas = ctas

    def slots(self, *warps: int) -> IntArray:
        return np.concatenate([np.arange(self.ctas) + warp * self.ctas for warp in warps])

    def lanes(self, *warps: int) -> IntArray:
        return (self.slots(*warps)[:, None] * LANES + np.arange(LANES)).reshape(-1)

    def places(self, *warps: int, base: int = 0, reverse: bool = False) -> IntArray:
        """Each lane its own 16 bytes of the 512 at base, the same for all warps."""
        lane = np.arange(LANES)[::-1] if reverse else np.arange(LANES)
        return ((self.slots(*warps) % self.ctas * SMEM)[:, None] + base + lane * 16).reshape(-1)

    def write(self, warp: int, instruction: int = 1, base: int = 0) -> None:
        self.shadow.write(self.lanes(warp), self.places(warp, base=base), 16, instruction)

    def read(self, *warps: int, instruction: int = 2, base: int = 0, reverse: bool = False) -> None:
        self.shadow.read(self.lanes(*warps), self.places(*warps, base=base, reverse=reverse), 16, instruction)

    def ldmatrix(self, *warps: int, instruction: int = 3, base: int = 0) -> None:
        self.shadow.read(self.lanes(*warps), self.places(*warps, base=base), 16, instruction, aligned=True)

    def sync(self, *warps: int) -> None:
        self.clocks.barrier(self.slots(*warps))

    @property
    def kinds(self) -> list[str]:
        return [finding.kind for finding in self.findings]
