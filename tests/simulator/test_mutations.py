"""A sample of the mutants that ``python -m tests.simulator.mutations`` runs all of."""

from __future__ import annotations

import pytest

from tests.simulator.mutations import CASES, run, verdict
from tests.simulator.prefill_cases import bank_conflicts, compiled, spec_of
from tests.simulator.ptx_changes import Mutant, equivalence, mutants

EVERY = {"d64 causal": 41, "d64 one stage, padded": 11, "d128": 17}  # about 10 mutants each


def mutants_of(name: str) -> list[Mutant]:
    return list(mutants(compiled(spec_of(CASES[name], "sm_80")).__ptx__))


@pytest.mark.parametrize("name", CASES)
def test_sampled_mutants_are_caught_or_equivalent(name: str) -> None:
    report = run(CASES[name])
    assert not report.findings
    assert bank_conflicts(report) == 0
    assert report.excess_wavefronts == 0 or CASES[name].config is not None
    sample = [mutant for mutant in mutants_of(name)[:: EVERY[name]] if not equivalence(mutant)]
    survivors = [mutant for mutant in sample if not verdict(CASES[name], mutant).how]
    assert not survivors, [(mutant.kind, mutant.line, mutant.before) for mutant in survivors]


def test_barriers_and_waits_that_only_a_block_without_keys_needs() -> None:
    """Behind the loop: without them O is staged over Q while other warps' copies of Q are under way."""
    last = [mutant for mutant in mutants_of("d64 causal") if mutant.kind in ("barrier removed", "wait removed")][-3:]
    assert [verdict(CASES["d64 causal"], mutant).how for mutant in last] == ["finding"] * 3
