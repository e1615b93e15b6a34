"""What a compiled function launches: found on the CPU, with no GPU, driver or C compiler.

``capture`` runs the host code that the DSL compiled; ``launch_of_ptx`` takes the grid and block from the caller.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from layouts.simulator.arguments import AddressOf
from layouts.simulator.entry import Entry, entries_of, pack
from layouts.simulator.errors import PtxSyntaxError, SimulatorError
from layouts.simulator.host import HostProgram
from layouts.simulator.recorder import Dim3

_PROGRAM = "_simulator_host_program"  # where a compiled object keeps its host program


@dataclass(frozen=True)
class Launch:
    """A kernel, and all that the GPU would be given with it.

    Attributes:
        ptx: the text that has the kernel.
        kernel: name of the entry.
        grid: blocks along x, y, z.
        block: threads along x, y, z.
        cluster: blocks of a cluster along x, y, z.
        smem_bytes: dynamic shared memory of a block.
        parameters: the bytes of each parameter of the entry, in order. Paddings hold anything.
        cooperative: whether all blocks are to be resident at once.
    """

    ptx: str = field(repr=False)
    kernel: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    smem_bytes: int
    parameters: tuple[bytes, ...]
    cooperative: bool = False


def capture(compiled: Any, arguments: Sequence[Any], address_of: AddressOf, *, num_sms: int = 132) -> list[Launch]:
    """The launches of a call of a compiled function, in order.

    Args:
        compiled: what ``cute.compile`` returned, for any architecture, with or without ``--enable-tvm-ffi``, and with
            ``--keep-ptx``.
        arguments: as for a call on a GPU, but with numpy arrays or torch tensors on the CPU. Compiled without TVM-FFI,
            tensors of ``from_dlpack`` too: ``address_of`` is given ``array_behind`` them. Pointers of ``make_ptr`` go
            on as they are.
        address_of: gives the device address of an array's first element.
        num_sms: how many multiprocessors the host code is told of.

    Raises:
        SimulatorError: the compiled object lacks its PTX or host code, or CUDA would not allow the launch.
        Exception: what the host code raises about the arguments, such as TypeError and ValueError with its own message.
    """
    ptx = _kept_ptx(compiled)
    program = getattr(compiled, _PROGRAM, None)
    if program is None:
        program = HostProgram(compiled, entries_of(ptx), _capability(ptx))
        setattr(compiled, _PROGRAM, program)
    return [Launch(ptx, **vars(launch)) for launch in program.run(arguments, address_of, num_sms)]


def launch_of_ptx(
    ptx: str,
    arguments: Sequence[Any],
    grid: int | Sequence[int],
    block: int | Sequence[int],
    smem_bytes: int,
    address_of: AddressOf,
    entry: str | None = None,
) -> Launch:
    """A launch of a PTX kernel, from any compiler.

    Args:
        ptx: the text.
        arguments: one for each parameter of the entry: an array for a 64-bit pointer (or None for a null pointer), a
            number for a scalar, bytes for a byte array.
        grid: blocks along x, y, z; missing ones are 1.
        block: threads along x, y, z; missing ones are 1.
        smem_bytes: dynamic shared memory of a block.
        address_of: gives the device address of an array's first element.
        entry: its name; not needed where there is only one.

    Raises:
        SimulatorError: no such entry, or the arguments do not fit its parameters.
    """
    found = _entry(ptx, entry)
    extents = _dim3("grid", grid), _dim3("block", block)
    if math.prod(extents[1]) > MAX_THREADS:
        raise SimulatorError(f"block is {block}; allowed: at most {MAX_THREADS} threads")
    if not isinstance(smem_bytes, int) or not 0 <= smem_bytes <= MAX_SMEM_BYTES:
        raise SimulatorError(f"smem_bytes is {smem_bytes!r}; allowed: 0 to {MAX_SMEM_BYTES}")
    if len(arguments) != len(found.parameters):
        names = ", ".join(map(str, found.parameters))
        raise SimulatorError(f"{found.name} takes {len(found.parameters)} arguments, got {len(arguments)}: {names}")
    parameters = tuple(
        pack(parameter, argument, address_of) for parameter, argument in zip(found.parameters, arguments, strict=True)
    )
    return Launch(ptx, found.name, *extents, found.cluster, smem_bytes, parameters)


MAX_THREADS = 1024  # of a block
MAX_SMEM_BYTES = 227 * 1024  # of a block, on the largest architectures


def _kept_ptx(compiled: Any) -> str:
    ptx = getattr(compiled, "__ptx__", None)
    if not isinstance(ptx, str) or ".entry" not in ptx:  # without the folder, the DSL leaves the file's name
        raise SimulatorError(
            f"{type(compiled).__name__} did not keep its PTX: compile with the options "
            "'--keep-ptx --dump-dir FOLDER', where FOLDER exists"
        )
    return ptx


def _capability(ptx: str) -> int:
    found = re.search(r"^\s*\.target\s+sm_(\d+)", ptx, flags=re.MULTILINE)
    if found is None:
        raise PtxSyntaxError("the PTX has no .target sm_...")
    return int(found[1])


def _entry(ptx: str, kernel: str | None) -> Entry:
    entries = entries_of(ptx)
    if kernel is None and len(entries) == 1:
        return next(iter(entries.values()))
    if kernel not in entries:
        wanted = "several entries" if kernel is None else f"no entry {kernel}"
        raise SimulatorError(f"the PTX has {wanted if entries else 'no entry'}; entry= takes one of {list(entries)}")
    return entries[kernel]


def _dim3(what: str, extents: int | Sequence[int]) -> Dim3:
    given = tuple(extents) if isinstance(extents, (list, tuple)) else (extents,)
    if not 1 <= len(given) <= 3 or any(not isinstance(extent, Integral) or extent < 1 for extent in given):
        raise SimulatorError(f"{what} is {extents!r}; allowed: one to three positive integers")
    x, y, z = (*map(int, given), 1, 1)[:3]
    return x, y, z
