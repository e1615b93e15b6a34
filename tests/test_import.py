"""The package's names, and what importing it costs and touches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cute_attn
import layouts

ROOT = Path(cute_attn.__file__).parent.parent


def output(script: str, *paths: Path) -> str:
    """What a script prints in a process of its own, where nothing is compiled on import."""
    environment = os.environ | {
        "CUTE_ATTN_COMPILE": "lazy",
        "PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT))),
    }
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=(*paths, ROOT)[0],  # which Python searches first
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_public_names() -> None:
    assert set(cute_attn.__all__) == {
        "SEED_CONFIGS", "ContiguousCache", "PagedCache", "PrefillConfig", "RolesConfig", "StreamsConfig", "__version__",
        "attention", "decode", "layouts", "merge", "reference", "warmup", "warmup_decode",
    }  # fmt: skip
    for name in cute_attn.__all__:
        assert getattr(cute_attn, name) is not None
    with pytest.raises(AttributeError, match=r"module 'cute_attn' has no attribute 'nothing'"):
        _ = cute_attn.nothing  # type: ignore[attr-defined]


def test_layouts_is_the_package_of_that_name() -> None:
    assert cute_attn.layouts is layouts
    assert output("import sys, cute_attn; print('layouts' in sys.modules); cute_attn.layouts").startswith("False")


def test_another_package_called_layouts_is_told(tmp_path: Path) -> None:
    (tmp_path / "layouts.py").write_text("")
    script = """
import cute_attn
try:
    cute_attn.layouts
except ImportError as error:
    print(error)
"""
    message = output(script, tmp_path)
    assert message.startswith("cute_attn.layouts is the package 'layouts' that is installed with cute_attn, but")
    assert str(tmp_path / "layouts.py") in message


def test_import_is_cheap() -> None:
    """Half a second beyond torch at most, which leaves out the DSL; and CUDA stays uninitialised for forks."""
    script = """
import sys, time, torch
start = time.process_time()
import cute_attn
print(time.process_time() - start)
print([name for name in ("cutlass", "tvm_ffi", "torch._dynamo") if name in sys.modules])
print(torch.cuda.is_initialized())
"""
    seconds, imported, initialised = output(script).splitlines()
    assert float(seconds) < 0.5
    assert imported == "[]"
    assert initialised == "False"
