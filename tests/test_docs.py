"""The README and its pictures: drawn and filled by the tools, and its examples run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tools import draw_pictures, update_readme

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "docs" / "design.md"]


def test_tables_are_what_the_tools_write() -> None:
    text = README.read_text()
    assert update_readme.filled(text) == text, "run: make docs"


def test_tables_of_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = dict.fromkeys(("driver", "cuda", "torch", "cudnn", "nvidia-cutlass-dsl", "date"), "1.2")
    common = {"environment": {**environment, "device": "some GPU"}}
    row = {"dtype": "bfloat16", "head_dim": 64, "length": 1024, "causal": True}
    row |= {"ratio": {"FA2": 1.234, "FA4": None}, "tflops": {"cute_attn": 320.4, "FA2": 300.0}}
    table = {"unit": "TFLOP/s", "peers": {"FA2": "torch's"}, "geometric_mean_ratio": {"FA2": 1.2, "FA4": None}}
    (tmp_path / "prefill.json").write_text(json.dumps({**common, **table, "rows": [row]}))
    (tmp_path / "host.json").write_text(json.dumps({**common, "host": {"cute_attn": 12.34, "FA2": 27.0}}))
    monkeypatch.setattr(update_readme, "RESULTS", tmp_path)
    prefill = update_readme.prefill()
    assert "| bf16 | 64 | 1024 | yes | 1.23 | - | 320 | 300 | - |" in prefill
    assert "| geometric mean |  |  |  | **1.20** | **-** |  |  |  |" in prefill
    assert "Measured on one some GPU" in prefill
    assert "| cute_attn | 12.3 |" in update_readme.host()
    assert update_readme.gpu_tests() == "No record yet."


@pytest.mark.parametrize("name", draw_pictures.pictures())
def test_pictures_are_what_the_tools_draw(name: str) -> None:
    assert (draw_pictures.FOLDER / name).read_text() == draw_pictures.pictures()[name], "run: make docs"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", document.read_text())
    missing = [t for t in targets if not t.startswith("https://") and not (document.parent / t).exists()]
    assert targets
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document: Path) -> None:
    names = re.findall(r"`((?:cute_attn|layouts|benchmarks|tests|tools|docs)/[\w/.]*)`", document.read_text())
    assert not [name for name in names if not (ROOT / name).exists()]


def test_examples_run_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """From top to bottom in one namespace, as they stand but for the device, the lengths and CUDA graphs."""
    # torch.compile would need a C++ compiler.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    shapes = []
    names: dict[str, Any] = {}
    for block in blocks:
        if "CUDAGraph" not in block:
            exec(block.replace('"cuda"', '"cpu"').replace("4096", "96"), names)
            shapes.append(tuple(names["out"].shape))
    assert shapes == [(1024, 16, 64), (2, 16, 96, 128), (2, 1, 32, 128), (2, 16, 96, 128)]
    assert tuple(names["out_lse"].shape) == (2, 1, 32)
    assert tuple(names["lse"].shape) == (2, 32, 96)
