"""The merge of decode's splits by their last block: all that orders it is needed, and missed where it is not there."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cute_attn.decode_configs import DecodeConfig
from cute_attn.decode_problem import DecodeProblem
from layouts.simulator.launch import capture
from layouts.simulator.memory import GlobalMemory
from layouts.simulator.report import Report
from layouts.simulator.simulate import place, run_launch
from tests.simulator.decode_cases import DecodeCase, arguments, compiled, make_tensors, spec_of

CASE = DecodeCase(DecodeProblem("float16", "float16", 64), (700,), heads_kv=1, group=2, num_splits=3)
COUNT = r"atom\.acq_rel\.gpu\.global\.inc\.u32"
BARRIER = r"(bar\.sync|barrier\.sync)\s[^\n]*"
# What is altered: a pattern of the PTX, and what stands there instead.
CHANGES: dict[str, tuple[str, str]] = {
    "no order": (COUNT, "atom.relaxed.gpu.global.inc.u32"),
    "no release": (COUNT, "atom.acquire.gpu.global.inc.u32"),
    "no acquire": (COUNT, "atom.release.gpu.global.inc.u32"),
    "order in a block only": (COUNT, "atom.acq_rel.cta.global.inc.u32"),
    "no barrier before": (rf"{BARRIER}((?:(?!bar).)*?{COUNT})", r"\2"),
    "no barrier after": (rf"({COUNT}(?:(?!bar).)*?){BARRIER}", r"\1"),
}


def run(change: tuple[str, str] | None = None) -> Report:
    config = spec_of(CASE, "sm_80").config
    assert isinstance(config, DecodeConfig)
    given, memory = (
        arguments(CASE, make_tensors(CASE, CASE.num_splits, config), CASE.num_splits, config),
        GlobalMemory(),
    )
    (launch,) = capture(compiled(spec_of(CASE, "sm_80")), given, place(memory, given))
    if change is not None:
        ptx, count = re.subn(*change, launch.ptx, flags=re.DOTALL)
        assert count == 1
        launch = replace(launch, ptx=ptx)
    return run_launch(launch, memory)


def test_nothing_is_missed() -> None:
    assert not run().findings


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_noticed(change: str) -> None:
    assert "race" in {finding.kind for finding in run(CHANGES[change]).findings}
