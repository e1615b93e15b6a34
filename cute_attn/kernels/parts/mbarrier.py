"""mbarriers in shared memory, by instructions that every architecture from sm_80 has.

An mbarrier counts arrivals; when all have come, its phase ends and the next begins. Phases are numbered from 0, and a
wait names one by its parity.
"""

import cutlass.cute as cute
from cutlass import Int32


def init(address: Int32, arrivals: int) -> None:
    """By one thread, before any other uses it."""
    cute.arch.inline_ptx("mbarrier.init.shared.b64 [{$r0}], {$r1};", read_only_args=[address, Int32(arrivals)])


def arrive(address: Int32) -> None:
    """One arrival; what the thread did before is seen by those who wait."""
    cute.arch.inline_ptx("{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [{$r0}]; }", read_only_args=[address])


def arrive_when_copied(address: Int32) -> None:
    """One arrival as soon as the thread's cp.async so far have landed."""
    cute.arch.inline_ptx("cp.async.mbarrier.arrive.noinc.shared.b64 [{$r0}];", read_only_args=[address])


@cute.jit
def wait(address: Int32, phase: Int32) -> None:
    """Until a phase has ended; it must be the current one or the one before."""
    done = Int32(0)
    while done == 0:
        done = cute.arch.inline_ptx(
            "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [{$r0}], {$r1}; selp.b32 {$w0}, 1, 0, p; }",
            write_only_types=[Int32],
            read_only_args=[address, phase & 1],
        )
