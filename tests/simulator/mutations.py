"""Mutants of the prefill kernel's PTX: does the simulator notice them?

``python -m tests.simulator.mutations`` removes or alters, one at a time, every barrier, wait, commit, transpose,
swizzle and bounds predicate of a few kernels, prints how many of each kind are caught, and lists those that survive.

A mutant is run at several lengths, because one call seldom takes every branch: an off-by-one in the guard of eight rows
shows only where the sequence ends in these rows.
"""

from __future__ import annotations

import argparse
import functools
import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from cute_attn.configs import SEED_CONFIGS, PrefillConfig
from layouts.simulator.errors import SimulatorError
from layouts.simulator.launch import capture
from layouts.simulator.memory import GlobalMemory
from layouts.simulator.report import Report
from layouts.simulator.scheduler import SCHEDULES
from layouts.simulator.simulate import place, run_launch
from tests.gpu import check
from tests.gpu.cases import Case, Shape, plain
from tests.gpu.tensors import make_tensors
from tests.simulator.prefill_cases import arguments, compiled, spec_of
from tests.simulator.ptx_changes import Mutant, equivalence, mutants

CASES = {
    "d64 causal": Case(plain(64, bounded_right=True), Shape.dense(70, 300, group=2)),
    "d64 one stage, padded": Case(plain(64), Shape.dense(70, 200, group=2), config=SEED_CONFIGS["seed_64x64_1stage"]),
    "d128": Case(plain(128, "bfloat16"), Shape.dense(70, 200, group=2)),
}
GUARDED_ROWS = 8  # the fewest rows that one bounds predicate guards
TILE = 128
HANG_SECONDS = 10


@dataclass(frozen=True)
class Verdict:
    """How a mutant was caught: "finding", "numbers", "error", "wavefronts", "hang"; "" where it survived."""

    how: str
    call: str = ""
    message: str = ""


class Hang(Exception):
    """A mutant runs for much longer than its kernel."""


def calls(case: Case) -> Iterator[tuple[Case, str]]:
    """The calls on which a mutant is tried, each with its schedule.

    The case itself; queries that see no key, which take the branches around whole loops; then ends in every group of
    rows, of queries and of keys, with odd and even numbers of keys: a lane masks keys in pairs.
    """
    yield case, "lockstep"
    for shape in (Shape.dense(300, 40, group=2), Shape.dense(70, 0, group=2)):
        yield replace(case, shape=shape), "serial"
    groups = TILE // GUARDED_ROWS
    for number in range(2 * groups):
        rows = 5 + GUARDED_ROWS * (number * 5 % groups)
        second = number // groups
        keys = 5 - second + GUARDED_ROWS * ((number * 7 + second) % groups) + TILE * (number % 3)
        yield replace(case, shape=Shape.dense(rows, keys, group=2)), SCHEDULES[number % len(SCHEDULES)]


def verdict(case: Case, mutant: Mutant) -> Verdict:
    """What catches a mutant first."""
    for call, schedule in calls(case):
        how, message = _outcome(call, schedule, mutant.ptx)
        if how:
            return Verdict(how, f"{call.shape.q_lens[0]} x {call.shape.k_lens[0]}, {schedule}", message)
    return Verdict("")


def _outcome(call: Case, schedule: str, ptx: str) -> tuple[str, str]:
    try:
        report = run(call, ptx, schedule)
    except SimulatorError as error:
        return "error", str(error)
    except AssertionError as error:
        return "numbers", str(error)
    except Hang:
        return "hang", ""
    if report.findings:
        return "finding", str(report.findings[0])
    expected = _excess(call)
    return ("wavefronts", f"{report.excess_wavefronts} in excess") if report.excess_wavefronts != expected else ("", "")


@functools.cache
def _excess(call: Case) -> int:
    """The excess wavefronts of the kernel as it is: none where rows are swizzled, as those of the tensors are lines."""
    padded = isinstance(call.config, PrefillConfig) and not call.config.swizzle
    return run(call).excess_wavefronts if padded else 0


def run(case: Case, ptx: str | None = None, schedule: str = "lockstep") -> Report:
    """A call with other PTX than the compiler's; asserts that its result is right, unless something was found."""
    tensors = make_tensors(case, "cpu")
    given, lse = arguments(case, tensors)
    memory = GlobalMemory()
    (launch,) = capture(compiled(spec_of(case, "sm_80")), given, place(memory, given))
    with time_limit():
        report = run_launch(replace(launch, ptx=ptx or launch.ptx), memory, schedule=schedule)
    if not report.findings:
        check.assert_nothing_written_beyond(tensors)
        check.assert_right(case, tensors, check.Result(tensors.out, lse))
    return report


class time_limit:
    """Of the process's own time, so that a busy machine makes no hang."""

    def __enter__(self) -> None:
        signal.signal(signal.SIGPROF, self._raise)
        signal.setitimer(signal.ITIMER_PROF, HANG_SECONDS)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)

    @staticmethod
    def _raise(*_: object) -> None:
        raise Hang


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator.mutations", description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--kinds", default="", help="a regular expression; default: all")
    parser.add_argument("--every", type=int, default=1, help="run only every so many-th mutant")
    options = parser.parse_args()
    torch.set_num_threads(1)
    total, caught, how = Counter[str](), Counter[str](), Counter[str]()
    for name in options.case or CASES:
        case = CASES[name]
        ptx = compiled(spec_of(case, "sm_80")).__ptx__
        chosen = [mutant for mutant in mutants(ptx) if re.search(options.kinds, mutant.kind)]
        for mutant in chosen[:: options.every]:
            found = verdict(case, mutant)
            total[mutant.kind] += 1
            caught[mutant.kind] += bool(found.how)
            how[found.how or "survived"] += 1
            if found.how in ("", "hang"):
                reason = "" if found.how else equivalence(mutant) or "NO REASON KNOWN"
                where = f"{name}, {mutant.kind}, line {mutant.line}: {mutant.before}"
                print(f"{found.how or 'survives'}: {where}  {reason}", flush=True)
    for kind, number in sorted(total.items()):
        print(f"{kind:<28}{caught[kind]:>4} of {number}")
    print(", ".join(f"{number} {way}" for way, number in how.most_common()))
    print(f"{caught.total()} of {total.total()} caught, {caught.total() / total.total():.1%}")


if __name__ == "__main__":
    main()
