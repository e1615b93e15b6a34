"""Set-up: what counts as installed, and what is installed where."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import in_env


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """What would be run to fill a new environment; nothing is."""
    recorded: list[list[str]] = []
    monkeypatch.setattr(in_env, "run", lambda command, quiet=False: recorded.append(command))
    monkeypatch.setattr(in_env, "VENV_PYTHON", tmp_path / "bin" / "python")
    nothing_installed: subprocess.CompletedProcess[bytes] = subprocess.CompletedProcess([], returncode=1)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: nothing_installed)
    return recorded


def test_this_interpreter_has_everything() -> None:
    assert in_env.missing_requirements("test") == []


def test_an_extra_brings_those_that_it_names() -> None:
    names = " ".join(in_env.requirements("test"))
    assert "pytest" in names
    assert "nvidia-cuda-nvdisasm" in names
    assert "pytest" not in " ".join(in_env.requirements(None))


def test_absent_and_wrong_versions_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_env, "requirements", lambda _: ["no-such-package>=1", "numpy>=1000", "numpy>=1"])
    absent, too_old = in_env.missing_requirements(None)
    assert absent == "no-such-package>=1"
    assert too_old.startswith("numpy>=1000 (found ")


def test_command_runs_in_an_environment_that_is_ready() -> None:
    command = [sys.executable, in_env.__file__, "--", "-c", "import sys; print(sys.argv[1:])", "-x"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "['-x']"


def test_without_a_gpu_torch_is_a_cpu_build(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_env, "has_gpu", lambda: False)
    in_env.prepared_venv("test")
    venv, torch, project = commands
    assert venv[1:3] == ["-m", "venv"]
    assert "--system-site-packages" not in venv
    assert torch[-1] == in_env.CPU_TORCH
    assert project[-2:] == ["--editable", f"{in_env.ROOT}[test]"]


def test_with_a_gpu_an_installed_torch_is_used(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_env, "has_gpu", lambda: True)
    in_env.prepared_venv(None)
    venv, project = commands
    assert "--system-site-packages" in venv
    assert project[-2:] == ["--editable", str(in_env.ROOT)]


def test_cpu_build_from_pytorch_where_the_index_has_none(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], quiet: bool = False) -> None:
        assert quiet == ("--index-url" not in command)
        commands.append(command)
        if "--index-url" not in command:
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(in_env, "run", run)
    in_env.install_cpu_torch()
    assert commands[-1][-3:] == [in_env.CPU_TORCH, "--index-url", in_env.CPU_TORCH_INDEX]
