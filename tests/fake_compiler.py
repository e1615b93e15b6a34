"""A compiler that writes a few bytes instead of a kernel, so that the cache can be tested fast and without the DSL.

It stands in for ``cute_attn.compiler.build`` and for the DSL's loader, in this process (the fixture
``fake_compiler``) and in every process that this one starts (through a ``sitecustomize`` module on their path).
Environment variables say what it does, because the compile often happens in a child.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cute_attn.problem import KernelSpec

LOG = "FAKE_COMPILER_LOG"  # a file that gets one line a compile
BROKEN = "FAKE_COMPILER_BROKEN"  # kernels with this in their name do not compile
DEADLY = "FAKE_COMPILER_DEADLY"  # kernels with this in their name kill the process while they are written
SECONDS = "FAKE_COMPILER_SECONDS"  # what a compile takes
WHOLE = "FAKE_COMPILER_WHOLE"  # set: scripts import the whole package, not only its compiler

noise = ""  # what a compile prints


class _Compiled:
    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec

    def export_to_c(self, path: str, function_name: str) -> None:
        content = _content(function_name)
        if _named(DEADLY, self._spec):
            Path(path).write_bytes(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        Path(path).write_bytes(content)


def compile_kernel(spec: KernelSpec, options: str = "") -> _Compiled:
    del options
    print(noise, end="", flush=True)
    with open(os.environ[LOG], "a") as log:
        log.write(f"{spec.name}\n")
    time.sleep(float(os.environ.get(SECONDS, "0")))
    if _named(BROKEN, spec):
        raise ValueError("ptxas is unhappy")
    return _Compiled(spec)


def load_module(path: str, enable_tvm_ffi: bool) -> dict[str, Callable[[], str]]:
    """Stands in for ``cutlass.cute.runtime.load_module``; the real one may crash on a damaged file."""
    assert enable_tvm_ffi
    content = Path(path).read_bytes()
    name = content.split(b"\n")[0].decode()
    assert content.startswith(_content(name)), f"{path} is damaged, and was to be loaded"
    return {name: lambda: name}


def install() -> None:
    """Use this compiler in this process."""
    sys.modules["cute_attn.compiler.build"] = sys.modules[__name__]
    sys.modules["cutlass.cute.runtime"] = sys.modules[__name__]


def install_in_child() -> None:
    """Use this compiler in a new process, which does without torch, seconds to import, unless a test needs that."""
    install()
    is_worker = "-m" in sys.orig_argv
    if is_worker or not os.environ.get(WHOLE):
        spec = importlib.util.find_spec("cute_attn")
        assert spec is not None
        package = importlib.util.module_from_spec(spec)  # made, but not executed
        package.__dict__["__version__"] = "0"
        sys.modules["cute_attn"] = package


def _named(variable: str, spec: KernelSpec) -> bool:
    part = os.environ.get(variable)
    return part is not None and part in spec.name


def _content(name: str) -> bytes:
    return f"{name}\n".encode() * 1000
