"""ldmatrix, stmatrix, movmatrix and mma.sync. Runs of independent mma instructions are computed together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from layouts.simulator import fragments, traffic
from layouts.simulator.access import SharedAccess
from layouts.simulator.errors import UnknownInstructionError
from layouts.simulator.group import LANES, Group
from layouts.simulator.instructions.machine_code import Handler, instruction
from layouts.simulator.operands import items, reader, writer
from layouts.simulator.ptx import Instruction, Operand

if TYPE_CHECKING:
    from layouts.simulator.machine import Machine

ROW_BYTES = 16
MATRIX_ROWS = 8


def needs_whole_warps(machine: Machine, instruction: Instruction, group: Group) -> bool:
    """Whether all lanes are here, as .sync.aligned demands; a finding if not."""
    if group.active is None:
        return True
    text = f"{instruction.text}: only {group.num_lanes} of {len(group.slots) * LANES} lanes execute it"
    machine.find("divergence", text, instruction)
    return False


class _Found(NamedTuple):
    """Rows whose addresses are right.

    Attributes:
        flat: byte indices in shared memory, (n * matrices * 8,).
        rows: the same in units of a row.
        wavefronts, ideal: of all warps together.
    """

    flat: Any
    rows: Any
    wavefronts: int
    ideal: int


KEPT = 4  # of an instruction: loops come back to the same addresses, once for each stage of a pipeline


class _Rows:
    """The 16-byte rows of matrices in shared memory: lane 8 i + j has the address of row j of matrix i."""

    def __init__(self, machine: Machine, instruction: Instruction, operand: Operand, matrices: int):
        self.machine, self.instruction, self.matrices = machine, instruction, matrices
        self.access = SharedAccess(machine, instruction, operand, ROW_BYTES)
        self.kept: dict[tuple[bytes, bytes], _Found] = {}

    def find(self, group: Group, write: bool) -> Any:
        """The rows' indices in shared memory in units of a row, (n * matrices * 8,), or None if some are wrong."""
        machine, count = self.machine, self.matrices * MATRIX_ROWS
        if not needs_whole_warps(machine, self.instruction, group):
            return None
        lanes = group.lanes if count == LANES else (group.slots[:, None] * LANES + np.arange(count)).ravel()
        address = self.access.addresses(group).reshape(-1, LANES)[:, :count].ravel()
        key = address.tobytes(), group.slots.tobytes()
        found = self.kept.get(key)
        if found is None:
            found = self._locate(group, lanes, address)
            if found is None:
                return None
            if len(self.kept) == KEPT:
                self.kept.clear()
            self.kept[key] = found
        counters, index = machine.counters, self.instruction.index
        counters.wavefronts[index] += found.wavefronts
        counters.ideal_wavefronts[index] += found.ideal
        counters.bytes[index] += len(found.flat) * ROW_BYTES
        if machine.shadow is not None:
            check = machine.shadow.write if write else machine.shadow.read
            check(lanes, found.flat, ROW_BYTES, index, aligned=True)
        return found.rows

    def _locate(self, group: Group, lanes: Any, address: Any) -> _Found | None:
        machine, count = self.machine, self.matrices * MATRIX_ROWS
        wrong = (address < 0) | (address + ROW_BYTES > machine.smem_size) | (address & (ROW_BYTES - 1) != 0)
        if wrong.any():
            full = np.zeros((len(group.slots), LANES), bool)
            full[:, :count] = wrong.reshape(-1, count)
            self.access.complain(group, self.access.addresses(group), full.ravel())
            return None
        flat = address + machine.shared_base[lanes]
        wavefronts, ideal = traffic.matrix_wavefronts(flat.reshape(-1, self.matrices, MATRIX_ROWS))
        return _Found(flat, flat // ROW_BYTES, int(wavefronts.sum()), int(ideal.sum()))


def _matrices(instruction: Instruction) -> tuple[int, bool]:
    """How many 8x8 matrices of 16-bit elements, and whether they are transposed."""
    parts = instruction.parts[1:]
    numbers = {"x1": 1, "x2": 2, "x4": 4}
    known = {"sync", "aligned", "m8n8", "trans", "b16", "shared", "shared::cta", *numbers}
    unknown = set(parts) - known
    count = next((numbers[part] for part in parts if part in numbers), None)
    if unknown or count is None or "m8n8" not in parts or parts[-1] != "b16":
        raise UnknownInstructionError(f"{instruction.text}: this form of {instruction.base} is not modelled")
    return count, "trans" in parts


@instruction("ldmatrix")
def load_matrices(machine: Machine, instruction: Instruction) -> Handler:
    """ldmatrix.sync.aligned.m8n8.x{1,2,4}[.trans].shared.b16."""
    count, transpose = _matrices(instruction)
    target, address = instruction.operands
    rows = _Rows(machine, instruction, address, count)
    writes = [writer(machine, instruction, part, np.uint32) for part in items(target)]
    shared = machine.shared.data.reshape(-1, ROW_BYTES)

    def run(group: Group) -> None:
        found = rows.find(group, write=False)
        if found is None:
            return
        values = fragments.ldmatrix(shared[found].reshape(-1, count, MATRIX_ROWS, ROW_BYTES), transpose)
        for write, value in zip(writes, values, strict=True):
            write(group, value.ravel())

    return run


@instruction("stmatrix")
def store_matrices(machine: Machine, instruction: Instruction) -> Handler:
    """stmatrix.sync.aligned.m8n8.x{1,2,4}[.trans].shared.b16."""
    count, transpose = _matrices(instruction)
    address, source = instruction.operands
    rows = _Rows(machine, instruction, address, count)
    reads = [reader(machine, instruction, part, np.uint32) for part in items(source)]
    shared = machine.shared.data.reshape(-1, ROW_BYTES)

    def run(group: Group) -> None:
        found = rows.find(group, write=True)
        if found is not None:
            shared[found] = fragments.stmatrix(_stack(group, reads), transpose).reshape(-1, ROW_BYTES)

    return run


@instruction("movmatrix")
def move_matrix(machine: Machine, instruction: Instruction) -> Handler:
    """movmatrix.sync.aligned.m8n8.trans.b16."""
    if instruction.opcode != "movmatrix.sync.aligned.m8n8.trans.b16":
        raise UnknownInstructionError(f"{instruction.text}: this form of movmatrix is not modelled")
    target, source = instruction.operands
    read, write = reader(machine, instruction, source, np.uint32), writer(machine, instruction, target, np.uint32)

    def run(group: Group) -> None:
        if needs_whole_warps(machine, instruction, group):
            write(group, fragments.movmatrix(_stack(group, [read])[0]).ravel())

    return run


def _stack(group: Group, reads: list) -> Any:
    """(registers, n, 32) uint32."""
    return _stack_all(group, [reads])[0]


def _stack_all(group: Group, every: list[list]) -> Any:
    """(operands, registers, n, 32) uint32."""
    stacked = np.empty((len(every), len(every[0]), len(group.slots) * LANES), np.uint32)
    for rows, reads in zip(stacked, every, strict=True):
        for row, read in zip(rows, reads, strict=True):
            row[...] = read(group)
    return stacked.reshape(*stacked.shape[:2], -1, LANES)


def fused_runs(machine: Machine, instructions: list[Instruction]) -> list[Instruction | Callable[[Group], None]]:
    """The instructions, with each run of mma.sync of which none reads what another writes as one function."""
    result: list[Instruction | Callable[[Group], None]] = []
    run: list[Instruction] = []
    written: set[str] = set()

    def close() -> None:
        if run:
            result.append(_multiply(machine, list(run)))
        run.clear()
        written.clear()

    for each in instructions:
        watched = machine.reads_unwritten(each.index) or each.index in machine.early_uses
        if each.base != "mma" or each.guard is not None or watched:
            close()
            result.append(each)
            continue
        registers = [[part.name for part in items(operand) if part is not None and hasattr(part, "name")]
                     for operand in each.operands]  # fmt: skip
        if run and (each.opcode != run[0].opcode or written & {name for names in registers for name in names}):
            close()
        run.append(each)
        written.update(registers[0])
    close()
    return result


@instruction("mma")
def multiply(machine: Machine, instruction: Instruction) -> Handler:
    """mma.sync.aligned, alone."""
    return _multiply(machine, [instruction])


def _multiply(machine: Machine, run: list[Instruction]) -> Handler:
    form = fragments.mma_form(run[0].opcode)
    left, right, pairs = _distinct(run)
    reads_a = [[reader(machine, run[0], part, np.uint32) for part in items(operand)] for operand in left]
    reads_b = [[reader(machine, run[0], part, np.uint32) for part in items(operand)] for operand in right]
    reads_c = [[reader(machine, each, part, np.uint32) for part in items(each.operands[3])] for each in run]
    writes = [[writer(machine, each, part, np.uint32) for part in items(each.operands[0])] for each in run]

    def execute(group: Group) -> None:
        if not needs_whole_warps(machine, run[0], group):
            return
        a, b, c = (_stack_all(group, every) for every in (reads_a, reads_b, reads_c))
        for puts, values in zip(writes, fragments.mma_many(form, a, b, c, pairs), strict=True):
            for put, value in zip(puts, values, strict=True):
                put(group, value.ravel())

    return execute


def _distinct(run: list[Instruction]) -> tuple[list[Operand], list[Operand], list[tuple[int, int]]]:
    """The different A and B operands of a run, and which two each instruction multiplies."""
    left: dict[Operand, int] = {}
    right: dict[Operand, int] = {}
    pairs = []
    for each in run:
        i = left.setdefault(each.operands[1], len(left))
        pairs.append((i, right.setdefault(each.operands[2], len(right))))
    return list(left), list(right), pairs
