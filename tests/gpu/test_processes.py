"""What a user's processes see: kernels compiled once for all of them, on import or when called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MAX_ERROR = 5e-3
pytestmark = pytest.mark.hang_after(240)

# Every script prints one line of JSON; ``compiles`` counts what this process itself compiled.
COUNTING = """
import json, os, sys, time
import torch
start = time.perf_counter()
import cute_attn
import_seconds = time.perf_counter() - start
from cute_attn.compiler import cache
compiles = []
compile_spec = cache.compile_spec
cache.compile_spec = lambda spec, *rest: (compiles.append(spec.name), compile_spec(spec, *rest))[1]
"""

ONE_CALL = (
    COUNTING
    + """
q, k, v = (torch.randn(1, 2, 77, 32, device="cuda", dtype=torch.float16) for _ in range(3))
start = time.perf_counter()
out = cute_attn.attention(q, k, v, causal=True)
torch.cuda.synchronize()
seconds = time.perf_counter() - start
expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
print(json.dumps({"compiles": compiles, "error": float((out - expected).abs().max()), "seconds": seconds}))
"""
)

# No main guard, as in many a user's script: workers must not run it again.
IMPORT_THEN_FORK = (
    COUNTING
    + """
initialised = torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    total = float(torch.ones(8, device="cuda").sum())
    os._exit(0 if total == 8 else 1)
_, status = os.waitpid(child, 0)
q = torch.randn(1, 2, 77, 128, device="cuda", dtype=torch.bfloat16)
out = cute_attn.attention(q, q, q)
torch.cuda.synchronize()
print(json.dumps({
    "initialised": initialised, "child": status, "compiles": compiles, "import_seconds": import_seconds,
    "finite": bool(out.isfinite().all()),
}))
"""
)

COLD_COMPILED_MODEL = (
    COUNTING
    + """
@torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
def model(q):
    return cute_attn.attention(q, q, q, causal=True) + 1
q = torch.randn(1, 2, 77, 32, device="cuda", dtype=torch.float16)
out = model(q)
equal = torch.equal(out, cute_attn.attention(q, q, q, causal=True) + 1)
print(json.dumps({"compiles": compiles, "equal": equal}))
"""
)


def start(script: str, cache: Path, compile_mode: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "CUTE_ATTN_CACHE_DIR": str(cache), "CUTE_ATTN_COMPILE": compile_mode}
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate()
    assert process.returncode == 0, errors[-4000:]
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache's folder with the one kernel of ``ONE_CALL``, for which four processes asked at once."""
    folder = tmp_path_factory.mktemp("kernels")
    answers = [answer(process) for process in [start(ONE_CALL, folder, "lazy") for _ in range(4)]]
    assert sum(len(result["compiles"]) for result in answers) == 1
    assert all(result["error"] < MAX_ERROR for result in answers)
    return folder


def test_later_process_compiles_nothing(filled: Path) -> None:
    later = answer(start(ONE_CALL, filled, "lazy"))
    assert later["compiles"] == []
    assert later["error"] < MAX_ERROR


@pytest.mark.parametrize("damage", ["truncated", "other bytes"])
def test_damaged_file_is_compiled_again(filled: Path, damage: str) -> None:
    (file,) = filled.rglob("*.o")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] if damage == "truncated" else bytes(len(content)))
    result = answer(start(ONE_CALL, filled, "lazy"))
    assert len(result["compiles"]) == 1
    assert result["error"] < MAX_ERROR


def test_import_compiles_the_core_kernels_and_leaves_cuda_alone(tmp_path: Path) -> None:
    first = answer(start(IMPORT_THEN_FORK, tmp_path, "import"))
    assert first["compiles"] == []
    assert not first["initialised"]
    assert first["child"] == 0
    assert first["finite"]
    second = answer(start(IMPORT_THEN_FORK, tmp_path, "import"))
    assert second["compiles"] == []
    assert second["import_seconds"] < 1.0


def test_cold_cache_under_torch_compile(tmp_path: Path) -> None:
    result = answer(start(COLD_COMPILED_MODEL, tmp_path, "lazy"))
    assert len(result["compiles"]) == 1
    assert result["equal"]
