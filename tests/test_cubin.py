"""The frame of a kernel as its ELF file says it."""

from __future__ import annotations

import struct

import pytest

from cute_attn.arch import arch_by_name
from cute_attn.compiler.compiling import compile_spec
from cute_attn.compiler.cubin import frame_bytes
from cute_attn.configs import PrefillConfig, default_config
from cute_attn.problem import KernelSpec, PrefillProblem


def elf(info: bytes) -> bytes:
    """A file with the one section ``.nv.info``, after the section of names."""
    names = b"\0.shstrtab\0.nv.info\0"
    headers = [(0, 0), (1, 0x40), (11, 0x40 + len(names))]
    sizes = [0, len(names), len(info)]
    table = b"".join(
        struct.pack("<IIQQQQIIQQ", name, 0, 0, 0, at, size, 0, 0, 0, 0)
        for (name, at), size in zip(headers, sizes, strict=True)
    )
    head = bytearray(0x40)
    struct.pack_into("<Q", head, 0x28, 0x40 + len(names) + len(info))
    struct.pack_into("<HHH", head, 0x3A, 64, len(headers), 1)
    return bytes(head) + names + info + table


def test_the_largest_frame_counts() -> None:
    frames = b"".join(struct.pack("<BBHII", 4, 0x11, 8, symbol, size) for symbol, size in ((1, 8), (2, 40), (3, 0)))
    others = struct.pack("<BBH", 3, 0x1B, 0xFF) + struct.pack("<BBHII", 4, 0x2F, 8, 1, 255)
    assert frame_bytes(elf(others + frames)) == 40
    assert frame_bytes(elf(b"")) == 0


@pytest.mark.parametrize(("config", "spills"), [(None, False), (PrefillConfig(128, 128, 4, 1, q_in_regs=True), True)])
def test_a_compiled_kernel(config: PrefillConfig | None, spills: bool) -> None:
    arch, problem = arch_by_name("sm_80"), PrefillProblem("float16", 128, 128)
    compiled = compile_spec(KernelSpec(problem, config or default_config(arch, 128, 128), arch))
    assert (frame_bytes(compiled.__cubin__) > 0) == spills
