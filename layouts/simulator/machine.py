"""A batch of CTAs while they run: registers, memories, what is under way, and the code of each basic block.

The lane axis holds the lanes of all warps of the batch: slot = warp * ctas + cta, lane = slot * 32 + lane of the warp.
The warps of one place in their CTAs lie together, so that groups are slices of that axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layouts.simulator import checks
from layouts.simulator.analysis import Analysis, analysis_of
from layouts.simulator.clocks import Clocks
from layouts.simulator.errors import UnknownInstructionError
from layouts.simulator.global_shadow import Conflict, GlobalShadow
from layouts.simulator.group import LANES, Group, Lanes
from layouts.simulator.instructions import machine_code
from layouts.simulator.memory import AddressError, GlobalMemory
from layouts.simulator.operands import RAW
from layouts.simulator.ptx import Instruction, Kernel, Register
from layouts.simulator.report import Finding
from layouts.simulator.shadow import SharedShadow

SHARED_ALIGNMENT = 128
PARAMETER_SPACE = 1 << 58  # where the kernel's parameters lie among generic addresses

Handler = Callable[[Group], None]
Control = Callable[[Group], list[Group]]


class Counters:
    """By instruction, summed over all batches of a launch."""

    def __init__(self, count: int):
        self.executions = np.zeros(count, np.int64)
        self.lanes = np.zeros(count, np.int64)
        self.wavefronts = np.zeros(count, np.int64)
        self.ideal_wavefronts = np.zeros(count, np.int64)
        self.sectors = np.zeros(count, np.int64)
        self.ideal_sectors = np.zeros(count, np.int64)
        self.bytes = np.zeros(count, np.int64)


class SharedMemory:
    """The shared memory of the batch: ``units[size]`` are views of all its bytes by the size of an element."""

    def __init__(self, ctas: int, smem_bytes: int):
        self.bytes_per_cta = smem_bytes
        self.data = np.full(ctas * smem_bytes, 0xFF, np.uint8)  # NaN in every format
        self.units = {size: self.data.view(f"u{size}") for size in (1, 2, 4, 8)}


class Machine:
    """The state of a batch.

    Attributes:
        kernel: what runs.
        ctas: how many CTAs; ``coordinates`` (ctas, 3) says which of the grid.
        warps: of a CTA.
        shared: shared memory.
        memory: global memory.
        clocks, shadow, global_shadow: who knows of what; None where nothing is checked.
        events: goes up when something happens that a waiting warp may wait for.
        delayed: asynchronous work that completes by itself; each call completes one piece.
        exited: (lanes,) those that have ended.
        held: warps that wait for the others of their warpgroup, and in which instruction.
        at_end: are called when the batch has ended, or is stuck.
        early_uses: by instruction, its uses of registers that wgmma may still be using.
        tracked: of each register that may be read before it is written, the lanes that have written it.
    """

    def __init__(
        self,
        kernel: Kernel,
        shape: tuple[tuple[int, int, int], tuple[int, int, int]],
        coordinates: NDArray[np.int64],
        memory: GlobalMemory,
        parameters: bytes,
        smem_bytes: int,
        counters: Counters,
        findings: list[Finding],
        global_shadow: GlobalShadow | None = None,
    ):
        self.kernel, self.memory, self.parameters = kernel, memory, parameters
        self.grid, self.block = shape
        self.coordinates = coordinates
        self.ctas = len(coordinates)
        self.threads = int(np.prod(self.block))
        self.warps = -(-self.threads // LANES)
        self.num_lanes = self.warps * self.ctas * LANES
        self.counters, self.findings = counters, findings
        checked = global_shadow is not None
        self.files = {kind: np.zeros((rows, self.num_lanes), RAW[kind]) for kind, rows in kernel.registers.items()}
        analysis = analysis_of(kernel)
        unwritten = analysis.unwritten if checked else {}
        self.tracked: dict[Register, NDArray[np.bool_]] = {
            register: np.zeros(self.num_lanes, bool) for registers in unwritten.values() for register in registers
        }
        self._reads_to_check = unwritten
        self.early_uses = analysis.early_uses if checked else {}
        dynamic = max(kernel.shared.values(), default=0) + smem_bytes
        size = max(dynamic, kernel.static_smem_bytes, 1)
        self.shared = SharedMemory(self.ctas, -(-size // SHARED_ALIGNMENT) * SHARED_ALIGNMENT)
        self.smem_size = size
        self.local = np.zeros((self.num_lanes, max(kernel.local_bytes, 1)), np.uint8)
        slots = np.arange(self.warps * self.ctas)
        self.cta_of_lane = np.repeat(slots % self.ctas, LANES)
        self.shared_base = self.cta_of_lane * self.shared.bytes_per_cta
        self.thread_of_lane = np.repeat(slots // self.ctas, LANES) * LANES + np.tile(np.arange(LANES), len(slots))
        self.exited = self.thread_of_lane >= self.threads
        self.clocks: Clocks | None = Clocks(self.warps, self.ctas) if checked else None
        self.shadow: SharedShadow | None = None
        self.global_shadow = global_shadow
        if self.clocks is not None and global_shadow is not None:
            x, y, _ = self.grid
            global_shadow.begin(self.clocks, coordinates @ np.array([1, x, x * y]))
            self.shadow = SharedShadow(self.clocks, self.shared.bytes_per_cta, analysis.granule, self._report)
        self.events = 0
        self.delayed: list[Callable[[], None]] = []
        self.ready: list[Group] = []
        self.held: list[tuple[Group, Instruction]] = []
        self.at_end: list[Callable[[], None]] = []
        self.state: dict[str, Any] = {}
        self._special = self._special_registers()
        self._link(analysis)

    def _link(self, analysis: Analysis) -> None:
        """Turn every instruction into a function."""
        code = machine_code.load()
        self.blocks, self.meeting = analysis.blocks, analysis.meeting
        self.code: dict[int, tuple[list[Handler], Control]] = {}
        for start, block in self.blocks.items():
            self.code[start] = code.link(self, block)

    def row(self, register: Register) -> NDArray[Any]:
        """All lanes' values of a register, raw."""
        return self.files[register.kind][register.row]

    def special(self, name: str) -> NDArray[Any]:
        """The values of a hardware register: (lanes,), or a scalar.

        Raises:
            UnknownInstructionError: it is not modelled.
        """
        if name not in self._special:
            raise UnknownInstructionError(f"the register {name} is not modelled; modelled: {', '.join(self._special)}")
        return np.asarray(self._special[name])

    def _special_registers(self) -> dict[str, Any]:
        x, y, _ = self.block
        thread = self.thread_of_lane.astype(np.uint32)
        lane = thread % LANES
        place = self.coordinates[self.cta_of_lane].astype(np.uint32)
        one = np.uint32(1)
        named = {
            "%tid.x": thread % x,
            "%tid.y": thread // x % y,
            "%tid.z": thread // (x * y),
            "%laneid": lane,
            "%warpid": thread // LANES,
            "%lanemask_eq": one << lane,
            "%lanemask_lt": (one << lane) - one,
            "%lanemask_le": ((one << lane) - one) | (one << lane),
            "%lanemask_ge": ~((one << lane) - one),
            "%lanemask_gt": ~(((one << lane) - one) | (one << lane)),
            "%dynamic_smem_size": np.uint32(self.smem_size),
            "%nwarpid": np.uint32(self.warps),
            "%cluster_ctarank": np.uint32(0),
            "%cluster_nctarank": one,
        }
        for i, axis in enumerate("xyz"):
            named[f"%ctaid.{axis}"] = place[:, i]
            named[f"%ntid.{axis}"] = np.uint32(self.block[i])
            named[f"%nctaid.{axis}"] = np.uint32(self.grid[i])
        return named

    def address_of(self, name: str) -> int | None:
        """The address of a shared or local variable in its window, or of a parameter."""
        found = self.kernel.shared.get(name, self.kernel.local.get(name))
        if found is None:
            parameter = next((p for p in self.kernel.parameters if p.name == name), None)
            found = None if parameter is None else PARAMETER_SPACE + parameter.offset
        return found

    def find(self, kind: str, message: str, instruction: Instruction | None, count: int = 1, **details: Any) -> None:
        """Note that the kernel does something wrong."""
        index, source = (instruction.index, instruction.source) if instruction else (None, None)
        self.findings.append(Finding(kind, message, index, source, count, details))

    def _report(self, finding: checks.Finding) -> None:
        instruction = self.kernel.instructions[finding.instruction]
        other = self.kernel.instructions[finding.other_instruction] if finding.other_instruction >= 0 else None
        text = finding.message.removeprefix(f"{finding.kind}: ")
        if other is not None:
            text += f"; the other is {other.text}" + (f" ({other.source})" if other.source else "")
        cta = tuple(self.coordinates[finding.cta].tolist())
        self.find(finding.kind, text, instruction, finding.count, cta=cta, address=finding.address)

    def global_race(self, instruction: Instruction, what: str, lane: int, conflict: Conflict) -> None:
        """Note an access to global memory that is not ordered after another thread's write."""
        x, y, _ = self.grid
        other = self.kernel.instructions[conflict.instruction]
        cta = conflict.cta % x, conflict.cta // x % y, conflict.cta // (x * y)
        writer = f"CTA {cta}, thread {conflict.agent * LANES + conflict.lane} in {other.text}"
        source = f" ({other.source})" if other.source else ""
        text = f"{what} by {self.lane_name(lane)}, {conflict.place}, not ordered after the write by {writer}{source}"
        self.find("race", text, instruction, conflict.accesses)

    def address_error(self, instruction: Instruction, lanes: NDArray[np.int64], error: AddressError) -> None:
        """Note an access to global memory outside of every array."""
        lane = int(lanes[error.position])
        kind = "misaligned" if "multiple" in error.problem else "out_of_bounds"
        self.find(kind, f"{self.lane_name(lane)}: {instruction.text}: {error.problem}", instruction)

    def lane_numbers(self, lanes: Lanes) -> NDArray[np.int64]:
        """The numbers on the lane axis of lanes that may be given as a slice."""
        return np.arange(self.num_lanes)[lanes] if isinstance(lanes, slice) else lanes

    def lane_name(self, lane: int) -> str:
        """For messages: a lane of the lane axis."""
        cta = tuple(self.coordinates[self.cta_of_lane[lane]].tolist())
        return f"CTA {cta}, thread {int(self.thread_of_lane[lane])}"

    def check_written(self, index: int, group: Group, not_read: frozenset[Register] = frozenset()) -> None:
        """Note registers that an instruction reads, all but these, and some lane has not written."""
        for register in self._reads_to_check[index]:
            if register in not_read:
                continue
            lanes = group.lane_numbers()
            missing = lanes[~self.tracked[register][lanes]]
            if len(missing):
                instruction = self.kernel.instructions[index]
                text = (
                    f"{self.lane_name(int(missing[0]))}: {register.name} is read in {instruction.text}, never written"
                )
                self.find("register", text, instruction, len(missing))

    def reads_unwritten(self, index: int) -> bool:
        return index in self._reads_to_check

    def registers_to_check(self, index: int) -> frozenset[Register]:
        return frozenset(self._reads_to_check.get(index, ()))

    def start(self, by_warp: bool) -> None:
        """Make the first groups: all warps in one, or one for each warp of the CTAs."""
        slots = np.arange(self.warps * self.ctas)
        parts = np.split(slots, self.warps) if by_warp else [slots]
        for part in parts:
            active = ~self.exited.reshape(-1, LANES)[part].ravel()
            self.ready.append(Group(0, part, None if active.all() else active))
