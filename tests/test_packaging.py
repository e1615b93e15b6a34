"""The wheel: what is in it, and that it works where nothing but the wheel is."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import cute_attn

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cute_attn", "layouts")


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
    environment = {
        **os.environ,
        "PYTHONPATH": str(installed),
        "CUTE_ATTN_COMPILE": "lazy",
        "CUTE_ATTN_CACHE_DIR": str(folder / "cache"),
    }
    result = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_module_is_in_the_wheel(wheel: Path) -> None:
    """pyproject.toml names the packages one by one: a new one must not be forgotten."""
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if name.split("/")[0] in PACKAGES}
    in_sources = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".typed")
    }
    assert in_wheel == in_sources
    assert {f"{package}/py.typed" for package in PACKAGES} <= in_wheel


def test_nothing_but_the_packages_is_installed(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {*PACKAGES, f"cute_attn-{cute_attn.__version__}.dist-info"}


def test_metadata(wheel: Path) -> None:
    folder = f"cute_attn-{cute_attn.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as files:
        metadata = files.read(f"{folder}/METADATA").decode()
        licence = files.read(f"{folder}/licenses/LICENSE").decode()
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "Requires-Dist: nvidia-cutlass-dsl[cu13]==4.8.1\n" in metadata
    assert "Apache License" in licence


def test_attention_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    script = """
import cute_attn, layouts, torch
q, k, v = (torch.randn(1, 4, 33, 64, dtype=torch.float16) for _ in range(3))
out = cute_attn.attention(q, k, v, causal=True)
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
assert (out.float() - expected.float()).abs().max() < 1e-2
assert cute_attn.layouts is layouts
print(cute_attn.__file__, layouts.__file__, sep="\\n")
"""
    paths = run_installed(installed, tmp_path, "-c", script).split()
    assert all(path.startswith(str(installed)) for path in paths)


def test_command_line_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    listing = run_installed(installed, tmp_path, "-m", "cute_attn", "--help")
    assert all(command in listing for command in ("build", "cache", "inspect"))
    assert str(tmp_path / "cache") in run_installed(installed, tmp_path, "-m", "cute_attn", "cache")


def test_kernel_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    """The wheel compiles: its kernels' sources are there, as the DSL reads them."""
    arguments = ("inspect", "prefill", "--head-dim", "64", "--arch", "sm_80")
    assert "LDGSTS.128" in run_installed(installed, tmp_path, "-m", "cute_attn", *arguments)


def test_demo_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    assert "all within twice the error of torch" in run_installed(installed, tmp_path, "-m", "cute_attn.demo")
