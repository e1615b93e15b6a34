"""What importing the package does on a machine with devices; the devices are made up."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cute_attn import loading
from cute_attn.arch import arch_by_name
from cute_attn.compiler import cache, workers
from cute_attn.compiler.compiling import KernelCompileError
from cute_attn.compiler.kernel_sets import all_kernels, core_kernels
from tests import fake_compiler as compiler
from tests.compiler_fixtures import FakeCompiler, fake_compiler, forget_loaded

__all__ = ["fake_compiler"]

CORE = core_kernels(arch_by_name("sm_90a"))
Devices = Callable[..., None]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    """Sets the compute capabilities that NVML reports, on a machine with a CUDA build of torch."""

    def install(*capabilities: tuple[int, int]) -> None:
        nvml = types.ModuleType("pynvml")
        nvml.__dict__.update(
            NVMLError=type("NVMLError", (Exception,), {}),
            nvmlInit=lambda: None,
            nvmlShutdown=lambda: None,
            nvmlDeviceGetCount=lambda: len(capabilities),
            nvmlDeviceGetHandleByIndex=lambda index: index,
            nvmlDeviceGetCudaComputeCapability=lambda index: capabilities[index],
        )
        monkeypatch.setitem(sys.modules, "pynvml", nvml)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUTE_ATTN_COMPILE", "import")
    return install


def _archs() -> list[str]:
    return [arch.gpu_arch for arch in loading.machine_archs()]


# Devices


def test_every_architecture_counts_once(devices: Devices) -> None:
    devices((9, 0), (8, 0), (9, 0), (12, 0))
    assert _archs() == ["sm_80", "sm_90a", "sm_120a"]


def test_unsupported_devices_are_ignored(devices: Devices) -> None:
    devices((7, 5), (8, 9), (99, 0))
    assert _archs() == ["sm_89"]


@pytest.mark.parametrize("hidden", ["", "-1", "-1,0"])
def test_hidden_devices_do_not_count(hidden: str, devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    devices((9, 0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert _archs() == []


@pytest.mark.parametrize("visible", ["0", "1,0", "GPU-0a1b"])
def test_a_choice_of_devices_hides_no_architecture(
    visible: str, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices((8, 0), (9, 0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _archs() == ["sm_80", "sm_90a"]


def test_without_nvml_there_are_no_devices(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert _archs() == []


def test_without_a_driver_there_are_no_devices(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    devices((9, 0))

    def fail() -> None:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setattr(sys.modules["pynvml"], "nvmlInit", fail)
    assert _archs() == []


def test_a_lost_device_does_not_hide_the_others(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    devices((9, 0), (8, 0))
    nvml = sys.modules["pynvml"]

    def handle(index: int) -> int:
        if index == 0:
            raise nvml.NVMLError("GPU is lost")
        return index

    monkeypatch.setattr(nvml, "nvmlDeviceGetHandleByIndex", handle)
    assert _archs() == ["sm_80"]


# When


@pytest.mark.parametrize(("value", "mode"), [(None, "import"), ("", "import"), ("import", "import"), ("lazy", "lazy")])
def test_modes(value: str | None, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUTE_ATTN_COMPILE", raising=False)
    if value is not None:
        monkeypatch.setenv("CUTE_ATTN_COMPILE", value)
    assert loading.compile_mode() == mode


def test_another_mode_is_an_error(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_ATTN_COMPILE", "eager")
    with pytest.raises(ValueError, match="CUTE_ATTN_COMPILE is 'eager'; allowed: import, lazy"):
        loading.compile_core_kernels()


def test_core_kernels_are_compiled_once(
    fake_compiler: FakeCompiler, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices((9, 0))
    loading.compile_core_kernels()
    assert sorted(fake_compiler.compiled) == sorted(spec.name for spec in CORE)
    monkeypatch.delattr(workers, "build")
    loading.compile_core_kernels()
    assert not any(cache.loaded(spec) for spec in CORE)


def test_the_sets_are_what_they_say() -> None:
    names = {spec.problem.name for spec in CORE}
    dense = {f"prefill_{dtype}_d{dim}" for dtype in ("fp16", "bf16") for dim in (64, 128)}
    decode = {f"decode_{dtype}_d128{page}" for dtype in ("fp16", "bf16") for page in ("", "_page64")}
    assert names == dense | {f"{name}_right" for name in dense} | decode
    everything = all_kernels(arch_by_name("sm_90a"))
    assert len(set(everything)) == len(everything) == 144 + 72
    assert set(CORE) <= set(everything)


@pytest.mark.parametrize("reason", ["lazy", "torch for the CPU", "child of multiprocessing", "python -m cute_attn"])
def test_nothing_is_compiled(
    reason: str, fake_compiler: FakeCompiler, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices((9, 0))
    if reason == "lazy":
        monkeypatch.setenv("CUTE_ATTN_COMPILE", "lazy")
    elif reason == "torch for the CPU":
        monkeypatch.setattr(torch.version, "cuda", None)
    elif reason == "child of multiprocessing":
        monkeypatch.setattr(multiprocessing, "parent_process", object)
    else:
        monkeypatch.setattr(sys, "argv", ["-m", "cache"])
        monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "cute_attn", "cache"])
    loading.compile_core_kernels()
    assert fake_compiler.compiled == []


def test_another_package_that_runs_compiles(
    fake_compiler: FakeCompiler, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices((9, 0))
    monkeypatch.setattr(sys, "argv", ["-m"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "training"])
    loading.compile_core_kernels()
    assert len(fake_compiler.compiled) == 12


# Trouble


def test_a_broken_compile_is_one_warning_and_an_error_when_called(
    fake_compiler: FakeCompiler, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices((9, 0))
    monkeypatch.setenv(compiler.BROKEN, "bf16")
    with pytest.warns(UserWarning, match="could not compile 6 of its kernels") as caught:
        loading.compile_core_kernels()
    assert len(caught) == 1
    assert len(fake_compiler.compiled) == 12
    for spec in CORE:
        if spec.problem.dtype == "bfloat16":
            with pytest.raises(KernelCompileError, match=f"{spec.name} failed to compile: ptxas is unhappy"):
                cache.load(spec)
        else:
            cache.load(spec)
    assert len(fake_compiler.compiled) == 12


def test_a_folder_that_cannot_be_written_is_one_warning(
    fake_compiler: FakeCompiler, devices: Devices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices((9, 0))
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loading.compile_core_kernels()
        cache.load(CORE[0])
    assert len(caught) == 1
    assert fake_compiler.compiled == [CORE[0].name]


def test_whatever_else_goes_wrong_is_one_warning(
    fake_compiler: FakeCompiler, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices((9, 0))
    monkeypatch.delattr(subprocess, "Popen")
    with pytest.warns(UserWarning, match="Popen") as caught:
        loading.compile_core_kernels()
    assert len(caught) == 1
    forget_loaded()
    cache.load(CORE[0])


def test_what_another_process_just_tried_is_left_to_the_first_call(
    fake_compiler: FakeCompiler, devices: Devices
) -> None:
    devices((9, 0))
    importing = threading.Thread(target=loading.compile_core_kernels)
    with cache.current_store().lock("import"):
        importing.start()
        time.sleep(0.5)
    importing.join()
    assert fake_compiler.compiled == []
    cache.load(CORE[0])


# Real imports

SCRIPT = """
    import torch
    torch.version.cuda = "13.0"
    print("the script runs", flush=True)

    import sys
    import cute_attn
    assert "cutlass" not in sys.modules
    assert not torch.cuda.is_initialized()

    class Squares(torch.utils.data.Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, index):
            return index * index

    loader = torch.utils.data.DataLoader(Squares(), num_workers=2, multiprocessing_context="fork")
    print([int(item) for item in loader])
"""


@pytest.fixture
def importing(fake_compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    """Other processes import the package, and find one device."""
    monkeypatch.setenv(compiler.WHOLE, "1")
    monkeypatch.setenv("CUTE_ATTN_COMPILE", "import")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake_compiler.log.with_name("pynvml.py").write_text(
        "class NVMLError(Exception): pass\n"
        "def nvmlInit(): pass\n"
        "def nvmlShutdown(): pass\n"
        "def nvmlDeviceGetCount(): return 1\n"
        "def nvmlDeviceGetHandleByIndex(index): return index\n"
        "def nvmlDeviceGetCudaComputeCapability(handle): return 9, 0\n"
    )
    return fake_compiler


def test_a_script_without_a_main_guard_imports_and_forks(importing: FakeCompiler) -> None:
    for _ in range(2):
        process = importing.start(SCRIPT)
        output = process.communicate()[0]
        assert process.returncode == 0, output
        assert output.count("the script runs") == 1
        assert "[0, 1, 4, 9]" in output
        assert len(importing.compiled) == 12


def test_four_imports_at_once_compile_once(importing: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiler.SECONDS, "0.3")
    processes = [importing.start(SCRIPT) for _ in range(4)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert sum("compiling 12 kernels" in output for output in outputs) == 1
    assert len(importing.compiled) == 12


def test_a_wrong_mode_stops_the_import(importing: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_ATTN_COMPILE", "now")
    process = importing.start("import cute_attn")
    assert "ValueError: CUTE_ATTN_COMPILE is 'now'; allowed: import, lazy" in process.communicate()[0]
    assert process.returncode == 1
