"""Mutants of the decode kernels' PTX, both arrangements: ``python -m tests.simulator.decode_mutations``.

As ``tests.simulator.mutations``, with what decode adds: mbarriers that are initialised, arrived at and waited for, and
copies that arrive by themselves. A mutant is run at lengths that end in every part of a step, in one block and in two.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch

from cute_attn.decode_configs import DecodeConfig, RolesConfig, StreamsConfig
from cute_attn.decode_problem import DecodeProblem
from layouts.simulator.errors import SimulatorError
from layouts.simulator.launch import capture
from layouts.simulator.memory import GlobalMemory
from layouts.simulator.report import Report
from layouts.simulator.simulate import place, run_launch
from tests.simulator.decode_cases import DecodeCase, arguments, assert_right, compiled, make_tensors, spec_of
from tests.simulator.mutations import Hang, Verdict, time_limit
from tests.simulator.ptx_changes import Mutant, mutants

ARCH = "sm_80"
PROBLEM = DecodeProblem("float16", "float16", 64, 16)
CASES = {
    "streams": DecodeCase(PROBLEM, (150, 0, 70), q_len=2, num_splits=2, config=StreamsConfig()),
    "roles": DecodeCase(replace(PROBLEM, head_dim=128), (300, 0, 70), q_len=2, num_splits=2, config=RolesConfig(8)),
}
LENGTHS = (((150, 0, 70), 2, "lockstep"), ((1, 600), 1, "reversed"), ((259, 64), 2, "random"), ((33, 518), 1, "serial"))


def calls(case: DecodeCase) -> Iterator[tuple[DecodeCase, str]]:
    """The calls on which a mutant is tried, each with its schedule."""
    yield case, "lockstep"
    for lengths, splits, schedule in LENGTHS:
        yield replace(case, lengths=lengths, num_splits=splits), schedule


def run(case: DecodeCase, ptx: str | None = None, schedule: str = "lockstep") -> Report:
    """A call with other PTX than the compiler's; asserts that its result is right, unless something was found."""
    spec = spec_of(case, ARCH)
    assert isinstance(spec.config, DecodeConfig)
    tensors = make_tensors(case, case.num_splits, spec.config)
    given, memory = arguments(case, tensors, case.num_splits, spec.config), GlobalMemory()
    (launch,) = capture(compiled(spec), given, place(memory, given))
    with time_limit():
        report = run_launch(replace(launch, ptx=ptx or launch.ptx), memory, schedule=schedule)
    if not report.findings:
        assert tensors.out_buffer[:, :, -1].isnan().all(), "elements beyond the output were written"
        assert not tensors.semaphores.any(), "semaphores are left"
        assert_right(case, tensors)
    return report


def verdict(case: DecodeCase, mutant: Mutant) -> Verdict:
    """What catches a mutant first."""
    for call, schedule in calls(case):
        where = f"{call.lengths}, {schedule}"
        try:
            report = run(call, mutant.ptx, schedule)
        except SimulatorError as error:
            return Verdict("error", where, str(error))
        except AssertionError as error:
            return Verdict("numbers", where, str(error))
        except Hang:
            return Verdict("hang", where)
        if report.findings:
            return Verdict("finding", where, str(report.findings[0]))
    return Verdict("")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator.decode_mutations", description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--kinds", default="", help="a regular expression; default: all")
    parser.add_argument("--every", type=int, default=1, help="run only every so many-th mutant")
    options = parser.parse_args()
    torch.set_num_threads(1)
    total, caught = Counter[str](), Counter[str]()
    for name in options.case or CASES:
        case = CASES[name]
        chosen = [m for m in mutants(compiled(spec_of(case, ARCH)).__ptx__) if re.search(options.kinds, m.kind)]
        for mutant in chosen[:: options.every]:
            found = verdict(case, mutant)
            total[mutant.kind] += 1
            caught[mutant.kind] += bool(found.how)
            if not found.how:
                print(f"survives: {name}, {mutant.kind}, line {mutant.line}: {mutant.before}", flush=True)
    for kind, number in sorted(total.items()):
        print(f"{kind:<32}{caught[kind]:>4} of {number}")
    print(f"{caught.total()} of {total.total()} caught, {caught.total() / total.total():.1%}")


if __name__ == "__main__":
    main()
