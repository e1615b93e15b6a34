"""Instructions that work lane by lane: from an opcode to a pure function over numpy arrays.

``lookup("add.rn.ftz.f32")`` gives the types of the operands and the function. A factory for each opcode and type reads
the modifiers from the left; a modifier that no factory read is an error, so that none is ever ignored.

How values are passed: integers, f16, f32, f64 and predicates as the numpy type; bf16 as its raw uint16; packed types
(f16x2, s16x2, ...) as one raw uint32, packed 8-bit floats (e4m3x2) as one raw uint16; tf32 as float32. Sources may be
scalars. The functions assume ``np.errstate(all="ignore")``. Payloads and signs of NaN results are not modelled, except
where a conversion to a smaller format defines them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from layouts.simulator.errors import UnknownInstructionError

Array = Any  # an array or a scalar of numpy: operands of either kind broadcast
Function = Callable[..., Any]

_MODULES = ("integer", "bits", "compare", "floating", "half", "convert")

_NUMPY_TYPES = (
    {"pred": "bool", "tf32": "float32", "bf16": "uint16"}
    | {
        f"{letter}{bits}": f"{name}{bits}"
        for letter, name in (("b", "uint"), ("u", "uint"))
        for bits in (8, 16, 32, 64)
    }
    | {f"s{bits}": f"int{bits}" for bits in (8, 16, 32, 64)}
    | {f"f{bits}": f"float{bits}" for bits in (16, 32, 64)}
    | dict.fromkeys(("f16x2", "bf16x2", "u16x2", "s16x2"), "uint32")
    | dict.fromkeys(("e4m3x2", "e5m2x2"), "uint16")
)
NUMPY_TYPES: dict[str, np.dtype] = {name: np.dtype(numpy_name) for name, numpy_name in _NUMPY_TYPES.items()}

ANY = ""
"""The key of a factory that takes every type."""


@dataclass(frozen=True)
class Elementwise:
    """An instruction as a function of its sources.

    Attributes:
        result: the type of the destination, or of each of several.
        sources: the types of the source operands, in order.
        function: from arrays or scalars of the sources' numpy types, of any shapes that broadcast, to an array or
            scalar of the result's numpy type that broadcasts to the same shape, or a tuple of them.
    """

    result: str | tuple[str, ...]
    sources: tuple[str, ...]
    function: Function

    @property
    def num_results(self) -> int:
        return 1 if isinstance(self.result, str) else len(self.result)


class Form:
    """An opcode while a factory reads it, from the left.

    Attributes:
        opcode: in full.
        base: the part before the first dot.
        rest: the modifiers not read yet.
        num_results: how many destinations the instruction has, None if the caller leaves it to the opcode.
        num_sources: the same of the sources.
    """

    def __init__(self, opcode: str, num_results: int | None, num_sources: int | None):
        self.opcode = opcode
        self.base, *self.rest = opcode.split(".")
        self.num_results = num_results
        self.num_sources = num_sources

    def take(self, *allowed: str) -> str | None:
        """The next modifier if it is one of these, and None otherwise."""
        return self.rest.pop(0) if self.rest and self.rest[0] in allowed else None

    def flag(self, name: str) -> bool:
        """Whether the next modifier is this one; it is read then."""
        return self.take(name) is not None

    def need(self, *allowed: str) -> str:
        """The next modifier, which must be one of these."""
        taken = self.take(*allowed)
        if taken is None:
            found = f"the modifier .{self.rest[0]}" if self.rest else "the end of the opcode"
            raise UnknownInstructionError(f"{self.opcode}: {found} is not modelled here; allowed: {', '.join(allowed)}")
        return taken

    def refuse(self, reason: str) -> UnknownInstructionError:
        """The error to raise for a combination that is not modelled."""
        return UnknownInstructionError(f"{self.opcode}: {reason}")


Factory = Callable[[Form], Elementwise]

TABLE: dict[str, dict[str, Factory]] = {}
"""For each opcode before its first dot: a factory for each type that may stand last, or one for ``ANY``."""


def elementwise(*opcodes: str, types: Iterable[str] = (ANY,)) -> Callable[[Factory], Factory]:
    """Register the decorated factory for these opcodes, where the last modifier is one of ``types``."""
    kinds = tuple(types)

    def register(factory: Factory) -> Factory:
        for opcode in opcodes:
            for kind in kinds:
                if TABLE.setdefault(opcode, {}).setdefault(kind, factory) is not factory:
                    raise ValueError(f"{opcode}.{kind} has two factories")
        return factory

    return register


def numpy_type(ptx_type: str) -> np.dtype:
    """The numpy type in which values of a PTX type ("s32", "f16x2", "pred") are passed.

    Raises:
        UnknownInstructionError: the type is not modelled.
    """
    if ptx_type not in NUMPY_TYPES:
        raise UnknownInstructionError(f"the type .{ptx_type} is not modelled; modelled: {', '.join(NUMPY_TYPES)}")
    return NUMPY_TYPES[ptx_type]


@cache
def _load() -> None:
    for module in _MODULES:
        import_module(f"layouts.simulator.instructions.{module}")


def is_elementwise(opcode: str) -> bool:
    """Whether the part before the first dot belongs to an instruction of this table."""
    _load()
    return opcode.split(".")[0] in TABLE


@cache
def lookup(opcode: str, num_results: int | None = None, num_sources: int | None = None) -> Elementwise:
    """The function of an opcode.

    Args:
        opcode: in full, "add.rn.ftz.f32".
        num_results: how many destinations are written, 2 for ``p|q``; None for as many as is usual.
        num_sources: how many sources are written, 3 for ``max.f32 d, a, b, c``; None for as many as is usual.

    Raises:
        UnknownInstructionError: the opcode, a modifier or the number of operands is not modelled.
    """
    _load()
    form = Form(opcode, num_results, num_sources)
    if form.base not in TABLE:
        raise form.refuse(f"no elementwise instruction {form.base!r} is modelled")
    factories = TABLE[form.base]
    last = form.rest[-1] if form.rest else ANY
    factory = factories.get(last) or factories.get(ANY)
    if factory is None:
        raise form.refuse(f"the type .{last} is not modelled for {form.base}; modelled: {', '.join(sorted(factories))}")
    found = factory(form)
    if form.rest:
        raise form.refuse(f"the modifier .{form.rest[0]} is not modelled here")
    if num_results not in (None, found.num_results):
        raise form.refuse(f"it has {found.num_results} destinations, not {num_results}")
    if num_sources not in (None, len(found.sources)):
        raise form.refuse(f"it has {len(found.sources)} sources, not {num_sources}")
    return found
