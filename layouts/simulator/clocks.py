"""Which access happened before which: vector clocks of the warps, and of the asynchronous agents, of a batch of CTAs.

An *agent* is a warp of a CTA, or something that accesses shared memory on its own: the copies that complete an
mbarrier, the wgmmas of a warpgroup, the bulk stores of a thread. A *slot* is an agent of a CTA, slot = agent * ctas +
cta; its lanes have the numbers slot * 32 .. slot * 32 + 31. An asynchronous agent accesses memory as its lane 0.

Every access is stamped with the time of its slot: a multiple of ``STEP``, plus a code that says which lane made it. A
slot's time goes on whenever others may learn of what the slot did so far (a release), and when the lanes of the warp
learn it of each other. Of every slot the clocks keep, for each agent of its CTA, the latest stamp that is known to lie
behind it: an access is ordered if its stamp is not above that. Of the slot's own agent it is what every lane of the
warp has behind it, so an access that another lane made after the last warp-level sync is not ordered.

Two things are kept by the lane rather than by the warp, as kernels let one elected lane arrive or wait for all: what a
lone lane has released although others have accesses outstanding, and what a lone lane has learned.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LANES = 32
STEP = 256  # 2^30 / STEP: a slot may release four million times
IN_FLIGHT = 1 << 30  # stamps from here on are of accesses that have not ended: above whatever is known

# The code in a stamp's low bits: 0..31 a lane, or
MANY_LANES = 62  # read by several lanes, each on its own, or written from the registers of all (stmatrix)
WHOLE_WARP = 63  # read by an instruction that all lanes execute as one (ldmatrix)
CODE = 63  # the bits of it; two more say
COPIED = 64  # that cp.async wrote it, which the asynchronous proxy sees without a fence
ATOMIC = 128  # that it was an atomic

ORDERED, FENCED, BY_LANE = range(3)  # the three kinds of knowledge, see Clocks.known

IntArray = NDArray[np.int64]
Rows = NDArray[np.int32]  # knowledge to pass on: (n, 3, agents)
BoolArray = NDArray[np.bool_]


class Clocks:
    """The clocks of a batch of CTAs that run the same kernel.

    Attributes:
        warps, ctas: warps of a CTA, CTAs of the batch.
        names: of each agent, for messages; the warps come first.
        known: (3, slots, agents) int32, the latest stamps that a slot has behind it.
            ``ORDERED``: what happened before. ``FENCED``: the part of it that the asynchronous proxy sees, as a
            fence.proxy.async lay on the way. ``BY_LANE``: what lanes in ``alone`` did before they released it.
        now: (slots * 32,) int32, the stamp of an access that a lane makes now.
        lanes, slot_of, agent_of, row_of: (slots * 32,) int64, of a lane its number, slot, agent, and slot * agents.
        signature: (slots * 32,) int64, the agent in the high half; with a stamp in the low half it names an access.
        era: counts the barriers that all warps of a CTA completed.
        settled: (slots * 32,) int64, the era since which a lane's CTA has not met at such a barrier: what its warps
            did in an earlier era is ordered.
        loose: (slots * 32,) bool, the lanes that accessed memory on their own since their warp's last sync.
    """

    def __init__(self, warps: int, ctas: int) -> None:
        self.warps = warps
        self.ctas = ctas
        self.names: list[str] = []
        self.known = np.zeros((3, 0, 0), np.int32)
        self.now = np.zeros(0, np.int32)
        self.era = 1
        self.settled = np.zeros(0, np.int64)
        self.loose = np.zeros(0, np.bool_)
        self.alone = np.zeros((0, LANES), np.bool_)  # lanes that have released for themselves only
        self.told = np.zeros((0, LANES), np.bool_)  # lanes that have learned what their warp has not
        self.hearsay = np.zeros((3, 0, 0), np.int32)  # what they learned
        self._grow([f"warp {warp}" for warp in range(warps)])

    @property
    def agents(self) -> int:
        return len(self.names)

    def add_agent(self, name: str) -> IntArray:
        """Adds an asynchronous agent, the same in every CTA: returns its slots, (ctas,). Its lane 0 makes accesses."""
        self._grow([name])
        return np.arange(self.ctas, dtype=np.int64) + (self.agents - 1) * self.ctas

    def release(self, slots: IntArray, active: BoolArray | None = None) -> Rows:
        """What a waiter learns from these slots when they arrive now.

        Args:
            slots: (n,), distinct.
            active: (n, 32), the lanes that arrive; None for all lanes of the warps (or those that have not exited).
                Accesses that other lanes made on their own since the last warp sync are not released.
        """
        rows = self.known[:, slots].transpose(1, 0, 2)  # indexing has made a copy
        place, agent = np.arange(len(slots)), slots // self.ctas
        base = self.now[slots * LANES] + (STEP - 1)
        if active is None:
            whole: BoolArray = np.ones(len(slots), np.bool_)
        else:
            whole = np.logical_not((self._by_slot(self.loose)[slots] & ~active).any(axis=1))
            partly = slots[~whole]
            self.alone[partly] |= active[~whole]
        rows[place[whole], ORDERED, agent[whole]] = base[whole]
        rows[place[~whole], BY_LANE, agent[~whole]] = base[~whole]
        asynchronous = agent >= self.warps  # needs no fence; saying so keeps the shadow on its fast path
        rows[place[asynchronous], FENCED, agent[asynchronous]] = base[asynchronous]
        told = self.told[slots] if active is None else self.told[slots] & active
        heard = told.any(axis=1)
        if heard.any():
            rows[heard] = np.maximum(rows[heard], self.hearsay[:, slots[heard]].transpose(1, 0, 2))
        self._advance(slots)
        return rows

    def acquire(self, slots: IntArray, rows: Rows, active: BoolArray | None = None) -> None:
        """A wait of these slots succeeded.

        Args:
            slots: (n,), distinct.
            rows: (n, 3, agents), what each learns.
            active: (n, 32), the lanes that waited; None for all. What some lanes learn the others know after the next
                warp sync.
        """
        learned = _widened(rows, self.agents).transpose(1, 0, 2)
        if active is None:
            self.known[:, slots] = np.maximum(self.known[:, slots], learned)
            return
        self.hearsay[:, slots] = np.maximum(self.hearsay[:, slots], learned)
        self.told[slots] |= active

    def warp_sync(self, slots: IntArray) -> None:
        """bar.warp.sync of these slots: their lanes know of each other's accesses."""
        self._share(slots)
        self.known[ORDERED, slots, slots // self.ctas] = self.now[slots * LANES] + (STEP - 1)
        self._by_slot(self.loose)[slots] = False
        self._advance(slots)

    def barrier(self, slots: IntArray) -> None:
        """A barrier that these slots completed together, those of a CTA with each other; a warp sync of each, too."""
        self._share(slots)
        ctas, rows = self.joined(slots, self.release(slots))
        self.known[:, slots] = rows[np.searchsorted(ctas, slots % self.ctas)].transpose(1, 0, 2)
        self._by_slot(self.loose)[slots] = False
        self.era += 1
        complete = np.bincount(slots % self.ctas, minlength=self.ctas) == self.warps
        self._by_slot(self.settled)[slots[complete[slots % self.ctas]]] = self.era

    def pass_on(
        self,
        givers: IntArray,
        takers: IntArray,
        giving: BoolArray | None = None,
        taking: BoolArray | None = None,
    ) -> None:
        """What the givers did happens before what the takers do from now on, CTA by CTA.

        The issue of asynchronous work (from the warps to its agent), and its wait (from the agent to the warps).

        Args:
            giving, taking: (n, 32), the lanes that release and acquire; None for all.

        Raises:
            ValueError: a taker's CTA has no giver.
        """
        ctas, rows = self.joined(givers, self.release(givers, giving))
        place = np.searchsorted(ctas, takers % self.ctas)
        if (place == len(ctas)).any() or (ctas[place] != takers % self.ctas).any():
            raise ValueError(f"takers: every CTA of {takers.tolist()} needs a giver, but givers is {givers.tolist()}")
        self.acquire(takers, rows[place], taking)

    def fence_proxy_async(self, slots: IntArray) -> None:
        """fence.proxy.async: the asynchronous proxy sees what these slots have written or learned of so far."""
        own = slots // self.ctas
        fenced = self.known[ORDERED, slots]
        fenced[np.arange(len(slots)), own] = self.now[slots * LANES] + (STEP - 1)
        self.known[FENCED, slots] = fenced
        self.hearsay[FENCED, slots] = self.hearsay[ORDERED, slots]
        self._advance(slots)

    def joined(self, slots: IntArray, rows: Rows) -> tuple[IntArray, Rows]:
        """The CTAs of the slots, ascending, and what the slots of each release together."""
        order = np.argsort(slots % self.ctas, kind="stable")
        ctas, first = np.unique((slots % self.ctas)[order], return_index=True)
        return ctas, np.maximum.reduceat(rows[order], first, axis=0) if len(slots) else rows

    def behind(self, slot: int) -> NDArray[np.int32]:
        """Of each warp of the CTA the latest stamp that a slot has behind it now, (warps,)."""
        return self.known[ORDERED, slot, : self.warps].copy()

    def go_on(self, slots: IntArray) -> None:
        """Time passes for these slots: what they do from now on is told from what they did."""
        self._advance(slots)

    def ordered(self, lane: IntArray, agent: IntArray, stamp: NDArray[np.int32]) -> BoolArray:
        """Whether accesses by agents of their CTAs are ordered before what lanes do now. All arguments: (n,)."""
        known = stamp <= self.known[ORDERED, self.slot_of[lane], agent]
        code = stamp & CODE
        known |= (self.agent_of[lane] == agent) & ((code == lane % LANES) | (code == WHOLE_WARP))
        return known | self.known_to_lane(lane, agent, stamp)

    def known_to_lane(self, lane: IntArray, agent: IntArray, stamp: NDArray[np.int32]) -> BoolArray:
        """Whether accesses are ordered before a lane although they are not before its warp. All arguments: (n,)."""
        slot = self.slot_of[lane]
        code = stamp & CODE
        alone = self.alone[agent * self.ctas + slot % self.ctas, np.minimum(code, LANES - 1)] & (code < LANES)
        alone |= code == WHOLE_WARP  # the lane that released took part in it
        told = self.told[slot, lane % LANES]
        by_lane = (stamp <= self.known[BY_LANE, slot, agent]) | (told & (stamp <= self.hearsay[BY_LANE, slot, agent]))
        return (alone & by_lane) | (told & (stamp <= self.hearsay[ORDERED, slot, agent]))

    def _share(self, slots: IntArray) -> None:
        """What some lanes learned, all lanes of the warp know."""
        slots = slots[self.told[slots].any(axis=1)]
        if len(slots):
            self.known[:, slots] = np.maximum(self.known[:, slots], self.hearsay[:, slots])
            self.hearsay[:, slots] = 0
            self.told[slots] = False

    def _advance(self, slots: IntArray) -> None:
        self._by_slot(self.now)[slots] += STEP

    @staticmethod
    def _by_slot(table: NDArray) -> NDArray:
        return table.reshape(-1, LANES)

    def _grow(self, names: list[str]) -> None:
        self.names += names
        agents, more = self.agents, len(names)
        slots = np.arange(agents * self.ctas, dtype=np.int64)
        added = ((0, more * self.ctas), (0, 0))
        pad = ((0, 0), (0, more * self.ctas), (0, more))
        self.known = np.pad(self.known, pad, constant_values=STEP - 1)
        self.hearsay = np.pad(self.hearsay, pad)
        self.alone, self.told = np.pad(self.alone, added), np.pad(self.told, added)
        fresh = np.tile(np.arange(STEP, STEP + LANES, dtype=np.int32), more * self.ctas)
        self.now = np.concatenate([self.now, fresh])
        self.loose = np.pad(self.loose, (0, more * self.ctas * LANES))
        self.settled = np.pad(self.settled, (0, more * self.ctas * LANES))
        self.lanes = np.arange(len(slots) * LANES, dtype=np.int64)
        self.slot_of = self.lanes // LANES
        self.agent_of = self.slot_of // self.ctas
        self.row_of = self.slot_of * agents
        self.signature = self.agent_of << 32
        self.ordered_flat = self.known[ORDERED].reshape(-1)  # a view, for lookups at row_of + agent
        self.fenced_flat = self.known[FENCED].reshape(-1)


class Gate:
    """What an mbarrier, or a named barrier with bar.arrive, passes from those that arrive to those that wait.

    Later phases pass on what earlier ones did: an arrival continues the release of those before it.
    """

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._arrived = np.zeros((clocks.ctas, 3, clocks.agents), np.int32)
        self._passed = self._arrived.copy()

    def arrive(self, slots: IntArray, active: BoolArray | None = None) -> None:
        """These slots arrive; the arguments are those of ``Clocks.release``."""
        ctas, rows = self._clocks.joined(slots, self._clocks.release(slots, active))
        self._arrived = _widened(self._arrived, self._clocks.agents)
        self._arrived[ctas] = np.maximum(self._arrived[ctas], rows)

    def complete(self, ctas: IntArray) -> None:
        """The current phase of these CTAs is complete."""
        self._passed = _widened(self._passed, self._arrived.shape[2])
        self._passed[ctas] = self._arrived[ctas]

    def wait(self, slots: IntArray, active: BoolArray | None = None) -> None:
        """A wait of these slots for the last complete phase succeeded; ``active`` as in ``Clocks.acquire``."""
        self._clocks.acquire(slots, self._passed[slots % self._clocks.ctas], active)


def _widened(rows: Rows, agents: int) -> Rows:
    """Rows from before an agent was added know nothing of it."""
    missing = agents - rows.shape[2]
    return np.pad(rows, ((0, 0), (0, 0), (0, missing))) if missing else rows
