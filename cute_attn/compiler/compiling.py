"""One compile at a time, and errors that name the kernel."""

from __future__ import annotations

import threading
from typing import Any

from cute_attn.problem import KernelSpec

# The DSL's compiler keeps global state: two threads that compile at once break each other. Processes do not.
_COMPILER_LOCK = threading.RLock()


class KernelCompileError(RuntimeError):
    """A kernel does not compile; the message names it and says what the compiler said."""

    def __init__(self, spec: KernelSpec, reason: str) -> None:
        super().__init__(f"kernel {spec.name} failed to compile: {reason}")
        self.spec = spec
        self.reason = reason

    def __reduce__(self) -> tuple[type[KernelCompileError], tuple[KernelSpec, str]]:
        """How the error crosses to another process."""
        return type(self), (self.spec, self.reason)


def compile_spec(spec: KernelSpec, options: str = "") -> Any:
    """The DSL's compiled object of a kernel.

    The DSL is imported here, on the first compile, because that takes longer than everything else in this package.

    Raises:
        KernelCompileError: the DSL or its tools refused the kernel, or the DSL cannot be imported.
    """
    with _COMPILER_LOCK:
        try:
            from cute_attn.compiler.build import compile_kernel

            return compile_kernel(spec, options)
        except Exception as error:  # the DSL raises many types; the caller needs to know one
            raise KernelCompileError(spec, str(error).strip() or type(error).__name__) from error
