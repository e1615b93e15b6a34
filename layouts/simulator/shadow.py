"""The shadow of shared memory: who accessed each of its places last, and whether that is ordered before an access.

Shared memory is divided into granules, the finest unit that the kernel accesses. A granule has its last writer and,
for each agent that reads, its last read, as stamps of ``layouts.simulator.clocks``. An access compares them with what
its lanes know: a few array operations when all is well. ``layouts.simulator.checks`` looks closer when it is not.

All accesses of one call are simultaneous: they are checked against what was before, then recorded.

Of each granule and warp one read is kept, and of each granule one write. That is enough unless lanes of one warp order
their accesses by something else than a sync of the whole warp: when several lanes have read a place on their own, and
only some of these reads are ordered through an mbarrier, none of them counts as ordered. Of several unordered atomics
the last one stands for all when a read follows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from layouts.simulator import checks
from layouts.simulator.checks import Access, Finding
from layouts.simulator.clocks import (
    ATOMIC,
    CODE,
    COPIED,
    IN_FLIGHT,
    MANY_LANES,
    ORDERED,
    WHOLE_WARP,
    Clocks,
    IntArray,
)

UNWRITTEN = 0xFFFFFFFF  # a writer's stamp: above all when compared unsigned, as reads do, below all when signed

Lanes = IntArray | slice


class SharedShadow:
    """Checks the accesses to the shared memory of a batch of CTAs.

    In all methods ``lanes`` are the lanes that make the accesses, (n,) int64 (slot * 32 + lane; a lane may occur
    several times) or a slice of the lane axis; ``address`` is the flat byte index cta * smem_bytes + address of each,
    (n,) int64 and aligned to ``width``, the bytes that each accesses: the granule or more, at most 16; ``instruction``
    is the static index that findings name.

    Attributes:
        last_write: (granules,) int64, the agent in the high and the stamp in the low half.
        last_read: (granules,) int64, the era in the high half, the instruction in the low half; 0 if there is none.
        written_by: (granules,) int32, the instruction of the last write.
        reads: (granules, readers) int32, the stamp of each reader's last read; 0 if there is none.
        readers: (readers,) int64, the agents of these columns: the warps, then asynchronous agents.
    """

    def __init__(self, clocks: Clocks, smem_bytes: int, granule: int, report: Callable[[Finding], None]) -> None:
        """
        Args:
            smem_bytes: of one CTA, a multiple of 16.
            granule: bytes of the finest access: 1, 2, 4, 8 or 16.
            report: is called with each finding, one for each kind and pair of instructions in a call.

        Raises:
            ValueError: a size is not one of these.
        """
        if granule not in (1, 2, 4, 8, 16):
            raise ValueError(f"granule must be 1, 2, 4, 8 or 16 bytes, but is {granule}")
        if smem_bytes % 16:
            raise ValueError(f"smem_bytes must be a multiple of 16, but is {smem_bytes}")
        self.clocks = clocks
        self.smem_bytes = smem_bytes
        self.granule = granule
        self.report = report
        granules = clocks.ctas * smem_bytes // granule
        self.last_write = np.full(granules, UNWRITTEN, np.int64)
        self.last_read = np.zeros(granules, np.int64)
        self.written_by = np.full(granules, -1, np.int32)
        self.reads = np.zeros((granules, clocks.warps), np.int32)
        self.readers = np.arange(clocks.warps, dtype=np.int64)
        self._flights = 0

    @staticmethod
    def bytes_per_cta(readers: int, smem_bytes: int, granule: int) -> int:
        """Memory that a CTA's shadow takes, with so many warps and asynchronous agents that read."""
        return smem_bytes // granule * (8 + 8 + 4 + 4 * readers)

    def read(self, lanes: Lanes, address: IntArray, width: int, instruction: int, aligned: bool = False) -> None:
        """Threads read.

        Args:
            aligned: all lanes of a warp execute it as one and exchange what they read (ldmatrix). It converges them:
                any of them may then overwrite what the warp read.
        """
        access = self._access("read", lanes, address, width, instruction, aligned)
        self._check_read(access)
        now = self.clocks.now[lanes]
        if aligned:
            place = self.clocks.agent_of[lanes]
            reads, readers = self.reads.reshape(-1), len(self.readers)
            for granule in access.granules:
                reads[granule * readers + place] = now | WHOLE_WARP
            self._note_read(access)
        else:
            self._record_reads(access, now)

    def write(self, lanes: Lanes, address: IntArray, width: int, instruction: int, aligned: bool = False) -> None:
        """Threads write.

        Args:
            aligned: all lanes of a warp execute it as one and write each other's registers (stmatrix).
        """
        access = self._access("write", lanes, address, width, instruction, aligned)
        self._check_overwrite(access)
        now = self.clocks.now[lanes]
        if self._overwritten(access, self._record_write(access, now)):
            checks.simultaneous_writes(self, access)
        if aligned:
            self._record_write(access, (now & ~CODE) | MANY_LANES)
        self.clocks.loose[lanes] = True

    def atomic(self, lanes: Lanes, address: IntArray, width: int, instruction: int) -> None:
        """Threads read, change and write as one step. Atomics do not race with each other."""
        access = self._access(checks.ATOMIC_ACCESS, lanes, address, width, instruction)
        self._check_read(access)
        if self._unordered_reads(access):
            checks.after_reads(self, access)
        now = self.clocks.now[lanes] | ATOMIC
        if self._overwritten(access, self._record_write(access, now)):  # then no lane is the last one's only writer
            self._record_write(access, (now & ~CODE) | MANY_LANES)
        self._record_reads(access, now)

    def touch(self, lanes: Lanes, address: IntArray, width: int, instruction: int) -> None:
        """Threads use a synchronisation object (an mbarrier): its initialisation must be ordered before."""
        self._check_read(self._access("use of an mbarrier", lanes, address, width, instruction))

    def begin_write(self, lanes: Lanes, address: IntArray, width: int, instruction: int) -> None:
        """An asynchronous copy into these places is under way: cp.async of threads, or a bulk copy of an agent."""
        access = self._access("asynchronous write", lanes, address, width, instruction)
        self._check_overwrite(access)
        stamp = self.clocks.now[lanes] & CODE | IN_FLIGHT
        if self._overwritten(access, self._record_write(access, stamp)):
            checks.simultaneous_writes(self, access)

    def end_write(self, lanes: Lanes, address: IntArray, width: int) -> None:
        """An asynchronous copy landed.

        Args:
            lanes: those that issued a cp.async and have waited for it, or an asynchronous agent's (a bulk copy, or a
                cp.async whose end an mbarrier signals): they must release afterwards what others are to see.
        """
        access = self._access("asynchronous write", lanes, address, width, -1)
        value = self.clocks.signature[lanes] | (self.clocks.now[lanes] | COPIED)
        for granule in access.granules:
            self.last_write[granule] = value
        self.clocks.loose[lanes] = True

    def begin_read(self, lanes: Lanes, address: IntArray, width: int, instruction: int) -> int:
        """Asynchronous agents (wgmma, a bulk store) start to read these places.

        Returns:
            the number of this read, for ``end_read``.
        """
        access = self._access("asynchronous read", lanes, address, width, instruction)
        self._check_read(access)
        if self._unfenced(access):
            checks.missing_fence(self, access)
        column = self._columns(lanes)
        self._flights += 1
        for granule in access.granules:
            self.reads[granule, column] = IN_FLIGHT + self._flights
        self._note_read(access)
        return self._flights

    def end_read(self, lanes: Lanes, address: IntArray, width: int, number: int) -> None:
        """The asynchronous read with this number ended. Places that a later one still reads stay in use."""
        access = self._access("asynchronous read", lanes, address, width, -1)
        column, now = self._columns(lanes), self.clocks.now[lanes]
        for granule in access.granules:
            ended = self.reads[granule, column] == IN_FLIGHT + number
            self.reads[granule[ended], column[ended]] = now[ended]

    def _access(
        self, what: str, lanes: Lanes, address: IntArray, width: int, instruction: int, aligned: bool = False
    ) -> Access:
        pieces = width // self.granule
        if pieces not in (1, 2, 4, 8, 16) or width > 16:
            raise ValueError(f"width of instruction {instruction} must be {self.granule} to 16 bytes, but is {width}")
        place = address >> (width.bit_length() - 1)
        if pieces == 1:
            return Access(what, lanes, place, (place,), instruction, aligned)
        first = place * pieces
        granules = (first, *(first + piece for piece in range(1, pieces)))
        return Access(what, lanes, place, granules, instruction, aligned)

    def _check_read(self, access: Access) -> None:
        stamp, known = self._writes(access, self.clocks.ordered_flat)
        if np.count_nonzero(stamp > known.view(np.uint32)):
            checks.after_writes(self, access, reads=True)

    def _check_overwrite(self, access: Access) -> None:
        stamp, known = self._writes(access, self.clocks.ordered_flat)
        if np.count_nonzero(stamp.view(np.int32) > known):
            checks.after_writes(self, access, reads=False)
        if self._unordered_reads(access):
            checks.after_reads(self, access)

    def _unfenced(self, access: Access) -> bool:
        stamp, known = self._writes(access, self.clocks.fenced_flat)
        return bool(np.count_nonzero(stamp > known.view(np.uint32)))

    def _writes(self, access: Access, known: NDArray[np.int32]) -> tuple[NDArray[np.uint32], NDArray[np.int32]]:
        """The stamps of the last writes, and what the lanes know of their writers."""
        row = self.clocks.row_of[access.lanes]
        pieces = len(access.granules)
        if pieces == 1:
            halves = self.last_write.take(access.place).view(np.uint32)
            return halves[0::2], known.take(row + halves[1::2])
        halves = self.last_write.reshape(-1, pieces).take(access.place, axis=0).view(np.uint32)
        return halves[:, 0::2], known.take(row[:, None] + halves[:, 1::2])

    def _unordered_reads(self, access: Access) -> bool:
        """Whether a place has a read that is not ordered before the access; it may be its lane's own."""
        clocks, pieces, readers = self.clocks, len(access.granules), len(self.readers)
        if readers == clocks.warps:  # then a barrier of all warps orders all reads: none of them goes on after it
            settled = clocks.settled[access.lanes] << 32
            if all(not np.count_nonzero(self.last_read.take(granule) >= settled) for granule in access.granules):
                return False
        known = clocks.known[ORDERED].take(clocks.slot_of[access.lanes], axis=0)
        if readers != clocks.agents:
            known = known[:, self.readers]
        reads = self.reads.reshape(-1, pieces, readers).take(access.place, axis=0)
        return bool(np.count_nonzero(reads > known[:, None]))

    def _record_write(self, access: Access, stamp: NDArray[np.int32]) -> IntArray:
        """Returns the records, (n,)."""
        record = self.clocks.signature[access.lanes] | stamp
        for granule in access.granules:
            self.last_write[granule] = record
            self.written_by[granule] = access.instruction
        return record

    def _overwritten(self, access: Access, record: IntArray) -> bool:
        """Whether another lane of the same call has left its record in a place that was just recorded."""
        return any(np.count_nonzero(self.last_write.take(granule) != record) for granule in access.granules)

    def _record_reads(self, access: Access, now: NDArray[np.int32]) -> None:
        """Records reads of single lanes, or that several of a warp have read a place since its last sync."""
        warp = self.clocks.agent_of[access.lanes]
        converged = self.clocks.ordered_flat.take(self.clocks.row_of[access.lanes] + warp)
        reads, readers = self.reads.reshape(-1), len(self.readers)
        for granule in access.granules:
            place = granule * readers + warp
            before = reads.take(place)
            reads[place] = now
            overwritten = reads.take(place) != now
            unsynced = before > converged
            if np.count_nonzero(overwritten) or np.count_nonzero(unsynced):
                unsynced &= ((before ^ now) & CODE != 0) & (before & CODE != WHOLE_WARP)
                unsynced &= ~self.clocks.known_to_lane(self.clocks.lanes[access.lanes], warp, before)
                several = overwritten | unsynced
                reads[place[several]] = (now[several] & ~CODE) | MANY_LANES
        self.clocks.loose[access.lanes] = True
        self._note_read(access)

    def _note_read(self, access: Access) -> None:
        note = (self.clocks.era << 32) | access.instruction
        for granule in access.granules:
            self.last_read[granule] = note

    def _columns(self, lanes: Lanes) -> IntArray:
        """The columns of ``reads`` of asynchronous agents, new ones where they have none."""
        agents = self.clocks.agent_of[lanes]
        column = np.full(self.clocks.agents, -1)
        column[self.readers] = np.arange(len(self.readers))
        missing = np.unique(agents[column[agents] < 0])
        if len(missing):
            column[missing] = len(self.readers) + np.arange(len(missing))
            self.readers = np.concatenate([self.readers, missing])
            self.reads = np.pad(self.reads, ((0, 0), (0, len(missing))))
        return column[agents]
