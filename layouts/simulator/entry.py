"""The headers of a PTX file's entries: which parameters a kernel takes, and how Python values become their bytes."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Any

from layouts.simulator.arguments import AddressOf, is_array
from layouts.simulator.errors import PtxSyntaxError, SimulatorError

_ENTRY = re.compile(r"\.entry\s+([\w$%]+)\s*(?:\(([^)]*)\))?([^{;]*)")
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.(?P<type>[busf](?P<bits>8|16|32|64|128))\s+"
    r"(?:\.\w+\s+(?:\d+\s+)?)*"  # such as .ptr .global .align 16
    r"(?P<name>[\w$%]+)\s*(?:\[(?P<count>\d+)\])?"
)
_FLOAT_FORMATS = {16: "<e", 32: "<f", 64: "<d"}
_POINTER_BYTES = 8


@dataclass(frozen=True)
class EntryParameter:
    """One parameter.

    Attributes:
        name: in the PTX.
        type: of an element, such as "u32".
        count: elements of a byte array, or None for a scalar.
    """

    name: str
    type: str
    count: int | None

    @property
    def bits(self) -> int:
        """Of an element."""
        return int(self.type[1:])

    @property
    def size(self) -> int:
        """In bytes."""
        return self.bits // 8 * (1 if self.count is None else self.count)

    def __str__(self) -> str:
        extent = "" if self.count is None else f"[{self.count}]"
        return f"parameter {self.name} (.{self.type}{extent})"


@dataclass(frozen=True)
class Entry:
    """The head of a kernel.

    Attributes:
        name: of the kernel.
        parameters: in order.
        cluster: blocks of a cluster, where ``.reqnctapercluster`` demands it, otherwise 1, 1, 1.
    """

    name: str
    parameters: tuple[EntryParameter, ...]
    cluster: tuple[int, int, int]


def entries_of(ptx: str) -> dict[str, Entry]:
    """The entries of a PTX text by name, in the text's order.

    Raises:
        PtxSyntaxError: a parameter is written in a way that is not known.
    """
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.DOTALL)
    return {
        name: Entry(name, tuple(map(_parameter, _split(parameters or ""))), _cluster(directives))
        for name, parameters, directives in _ENTRY.findall(text)
    }


def pack(parameter: EntryParameter, value: Any, address_of: AddressOf) -> bytes:
    """The bytes of a parameter.

    Args:
        parameter: what the kernel takes.
        value: an array for a 64-bit pointer (None for a null pointer), a number for a scalar, bytes for either.
        address_of: gives the address of an array's first element.

    Raises:
        SimulatorError: the value does not fit.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _pack_bytes(parameter, bytes(value))
    if parameter.count is not None:
        raise SimulatorError(f"{parameter} takes bytes, got {_kind(value)}")
    if value is None or is_array(value):
        return _pack_pointer(parameter, value, address_of)
    number = plain_number(value)
    if isinstance(number, int) and not parameter.type.startswith("f"):
        return _pack_integer(parameter, number)
    if isinstance(number, (int, float)) and parameter.type[0] in "fb" and parameter.bits in _FLOAT_FORMATS:
        return struct.pack(_FLOAT_FORMATS[parameter.bits], number)
    raise SimulatorError(f"{parameter} does not take {_kind(value)}")


def plain_number(value: Any) -> Any:
    """Scalars of numpy and of the DSL as Python's own numbers; everything else as it is."""
    if hasattr(value, "item") and not is_array(value):
        return value.item()
    inner = getattr(value, "value", None)
    return inner if isinstance(inner, (int, float)) else value


def _split(parameters: str) -> list[str]:
    return [stripped for part in parameters.split(",") if (stripped := part.strip())]


def _parameter(text: str) -> EntryParameter:
    found = _PARAMETER.fullmatch(text)
    if found is None:
        raise PtxSyntaxError(f"a parameter of an entry that is not understood: {text!r}")
    return EntryParameter(found["name"], found["type"], int(found["count"]) if found["count"] else None)


def _cluster(directives: str) -> tuple[int, int, int]:
    found = re.search(r"\.reqnctapercluster\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", directives)
    if found is None:
        return 1, 1, 1
    x, y, z = (int(extent or 1) for extent in found.groups())
    return x, y, z


def _pack_bytes(parameter: EntryParameter, value: bytes) -> bytes:
    if len(value) != parameter.size:
        raise SimulatorError(f"{parameter} has {parameter.size} bytes, got {len(value)}")
    return value


def _pack_pointer(parameter: EntryParameter, value: Any, address_of: AddressOf) -> bytes:
    if parameter.size != _POINTER_BYTES or parameter.type.startswith("f"):
        raise SimulatorError(f"{parameter} is no 64-bit pointer, got {_kind(value)}")
    return struct.pack("<Q", 0 if value is None else address_of(value))


def _pack_integer(parameter: EntryParameter, value: int) -> bytes:
    # C compilers write .u32 for signed and unsigned integers alike.
    least, beyond = -(1 << parameter.bits - 1), 1 << parameter.bits
    if not least <= value < beyond:
        raise SimulatorError(f"{parameter} holds {least} to {beyond - 1}, got {value}")
    return (value % beyond).to_bytes(parameter.size, "little")


def _kind(value: Any) -> str:
    return (
        "None" if value is None else f"{value!r} of type {type(value).__name__}" if _is_short(value) else _type(value)
    )


def _is_short(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str)) and len(repr(value)) < 40


def _type(value: Any) -> str:
    return f"a value of type {type(value).__name__}"
