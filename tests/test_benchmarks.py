"""The benchmarks' arithmetic and tables, with made-up measurements."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import config_sweep, decode, measure, prefill, report, seed_tilings
from benchmarks.measure import Cell
from benchmarks.peers import Contender, as_tensor, select
from benchmarks.workload import Inputs, Workload, error
from cute_attn import reference
from cute_attn.arch import ARCHS
from cute_attn.configs import SEED_CONFIGS

Q, K, V = (torch.randn(2, 2, 150, 32, dtype=torch.float16) for _ in range(3))
SMALL = Inputs(Q, K, V, causal=True)
RIGHT = as_tensor(reference.attention(Q, K, V, causal=True))


def test_flops_of_a_cell() -> None:
    full = Workload("float16", 128, 4096, causal=False)
    assert (full.batch, full.heads) == (4, 16)
    assert full.flops == 4 * full.batch * full.heads * 4096**2 * 128
    assert Workload("float16", 128, 4096, causal=True).flops == full.flops / 2
    assert full.tflops(milliseconds=1.0) == pytest.approx(full.flops / 1e9)


def test_error_of_right_and_wrong_results() -> None:
    assert error(RIGHT, SMALL) < 5e-4
    shifted = RIGHT.clone()
    shifted[1, 1, 149] += 0.5
    assert error(shifted, SMALL) > 1e-2
    unwritten = RIGHT.clone()
    unwritten[0, 0, 70, 3] = math.nan
    assert math.isnan(error(unwritten, SMALL))


def test_geometric_mean_and_ratio() -> None:
    assert report.geometric_mean([2.0, 8.0, None]) == pytest.approx(4.0)
    assert report.geometric_mean([None]) is None
    assert report.ratio(3.0, 2.0) == 1.5
    assert report.ratio(None, 2.0) is None


@pytest.fixture
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workload, "inputs", lambda self: SMALL)
    monkeypatch.setattr(measure, "device_medians_ms", lambda calls, budget_ms: dict.fromkeys(calls, 1.0))


@pytest.mark.usefixtures("_no_device")
def test_wrong_and_absent_contenders_are_not_timed() -> None:
    def absent(inputs: Inputs) -> Contender:
        raise ImportError("No module named 'flash_attn'")

    binds: dict[str, measure.Bind] = {
        "right": lambda inputs: Contender(lambda: RIGHT, as_tensor),
        "wrong": lambda inputs: Contender(lambda: RIGHT + 1, as_tensor),
        "absent": absent,
    }
    cell = measure.measure(Workload("float16", 64, 1024, causal=True), binds, budget_ms=1.0)
    assert set(cell.tflops) == {"right"}
    assert cell.missing["wrong"].startswith("WRONG: relative error")
    assert cell.missing["absent"] == "ImportError: No module named 'flash_attn'"
    assert cell.shown("wrong") == "WRONG"
    assert cell.shown("absent") == "-"


def _fake_measure(workload: Workload, binds: dict[str, measure.Bind], budget_ms: float) -> Cell:
    cell = Cell(workload)
    for i, name in enumerate(binds):
        if name == "FA4":
            cell.missing[name] = "ModuleNotFoundError: No module named 'flash_attn'"
        else:
            cell.tflops[name] = 300.0 / (1 + i)
    return cell


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    for module in (prefill, seed_tilings):
        monkeypatch.setattr(module, "measure", _fake_measure)
        monkeypatch.setattr(module, "compile_in_parallel", lambda workloads, configs: None)
    monkeypatch.setattr(command, "_require_gpu", lambda parser: None)
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    command.main()


def test_prefill_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _run(monkeypatch, "prefill", "--json", str(tmp_path / "prefill.json"))
    printed = capsys.readouterr().out
    header = printed.splitlines()[0].split()
    assert header == [
        "dtype",
        "d",
        "N",
        "causal",
        "/",
        "FA2",
        "/",
        "cuDNN",
        "/",
        "FA4",
        "cute_attn",
        "FA2",
        "cuDNN",
        "FA4",
    ]
    assert "FA4: no figure in 24 of 24 cells: ModuleNotFoundError" in printed
    assert "geometric mean" in printed
    content: dict[str, Any] = json.loads((tmp_path / "prefill.json").read_text())
    assert len(content["rows"]) == 24
    assert content["geometric_mean_ratio"]["FA2"] == pytest.approx(2.0)
    assert content["geometric_mean_ratio"]["FA4"] is None
    assert content["environment"]["torch"] == torch.__version__


def test_decode_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """All of it but compiling and timing, on CPU tensors: what is timed is right in every kind of cache."""
    monkeypatch.setattr(decode, "DEVICE", "cpu")
    monkeypatch.setattr(decode, "ROWS", (decode.Row(2, 64, True), decode.Row(1, 128)))
    monkeypatch.setattr(decode, "_compile", lambda configs: None)
    monkeypatch.setattr(decode, "_read_bandwidth_gb_per_s", lambda: 4000.0)
    monkeypatch.setattr(decode, "_config_name", lambda name: "streams_8x16_w4_s3_b2")
    monkeypatch.setattr(decode, "device_medians_ms", lambda calls, budget_ms: dict.fromkeys(calls, 0.004))
    monkeypatch.setattr(decode, "_graph_us", lambda call: 2.0)
    _run(monkeypatch, "decode", "--configs", "seed", "--json", str(tmp_path / "decode.json"))
    printed = capsys.readouterr().out
    assert "a sum over 4 GB reads 4000 GB/s" in printed
    assert "FA4: ModuleNotFoundError" in printed
    content: dict[str, Any] = json.loads((tmp_path / "decode.json").read_text())
    row = content["rows"][1]
    assert {row["microseconds"][name] for name in (*decode.KINDS, "seed")} == {4.0}
    assert row["gb_per_s"]["bf16"] == pytest.approx(128 * 8 * 128 * 2 * 2 / 4e3)
    assert row["gb_per_s"]["fp8"] == pytest.approx(128 * 8 * 128 * 2 / 4e3)
    assert max(row["relative_error"][name] for name in decode.KINDS) < decode.MAX_ERROR


def test_prefill_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "prefill.svg"
    _run(monkeypatch, "prefill", "--quick", "--configs", "seed_64x64_1stage", "--picture", str(path))
    assert "head dim 128, bf16, causal" in path.read_text()


def test_seed_tilings_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _run(monkeypatch, "seed-tilings", "--json", str(tmp_path / "seed.json"))
    rows = json.loads((tmp_path / "seed.json").read_text())["rows"]
    assert len(rows) == len(SEED_CONFIGS) * 9
    compared = [row for row in rows if row["cuda_tflops"]]
    # One tiling a head dim, with 1 and 2 stages, except that head dim 256 has 1 stage alone.
    assert len(compared) == 3 * (2 + 2 + 1)
    row = next(r for r in rows if (r["head_dim"], r["length"], r["config"]) == (64, 4096, "seed_128x64_1stage"))
    assert row["cuda_tflops"] == 225
    assert row["ratio_to_cuda"] == pytest.approx(row["tflops"] / 225)
    assert row["ratio_to_cuda_at_this_pace"] == pytest.approx(row["tflops"] / (225 * 150 / 298))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("capability", [86, 90])
def test_swept_configs_fit(head_dim: int, capability: int) -> None:
    arch = ARCHS[capability]
    configs = config_sweep.candidates(arch, head_dim, list(config_sweep.TILE_N))
    assert len(configs) > 10
    assert len(configs) == len(set(configs))
    for config in configs:
        config.check_fits(arch, head_dim, head_dim)


def test_picture_without_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as exit_:
        _run(monkeypatch, "picture", "--json", str(tmp_path / "none.json"))
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "none.json" in line


def test_unknown_peer_is_refused() -> None:
    with pytest.raises(ValueError, match="FA2"):
        select(["FA5"])
