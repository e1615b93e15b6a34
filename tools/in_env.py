"""Runs a Python command where the project's dependencies are installed, and installs them first if they are not.

    python3 tools/in_env.py [--extra NAME] -- ARGUMENTS...     the same as `python ARGUMENTS...`

The environment is the calling interpreter if that has everything, else `.venv`, which is made when it is missing. Only
the standard library is needed, and a machine on which everything is importable needs no network. Without a GPU a CPU
build of torch is installed, because the default build brings several GB of CUDA libraries.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
CPU_TORCH = "torch==2.13.0+cpu"
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
OLDEST_PYTHON = (3, 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", help="also needs the optional dependencies of this name, from pyproject.toml")
    parser.add_argument("--check", action="store_true", help="install and run nothing; exit 1 if something is missing")
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(f"Python {'.'.join(map(str, OLDEST_PYTHON))} or newer is needed, this is {sys.version.split()[0]}")
    if options.check:
        sys.exit("\n".join(missing_requirements(options.extra)) or 0)
    python = Path(sys.executable) if not missing_requirements(options.extra) else prepared_venv(options.extra)
    os.execv(python, [str(python), *options.arguments])


def missing_requirements(extra: str | None) -> list[str]:
    """Requirements of pyproject.toml that the running interpreter does not meet."""
    try:
        from pip._vendor.packaging.requirements import Requirement
    except ImportError:
        return ["pip, which reads requirements"]
    unmet = []
    for line in requirements(extra):
        requirement = Requirement(line)
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            unmet.append(line)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            unmet.append(f"{line} (found {version})")
    return unmet


def requirements(extra: str | None) -> list[str]:
    """The project's requirements, with those of an extra and of the extras that it names."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        from pip._vendor import tomli as tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found: list[str] = list(project["dependencies"])
    waiting = [extra] if extra else []
    while waiting:
        for line in extras[waiting.pop()]:
            if line.startswith(project["name"] + "["):
                waiting.extend(line[len(project["name"]) + 1 : -1].split(","))
            else:
                found.append(line)
    return found


def prepared_venv(extra: str | None) -> Path:
    """The interpreter of `.venv`, made and filled as needed."""
    if not VENV_PYTHON.exists():
        reuse_torch = has_gpu() and is_installed("torch")
        options = ["--system-site-packages"] if reuse_torch else []
        run([sys.executable, "-m", "venv", *options, str(VENV)])
    check = [str(VENV_PYTHON), __file__, *(["--extra", extra] if extra else []), "--check"]
    if subprocess.run(check, capture_output=True).returncode != 0:
        announce_install()
        if not has_gpu():
            install_cpu_torch()
        pip_install("--editable", f"{ROOT}[{extra}]" if extra else str(ROOT))
    return VENV_PYTHON


def announce_install() -> None:
    size = "several GB, unless torch for CUDA is there" if has_gpu() else "about 1 GB, with a CPU build of torch"
    print(f"installing into {VENV}, once: {size}; this takes minutes", file=sys.stderr, flush=True)


def is_installed(package: str) -> bool:
    """Whether an install ended: one that was interrupted leaves modules that can be found, but no metadata."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def has_gpu() -> bool:
    tool = shutil.which("nvidia-smi")
    return tool is not None and b"GPU" in subprocess.run([tool, "-L"], capture_output=True).stdout


def install_cpu_torch() -> None:
    """From the configured package index or, where that has no CPU build, from PyTorch's own."""
    probe = "import importlib.metadata; importlib.metadata.version('torch')"
    if subprocess.run([str(VENV_PYTHON), "-c", probe], capture_output=True).returncode == 0:
        return
    try:
        pip_install(CPU_TORCH, quiet=True)
    except subprocess.CalledProcessError:
        pip_install(CPU_TORCH, "--index-url", CPU_TORCH_INDEX)


def pip_install(*arguments: str, quiet: bool = False) -> None:
    run([str(VENV_PYTHON), "-m", "pip", "install", "--quiet", *arguments], quiet)


def run(command: list[str], quiet: bool = False) -> None:
    """Runs a command, and says so; a quiet one may fail, and what it prints would only alarm."""
    print("+", *command, file=sys.stderr, flush=True)
    subprocess.run(command, check=True, capture_output=quiet)


if __name__ == "__main__":
    main()
