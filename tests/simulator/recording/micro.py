"""A micro-kernel: one instruction between loads of its operands and stores of its results, as PTX text."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.simulator.recording.operands import buffer_type, operand_set

THREADS = 256
BLOCK = 128
ENTRY = "micro"

_HEAD = """.version 8.7
.target {target}
.address_size 64
.visible .entry {entry}({parameters})
{{
    .reg .pred %p<40>, %q<16>;
    .reg .b16 %h<40>;
    .reg .b32 %r<40>, %t<16>;
    .reg .b64 %d<40>, %a<32>;
    .shared .align 1024 .b8 tile[16384];
    mov.u32 %t0, %tid.x;
    mov.u32 %t1, %ctaid.x;
    mad.lo.u32 %t2, %t1, {block}, %t0;
    mov.u32 %t3, tile;
    shl.b32 %t4, %t0, 4;
    add.u32 %t4, %t4, %t3;
"""


@dataclass(frozen=True)
class Tolerance:
    """How far a result may be from the GPU's: ``relative`` times its size, plus ``absolute``."""

    relative: float = 0.0
    absolute: float = 0.0


@dataclass(frozen=True)
class MicroKernel:
    """Micro-kernels are launched with THREADS / BLOCK blocks; a thread has one value of each operand.

    Attributes:
        name: of the instruction and variant.
        inputs: the kind of each operand, as ``operands.values`` takes it.
        outputs: the PTX type of each result.
        body: works on the registers that ``register`` names, and on %t0 (thread), %t3 (16 KB of shared memory), %t4 (16
            bytes of the thread in it), %t5 and up, %q0 and up.
        tolerance: None where hardware defines the bits.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    tolerance: Tolerance | None = None

    def ptx(self, target: str = "sm_90a", entry: str = ENTRY) -> str:
        """The module's text: an entry that takes the address of each operand, then of each result."""
        names = [f"in{i}" for i in range(len(self.inputs))] + [f"out{i}" for i in range(len(self.outputs))]
        parameters = ", ".join(f".param .u64 {name}" for name in names)
        lines = [_HEAD.format(target=target, entry=entry, parameters=parameters, block=BLOCK)]
        for i, (name, kind) in enumerate(zip(names, self.inputs + self.outputs, strict=True)):
            lines += [
                f"    ld.param.u64 %a{i}, [{name}];",
                f"    mad.wide.u32 %a{i}, %t2, {bits_of(kind) // 8}, %a{i};",
            ]
        lines += [_load(kind, i) for i, kind in enumerate(self.inputs)]
        lines += [f"    {line}" for line in self.body.splitlines()]
        lines += [_store(kind, len(self.inputs) + i, i) for i, kind in enumerate(self.outputs)]
        return "\n".join([*lines, "    ret;", "}", ""])

    def operands(self) -> list[NDArray]:
        return operand_set(self.inputs, THREADS, self.name)

    def results(self) -> list[NDArray]:
        """Arrays for the results, filled with a mark."""
        return [np.full(THREADS, 0xA5A5, buffer_type(kind)) for kind in self.outputs]


def register(kind: str, place: int, result: bool = False) -> str:
    """The register of an operand, or from 20 on, of a result."""
    letter = "p" if kind == "pred" else {16: "h", 32: "r", 64: "d"}[bits_of(kind)]
    return f"%{letter}{place + 20 * result}"


def bits_of(kind: str) -> int:
    """Of an operand's buffer and register; those for a purpose ("small_f16") are words."""
    return 32 if "_" in kind else buffer_type(kind).itemsize * 8


def _load(kind: str, place: int) -> str:
    name = register(kind, place)
    if kind == "pred":
        return f"    ld.global.b32 %t15, [%a{place}];\n    setp.ne.u32 {name}, %t15, 0;"
    return f"    ld.global.b{bits_of(kind)} {name}, [%a{place}];"


def _store(kind: str, address: int, place: int) -> str:
    name = register(kind, place, result=True)
    if kind == "pred":
        return f"    selp.u32 %t15, 1, 0, {name};\n    st.global.b32 [%a{address}], %t15;"
    return f"    st.global.b{bits_of(kind)} [%a{address}], {name};"


def expand(pattern: str) -> list[str]:
    """All texts of a pattern with alternatives in braces: "a{,.x}.{b,c}"."""
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(choice) for choice in itertools.product(*choices)]


def expand_all(*patterns: str) -> list[str]:
    return list(dict.fromkeys(text for pattern in patterns for text in expand(pattern)))
