"""wgmma: products of a warpgroup, four warps, that run while the warps go on and land as late as their wait allows.

Operands in shared memory and A's registers are read, and accumulators written, when the wait completes the product:
who changes an operand, or uses an accumulator, before that gets wrong numbers. Until then accumulators hold NaN.

Of a product each warp reads all of B and its own 16 rows of A, and what it reads must be ordered before its own issue:
the warps of a warpgroup wait for each other here, but that orders nothing. Its wait tells a warp that the product has
ended in all four.

Not modelled: wavefronts of the operands in shared memory, and a wgmma.fence that is missing after the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from layouts.simulator import warpgroup
from layouts.simulator.errors import UnknownInstructionError
from layouts.simulator.group import LANES, Group
from layouts.simulator.instructions.machine_code import Control, Handler, control, go_on, instruction
from layouts.simulator.instructions.matrix import needs_whole_warps
from layouts.simulator.operands import reader
from layouts.simulator.ptx import Immediate, Instruction, Operand, Register
from layouts.simulator.warpgroup import ROWS, WARPS, Tiles, WgmmaForm, WgmmaOperands

if TYPE_CHECKING:
    from layouts.simulator.machine import Machine

IntArray = NDArray[np.int64]
CHUNK = 16  # bytes: a swizzle moves no less
POISON = 0x7FFF7FFF  # a NaN as f32 and as two f16, a large number as s32


@dataclass(frozen=True)
class _Tile:
    """An operand in shared memory: ``warp_rows`` says whether a warp reads its quarter of the rows (A) or all (B)."""

    rows: int
    k: int
    element_bytes: int
    k_major: bool
    warp_rows: bool


@lru_cache(maxsize=4096)
def _chunks(descriptor: int, tile: _Tile) -> tuple[IntArray, IntArray]:
    """The warp of the warpgroup (0 to 3) and the address of every 16 bytes that it reads."""
    addresses = warpgroup.operand_addresses(descriptor, tile.rows, tile.k, tile.element_bytes, tile.k_major)
    parts = np.split(addresses, WARPS) if tile.warp_rows else [addresses] * WARPS
    found = [np.unique(part // CHUNK) * CHUNK for part in parts]
    return np.repeat(np.arange(WARPS), [len(each) for each in found]), np.concatenate(found)


@dataclass(frozen=True)
class _Operand:
    """An operand in shared memory of the instruction's warpgroups, and the chunks that their warps read."""

    tile: _Tile
    descriptors: NDArray[np.uint64]  # (g,)
    chunk_group: IntArray  # (m,), which of the g
    chunk_lane: IntArray  # (m,), of the agent that reads it
    chunk_flat: IntArray  # (m,), its flat byte index

    def part(self, keep: NDArray[np.bool_]) -> _Operand:
        kept = keep[self.chunk_group]
        number = np.cumsum(keep) - 1
        return _Operand(
            self.tile,
            self.descriptors[keep],
            number[self.chunk_group[kept]],
            self.chunk_lane[kept],
            self.chunk_flat[kept],
        )


@dataclass(frozen=True)
class _Kind:
    """What all products of an instruction have in common; ``d`` and ``a`` are rows of the 32-bit registers."""

    instruction: Instruction
    form: WgmmaForm
    operands: WgmmaOperands
    d: IntArray
    a: IntArray


@dataclass
class _Product:
    """Products of an instruction that have not landed, by warpgroup (g).

    Attributes:
        warpgroups: (g,), their numbers.
        slots: (4, g), their warps.
        d: (registers, 4, g, 32), the accumulators that the product is added to.
        a: (registers, 4, g, 32), A's registers when the product was issued; none for an A in shared memory.
        scale_d: (g,) bool.
        committed: (g,), how many groups the warpgroup had committed.
        shared: the operands in shared memory, B last.
        flights: the number of each one's read.
    """

    kind: _Kind
    warpgroups: IntArray
    slots: IntArray
    d: NDArray[np.uint32]
    a: NDArray[np.uint32]
    scale_d: NDArray[np.bool_]
    committed: IntArray
    shared: list[_Operand]
    flights: list[int] = field(default_factory=list)

    def part(self, keep: NDArray[np.bool_]) -> _Product:
        return replace(
            self,
            warpgroups=self.warpgroups[keep],
            slots=self.slots[:, keep],
            d=self.d[:, :, keep],
            a=self.a[:, :, keep],
            scale_d=self.scale_d[keep],
            committed=self.committed[keep],
            shared=[operand.part(keep) for operand in self.shared],
        )


class _Warpgroups:
    """The warpgroups of a batch, number = warpgroup of the CTA * ctas + cta, and what they have under way."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.flying: list[_Product] = []
        count = -(-machine.warps // WARPS) * machine.ctas
        self.committed = np.zeros(count, np.int64)
        self.fenced = np.zeros(machine.warps * machine.ctas, bool)
        self.registers = machine.files["b32"].view(np.uint32).reshape(-1, machine.num_lanes // LANES, LANES)
        self.agents = np.zeros(0, np.int64)  # of each slot the slot of its agent
        machine.at_end.append(self._left_over)

    def gather(self, instruction: Instruction, group: Group) -> tuple[list[Group], IntArray]:
        """The warps wait for the others of their warpgroup: the groups that go on, and their warpgroups."""
        held = self.machine.held
        here = [each for each, where in held if where is instruction] + [group]
        numbers = [self._numbers(each.slots) for each in here]
        complete = np.bincount(np.concatenate(numbers), minlength=len(self.committed)) == WARPS
        held[:] = [(each, where) for each, where in held if where is not instruction]
        going: list[Group] = []
        for each, number in zip(here, numbers, strict=True):
            goes = complete[number]
            if goes.all():
                going.append(each)
            elif goes.any():
                going.append(each.part(goes))
                held.append((each.part(~goes), instruction))
            else:
                held.append((each, instruction))
        return going, np.flatnonzero(complete)

    def slots(self, warpgroups: IntArray) -> IntArray:
        """(4, g), the warps of warpgroups."""
        ctas = self.machine.ctas
        first = warpgroups // ctas * WARPS * ctas + warpgroups % ctas
        return first + np.arange(WARPS)[:, None] * ctas

    def agent_slots(self) -> IntArray:
        """Of each warp's slot that of the agent which carries out its part of products."""
        machine = self.machine
        if not len(self.agents):
            assert machine.clocks is not None
            agents = [machine.clocks.add_agent(f"wgmma of warp {warp}") for warp in range(machine.warps)]
            self.agents = np.concatenate(agents)
        return self.agents

    def issue(self, product: _Product) -> None:
        """A product is under way. The warps' earlier work happens before it."""
        machine, index = self.machine, product.kind.instruction.index
        slots = product.slots.ravel()
        if machine.clocks is not None and machine.shadow is not None:
            machine.clocks.acquire(self.agent_slots()[slots], machine.clocks.release(slots))
            product.flights = [
                machine.shadow.begin_read(operand.chunk_lane, operand.chunk_flat, CHUNK, index)
                for operand in product.shared
            ]
        self._put(product.kind.d, product.slots, np.uint32(POISON))
        self.flying.append(product)

    def land(self, warpgroups: IntArray, pending: int) -> None:
        """All but the latest so many committed groups of these warpgroups land."""
        limit = np.zeros(len(self.committed), np.int64)
        limit[warpgroups] = self.committed[warpgroups] - pending
        flying, self.flying = self.flying, []
        landed: list[_Product] = []
        for product in flying:
            lands = product.committed < limit[product.warpgroups]
            if lands.any():
                landed.append(product if lands.all() else product.part(lands))
            if not lands.all():
                self.flying.append(product.part(~lands) if lands.any() else product)
        for i, product in enumerate(landed):
            self._complete(product, landed[i + 1 :] + self.flying)
        if landed:
            self._tell(self.slots(np.unique(np.concatenate([product.warpgroups for product in landed]))))

    def _tell(self, slots: IntArray) -> None:
        """The (4, g) warps learn that the products of their warpgroup ended; not what other warps did before."""
        clocks = self.machine.clocks
        if clocks is None:
            return
        agents = self.agent_slots()[slots].ravel()
        rows, place, own = clocks.release(agents), np.arange(len(agents)), agents // self.machine.ctas
        ends = np.zeros_like(rows)
        ends[place, :, own] = rows[place, :, own]
        of_warpgroup = ends.reshape(*slots.shape, *rows.shape[1:]).max(axis=0)
        clocks.acquire(slots.ravel(), np.concatenate([of_warpgroup] * WARPS))

    def _complete(self, product: _Product, later: list[_Product]) -> None:
        kind, machine = product.kind, self.machine
        self._check_registers(product)
        values = [self._shared_values(operand, product) for operand in product.shared]
        if len(kind.a):
            values.insert(0, warpgroup.register_operand(self.get(kind.a, product.slots), kind.form.a))
        a, b = values
        result = warpgroup.wgmma(kind.form, product.d, a, b, product.scale_d, kind.operands.sign)
        if machine.shadow is not None:
            for operand, number in zip(product.shared, product.flights, strict=True):
                machine.shadow.end_read(operand.chunk_lane, operand.chunk_flat, CHUNK, number)
        self._hand_on(product, result, later)

    def _hand_on(self, product: _Product, result: NDArray[np.uint32], later: list[_Product]) -> None:
        """The result goes to the next product of the same accumulators, or else into them."""
        left = np.ones(len(product.warpgroups), bool)
        for other in later:
            if not left.any():
                return
            if np.array_equal(other.kind.d, product.kind.d):
                _, mine, its = np.intersect1d(product.warpgroups, other.warpgroups, return_indices=True)
                wanted = left[mine]
                other.d[:, :, its[wanted]] = result[:, :, mine[wanted]]
                left[mine] = False
        self._put(product.kind.d, product.slots[:, left], result[:, :, left])

    def _check_registers(self, product: _Product) -> None:
        kind = product.kind
        if (self.get(kind.d, product.slots) != POISON).any():
            self._find(kind.instruction, "an accumulator is written before the wait")
        if (self.get(kind.a, product.slots) != product.a).any():
            self._find(kind.instruction, "a register of A is written before the wait")

    def _shared_values(self, operand: _Operand, product: _Product) -> Any:
        machine, tile, form = self.machine, operand.tile, product.kind.form
        shared = machine.shared.data.reshape(machine.ctas, -1)
        tiles = Tiles(operand.descriptors, product.warpgroups % machine.ctas, tile.rows, tile.k_major)
        return warpgroup.shared_operand(shared, tiles, tile.k, form.a if tile.warp_rows else form.b)

    def get(self, rows: IntArray, slots: IntArray) -> NDArray[np.uint32]:
        """(registers, 4, g, 32): the registers of these rows, of these (4, g) warps."""
        return self.registers[rows[:, None, None], slots]

    def _put(self, rows: IntArray, slots: IntArray, values: Any) -> None:
        self.registers[rows[:, None, None], slots] = values

    def check_issue(self, kind: _Kind, warpgroups: IntArray, slots: IntArray) -> None:
        """Note a first product without a fence, and accumulators that another product under way has in part."""
        if not self.fenced[slots].all():
            self._find(kind.instruction, "there is no wgmma.fence before the warpgroup's first product")
            self.fenced[slots] = True
        for other in self.flying:
            same = np.array_equal(other.kind.d, kind.d)
            if not same and np.isin(kind.d, other.kind.d).any() and np.isin(warpgroups, other.warpgroups).any():
                self._find(kind.instruction, f"{other.kind.instruction.opcode} still has some of its accumulators")

    def check_use(self, instruction: Instruction, rows: tuple[IntArray, IntArray], group: Group) -> None:
        """Note that warps use accumulators, or write registers of A, of these rows before their wait."""
        for product in self.flying:
            kind = product.kind
            accumulators, a = np.isin(kind.d, rows[0]).any(), np.isin(kind.a, rows[1]).any()
            if (accumulators or a) and np.isin(product.slots, group.slots).any():
                what = "uses an accumulator" if accumulators else "writes a register of A"
                text = f"{instruction.text}: it {what} of {kind.instruction.opcode} before the wait"
                self.machine.find("async", text, instruction)

    def _left_over(self) -> None:
        for product in self.flying:
            waits = product.committed < self.committed[product.warpgroups]
            self._find(product.kind.instruction, "never waited for" if waits.all() else "never committed")

    def _find(self, where: Instruction, problem: str) -> None:
        self.machine.find("async", f"{where.opcode}: {problem}", where)

    def _numbers(self, slots: IntArray) -> IntArray:
        ctas = self.machine.ctas
        return slots // ctas // WARPS * ctas + slots % ctas


def _warpgroups(machine: Machine) -> _Warpgroups:
    if "warpgroups" not in machine.state:
        machine.state["warpgroups"] = _Warpgroups(machine)
    return machine.state["warpgroups"]


def _as_one(machine: Machine, instruction: Instruction, work: Any) -> Control:
    """A control that holds warps back until their warpgroup is here, and then does its ``work`` on warpgroups."""
    if instruction.guard is not None:
        raise UnknownInstructionError(f"{instruction.text}: a guarded wgmma is not modelled")
    warpgroups = _warpgroups(machine)

    def run(group: Group) -> list[Group]:
        if not needs_whole_warps(machine, instruction, group):
            return go_on(machine, group, instruction.index + 1)
        going, numbers = warpgroups.gather(instruction, group)
        if going:
            work(numbers)
        return [each for some in going for each in go_on(machine, some, instruction.index + 1)]

    return run


def watched(machine: Machine, instruction: Instruction, handler: Handler) -> Handler:
    """The handler of one of ``machine.early_uses``, which looks first whether products are under way."""
    warpgroups, use = _warpgroups(machine), machine.early_uses[instruction.index]
    rows = _rows(instruction, tuple(use.accumulators)), _rows(instruction, tuple(use.a))

    def run(group: Group) -> None:
        warpgroups.check_use(instruction, rows, group)
        handler(group)

    return run


@instruction("wgmma.fence")
def fence(machine: Machine, instruction: Instruction) -> Handler:
    """wgmma.fence.sync.aligned: what the warp did with registers happens before its next products."""
    fenced = _warpgroups(machine).fenced

    def run(group: Group) -> None:
        if needs_whole_warps(machine, instruction, group):
            fenced[group.slots] = True

    return run


@control("wgmma.commit_group")
def commit(machine: Machine, instruction: Instruction) -> Control:
    """wgmma.commit_group.sync.aligned: the products so far are a group."""
    committed = _warpgroups(machine).committed

    def work(numbers: IntArray) -> None:
        committed[numbers] += 1

    return _as_one(machine, instruction, work)


@control("wgmma.wait_group")
def wait(machine: Machine, instruction: Instruction) -> Control:
    """wgmma.wait_group.sync.aligned n: all but the n latest groups of the warpgroup have landed."""
    (pending,) = instruction.operands
    if not isinstance(pending, Immediate):
        raise UnknownInstructionError(f"{instruction.text}: the number of groups must be a constant")
    warpgroups, number = _warpgroups(machine), int(pending.value)
    return _as_one(machine, instruction, lambda numbers: warpgroups.land(numbers, number))


@control("wgmma.mma_async")
def multiply(machine: Machine, instruction: Instruction) -> Control:
    """wgmma.mma_async.sync.aligned, the dense forms that ``warpgroup.wgmma_form`` knows."""
    return _as_one(machine, instruction, _Issue(machine, instruction).run)


class _Issue:
    """How a wgmma.mma_async finds its operands."""

    def __init__(self, machine: Machine, instruction: Instruction):
        self.machine, self.instruction = machine, instruction
        self.warpgroups = _warpgroups(machine)
        form = warpgroup.wgmma_form(instruction.opcode)
        operands = warpgroup.wgmma_operands(instruction)
        in_registers = operands.a if operands.a_in_registers else ()
        d, a = (_rows(instruction, part) for part in (operands.d, in_registers))
        self.kind = _Kind(instruction, form, operands, d, a)
        self.scale_d = reader(machine, instruction, operands.scale_d, bool)
        self.shared = [(_Tile(form.n, form.k, form.element_bytes, operands.b_k_major, False), operands.b)]
        if not operands.a_in_registers:
            tile = _Tile(ROWS, form.k, form.element_bytes, operands.a_k_major, True)
            self.shared.insert(0, (tile, operands.a[0]))
        self.descriptors = [reader(machine, instruction, operand, np.uint64) for _, operand in self.shared]
        self.accumulators = frozenset(item for item in operands.d if isinstance(item, Register))
        self.tracked = [machine.tracked[item] for item in self.accumulators if item in machine.tracked]

    def run(self, warpgroups: IntArray) -> None:
        machine, slots = self.machine, self.warpgroups.slots(warpgroups)
        scale_d = self._same_in_all(self.scale_d, slots)
        self._check_written(slots, scale_d)
        self.warpgroups.check_issue(self.kind, warpgroups, slots)
        product = _Product(
            self.kind,
            warpgroups,
            slots,
            self.warpgroups.get(self.kind.d, slots),
            self.warpgroups.get(self.kind.a, slots),
            scale_d,
            self.warpgroups.committed[warpgroups],
            [
                self._operand(tile, self._same_in_all(read, slots), slots)
                for (tile, _), read in zip(self.shared, self.descriptors, strict=True)
            ],
        )
        inside = np.ones(len(warpgroups), bool)
        for operand in product.shared:
            beyond = operand.chunk_flat - machine.shared_base[slots[0, operand.chunk_group] * LANES] + CHUNK
            inside[operand.chunk_group[beyond > machine.smem_size]] = False
        if not inside.all():
            self._out_of_bounds(int(slots[0, ~inside][0]), int((~inside).sum()))
            product = product.part(inside)
        for written in self.tracked:
            written.reshape(-1, LANES)[slots.ravel()] = True
        self.warpgroups.issue(product)

    def _same_in_all(self, read: Any, slots: IntArray) -> NDArray[Any]:
        """(g,), an operand that all threads of a warpgroup must agree on."""
        group = Group(self.instruction.index, np.sort(slots, axis=None), None)
        values = np.broadcast_to(read(group), (len(group.slots) * LANES,)).reshape(-1, LANES)
        values = values[np.searchsorted(group.slots, slots)]
        if (values != values[:1, :, :1]).any():
            text = f"{self.instruction.text}: threads of a warpgroup differ in a descriptor or in scale-d"
            self.machine.find("divergence", text, self.instruction)
        return values[0, :, 0]

    def _check_written(self, slots: IntArray, scale_d: NDArray[np.bool_]) -> None:
        """Accumulators are read only where the product is added to them."""
        index = self.instruction.index
        if not self.machine.reads_unwritten(index):
            return
        for adds, not_read in ((True, frozenset[Register]()), (False, self.accumulators)):
            some = np.sort(slots[:, scale_d == adds], axis=None)
            if len(some):
                self.machine.check_written(index, Group(index, some, None), not_read)

    def _operand(self, tile: _Tile, descriptors: NDArray[np.uint64], slots: IntArray) -> _Operand:
        machine = self.machine
        agents = self.warpgroups.agent_slots() if machine.clocks is not None else np.arange(slots.max() + 1)
        groups, lanes, flat = [], [], []
        for descriptor in np.unique(descriptors):
            warp, address = _chunks(int(descriptor), tile)
            some = np.flatnonzero(descriptors == descriptor)
            groups.append(np.repeat(some, len(warp)))
            lanes.append((agents[slots[:, some]][warp] * LANES).T.ravel())
            flat.append((machine.shared_base[slots[0, some] * LANES][:, None] + address).ravel())
        return _Operand(tile, descriptors, np.concatenate(groups), np.concatenate(lanes), np.concatenate(flat))

    def _out_of_bounds(self, slot: int, count: int) -> None:
        machine = self.machine
        text = f"{machine.lane_name(slot * LANES)}: {self.instruction.text}: an operand reaches beyond the block's"
        machine.find("out_of_bounds", f"{text} {machine.smem_size} bytes of shared memory", self.instruction, count)


def _rows(instruction: Instruction, operands: tuple[Operand, ...]) -> IntArray:
    rows = [item.row for item in operands if isinstance(item, Register) and item.kind == "b32"]
    if len(rows) != len(operands):
        raise UnknownInstructionError(f"{instruction.text}: all items in braces must be 32-bit registers")
    return np.array(rows, np.int64)
