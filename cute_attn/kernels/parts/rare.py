"""Ways to tell the compiler what it must not be clever about."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32


def fresh(value: Int32) -> Int32:
    """The same value, but the compiler must not reuse what it computed from it before for what it computes now."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def once_if(condition: Boolean) -> Int32:
    """1 or 0: how often to run the body of a loop that is rarely needed.

    An ``if`` around work on registers is turned into selects, which every tile would then pay for. A loop whose count
    the compiler cannot see stays a branch. Its index is 0 whenever the body runs, but the compiler does not know that
    either: what the body computes from values to which the index was added is not moved out of the loop.
    """
    return fresh(condition.to(Int32))
