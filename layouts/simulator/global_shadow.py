"""The shadow of global memory: who wrote each of its places last, and whether that is ordered before an access.

Within a CTA the clocks of ``layouts.simulator.clocks`` say what is ordered. From one CTA to another order takes

- a release: a write of a synchronisation word (an atomic, st.release ...) that is a release itself, or that a fence of
  the GPU's scope precedes. What the lane has behind it by then, its whole CTA's accesses before a barrier among them,
  is released;
- an acquire: a read of the same word after that, as an acquire, or followed by such a fence.

Words take the releases of all atomics that changed them, as reading one of these reads them all. Ordinary writes are
recorded for the launch, and reads checked against those before them; a write after an unordered read is not noticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from layouts.simulator.clocks import CODE, STEP, WHOLE_WARP, BoolArray, Clocks, IntArray
from layouts.simulator.memory import GlobalMemory, Segment

NOBODY = -1


class Order(NamedTuple):
    """How an access orders others: ``strong`` ones, of synchronisation words, do not race with each other; whether it
    is an acquire or a release by itself, of a scope beyond the CTA."""

    strong: bool
    acquires: bool
    releases: bool


class Conflict(NamedTuple):
    """Accesses to what another thread wrote, not ordered after that.

    Attributes:
        position: of the first of them, among the accesses of the call.
        place: what it accesses, in words.
        cta, agent, lane: who wrote there: the CTA's number in the grid, its warp and the lane.
        instruction: the index of the instruction that did.
        accesses: how many.
    """

    position: int
    place: str
    cta: int
    agent: int
    lane: int
    instruction: int
    accesses: int


@dataclass(frozen=True, eq=False)
class _Release:
    """What a CTA has done before it wrote a synchronisation word.

    Attributes:
        rows: (warps,), of each warp the stamp up to which its accesses are released.
        agent, stamp: of the lane that wrote, whose own accesses are released up to now; -1 if only fenced ones are.
        acquisitions: how many the CTA had by then.
    """

    cta: int
    rows: NDArray[np.int32]
    agent: int
    stamp: int
    acquisitions: int


@dataclass(frozen=True, eq=False)
class _Acquisition:
    """A lane has read a synchronisation word, and so has the first ``length`` releases of ``log`` behind it."""

    log: list[_Release]
    length: int
    agent: int
    stamp: int


@dataclass
class _Writes:
    """Of each granule of a segment its last writer."""

    cta: NDArray[np.int32]
    agent: NDArray[np.int32]
    stamp: NDArray[np.int32]
    instruction: NDArray[np.int32]


@dataclass
class _Cta:
    """What is known of a CTA: what it acquired; what it read and no fence has followed yet; and, of each warp, the
    stamp up to which a fence has followed its accesses."""

    acquisitions: list[_Acquisition] = field(default_factory=list)
    unfenced: list[_Acquisition] = field(default_factory=list)
    fenced: NDArray[np.int32] | None = None


class GlobalShadow:
    """Checks the accesses to global memory of one launch, batch after batch.

    In all methods ``lanes`` are lanes of the batch, (n,) int64, and ``address`` what each accesses, (n,) int64.
    """

    def __init__(self, memory: GlobalMemory, granule: int) -> None:
        """
        Args:
            granule: bytes of the finest access to global memory: 1, 2, 4, 8 or 16.
        """
        self._memory = memory
        self._granule = granule
        self._writes: dict[int, _Writes] = {}  # by the segment's base
        self._words: dict[int, list[_Release]] = {}
        self._ctas: dict[int, _Cta] = {}

    def begin(self, clocks: Clocks, ctas: IntArray) -> None:
        """A batch starts, of CTAs with these numbers in the grid."""
        self._clocks, self._numbers = clocks, ctas

    def read(self, lanes: IntArray, address: IntArray, width: int) -> Iterator[Conflict]:
        """Threads read, and expect nobody to write there at the same time."""
        if not self._writes:
            return
        for segment, positions in self._memory.locate(address, width):
            if segment.base in self._writes:
                yield from self._conflicts(segment, np.arange(len(address))[positions], lanes, address, width)

    def write(self, lanes: IntArray, address: IntArray, width: int, instruction: int) -> Iterator[Conflict]:
        """Threads write; others are not to access it at the same time."""
        clocks = self._clocks
        for segment, found in self._memory.locate(address, width):
            positions = np.arange(len(address))[found]
            if segment.base not in self._writes:
                count = -(-len(segment.data) // self._granule)
                self._writes[segment.base] = _Writes(*(np.full(count, NOBODY, np.int32) for _ in range(4)))
            yield from self._conflicts(segment, positions, lanes, address, width)
            writes, granules = self._writes[segment.base], self._granules(segment, address[positions], width)
            writer = lanes[positions]
            for table, values in (
                (writes.cta, self._cta_of(writer)),
                (writes.agent, clocks.agent_of[writer]),
                (writes.stamp, clocks.now[writer]),
            ):
                table[granules] = values[:, None]
            writes.instruction[granules] = instruction
            others = (writes.cta[granules] != self._cta_of(writer)[:, None]) | (
                writes.agent[granules] != clocks.agent_of[writer][:, None]
            )
            entry, column = np.nonzero(others)
            yield from self._described(segment, positions, entry, column, granules)

    def synchronise(
        self, lanes: IntArray, address: IntArray, width: int, order: Order, *, reads: bool, writes: bool
    ) -> None:
        """Threads access synchronisation words, one after the other.

        Args:
            reads, writes: what they do; an atomic does both, a write alone ends the chain of releases before it.
            order: whether the access orders others by itself, or only with a fence.
        """
        clocks = self._clocks
        for lane, word in zip(lanes.tolist(), address.tolist(), strict=True):
            if not writes and word not in self._words:
                continue
            number, slot = int(self._cta_of(np.array([lane]))[0]), lane // 32
            cta, agent, stamp = self._ctas.setdefault(number, _Cta()), slot // clocks.ctas, int(clocks.now[lane])
            log = self._words.get(word, [])
            if reads and log:
                acquired = cta.acquisitions if order.acquires else cta.unfenced
                acquired.append(_Acquisition(log, len(log), agent, stamp))
            if not writes:
                continue
            if not reads:
                log = []
            rows = clocks.behind(slot)
            if order.releases:
                log.append(_Release(number, rows, agent, stamp, len(cta.acquisitions)))
            elif cta.fenced is not None:
                log.append(_Release(number, np.minimum(rows, cta.fenced), NOBODY, 0, len(cta.acquisitions)))
            if log or word in self._words:
                self._words[word] = log
        if writes:
            self._forget(address, width)
            clocks.go_on(np.unique(lanes // 32))

    def fence(self, slots: IntArray) -> None:
        """Warps execute a fence of the GPU's scope."""
        clocks = self._clocks
        for slot in slots.tolist():
            number, agent, now = int(self._numbers[slot % clocks.ctas]), slot // clocks.ctas, int(clocks.now[slot * 32])
            cta, rows = self._ctas.setdefault(number, _Cta()), clocks.behind(slot)
            rows[agent] = now + STEP - 1
            cta.fenced = rows if cta.fenced is None else np.maximum(cta.fenced, rows)
            lane = np.array([slot * 32])
            for each in cta.unfenced:
                if each.agent == agent or clocks.ordered(lane, np.array([each.agent]), np.array([each.stamp])).all():
                    cta.acquisitions.append(_Acquisition(each.log, each.length, agent, now & ~CODE | WHOLE_WARP))
        clocks.go_on(slots)

    def _forget(self, address: IntArray, width: int) -> None:
        """What strong accesses write is no ordinary data any more; wrong addresses are left to others."""
        for segment in self._memory.segments:
            if segment.base in self._writes:
                inside = (address >= segment.base) & (address + width <= segment.base + len(segment.data))
                self._writes[segment.base].cta[self._granules(segment, address[inside], width)] = NOBODY

    def _cta_of(self, lanes: IntArray) -> IntArray:
        return self._numbers[lanes // 32 % self._clocks.ctas]

    def _granules(self, segment: Segment, address: IntArray, width: int) -> IntArray:
        first = (address - segment.base) // self._granule
        return first[:, None] + np.arange(max(width // self._granule, 1))

    def _conflicts(
        self, segment: Segment, positions: IntArray, lanes: IntArray, address: IntArray, width: int
    ) -> Iterator[Conflict]:
        """Accesses of these positions to what others wrote, unordered."""
        table = self._writes[segment.base]
        granules = self._granules(segment, address[positions], width)
        written = table.cta[granules] != NOBODY
        if not written.any():
            return
        entry, column = np.nonzero(written)
        places, lane = granules[written], lanes[positions][entry]
        cta, agent, stamp = table.cta[places], table.agent[places].astype(np.int64), table.stamp[places]
        own = self._cta_of(lane)
        unordered = cta != own
        unordered[~unordered] = ~self._clocks.ordered(lane[~unordered], agent[~unordered], stamp[~unordered])
        for reader, writer in {*zip(own[cta != own].tolist(), cta[cta != own].tolist(), strict=True)}:
            pair = np.flatnonzero((own == reader) & (cta == writer))
            unordered[pair] = ~self._ordered(reader, writer, lane[pair], agent[pair], stamp[pair])
        yield from self._described(segment, positions, entry[unordered], column[unordered], granules)

    def _described(
        self, segment: Segment, positions: IntArray, entry: IntArray, column: IntArray, granules: IntArray
    ) -> Iterator[Conflict]:
        """Conflicts at some of the granules (n, m) of the accesses of these positions: one by instruction."""
        table, places = self._writes[segment.base], granules[entry, column]
        for instruction in dict.fromkeys(table.instruction[places].tolist()):
            of_it = np.flatnonzero(table.instruction[places] == instruction)
            first = places[of_it[0]]
            yield Conflict(
                position=int(positions[entry[of_it[0]]]),
                place=f"byte {int(first) * self._granule} of the storage of {segment.name}",
                cta=int(table.cta[first]),
                agent=int(table.agent[first]),
                lane=int(table.stamp[first]) & CODE,
                instruction=instruction,
                accesses=len(np.unique(entry[of_it])),
            )

    def _ordered(
        self, reader: int, writer: int, lane: IntArray, agent: IntArray, stamp: NDArray[np.int32]
    ) -> BoolArray:
        """Whether writes of one CTA, by these agents at these times, are ordered before these lanes of another."""
        ordered = np.zeros(len(lane), bool)
        cta = self._ctas.get(reader)
        for each in cta.acquisitions if cta else ():
            event = np.full(len(lane), each.agent), np.full(len(lane), each.stamp, np.int32)
            reached = self._clocks.ordered(lane, *event)
            if not reached.any():
                continue
            for release in self._releases(each, writer, set()):
                behind = stamp <= release.rows[agent]
                behind |= (agent == release.agent) & (stamp <= release.stamp) & ((stamp ^ release.stamp) & CODE == 0)
                ordered |= reached & behind
        return ordered

    def _releases(self, acquisition: _Acquisition, writer: int, seen: set[_Acquisition]) -> Iterator[_Release]:
        """The releases of a CTA that an acquisition has behind it, through those of others too."""
        for release in acquisition.log[: acquisition.length]:
            if release.cta == writer:
                yield release
                continue
            for earlier in self._ctas[release.cta].acquisitions[: release.acquisitions]:
                if earlier not in seen:
                    seen.add(earlier)
                    yield from self._releases(earlier, writer, seen)
