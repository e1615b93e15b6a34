"""A sample of the mutants of ``tests.simulator.mutations``: those that can have no good reason to survive."""

from __future__ import annotations

from tests.simulator.mutations import CASES, mutants, run, survives
from tests.simulator.prefill_cases import compiled, spec_of


def test_waits_and_transposes_of_the_two_stage_kernel() -> None:
    case = CASES["d64"]
    original = run(case)
    assert not original.findings
    every = list(mutants(compiled(spec_of(case, "sm_80")).__ptx__))
    last_copy = max(mutant.line for mutant in every if mutant.kind == "commit")
    # Behind the last copy a wait drains what the loop has waited for: without it nothing changes.
    waits = [mutant for mutant in every if mutant.kind.startswith("wait") and mutant.line < last_copy]
    transposes = [mutant for mutant in every if mutant.kind == "transpose"]
    assert len(waits) >= 4
    assert len(transposes) >= 16
    survivors = [mutant for mutant in waits + transposes[::6] if survives(case, mutant, original)]
    assert not survivors, [(mutant.kind, mutant.line, mutant.before) for mutant in survivors]
