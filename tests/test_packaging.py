"""The wheel: what is in it, and that it works where nothing but the wheel is."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, so that this is complete too."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)], check=True)
    (built,) = folder.glob("*.whl")
    assert list(folder.glob("*.tar.gz"))
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), str(wheel)]
    subprocess.run(command, check=True)
    return folder


def run_installed(installed: Path, folder: Path, *arguments: str) -> str:
    """Python's output with the installed wheel first on its path, in another folder than the sources'."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    result = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_module_is_in_the_wheel(wheel: Path) -> None:
    """pyproject.toml names the packages one by one: a new one must not be forgotten."""
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if name.split("/")[0] == "layouts"}
    in_sources = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "layouts").rglob("*") if path.suffix in (".py", ".typed")
    }
    assert in_wheel == in_sources
    assert "layouts/py.typed" in in_wheel


def test_importing_layouts_is_light(installed: Path, tmp_path: Path) -> None:
    script = "import sys, layouts; print(layouts.__file__, *({'numpy', 'torch', 'cutlass'} & set(sys.modules)))"
    (path,) = run_installed(installed, tmp_path, "-c", script).split()
    assert path.startswith(str(installed))


def test_demo_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    assert "992 x race" in run_installed(installed, tmp_path, "-m", "layouts.simulator.demo")
