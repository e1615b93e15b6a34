"""PTX text to instructions: ``parse(text)`` gives the ``Kernel`` of an entry.

Names inside ``{ }`` scopes (inline assembly declares registers and labels there, and repeats them) are made unique, so
that an instruction's operands stand for themselves.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from functools import cached_property

from layouts.simulator.errors import PtxSyntaxError

REGISTER_KINDS = {"pred": "pred", "b16": "b16", "b32": "b32", "b64": "b64"} | {
    f"{letter}{bits}": f"b{bits}" for letter in "usf" for bits in (16, 32, 64)
}


@dataclass(frozen=True)
class Register:
    """A virtual register: a row of the file of its kind ("pred", "b16", "b32" or "b64")."""

    name: str
    kind: str
    row: int


@dataclass(frozen=True)
class Immediate:
    """A constant. Integers are kept as written; floats as "f32" or "f64" bits."""

    value: int
    kind: str = "int"


@dataclass(frozen=True)
class Special:
    """A read-only register of the hardware, such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """A variable, a parameter or a label."""

    name: str


@dataclass(frozen=True)
class Vector:
    """Operands in braces."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Address:
    """[base + offset], with the coordinates of a tensor access if there are any."""

    base: Register | Symbol | None
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class PredicatePair:
    """p|q: two destinations."""

    first: Register | None
    second: Register | None


@dataclass(frozen=True)
class Negated:
    """!p as a source."""

    register: Register


Operand = Register | Immediate | Special | Symbol | Vector | Address | PredicatePair | Negated | None


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        index: its place in the kernel.
        opcode: in full, "add.s32".
        operands: destinations first; None stands for ``_``.
        guard: the predicate that lets a lane take part, and whether it is negated.
        source: "file.py:12" where the compiler gave it.
        text: as it was written.
    """

    index: int
    opcode: str
    operands: tuple[Operand, ...]
    guard: tuple[Register, bool] | None
    source: str | None
    text: str

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The opcode cut at its dots: ("add", "s32")."""
        return tuple(self.opcode.split("."))

    @property
    def base(self) -> str:
        return self.parts[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        return self.parts[1:]


@dataclass(frozen=True)
class Parameter:
    """A parameter of the entry: where it lies in parameter space."""

    name: str
    offset: int
    size: int


@dataclass(eq=False)  # two are equal only if they are the same: what is known of a kernel is kept by it
class Kernel:
    """An entry, parsed.

    Attributes:
        name: of the entry.
        target: for instance "sm_90a".
        parameters: in order.
        registers: how many rows each kind of register has.
        instructions: in order, without labels.
        labels: the index of the instruction after each label.
        shared: the offset of each shared variable in the block's window; the dynamic array stands last.
        static_smem_bytes: shared memory of the variables with a size.
        local_bytes: local memory of a thread.
        local: the offset of each local variable.
        required_block: the block that ``.reqntid`` demands.
    """

    name: str
    target: str
    parameters: list[Parameter] = field(default_factory=list)
    registers: dict[str, int] = field(default_factory=lambda: {"pred": 0, "b16": 0, "b32": 0, "b64": 0})
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    static_smem_bytes: int = 0
    local_bytes: int = 0
    local: dict[str, int] = field(default_factory=dict)
    required_block: tuple[int, int, int] | None = None

    @property
    def parameter_bytes(self) -> int:
        return max((p.offset + p.size for p in self.parameters), default=0)


_ENTRY = re.compile(r"\.entry\s+([\w$.]+)\s*(?:\((.*?)\))?([^{;]*)\{", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?")
_VARIABLE = re.compile(r"\.(shared|local)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)((?:\[\d*\])*)\s*$")
_STATEMENT = re.compile(r"\s*(?:(?P<brace>[{}])|(?P<label>[\w$]+)\s*:(?!:)|(?P<loc>\.loc\s[^\n]*)|(?P<text>[^;]*);)")
_GUARD = re.compile(r"@(!?)([\w%$]+)\s+(.*)", re.DOTALL)
_SIZES = {"pred": 1, "b8": 1, "u8": 1, "s8": 1} | {f"{t}{bits}": bits // 8 for t in "busf" for bits in (16, 32, 64)}


def parse(text: str, entry: str | None = None) -> Kernel:
    """Parse one entry of a PTX module.

    Args:
        text: of the module.
        entry: the entry's name; may be left out if there is only one.

    Raises:
        PtxSyntaxError: there is no such entry, or a statement is not understood.
    """
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, flags=re.MULTILINE))
    text = re.sub(r"//[^\n]*", "", text)
    entries = [match for match in _ENTRY.finditer(text) if entry in (None, match[1])]
    if len(entries) != 1:
        names = [match[1] for match in _ENTRY.finditer(text)]
        raise PtxSyntaxError(f"entry {entry!r}: the module has the entries {names}, and one must be named")
    match = entries[0]
    target = re.search(r"^\s*\.target\s+(\w+)", text, flags=re.MULTILINE)
    kernel = Kernel(match[1], target[1] if target else "unknown", parameters=_parameters(match[2] or ""))
    required = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", match[3])
    if required:
        x, y, z = (int(value or 1) for value in required.groups())
        kernel.required_block = (x, y, z)
    parser = _Parser(kernel, files)
    for variable in re.findall(r"\.shared\s[^;{}()]*(?=;)", text[: _ENTRY.search(text).start()]):  # type: ignore[union-attr]
        parser.declare_variable(variable)
    parser.body(text, match.end())
    parser.place_dynamic_shared()
    return kernel


def _parameters(text: str) -> list[Parameter]:
    parameters: list[Parameter] = []
    end = 0
    for align, kind, name, count in _PARAMETER.findall(text):
        size = _SIZES[kind] * int(count or 1)
        step = int(align or _SIZES[kind])
        offset = -(-end // step) * step
        parameters.append(Parameter(name, offset, size))
        end = offset + size
    return parameters


class _Parser:
    def __init__(self, kernel: Kernel, files: dict[str, str]):
        self.kernel = kernel
        self.files = files
        self.scopes: list[dict[str, Register]] = [{}]
        self.labels: list[dict[str, str]] = [{}]
        self.num_scopes = 0
        self.dynamic: list[str] = []
        self.source: str | None = None

    def body(self, text: str, position: int) -> None:
        """Everything between the entry's braces."""
        depth = 0
        end = _closing_brace(text, position)
        self.labels[0].update({name: name for name in _labels_at(text, position, end)})
        while True:
            match = _STATEMENT.match(text, position)
            if match is None:
                raise PtxSyntaxError(f"not understood: {text[position : position + 80]!r}")
            position = match.end()
            if match["brace"] == "}":
                if depth == 0:
                    return
                depth -= 1
                self.scopes.pop()
                self.labels.pop()
            elif match["brace"]:
                depth += 1
                self.num_scopes += 1
                self.scopes.append({})
                names = _labels_at(text, position, _closing_brace(text, position))
                self.labels.append({name: f"{name}@{self.num_scopes}" for name in names})
            elif match["label"]:
                self.kernel.labels[self.label(match["label"])] = len(self.kernel.instructions)
            elif match["loc"]:
                self.location(match["loc"])
            else:
                self.statement(match["text"].strip())

    def location(self, text: str) -> None:
        file, line = text.split()[1:3]
        self.source = f"{self.files.get(file, '?').rsplit('/', 1)[-1]}:{line}" if int(line) else None

    def statement(self, text: str) -> None:
        if not text or text.startswith((".pragma", ".branchtargets")):
            return
        if text.startswith(".reg"):
            self.declare_registers(text)
        elif text.startswith("."):
            self.declare_variable(text)
        else:
            self.instruction(text)

    def declare_registers(self, text: str) -> None:
        kind, names = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
        if kind not in REGISTER_KINDS:
            raise PtxSyntaxError(f"{text!r}: registers of type .{kind} are not modelled")
        kind = REGISTER_KINDS[kind]
        for name in (part.strip() for part in names.split(",")):
            many = re.match(r"(.*)<(\d+)>$", name)
            for each in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]:
                self.scopes[-1][each] = Register(each, kind, self.kernel.registers[kind])
                self.kernel.registers[kind] += 1

    def declare_variable(self, text: str) -> None:
        match = _VARIABLE.search(text)
        if match is None:
            raise PtxSyntaxError(f"declaration not understood: {text!r}")
        space, align, kind, name, counts = match.groups()
        size = _SIZES[kind]
        for count in re.findall(r"\[(\d*)\]", counts):
            size *= int(count or 0)
        step = int(align or _SIZES[kind])
        if space == "local":
            self.kernel.local[name] = -(-self.kernel.local_bytes // step) * step
            self.kernel.local_bytes = self.kernel.local[name] + size
        elif size == 0:
            self.dynamic.append(name)
        else:
            self.kernel.shared[name] = -(-self.kernel.static_smem_bytes // step) * step
            self.kernel.static_smem_bytes = self.kernel.shared[name] + size

    def place_dynamic_shared(self) -> None:
        start = self.kernel.static_smem_bytes
        for name in self.dynamic:
            self.kernel.shared[name] = -(-start // 1024) * 1024

    def instruction(self, text: str) -> None:
        text = " ".join(text.split())
        guard, rest = None, text
        guarded = _GUARD.match(text)
        if guarded:
            guard = (self.register(guarded[2]), guarded[1] == "!")
            rest = guarded[3]
        opcode, _, operands = rest.partition(" ")
        parsed = tuple(self.operand(part) for part in _split(operands))
        index = len(self.kernel.instructions)
        self.kernel.instructions.append(Instruction(index, opcode, parsed, guard, self.source, text))

    def register(self, name: str) -> Register:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        raise PtxSyntaxError(f"register {name} is not declared")

    def label(self, name: str) -> str:
        for scope in reversed(self.labels):
            if name in scope:
                return scope[name]
        return name

    def operand(self, text: str) -> Operand:
        text = text.strip()
        if text == "_":
            return None
        if text.startswith("{"):
            return Vector(tuple(self.operand(part) for part in _split(text[1:-1])))
        if text.startswith("["):
            return self.address(text[1:-1])
        if text.startswith("!"):
            return Negated(self.register(text[1:].strip()))
        if "|" in text:
            first, second = (None if part.strip() == "_" else self.register(part.strip()) for part in text.split("|"))
            return PredicatePair(first, second)
        number = _number(text)
        if number is not None:
            return number
        for scope in reversed(self.scopes):
            if text in scope:
                return scope[text]
        if text.startswith("%"):
            return Special(text)
        if re.fullmatch(r"[\w$.]+", text):
            return Symbol(self.label(text))
        raise PtxSyntaxError(f"operand not understood: {text!r}")

    def address(self, text: str) -> Address:
        first, *coordinates = _split(text)
        coordinate = self.operand(coordinates[0]) if coordinates else None
        items = coordinate.items if isinstance(coordinate, Vector) else ()
        match = re.fullmatch(r"\s*([\w%$.]+)\s*(?:\+\s*(-?\w+)|(-\s*\w+))?\s*", first)
        if match is None:
            raise PtxSyntaxError(f"address not understood: [{text}]")
        number = _number((match[2] or match[3] or "0").replace(" ", ""))
        if number is None or number.kind != "int":
            raise PtxSyntaxError(f"address not understood: [{text}]")
        offset = number.value
        base = self.operand(match[1])
        if isinstance(base, Immediate):
            return Address(None, base.value + offset, items)
        if not isinstance(base, (Register, Symbol)):
            raise PtxSyntaxError(f"address not understood: [{text}]")
        return Address(base, offset, items)


def _number(text: str) -> Immediate | None:
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return Immediate(int(text[2:], 16), "f32")
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        return Immediate(int(text[2:], 16), "f64")
    if re.fullmatch(r"-?\d*\.\d+(?:[eE][-+]?\d+)?", text):
        return Immediate(struct.unpack("<Q", struct.pack("<d", float(text)))[0], "f64")
    if re.fullmatch(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?", text):
        digits = text.rstrip("U")
        octal = re.fullmatch(r"(-?)0([0-7]+)", digits)
        return Immediate(int(octal[1] + octal[2], 8) if octal else int(digits, 0))
    return None


def _split(text: str) -> list[str]:
    """Cut at the commas that stand in no bracket."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    last = text[start:]
    return [*parts, last] if last.strip() else parts


def _closing_brace(text: str, position: int) -> int:
    """The end of the scope whose first character stands at ``position``."""
    depth = 1
    for match in re.compile(r"[{}]").finditer(text, position):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    raise PtxSyntaxError("a brace is not closed")


def _labels_at(text: str, start: int, end: int) -> list[str]:
    """Labels that stand in a scope itself, not in one inside it."""
    names, depth = [], 0
    for match in re.compile(r"[{}]|(?:^|(?<=[;{}\n\s:]))([\w$]+)\s*:(?!:)").finditer(text, start, end):
        if match[0] in "{}":
            depth += 1 if match[0] == "{" else -1
        elif depth == 0:
            names.append(match[1])
    return names
