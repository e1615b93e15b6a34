"""Compiling in subprocesses: what comes back, what a broken kernel or a dying process costs, and what a user sees."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from cute_attn.compiler import cache, keys, workers
from cute_attn.compiler.compiling import KernelCompileError
from tests import fake_compiler as compiler
from tests.compiler_fixtures import FakeCompiler, fake_compiler, forget_loaded, spec

__all__ = ["fake_compiler"]

SPECS = [spec(head_dim) for head_dim in (32, 64, 96, 128)]


def test_builds_in_the_order_asked(fake_compiler: FakeCompiler) -> None:
    cache.ensure(SPECS[1])
    outcomes = workers.build(SPECS, jobs=2)
    assert [outcome.spec for outcome in outcomes] == SPECS
    assert [outcome.status for outcome in outcomes] == ["compiled", "found", "compiled", "compiled"]
    assert sorted(fake_compiler.compiled) == sorted(spec.name for spec in SPECS)
    assert all(cache.holds(spec) for spec in SPECS)
    assert cache.loaded(SPECS[0]) is None


def test_builds_a_kernel_once_that_is_asked_for_twice(fake_compiler: FakeCompiler) -> None:
    assert [outcome.status for outcome in workers.build(SPECS[:1] * 2)] == ["compiled"] * 2
    assert len(fake_compiler.compiled) == 1


def test_nothing_to_do_starts_no_process(fake_compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.ensure(SPECS[0])
    monkeypatch.delattr(subprocess, "Popen")
    assert [outcome.status for outcome in workers.build(SPECS[:1])] == ["found"]
    assert workers.build([]) == []


def test_a_damaged_file_is_built_again(fake_compiler: FakeCompiler) -> None:
    cache.ensure(SPECS[0])
    fake_compiler.kernel_file(SPECS[0]).write_bytes(b"damaged")
    assert [outcome.status for outcome in workers.build(SPECS[:1])] == ["compiled"]


def test_one_broken_kernel_does_not_stop_the_others(
    fake_compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compiler.BROKEN, "d64")
    outcomes = workers.build(SPECS, jobs=1)
    assert [outcome.status for outcome in outcomes] == ["compiled", "failed", "compiled", "compiled"]
    assert outcomes[1].reason == "ptxas is unhappy"


def test_a_dead_process_is_replaced(fake_compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiler.DEADLY, "d64")
    outcomes = workers.build(SPECS, jobs=1)
    assert [outcome.status for outcome in outcomes] == ["compiled", "failed", "compiled", "compiled"]
    assert "status -9" in outcomes[1].reason


def test_a_hanging_compile_is_ended(fake_compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiler.SECONDS, "60")
    monkeypatch.setattr(workers, "COMPILE_SECONDS", 2.0)
    (outcome,) = workers.build(SPECS[:1])
    assert outcome.status == "failed"
    assert outcome.seconds < 30


def test_a_python_that_does_not_start_is_no_fault_of_the_kernel(
    fake_compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    outcomes = workers.build(SPECS[:1])
    assert [outcome.status for outcome in outcomes] == ["not stored"]
    workers.remember_failures(outcomes)
    cache.load(SPECS[0])


def test_what_the_compiler_prints_is_not_an_answer(fake_compiler: FakeCompiler) -> None:
    site = fake_compiler.log.with_name("sitecustomize.py")
    site.write_text(
        "print('noise at start', flush=True)\n" + site.read_text() + "fake_compiler.noise = 'half a line'\n"
    )
    assert [outcome.status for outcome in workers.build(SPECS[:2])] == ["compiled"] * 2


def test_workers_find_the_same_package_from_anywhere(
    fake_compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('a module of the user shadows the standard library')")
    monkeypatch.chdir(tmp_path)
    assert [outcome.status for outcome in workers.build(SPECS[:1])] == ["compiled"]


def test_progress_is_one_line_without_a_terminal(
    fake_compiler: FakeCompiler, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.build(SPECS[:2])
    assert capsys.readouterr().err.splitlines() == [f"cute_attn: compiling 2 kernels (kept in {fake_compiler.folder})"]
    workers.build(SPECS[2:], progress=False)
    assert capsys.readouterr().err == ""


def test_progress_is_a_bar_on_a_terminal(
    fake_compiler: FakeCompiler, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    workers.build(SPECS[:2])
    assert "2/2" in capsys.readouterr().err


# prepare


def test_prepare_compiles_elsewhere_and_loads_here(fake_compiler: FakeCompiler) -> None:
    workers.prepare(SPECS)
    assert [kernel() for kernel in map(cache.loaded, SPECS) if kernel] == [keys.symbol(spec) for spec in SPECS]
    forget_loaded()
    workers.prepare(SPECS)
    assert len(fake_compiler.compiled) == len(SPECS)


def test_prepare_compiles_one_kernel_here(fake_compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(subprocess, "Popen")
    workers.prepare(SPECS[:1])
    assert cache.loaded(SPECS[0]) is not None


def test_prepare_raises_after_loading_the_rest(fake_compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiler.BROKEN, "d64")
    with pytest.raises(KernelCompileError, match=r"prefill_fp16_d64-.*ptxas is unhappy"):
        workers.prepare(SPECS)
    assert [cache.loaded(spec) is not None for spec in SPECS] == [True, False, True, True]
    assert len(fake_compiler.compiled) == len(SPECS)


def test_a_compile_error_crosses_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(KernelCompileError(spec(), "ptxas is unhappy")))
    assert (error.spec, error.reason) == (spec(), "ptxas is unhappy")
    assert str(error).endswith("failed to compile: ptxas is unhappy")


def test_prepare_works_without_a_folder(
    fake_compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="CUTE_ATTN_CACHE_DIR"):
        workers.prepare(SPECS)
    assert all(cache.loaded(spec) is not None for spec in SPECS)


def test_a_script_without_a_main_guard(fake_compiler: FakeCompiler) -> None:
    process = fake_compiler.start("""
        from cute_attn.compiler import workers
        from tests.compiler_fixtures import spec
        print("the script runs", flush=True)
        workers.prepare([spec(64), spec(128)], progress=False)
    """)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert output.count("the script runs") == 1
    assert len(fake_compiler.compiled) == 2
