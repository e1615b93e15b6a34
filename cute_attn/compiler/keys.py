"""What a kernel is called on disk and between processes.

A cached kernel is right only for the compiler, the sources and the processor that it was made with. All three are
found without importing the DSL, so that a process whose cache is full pays a few milliseconds.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.resources
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cute_attn.arch import Arch
from cute_attn.configs import PrefillConfig
from cute_attn.decode_configs import RolesConfig, StreamsConfig
from cute_attn.decode_problem import DecodeProblem
from cute_attn.problem import KernelSpec, PrefillProblem

if TYPE_CHECKING:
    from importlib.abc import Traversable

# The DSL's packages also say which CUDA compiler is used: libs-cu13, where installed, replaces the one for CUDA 12.
TOOL_PACKAGES = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
)

# Settings of the DSL that change the code it makes. The architecture is not among them: each compile names it.
TOOL_SETTINGS = tuple(
    f"CUTE_DSL_{name}"
    for name in (
        "AUTO_M2S",
        "COMPILER_BACKEND",
        "COMPILER_OPT",
        "DEBUG",
        "DRYRUN",
        "ENABLE_ASSERTIONS",
        "ENABLE_PYIR",
        "LIBS",
        "LINEINFO",
        "TOLERATE_M2M",
    )
)

# Files and folders of the package that decide machine code.
SOURCES = (
    "kernels", "arch.py", "configs.py", "decode_configs.py", "decode_problem.py", "problem.py", "compiler/build.py",
)  # fmt: skip

# What specs are made of, by the names that descriptions give them.
PROBLEMS = {kind.__name__: kind for kind in (PrefillProblem, DecodeProblem)}
CONFIGS = {kind.__name__: kind for kind in (PrefillConfig, StreamsConfig, RolesConfig)}


def describe(spec: KernelSpec) -> dict[str, Any]:
    """A spec as plain values that JSON can hold; ``spec_of`` reads it back."""
    return {"kinds": [type(spec.problem).__name__, type(spec.config).__name__], **asdict(spec)}


def spec_of(description: dict[str, Any]) -> KernelSpec:
    """The spec that ``describe`` described."""
    problem, config = description["kinds"]
    return KernelSpec(
        problem=PROBLEMS[problem](**description["problem"]),
        config=CONFIGS[config](**description["config"]),
        arch=Arch(**description["arch"]),
    )


def key(spec: KernelSpec) -> str:
    """SHA-256, in hexadecimal, of everything that decides a kernel's object file."""
    return _sha256({"spec": describe(spec), "fingerprint": fingerprint()})


def symbol(spec: KernelSpec) -> str:
    """The name that the kernel's function has in its object file."""
    return f"cute_attn_{key(spec)[:32]}"


def file_name(spec: KernelSpec) -> str:
    """The name of the kernel's object file, for people and for the cache."""
    return f"{spec.name}-{key(spec)[:16]}.o"


@functools.cache
def fingerprint() -> str:
    """SHA-256, in hexadecimal, of what all kernels have in common: compiler, sources, Python and processor."""
    return _sha256({
        "packages": {name: _version(name) for name in TOOL_PACKAGES},
        "settings": {name: os.environ.get(name) for name in TOOL_SETTINGS},
        "python": sys.version_info[:2],
        "machine": [platform.system(), platform.machine(), _processor_features()],
        "sources": fingerprinted_sources(),
    })  # fmt: skip


@functools.cache
def fingerprinted_sources() -> str:
    """The state of the sources that this process's keys stand for."""
    return sources_sha256()


def sources_sha256() -> str:
    """SHA-256, in hexadecimal, of the sources that decide machine code, as they are on disk now."""
    digest = hashlib.sha256()
    package = importlib.resources.files("cute_attn")
    for name in SOURCES:
        for path, content in _python_files(package.joinpath(*name.split("/")), name):
            digest.update(path.encode() + b"\0" + content)
    return digest.hexdigest()


def _python_files(entry: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
    if entry.is_file():
        if path.endswith(".py"):
            yield path, entry.read_bytes()
    elif entry.is_dir():
        for child in sorted(entry.iterdir(), key=lambda child: child.name):
            yield from _python_files(child, f"{path}/{child.name}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor_features() -> str:
    """The instruction sets of this processor: the launching half of an object file is compiled for exactly these.

    An object file that another processor wrote into a shared folder could stop the process on an unknown instruction.
    """
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            return next(line for line in lines if line.startswith(("flags", "Features"))).split(":", 1)[1].strip()
    except (OSError, StopIteration):
        return platform.processor()


def _sha256(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
