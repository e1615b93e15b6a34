"""Compiles many kernels at once, with every core, before they are timed one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch

from benchmarks.workload import Workload
from cute_attn.arch import Arch, arch_of
from cute_attn.compiler import workers
from cute_attn.compiler.compiling import KernelCompileError
from cute_attn.configs import default_config, parse_config
from cute_attn.problem import KernelSpec, PrefillProblem


def device_arch() -> Arch:
    """The current device's architecture."""
    return arch_of(torch.cuda.get_device_capability())


def compile_in_parallel(workloads: Iterable[Workload], configs: Iterable[str | None]) -> None:
    """Have the kernels of all workloads and configs (None: the default) loaded.

    One that does not compile says so when it is timed.
    """
    arch, names = device_arch(), list(configs)
    specs = {_spec(workload, name, arch) for workload in workloads for name in names}
    with contextlib.suppress(KernelCompileError):
        workers.prepare(sorted(specs, key=lambda spec: spec.name))


def _spec(workload: Workload, name: str | None, arch: Arch) -> KernelSpec:
    head_dim = workload.head_dim
    config = default_config(arch, head_dim, head_dim) if name is None else parse_config(name, head_dim)
    return KernelSpec(PrefillProblem(workload.dtype, head_dim, head_dim, bounded_right=workload.causal), config, arch)
