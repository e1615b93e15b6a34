"""What a compiled kernel's ELF file says of it, without the tools that read machine code."""

from __future__ import annotations

import struct

_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, ...
_INFO = ".nv.info"
_VALUE_OF_FORMAT = 4  # the attribute's value follows it, with its size; else two bytes in the header hold it
_FRAME_SIZE = 0x11  # of one function: its symbol, then the bytes of local memory that a thread has


def frame_bytes(cubin: bytes) -> int:
    """Local memory of one thread, in bytes: what it spills, for a kernel without local arrays.

    Of several functions the largest. The layout is that of ELF; the attribute is what ``cuobjdump -elf`` calls
    EIATTR_FRAME_SIZE.
    """
    return max((size for _, size in _frame_sizes(_section(cubin, _INFO))), default=0)


def _section(elf: bytes, name: str) -> bytes:
    """The content of a section; empty if there is none."""
    (headers,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    sections = [_SECTION_HEADER.unpack_from(elf, headers + i * size) for i in range(count)]
    names = sections[names_index][4]
    for section in sections:
        start = names + section[0]
        if elf[start : elf.index(b"\0", start)].decode() == name:
            return elf[section[4] : section[4] + section[5]]
    return b""


def _frame_sizes(info: bytes) -> list[tuple[int, int]]:
    """(symbol, bytes) of each function."""
    found, at = [], 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _VALUE_OF_FORMAT:
            if attribute == _FRAME_SIZE:
                found.append(struct.unpack_from("<II", info, at))
            at += size
    return found
