"""docs/simulator.md: its quick start runs as printed and prints what the document shows; what it lists exists."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from layouts.simulator.instructions import elementwise, machine_code
from layouts.simulator.scheduler import SCHEDULES

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "simulator.md").read_text(encoding="utf-8")
KERNEL = "components.py"
BARRIER = "    cute.arch.sync_threads()\n"


def _section(title: str) -> str:
    return DOCUMENT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def _block(section: str, language: str) -> str:
    (block,) = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    return block


def _run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """From a file, for the DSL reads the source of what it compiles."""
    (folder / KERNEL).write_text(code, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, KERNEL], cwd=folder, env=environment, capture_output=True, text=True)


def _timeless(text: str) -> str:
    """Without how long the run took, and without spaces at the ends of lines."""
    text = re.sub(r"in [\d.]+ s, [\d,]+ a second", "in a moment", text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def test_quick_start_prints_what_the_document_shows(tmp_path: Path) -> None:
    section = _section("Quick start")
    run = _run(tmp_path, _block(section, "python"))
    assert run.returncode == 0, run.stderr
    assert _timeless(run.stdout) == _timeless(_block(section, "text"))


def test_quick_start_without_its_barrier_has_the_finding_shown(tmp_path: Path) -> None:
    code = _block(_section("Quick start"), "python")
    assert code.count(BARRIER) == 1
    run = _run(tmp_path, code.replace(BARRIER, "    pass\n"))  # the lines keep their numbers
    assert run.returncode == 1
    assert " ".join(_block(_section("What is found"), "text").split()) in " ".join(run.stderr.split())


def test_schedules_are_all_named() -> None:
    assert tuple(re.findall(r"^\| `(\w+)` \|", _section("Schedules"), re.MULTILINE)) == SCHEDULES


def _modelled() -> set[str]:
    """Opcodes up to the first dot."""
    machine_code.load()
    elementwise.is_elementwise("add")
    known = {*elementwise.TABLE, *machine_code.BUILDERS, *machine_code.CONTROLS}
    return {opcode.split(".")[0] for opcode in known}


def test_instructions_are_those_that_are_modelled() -> None:
    rows = [line.split("|")[2] for line in _section("What is modelled").splitlines() if line.startswith("| ")]
    named = {name.split(".")[0] for row in rows for name in re.findall(r"`([a-z][\w.]*)`", row)}
    assert named == _modelled()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"python -m ([\w.]+)", DOCUMENT))))
def test_named_programs_exist(name: str) -> None:
    assert importlib.util.find_spec(name) is not None
