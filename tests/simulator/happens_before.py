"""An oracle for races: random programs of a CTA, run lane by lane with a vector clock for every lane."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LANES = 32


@dataclass(frozen=True)
class Step:
    """What a warp does: an access of some lanes to one place each, or a synchronisation.

    Attributes:
        what: "read", "write", "atomic", "warp_sync", "barrier" (all warps), "arrive" or "wait".
        warp: who; of no meaning for a barrier.
        lanes: which of its lanes.
        places: of each of them the place, for accesses; the gate, for arrive and wait.
    """

    what: str
    warp: int
    lanes: tuple[int, ...]
    places: tuple[int, ...] = ()


PLACES = 6
GATES = 2
WEIGHTS = {"read": 6, "write": 2, "atomic": 0, "warp_sync": 3, "barrier": 1, "arrive": 3, "wait": 3}


def random_program(
    rng: np.random.Generator, length: int, warps: int, lone_lanes: bool = False, atomics: int = 0
) -> list[Step]:
    """Random steps.

    Args:
        lone_lanes: single lanes arrive and wait, too.
        atomics: their weight, where reads have 6.
    """
    weights = WEIGHTS | {"atomic": atomics}
    kinds = list(weights)
    chance = np.array(list(weights.values())) / sum(weights.values())
    program = []
    for _ in range(length):
        what = str(rng.choice(kinds, p=chance))
        lanes = tuple(range(LANES))
        places: tuple[int, ...] = ()
        if what in ("read", "write", "atomic"):
            lanes = tuple(int(lane) for lane in rng.choice(3, size=int(rng.integers(1, 3)), replace=False))
            places = tuple(int(place) for place in rng.choice(PLACES, len(lanes), replace=what != "write"))
        elif what in ("arrive", "wait"):
            places = (int(rng.integers(GATES)),)
            if lone_lanes and rng.integers(2):
                lanes = (int(rng.integers(3)),)
        program.append(Step(what, int(rng.integers(warps)), lanes, places))
    return program


def racy_places(program: list[Step], warps: int) -> set[int]:
    """The places with two accesses that conflict, of which none happens before the other."""
    count = warps * LANES
    clock = np.eye(count, dtype=np.int64)
    gates = np.zeros((GATES, count), np.int64)
    accesses: list[list[tuple[str, int, int]]] = [[] for _ in range(PLACES)]  # what, which lane, at which of its times
    racy = set()
    for step in program:
        lanes = [step.warp * LANES + lane for lane in step.lanes]
        if step.what == "barrier":
            _meet(clock, list(range(count)))
        elif step.what == "warp_sync":
            _meet(clock, lanes)
        elif step.what == "arrive":
            for lane in lanes:
                gates[step.places[0]] = np.maximum(gates[step.places[0]], clock[lane])
                clock[lane, lane] += 1
        elif step.what == "wait":
            clock[lanes] = np.maximum(clock[lanes], gates[step.places[0]])
        else:
            for lane, place in zip(lanes, step.places, strict=True):
                for what, other, time in accesses[place]:
                    if what + step.what not in ("readread", "atomicatomic") and clock[lane, other] < time:
                        racy.add(place)
            for lane, place in zip(lanes, step.places, strict=True):
                accesses[place].append((step.what, lane, int(clock[lane, lane])))
    return racy


def _meet(clock: np.ndarray, lanes: list[int]) -> None:
    clock[lanes] = clock[lanes].max(axis=0)
    clock[lanes, lanes] += 1
