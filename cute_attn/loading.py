"""What happens on import: the core kernels are compiled for the machine's devices, once per machine.

CUDA is not initialised here, because a process that has done so cannot fork data loaders that use it: devices are
found through NVML.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator

import torch

from cute_attn.arch import Arch, arch_of
from cute_attn.compiler import cache, workers
from cute_attn.compiler.kernel_sets import core_kernels
from cute_attn.problem import KernelSpec

MODES = ("import", "lazy")


def compile_core_kernels() -> None:
    """Have the core kernels of every supported device on disk, unless CUTE_ATTN_COMPILE says to wait for their use.

    Whatever goes wrong is one warning: the import succeeds, and a kernel that does not compile raises when it is
    called.

    Raises:
        ValueError: CUTE_ATTN_COMPILE is neither "import" nor "lazy".
    """
    if compile_mode() == "lazy" or torch.version.cuda is None or _is_helper_process():
        return
    try:
        failures = _build_missing([spec for arch in machine_archs() for spec in core_kernels(arch)])
    except Exception as error:  # an import must not break because of what could as well happen later
        failures = [f"{type(error).__name__}: {error}"]
    if failures:
        warnings.warn(
            f"cute_attn could not compile {len(failures)} of its kernels ahead; they are tried when called, and raise "
            f"an error then. The first: {failures[0]}",
            stacklevel=3,
        )


def compile_mode() -> str:
    """The value of CUTE_ATTN_COMPILE: "import" (the default) or "lazy".

    Raises:
        ValueError: it has another value.
    """
    mode = os.environ.get("CUTE_ATTN_COMPILE") or "import"
    if mode not in MODES:
        raise ValueError(f"CUTE_ATTN_COMPILE is {mode!r}; allowed: {', '.join(MODES)}")
    return mode


def machine_archs() -> list[Arch]:
    """The supported architectures among the machine's devices, each once; empty without NVML or with devices hidden.

    All devices count, also those that CUDA_VISIBLE_DEVICES leaves out, unless it hides every one.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in ("", "-1"):
        return []
    archs = set()
    for capability in _nvml_capabilities():
        with contextlib.suppress(ValueError):  # a device that the kernels do not support
            archs.add(arch_of(capability))
    return sorted(archs, key=lambda arch: arch.capability)


def _nvml_capabilities() -> Iterator[tuple[int, int]]:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, or one without NVML: then there are no devices to compile for
        return
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(pynvml.NVMLError):  # a device that is lost or belongs to someone else
                yield pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(index))
    finally:
        pynvml.nvmlShutdown()


def _is_helper_process() -> bool:
    """Whether another process is in charge: a child of multiprocessing, or ``python -m cute_attn`` itself."""
    # Python puts "-m" there while it imports the package whose __main__ it is about to run.
    runs_a_package = sys.argv[:1] == ["-m"]
    return multiprocessing.parent_process() is not None or (runs_a_package and "cute_attn" in sys.orig_argv)


def _build_missing(specs: list[KernelSpec]) -> list[str]:
    """Build what the disk lacks, and return what failed."""
    if all(cache.contains(spec) for spec in specs) or not cache.is_writable():
        return []
    # The processes of one job start together: one of them builds, the others wait. What is missing after a wait has
    # failed a moment ago, and is not worth the time of every process.
    with cache.current_store().lock("import") as waited:
        missing = [] if waited else [spec for spec in specs if not cache.contains(spec)]
        outcomes = workers.build(missing)
    workers.remember_failures(outcomes)
    return [f"kernel {outcome.spec.name} {outcome.status}: {outcome.reason}" for outcome in outcomes if not outcome.ok]
