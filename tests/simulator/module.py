"""A PTX module around a handwritten body, and a run of it over any arrays."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from layouts.simulator.report import Report
from layouts.simulator.simulate import simulate

PROLOGUE = """
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mov.b32 %r3, tile;
    and.b32 %r4, %r1, 31;
    shr.u32 %r5, %r1, 5;
"""


def module(body: str, pointers: int = 1, shared: int = 4096, before: str = "", target: str = "sm_80") -> str:
    """A module with the entry ``small`` that takes pointers.

    The body may use %rd1, %rd2 ... (the pointers), %r1 (thread), %r2 (CTA), %r3 (address of the tile in shared
    memory), %r4 (lane), %r5 (warp), and every other %p, %h, %r, %rd, %f, %d as it likes. It returns at its end.

    Args:
        pointers: how many the entry takes.
        shared: bytes of the tile.
        before: text before the entry.
    """
    parameters = ", ".join(f".param .u64 array_{i}" for i in range(1, pointers + 1))
    loads = "".join(f"    ld.param.u64 %rd{i}, [array_{i}];\n" for i in range(1, pointers + 1))
    return (
        f".version 8.0\n.target {target}\n.address_size 64\n{before}\n.visible .entry small({parameters})\n{{\n"
        "    .reg .pred %p<16>;\n    .reg .b16 %h<16>;\n    .reg .b32 %r<64>;\n    .reg .b64 %rd<32>;\n"
        "    .reg .f32 %f<16>;\n    .reg .f64 %d<16>;\n"
        f"    .shared .align 128 .b8 tile[{shared}];\n{loads}{PROLOGUE}{body}\n    ret;\n}}\n"
    )


def launch(body: str, *arrays: NDArray, grid: Any = 1, block: Any = 32, **options: Any) -> Report:
    """Run a body over arrays; ``options`` are those of ``module`` and of ``simulate``."""
    of_module = {name: options.pop(name) for name in ("shared", "before", "target") if name in options}
    text = module(body, len(arrays), **of_module)
    return simulate(text, list(arrays), grid=grid, block=block, **options)


def place(register: str, pointer: str, scale: int, index: str = "%r1", scratch: str = "%rd20") -> str:
    """Instructions that put pointer + index * scale into a 64-bit register."""
    return f"    mul.wide.u32 {scratch}, {index}, {scale};\n    add.s64 {register}, {pointer}, {scratch};\n"


def messages(report: Report, kind: str) -> list[str]:
    """The texts of the findings of a kind."""
    return [finding.message for finding in report.findings if finding.kind == kind]
