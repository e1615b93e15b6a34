"""``python -m cute_attn simulate``: what it prints, and its exit status. One kernel is compiled for all of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_attn import __main__ as command
from cute_attn.arch import arch_by_name
from cute_attn.compiler.compiling import compile_spec
from cute_attn.configs import default_config
from cute_attn.problem import KernelSpec, PrefillProblem
from cute_attn.simulation import outcome
from layouts.simulator import launch
from layouts.simulator.scheduler import SCHEDULES

Capture = pytest.CaptureFixture[str]
CHOICE = ("simulate", "prefill", "--head-dim", "64", "--arch", "sm_80")
CALL = (*CHOICE, "--causal", "--heads", "2", "--kv-heads", "1", "--q-len", "37", "--k-len", "50")
ARCH = arch_by_name("sm_80")
SPEC = KernelSpec(PrefillProblem("float16", 64, 64, bounded_right=True), default_config(ARCH, 64, 64), ARCH)


@pytest.fixture(scope="module")
def causal_kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("ptx")
    return compile_spec(SPEC, f"--keep-ptx --generate-line-info --dump-dir {folder}")


@pytest.fixture
def kernel(causal_kernel: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command gets it instead of compiling it again."""

    def compile_it(spec: KernelSpec, options: str) -> Any:
        assert spec == SPEC
        assert "--keep-ptx" in options
        return causal_kernel

    monkeypatch.setattr(outcome, "compile_spec", compile_it)
    return causal_kernel


def test_result_findings_and_table_of_a_right_kernel(kernel: Any, capsys: Capture, tmp_path: Path) -> None:
    picture = tmp_path / "traffic.svg"
    assert command.main([*CALL, "--heatmap", str(picture)]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"{SPEC.name}\nall 74 rows right: largest error ")
    assert "findings       none" in output
    assert "excess 0)" in output
    assert "load.py:" in output
    assert "<svg" in picture.read_text()


def test_json(kernel: Any, capsys: Capture) -> None:
    assert command.main([*CALL, "--json", "--schedule", "random", "--seed", "5"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["ok"]
    assert 0 < values["largest_error"] <= values["largest_allowed"]
    assert (values["rows"], values["wrong_rows"]) == (74, 0)
    expected = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 37, "k_len": 50}
    assert values["call"] == {**expected, "window_left": -1, "window_right": 0, "seed": 5, "layout": "bhsd"}
    assert values["report"]["schedule"] == "random"
    assert values["report"]["totals"]["excess_wavefronts"] == 0


def test_listing_follows_the_table(kernel: Any, capsys: Capture) -> None:
    assert command.main([*CALL, "--listing", "--unchecked"]) == 0
    output = capsys.readouterr().out
    assert "mma.sync.aligned.m16n8k16" in output.split("memory instructions")[1]


def leave_out(opcode: str, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator gets the kernel's PTX without these instructions."""
    lines = kernel.__ptx__.splitlines()
    kept = [line for line in lines if opcode not in line]
    assert len(kept) < len(lines)
    monkeypatch.setattr(launch, "_kept_ptx", lambda compiled: "\n".join(kept))


@pytest.fixture
def without_waits(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out("cp.async.wait_group", kernel, monkeypatch)


@pytest.mark.usefixtures("without_waits")
@pytest.mark.parametrize("options", [(), ("--unchecked",)], ids=["checked", "unchecked"])
def test_missing_waits_are_a_fault(options: tuple[str, ...], capsys: Capture) -> None:
    assert command.main([*CALL, *options]) == 1
    output = capsys.readouterr().out
    assert "74 of 74 rows are wrong: largest error nan" in output
    assert ("async x" in output) == (not options)


def test_a_finding_is_a_fault_though_the_numbers_are_right(
    kernel: Any, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out("barrier.sync" if "barrier.sync" in kernel.__ptx__ else "bar.sync", kernel, monkeypatch)
    assert command.main(CALL) == 1
    output = capsys.readouterr().out
    assert "all 74 rows right" in output
    assert "race x" in output


@pytest.mark.parametrize("layout", ["bshd", "packed"])
def test_layouts_of_prefill(layout: str, capsys: Capture) -> None:
    options = ("--varlen", "--batch", "3") if layout == "packed" else ("--layout", layout, "--batch", "2")
    sizes = ("--head-dim-v", "72", "--q-len", "30", "--k-len", "20")  # of the third packed sequence nothing is left
    assert command.main([*CHOICE, "--lse", "--json", *sizes, *options]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["ok"]
    assert values["rows"] == 2 * (30 + 13 if layout == "packed" else 2 * 30)


DECODE = ("simulate", "decode", "--head-dim", "64", "--arch", "sm_90a", "--dtype", "bfloat16")
EVERYTHING = ("--page-size", "16", "--cache-dtype", "int8", "--window", "50", "--softcap", "--sinks", "--lse")


@pytest.mark.parametrize("options", [(), (*EVERYTHING, "--q-len", "2", "--schedule", "random")], ids=["plain", "all"])
def test_decode(options: tuple[str, ...], capsys: Capture) -> None:
    assert command.main([*DECODE, "--k-len", "90", "--json", *options]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["ok"]
    assert values["rows"] == 2 * 8 * (2 if options else 1)
    assert values["call"]["length"] == 90


def test_a_wrong_lse_is_a_fault() -> None:
    out = torch.ones(2, 4, 8, dtype=torch.float16)
    rows = outcome.Rows.of(out, out.float(), out.float())
    lse = torch.tensor([[1.0, -math.inf, 2.0, 3.0]] * 2)
    assert rows.with_lse(lse, lse).wrong == 0
    assert rows.with_lse(lse + torch.tensor([0.0, 0.0, 1e-3, math.nan]), lse).wrong == 4


@pytest.mark.usefixtures("without_waits")
def test_largest_error_is_null_where_it_is_nan(capsys: Capture) -> None:
    assert command.main([*CALL, "--json"]) == 1
    values = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert values["largest_error"] is None
    assert not values["ok"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--heads 3 --kv-heads 2", "kv_heads: it is 2; allowed: a divisor of heads, 3"),
        ("--window -2 4", "window: its left width is -2"),
        ("--page-size 16", "--page-size is no option of prefill"),
        ("--varlen --layout bshd", "--layout is the order of dense tensors"),
        ("--config huge", "config: it is 'huge'; allowed: seed_64x64_1stage"),
    ],
)
def test_what_is_wrong_with_the_call(options: str, message: str, capsys: Capture) -> None:
    assert command.main([*CHOICE, *options.split()]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err


def test_schedules_are_the_simulators() -> None:
    assert command.SCHEDULES == SCHEDULES
