"""Mutants of the prefill kernel's PTX: does the simulator notice them?

``python -m tests.simulator.mutations`` removes or alters, one at a time, every barrier, wait, commit, transpose,
swizzle and bounds branch of a few kernels, and lists what survives.

Some mutants are the kernel itself in other words, and survive: a commit whose copies the next commit takes along before
anything waits, the wait behind the last copy, the barrier before O is staged where each warp has read its own rows of Q
only, an xor that compares signs, and a bounds branch that this shape never takes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from cute_attn.configs import SEED_CONFIGS
from layouts.simulator.errors import SimulatorError
from layouts.simulator.launch import capture
from layouts.simulator.memory import GlobalMemory
from layouts.simulator.report import Report
from layouts.simulator.simulate import place, run_launch
from tests.gpu import check
from tests.gpu.cases import Case, Shape, plain
from tests.gpu.tensors import make_tensors
from tests.simulator.prefill_cases import arguments, compiled, spec_of

SHAPE = Shape.dense(70, 300, heads_kv=1, group=2)
CASES = {
    "d64": Case(plain(64, bounded_right=True), SHAPE),
    "d64 one stage, padded": Case(plain(64), SHAPE, config=SEED_CONFIGS["seed_64x64_1stage"]),
    "d128": Case(plain(128, "bfloat16"), SHAPE),
}
NEAR = 12  # lines after a branch within which it guards a memory access


@dataclass(frozen=True)
class Mutant:
    """The kernel with one line changed: ``kind`` of change, the line's number, the line before."""

    kind: str
    line: int
    before: str
    ptx: str


def mutants(ptx: str) -> Iterator[Mutant]:
    """Every mutant of a kernel."""
    lines = ptx.split("\n")
    for number, line in enumerate(lines):
        for kind, changed in _changes(lines, number):
            yield Mutant(kind, number + 1, line.strip(), "\n".join([*lines[:number], changed, *lines[number + 1 :]]))


def _changes(lines: list[str], number: int) -> Iterator[tuple[str, str]]:
    line = lines[number].strip()
    if line.startswith(("bar.sync", "bar.warp.sync")):
        yield "barrier", ""
    if line.startswith("cp.async.wait_group"):
        yield "wait", ""
        yield "wait for fewer", re.sub(r"(\d+);", lambda m: f"{int(m[1]) + 1};", line)
    if line.startswith("cp.async.commit_group"):
        yield "commit", ""
    if line.startswith("ldmatrix"):
        transposed = ".trans" in line
        yield "transpose", line.replace(".trans", "") if transposed else line.replace(".x4", ".x4.trans")
    swizzle = re.match(r"xor\.b32\s+(%r\d+), (%r\d+), (%r\d+|\d+);", line)
    if swizzle:
        yield "swizzle", f"mov.b32 {swizzle[1]}, {swizzle[2]};"
    if re.match(r"@!?%p\d+ bra\s", line):
        guarded = " ".join(lines[number + 1 : number + 1 + NEAR]).split("bra")[0]
        if re.search(r"cp\.async\.c|ld\.global|st\.global", guarded):
            yield "bounds", ""


def survives(case: Case, mutant: Mutant, original: Report) -> bool:
    """Whether a mutant gives right numbers, no finding, and no more wavefronts than the kernel itself."""
    try:
        report = run(case, mutant.ptx)
    except (SimulatorError, AssertionError):
        return False
    return not report.findings and report.excess_wavefronts <= original.excess_wavefronts


def run(case: Case, ptx: str | None = None) -> Report:
    """A call with other PTX than the compiler's; asserts that its result is right."""
    tensors = make_tensors(case, "cpu")
    given, lse = arguments(case, tensors)
    memory = GlobalMemory()
    (launch,) = capture(compiled(spec_of(case, "sm_80")), given, place(memory, given))
    report = run_launch(replace(launch, ptx=ptx or launch.ptx), memory)
    if not report.findings:
        check.assert_nothing_written_beyond(tensors)
        check.assert_right(case, tensors, check.Result(tensors.out, lse))
    return report


def main() -> None:
    torch.set_num_threads(1)
    total, caught = Counter[str](), Counter[str]()
    for name, case in CASES.items():
        original = run(case)
        for mutant in mutants(compiled(spec_of(case, "sm_80")).__ptx__):
            total[mutant.kind] += 1
            if survives(case, mutant, original):
                print(f"survives: {name}, {mutant.kind}, line {mutant.line}: {mutant.before}", flush=True)
            else:
                caught[mutant.kind] += 1
    for kind, number in total.items():
        print(f"{kind:<16}{caught[kind]:>4} of {number}")
    share = sum(caught.values()) / sum(total.values())
    print(f"{sum(caught.values())} of {sum(total.values())} caught, {share:.1%}")


if __name__ == "__main__":
    main()
