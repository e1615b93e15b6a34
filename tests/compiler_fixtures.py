"""Fixtures for tests of compiling and loading: an empty cache, a fake compiler, and processes that use both."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cute_attn.arch import arch_by_name
from cute_attn.compiler import cache, keys
from cute_attn.configs import PrefillConfig
from cute_attn.problem import KernelSpec, PrefillProblem
from tests import fake_compiler as compiler

ROOT = Path(__file__).parents[1]


def spec(head_dim: int = 64, arch: str = "sm_90a", dtype: str = "float16") -> KernelSpec:
    """A kernel to play with."""
    return KernelSpec(PrefillProblem(dtype, head_dim, head_dim), PrefillConfig(), arch_by_name(arch))


@dataclass(frozen=True)
class FakeCompiler:
    """What was compiled, and where it is kept."""

    folder: Path
    log: Path

    @property
    def compiled(self) -> list[str]:
        """The names of the kernels that were compiled, by any process."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    def kernel_file(self, spec: KernelSpec) -> Path:
        return cache.current_store().root / keys.file_name(spec)

    def start(self, script: str) -> subprocess.Popen[str]:
        """Run a script in another process, with the fake compiler and the same cache."""
        path = self.log.with_name("script.py")
        path.write_text(textwrap.dedent(script))
        return subprocess.Popen(
            [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.env()
        )

    def env(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": os.pathsep.join([str(self.log.parent), str(ROOT)])}


def forget_loaded() -> None:
    """Make this process one that has loaded nothing yet."""
    cache._kernels.clear()
    cache._failures.clear()
    cache._warned_of_folder = False


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCompiler]:
    """An empty cache and a compiler that takes no time, here and in child processes."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("from tests import fake_compiler\nfake_compiler.install_in_child()\n")
    fake = FakeCompiler(tmp_path / "cache", site / "compiled.log")
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(fake.folder))
    monkeypatch.setenv("CUTE_ATTN_COMPILE", "lazy")
    monkeypatch.setenv(compiler.LOG, str(fake.log))
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(site))
    for name in ("cute_attn.compiler.build", "cutlass.cute.runtime"):
        monkeypatch.setitem(sys.modules, name, compiler)
    forget_loaded()
    yield fake
    forget_loaded()
