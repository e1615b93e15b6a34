"""Every default config, and the seed's tilings, through the simulator: numbers, no findings, no bank conflicts."""

from __future__ import annotations

import pytest

from cute_attn.configs import SEED_CONFIGS, PrefillConfig
from tests.gpu.cases import Case, Shape, plain
from tests.simulator.prefill_cases import draw_short, simulated

DEFAULTS = [
    ("sm_80", plain(64, bounded_left=True, bounded_right=True, return_lse=True)),
    ("sm_80", plain(96, "bfloat16", bounded_right=True)),
    ("sm_80", plain(128, bounded_right=True, return_lse=True)),
    ("sm_80", plain(256, "bfloat16", bounded_right=True)),
    ("sm_90a", plain(64, "bfloat16", bounded_right=True, varlen=True)),
    ("sm_90a", plain(128, bounded_left=True, bounded_right=True, return_lse=True)),
    ("sm_90a", plain(256, varlen=True, return_lse=True)),
    ("sm_100a", plain(128, "bfloat16", bounded_right=True)),
    ("sm_86", plain(256, bounded_right=True)),
]


@pytest.mark.parametrize(("gpu_arch", "problem"), DEFAULTS, ids=lambda value: getattr(value, "name", value))
def test_default_configs(gpu_arch: str, problem: object) -> None:
    for seed, schedule in ((0, "lockstep"), (1, "random")):
        case = draw_short(problem, seed)  # type: ignore[arg-type]
        report = simulated(case, gpu_arch, schedule, seed)
        assert not report.findings, (case, report.findings)
        assert report.excess_wavefronts == 0, report.table()


@pytest.mark.parametrize("name", [name for name in SEED_CONFIGS if not name.startswith("seed_128x128")])
def test_seed_tilings(name: str) -> None:
    """Rows padded by 8 elements have no conflicts either; O goes out by shuffles."""
    config: PrefillConfig = SEED_CONFIGS[name]
    report = simulated(Case(plain(64), Shape.dense(70, 200, heads_kv=2, group=2), config=config), "sm_80", "reversed")
    assert not report.findings
    assert report.excess_wavefronts == 0, report.table()
