"""Exchange between the lanes of a warp: shfl, vote, match, redux, activemask, elect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from layouts.simulator.errors import UnknownInstructionError
from layouts.simulator.group import LANES, Group
from layouts.simulator.instructions.machine_code import Handler, instruction
from layouts.simulator.operands import reader, writer
from layouts.simulator.ptx import Instruction, PredicatePair

if TYPE_CHECKING:
    from layouts.simulator.machine import Machine


def _pair(instruction: Instruction) -> tuple[Any, Any]:
    first = instruction.operands[0]
    return (first.first, first.second) if isinstance(first, PredicatePair) else (first, None)


def check_members(machine: Machine, instruction: Instruction, group: Group, members: Any) -> Any:
    """All lanes that the mask names must be here, and no others. Returns the mask of each warp, (n,).

    Raises:
        UnknownInstructionError: lanes of a warp come with different masks.
    """
    here = group.rows()
    bits = np.broadcast_to(np.asarray(members, np.uint32), (len(group.slots) * LANES,)).reshape(-1, LANES)
    mask = bits[np.arange(len(bits)), here.argmax(axis=1)]  # lanes that are not here may have anything
    if ((bits != mask[:, None]) & here).any():
        raise UnknownInstructionError(f"{instruction.text}: lanes of a warp that name different members")
    named = (mask[:, None] >> np.arange(LANES, dtype=np.uint32)) & 1 != 0
    exited = machine.exited.reshape(-1, LANES)[group.slots]
    missing = named & ~here & ~exited
    if missing.any() or (here & ~named).any():
        warp, lane = (int(x[0]) for x in np.nonzero(missing | (here & ~named)))
        what = "is named by the mask but not here" if missing.any() else "is here but not named by the mask"
        name = machine.lane_name(int(group.slots[warp]) * LANES + lane)
        machine.find("divergence", f"{instruction.text}: {name} {what}", instruction)
    return mask


@instruction("shfl.sync")
def shuffle(machine: Machine, instruction: Instruction) -> Handler:
    """shfl.sync.{idx,bfly,up,down}.b32 d|p, a, b, c, membermask."""
    mode = instruction.parts[2]
    if mode not in ("idx", "bfly", "up", "down") or instruction.parts[3:] != ("b32",):
        raise UnknownInstructionError(f"{instruction.text}: this form of shfl is not modelled")
    target, found = _pair(instruction)
    value, by, limit, mask = (reader(machine, instruction, x, np.uint32) for x in instruction.operands[1:])
    write, write_found = writer(machine, instruction, target, np.uint32), writer(machine, instruction, found, bool)
    lane = np.arange(LANES)

    def run(group: Group) -> None:
        count = len(group.slots)
        members = mask(group)
        if group.active is not None or np.ndim(members) or members != 0xFFFFFFFF:
            check_members(machine, instruction, group, members)
        step = _rows(by(group), count) & 31
        bounds = _rows(limit(group), count)
        clamp, segment = bounds & 31, (bounds >> 8) & 31
        last = (lane & segment) | (clamp & ~segment)
        first = lane & segment
        source = {
            "idx": lambda: first | (step & ~segment),
            "bfly": lambda: lane ^ step,
            "up": lambda: lane - step,
            "down": lambda: lane + step,
        }[mode]()
        inside = source >= last if mode == "up" else source <= last
        source = np.where(inside, source, lane)
        values = np.broadcast_to(value(group), (count * LANES,)).reshape(count, LANES)
        write(group, np.take_along_axis(values, np.broadcast_to(source, values.shape), axis=1).ravel())
        if found is not None:
            write_found(group, np.broadcast_to(inside, values.shape).ravel())

    return run


def _rows(values: Any, count: int) -> Any:
    """A scalar as it is, lanes as (count, 32), signed so that differences are."""
    values = np.asarray(values).astype(np.int64)
    return values if values.ndim == 0 else values.reshape(count, LANES)


@instruction("vote.sync")
def vote(machine: Machine, instruction: Instruction) -> Handler:
    """vote.sync.{any,all,uni}.pred and .ballot.b32."""
    mode = instruction.parts[2]
    target, source, mask = instruction.operands
    read, members = reader(machine, instruction, source, bool), reader(machine, instruction, mask, np.uint32)
    if mode not in ("any", "all", "uni", "ballot"):
        raise UnknownInstructionError(f"{instruction.text}: this form of vote is not modelled")
    write = writer(machine, instruction, target, np.uint32 if mode == "ballot" else bool)

    def run(group: Group) -> None:
        check_members(machine, instruction, group, members(group))
        count = len(group.slots)
        votes = np.broadcast_to(read(group), (count * LANES,)).reshape(count, LANES)
        here = group.rows()
        yes, no = (votes & here).any(axis=1), (~votes & here).any(axis=1)
        if mode == "ballot":
            bits = (votes & here) * (np.uint32(1) << np.arange(LANES, dtype=np.uint32))
            result = bits.sum(axis=1, dtype=np.uint32)
        else:
            result = {"any": yes, "all": ~no, "uni": ~(yes & no)}[mode]
        write(group, np.repeat(result, LANES))

    return run


@instruction("activemask")
def active_mask(machine: Machine, instruction: Instruction) -> Handler:
    """activemask.b32."""
    write = writer(machine, instruction, instruction.operands[0], np.uint32)

    def run(group: Group) -> None:
        here = group.rows()
        bits = (here * (np.uint32(1) << np.arange(LANES, dtype=np.uint32))).sum(axis=1, dtype=np.uint32)
        write(group, np.repeat(bits, LANES))

    return run


@instruction("elect.sync")
def elect(machine: Machine, instruction: Instruction) -> Handler:
    """elect.sync d|p, membermask: the first lane of the mask is elected."""
    target, found = _pair(instruction)
    members = reader(machine, instruction, instruction.operands[1], np.uint32)
    write, write_found = writer(machine, instruction, target, np.uint32), writer(machine, instruction, found, bool)

    def run(group: Group) -> None:
        mask = check_members(machine, instruction, group, members(group))
        named = (mask[:, None] >> np.arange(LANES, dtype=np.uint32)) & 1 != 0
        leader = named.argmax(axis=1)[:, None]
        write(group, np.broadcast_to(leader, named.shape).astype(np.uint32).ravel())
        write_found(group, (np.arange(LANES) == leader).ravel())

    return run


@instruction("redux.sync")
def reduce(machine: Machine, instruction: Instruction) -> Handler:
    """redux.sync.{add,min,max,and,or,xor} over the lanes of the mask."""
    operations = {
        "add": np.add, "min": np.minimum, "max": np.maximum,
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    }  # fmt: skip
    operation, kind = instruction.parts[2], instruction.parts[-1]
    if operation not in operations or kind not in ("s32", "u32", "b32") or len(instruction.parts) != 4:
        raise UnknownInstructionError(f"{instruction.text}: this form of redux is not modelled")
    dtype = np.dtype(np.int32 if kind == "s32" else np.uint32)
    target, source, mask = instruction.operands
    read, write = reader(machine, instruction, source, dtype), writer(machine, instruction, target, dtype)
    members = reader(machine, instruction, mask, np.uint32)

    def run(group: Group) -> None:
        check_members(machine, instruction, group, members(group))
        values = np.broadcast_to(read(group), (len(group.slots) * LANES,)).reshape(-1, LANES)
        here = group.rows()
        neutral = {"add": 0, "or": 0, "xor": 0, "and": -1}.get(operation)
        if neutral is None:
            info = np.iinfo(dtype)
            neutral = info.max if operation == "min" else info.min
        fill = np.array(neutral & 0xFFFFFFFF, np.uint32).view(dtype)[()]
        result = operations[operation].reduce(np.where(here, values, fill), axis=1, dtype=dtype)
        write(group, np.repeat(result, LANES))

    return run
