"""``python -m cute_attn``: what the commands print, and what a wrong one says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cute_attn import __version__
from cute_attn.__main__ import main
from cute_attn.compiler import cache, inspect, keys
from cute_attn.compiler.inspect import KernelReport
from cute_attn.problem import KernelSpec
from tests import fake_compiler as compiler
from tests.compiler_fixtures import ROOT, FakeCompiler, fake_compiler, spec

__all__ = ["fake_compiler"]

Capture = pytest.CaptureFixture[str]


def _output(capsys: Capture, *arguments: str, status: int = 0) -> str:
    """What a command prints to standard output."""
    assert main(arguments) == status
    return capsys.readouterr().out


def _error(capsys: Capture, *arguments: str) -> str:
    """The one line that a wrong command prints to standard error."""
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    return line


# build


def test_build_compiles_the_core_kernels(fake_compiler: FakeCompiler, capsys: Capture) -> None:
    folder = fake_compiler.folder
    assert _output(capsys, "build", "--arch", "sm_90") == f"12 compiled, 0 found, 0 failed, in {folder}\n"
    assert all(name.endswith("-sm_90a") for name in fake_compiler.compiled)
    assert _output(capsys, "build", "--arch", "sm_90a") == f"0 compiled, 12 found, 0 failed, in {folder}\n"
    assert len(fake_compiler.compiled) == 12


def test_build_takes_several_architectures(fake_compiler: FakeCompiler, capsys: Capture) -> None:
    outcomes = json.loads(_output(capsys, "build", "--arch", "sm_80", "86", "sm_80", "--jobs", "1", "--json"))
    assert len(outcomes) == 24
    assert {outcome["spec"]["arch"]["gpu_arch"] for outcome in outcomes} == {"sm_80", "sm_86"}
    assert {outcome["status"] for outcome in outcomes} == {"compiled"}
    assert sorted(outcome["kernel"] for outcome in outcomes) == sorted(fake_compiler.compiled)


def test_build_all(fake_compiler: FakeCompiler, capsys: Capture) -> None:
    assert "216 compiled" in _output(capsys, "build", "--arch", "sm_86", "--all")


def test_build_says_what_failed(fake_compiler: FakeCompiler, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiler.BROKEN, "bf16_d64_right")
    assert main(["build", "--arch", "sm_80"]) == 2
    output = capsys.readouterr()
    assert "11 compiled, 0 found, 1 failed" in output.out
    failure = output.err.splitlines()[-1]
    assert failure.startswith("cute_attn: kernel prefill_bf16_d64_right-")
    assert failure.endswith(" failed: ptxas is unhappy")


def test_build_needs_a_device_or_an_architecture(
    fake_compiler: FakeCompiler, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "say which architecture with --arch" in _error(capsys, "build")


def test_build_refuses_an_unknown_architecture(fake_compiler: FakeCompiler, capsys: Capture) -> None:
    assert "arch 'sm_75' is not supported; supported: sm_80" in _error(capsys, "build", "--arch", "sm_75")


def test_build_refuses_no_jobs(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["build", "--jobs", "0"])
    assert exit_.value.code == 2
    assert "must be at least 1, got 0" in capsys.readouterr().err


def test_build_needs_a_folder_that_can_be_written(
    fake_compiler: FakeCompiler, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    message = f"cannot write the cache {tmp_path}/file/cache (Not a directory): set CUTE_ATTN_CACHE_DIR"
    for command in (["build", "--arch", "sm_80"], ["cache"], ["cache", "--clear"]):
        assert message in _error(capsys, *command)


# cache


def test_cache_shows_an_empty_folder(fake_compiler: FakeCompiler, capsys: Capture) -> None:
    assert _output(capsys, "cache") == f"0 kernels, 0.0 MiB, in {fake_compiler.folder}\n"


def test_cache_shows_kernels(fake_compiler: FakeCompiler, capsys: Capture) -> None:
    cache.ensure(spec())
    size = fake_compiler.kernel_file(spec()).stat().st_size
    _, line = _output(capsys, "cache").splitlines()
    name = spec().name.removesuffix("-sm_90a")
    assert line == f"{name}  sm_90a  {f'{size / 1024:.0f} KiB':>9}         0 s old"
    shown = json.loads(_output(capsys, "cache", "--json"))
    assert shown["folder"] == str(fake_compiler.folder)
    (kernel,) = shown["kernels"]
    assert kernel["gpu_arch"] == "sm_90a"
    assert kernel["size_bytes"] == size
    assert kernel["stale"] is False


@pytest.mark.parametrize(
    ("seconds", "age"), [(5, "5 s"), (60, "1 minute"), (7300, "2 hours"), (90000, "1 day"), (864000, "10 days")]
)
def test_cache_shows_ages(seconds: int, age: str, fake_compiler: FakeCompiler, capsys: Capture) -> None:
    cache.ensure(spec())
    path = fake_compiler.kernel_file(spec())
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))
    assert f" {age} old" in _output(capsys, "cache")


def test_cache_clears_stale_kernels(
    fake_compiler: FakeCompiler, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.ensure(spec())
    stale = fake_compiler.kernel_file(spec())
    monkeypatch.setattr(keys, "fingerprint", lambda: "0" * 64)
    cache.ensure(spec())
    assert [line.endswith("stale") for line in _output(capsys, "cache").splitlines()] == [False, False, True]
    assert "1 kernel," in _output(capsys, "cache", "--clear-stale")
    assert not stale.parent.exists()
    assert cache.holds(spec())


def test_cache_clears_its_own_files_only(fake_compiler: FakeCompiler, capsys: Capture) -> None:
    cache.ensure(spec())
    cache.ensure(spec(128))
    own = fake_compiler.kernel_file(spec()).parent
    foreign = [fake_compiler.folder / "main.o", fake_compiler.folder / "src" / "main-sm_90a-0123456789abcdef.o"]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("someone else's")
    assert "2 kernels," in _output(capsys, "cache", "--clear")
    assert not own.exists()
    assert all(path.exists() for path in foreign)
    assert "0 kernels," in _output(capsys, "cache", "--clear")


def test_cache_keeps_a_folder_with_foreign_files(fake_compiler: FakeCompiler, capsys: Capture) -> None:
    cache.ensure(spec())
    notes = fake_compiler.kernel_file(spec()).with_name("notes.txt")
    notes.write_text("someone else's")
    _output(capsys, "cache", "--clear")
    assert list(notes.parent.iterdir()) == [notes]


# inspect


@pytest.fixture
def inspected(monkeypatch: pytest.MonkeyPatch) -> list[KernelSpec]:
    """What the command inspects, instead of inspecting it."""
    specs: list[KernelSpec] = []

    def inspect_kernel(spec: KernelSpec) -> KernelReport:
        specs.append(spec)
        return KernelReport(spec.name, spec.arch.gpu_arch, 168, 1, 0, 0, 0, 65536, 65536, 9, {"LDSM.16.M88.4": 9})

    monkeypatch.setattr(inspect, "inspect_kernel", inspect_kernel)
    return specs


def test_inspect_takes_the_tuned_config(inspected: list[KernelSpec], capsys: Capture) -> None:
    output = _output(capsys, "inspect", "prefill", "--head-dim", "128", "--arch", "sm_80")
    assert inspected[0].problem.name == "prefill_fp16_d128"
    assert inspected[0].arch.gpu_arch == "sm_80"
    assert [line.split()[1] for line in output.splitlines() if line.startswith("registers")] == ["168"]


def test_inspect_takes_every_option(inspected: list[KernelSpec], capsys: Capture) -> None:
    options = "--head-dim 64 --head-dim-v 32 --arch sm_86 --dtype bfloat16 --window --varlen --lse --json"
    report = json.loads(
        _output(capsys, "inspect", "prefill", *options.split(), "--config", "128x64_w4_s2_swizzle_qreg_o32_smem")
    )
    assert inspected[0].problem.name == "prefill_bf16_d64v32_left_right_varlen_lse"
    assert inspected[0].config.q_in_regs
    assert report["registers"] == 168
    assert report["instructions"]["LDSM"] == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--head-dim 44 --arch sm_80", "--head-dim must be a multiple of 8 up to 256, got 44"),
        ("--head-dim 264 --arch sm_80", "--head-dim must be a multiple of 8 up to 256, got 264"),
        ("--head-dim 64 --head-dim-v 9 --arch sm_80", "--head-dim-v must be a multiple of 8 up to 256, got 9"),
        ("--head-dim 64 --arch sm_75", "arch 'sm_75' is not supported"),
        ("--head-dim 64 --arch sm_80 --config huge", "config: it is 'huge'; allowed: seed_64x64_1stage"),
        ("--head-dim 256 --arch sm_86 --config seed_128x128_2stage", "bytes; allowed: 101376 bytes on sm_86"),
    ],
)
def test_inspect_says_what_is_wrong(options: str, message: str, capsys: Capture) -> None:
    assert message in _error(capsys, "inspect", "prefill", *options.split())


def test_inspect_of_decode(inspected: list[KernelSpec], capsys: Capture) -> None:
    options = "--head-dim 128 --arch sm_90a --dtype bfloat16 --cache-dtype int8 --page-size 16"
    _output(capsys, "inspect", "decode", *options.split(), "--window", "--softcap", "--sinks", "--lse", "--rows", "16")
    assert inspected[0].problem.name == "decode_bf16_d128_int8_page16_window_softcap_sinks_lse"
    assert inspected[0].config.tile_m == 16
    _output(capsys, "inspect", "decode", "--head-dim", "128", "--arch", "sm_80", "--config", "seed")
    assert inspected[1].config.name.startswith("roles_16_k128x2_v64x2_")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("decode --head-dim 24", "--head-dim"),
        ("decode --head-dim 64 --page-size 12", "--page-size must be a multiple of 8, got 12"),
        ("decode --head-dim 64 --causal", "--causal is no option of decode"),
        ("decode --head-dim 256 --config streams_8x64_w8_s3_b1", "shared memory"),
        ("prefill --head-dim 64 --sinks", "--sinks is no option of prefill"),
    ],
)
def test_inspect_of_decode_says_what_is_wrong(options: str, message: str, capsys: Capture) -> None:
    assert message in _error(capsys, "inspect", *options.split(), "--arch", "sm_80")


def test_inspect_says_which_tool_is_missing(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "TOOL_PACKAGES", {"nvdisasm": "no-such-package"})
    monkeypatch.setenv("PATH", "")
    error = _error(capsys, "inspect", "prefill", "--head-dim", "64", "--arch", "sm_80")
    assert "nvdisasm is not installed: pip install 'cute-attn[inspect]'" in error


# The program


@pytest.mark.parametrize("arguments", [[], ["build"], ["cache"], ["inspect"], ["simulate"]])
def test_help(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, "--help"])
    assert exit_.value.code == 0
    output = capsys.readouterr().out
    assert "usage: python -m cute_attn" in output
    assert "stdin" not in output


def test_runs_as_a_module(fake_compiler: FakeCompiler) -> None:
    command = [sys.executable, "-m", "cute_attn", "cache"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("0 kernels")


def test_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"cute_attn {__version__}\n"


def test_no_command_is_an_error(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 2
