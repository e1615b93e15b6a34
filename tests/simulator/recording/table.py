"""All micro-kernels."""

from __future__ import annotations

import hashlib
import re
from functools import cache

from tests.simulator.recording.elementwise import elementwise_kernels
from tests.simulator.recording.micro import MicroKernel
from tests.simulator.recording.warp import warp_kernels


@cache
def micro_kernels() -> dict[str, MicroKernel]:
    """By name.

    Raises:
        ValueError: two have one name.
    """
    kernels = [*elementwise_kernels(), *warp_kernels()]
    table = {kernel.name: kernel for kernel in kernels}
    if len(table) != len(kernels):
        names = [kernel.name for kernel in kernels]
        raise ValueError(f"twice in the table: {sorted({name for name in names if names.count(name) > 1})}")
    return table


def key(kernel: MicroKernel) -> str:
    """A name for files."""
    return re.sub(r"\W+", "_", kernel.name)


def digest(kernel: MicroKernel) -> str:
    """Of the text and the operands: what a record belongs to."""
    state = hashlib.sha256(kernel.ptx().encode())
    for operand in kernel.operands():
        state.update(operand.tobytes())
    return state.hexdigest()[:16]
