"""Changes of one line of a kernel's PTX that ought to break it: see ``tests.simulator.mutations``."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

_GUARDED = re.compile(r"\b(cp\.async\.c|ld\.global|st\.global|ld\.shared|st\.shared|red\.|atom\.)")
_SHARED = re.compile(r"(ldmatrix|stmatrix|ld\.shared|st\.shared|cp\.async\.c[ag]\.shared)\S*\s")
_OTHER_COMPARISON = {
    "lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq",
    "lo": "ls", "ls": "lo", "hi": "hs", "hs": "hi",
}  # fmt: skip


Change = tuple[int, str, str]  # the line's number from 0, the kind of change, the new line


@dataclass(frozen=True)
class Mutant:
    """The kernel with one line changed: the kind of change, the line's number from 1, the line before."""

    kind: str
    line: int
    before: str
    ptx: str


def mutants(ptx: str) -> Iterator[Mutant]:
    """Every mutant of a kernel."""
    lines = ptx.split("\n")
    changes = {*_synchronisation(lines), *_transposes(lines), *_swizzles(lines), *_guards(lines), *_masks(lines)}
    for number, kind, changed in sorted(changes):
        yield Mutant(
            kind, number + 1, lines[number].strip(), "\n".join([*lines[:number], changed, *lines[number + 1 :]])
        )


def _synchronisation(lines: list[str]) -> Iterator[Change]:
    for number, line in enumerate(map(str.strip, lines)):
        if line.startswith(("bar.sync", "barrier.")):
            yield number, "barrier removed", ""
            yield number, "barrier of a warp only", "bar.warp.sync 0xffffffff;"
        elif line.startswith(("bar.warp.sync", "fence.", "membar.", "mbarrier.")):
            yield number, line.split()[0], ""
        elif line.startswith(("cp.async.wait_group", "cp.async.wait_all")):
            yield number, "wait removed", ""
            if "wait_group" in line:
                yield number, "wait for one group fewer", re.sub(r"(\d+);", lambda m: f"{int(m[1]) + 1};", line)
        elif line.startswith("cp.async.commit_group"):
            yield number, "commit removed", ""
        elif found := re.search(r"mbarrier\.(arrive|test_wait|init)\S*|cp\.async\.mbarrier\.arrive\S*", line):
            yield number, f"{found[0].split('.shared')[0]} removed", _without(line, found[0])


def _without(line: str, instruction: str) -> str:
    """The line without an mbarrier's instruction; a test of its phase always succeeds."""
    start = line.index(instruction)
    end = line.index(";", start) + 1
    instead = re.sub(r"\S+\s+(\w+),.*", r"setp.eq.u32 \1, 0, 0;", line[start:end]) if "test_wait" in instruction else ""
    return line[:start] + instead + line[end:]


def _transposes(lines: list[str]) -> Iterator[Change]:
    for number, line in enumerate(map(str.strip, lines)):
        if line.startswith(("ldmatrix", "stmatrix")):
            if ".trans" in line:
                yield number, "transpose removed", line.replace(".trans", "")
            else:
                yield number, "transpose added", re.sub(r"(\.x\d)", r"\1.trans", line, count=1)


def _swizzles(lines: list[str]) -> Iterator[Change]:
    """Of what shared addresses are computed from: xor, and, and +-2^n chosen by a bit (an xor in other words)."""
    for number in sorted(_shared_address_lines(lines)):
        line = lines[number].strip()
        if found := re.match(r"(xor|and)\.b(\d+)\s+(%\w+), (%\w+), (-?\w+|%\w+);", line):
            operation, bits, to, first, second = found.groups()
            yield number, f"{operation} removed", f"mov.b{bits} {to}, {first};"
            if second.startswith("%"):
                yield number, f"{operation} removed", f"mov.b{bits} {to}, {second};"
        elif found := re.match(r"(selp\.\w+\s+%\w+), (-?\d+), (-?\d+), (%\w+);", line):
            yield number, "swizzle offset swapped", f"{found[1]}, {found[3]}, {found[2]}, {found[4]};"


def _shared_address_lines(lines: list[str]) -> set[int]:
    """Lines whose results shared addresses depend on."""
    definitions = _definitions(lines)
    waiting = [
        match[1]
        for line in lines
        if _SHARED.search(line)
        for match in [re.search(r"\[(%\w+)", line)]
        if match and not line.strip().startswith("//")
    ]
    seen: set[int] = set()
    while waiting:
        for number in definitions[waiting.pop()]:
            if number not in seen and not re.match(r"(@|ld|mma|shfl|setp)", lines[number].strip()):
                seen.add(number)
                waiting += re.findall(r"%r[sd]?\d+", lines[number].split(",", 1)[-1])
    return seen


def _definitions(lines: list[str]) -> dict[str, list[int]]:
    """Lines that write each register."""
    definitions = defaultdict[str, list[int]](list)
    for number, line in enumerate(lines):
        if found := re.match(r"\s*(?:@!?%p\d+\s+)?[a-z][\w.:]*\s+\{?(%\w+)[,|}]", line):
            definitions[found[1]].append(number)
    return definitions


def _guards(lines: list[str]) -> Iterator[Change]:
    """Branches around memory accesses, predicates on them, and the comparisons behind both."""
    labels = {line.strip()[:-1]: number for number, line in enumerate(lines) if line.strip().endswith(":")}
    definitions = _definitions(lines)
    for number, line in enumerate(map(str.strip, lines)):
        if found := re.match(r"@!?(%p\d+) bra(?:\.uni)?\s+(\S+);", line):
            end = labels[found[2]]
            if not any(_GUARDED.search(line) for line in lines[number:end]):
                continue
            yield number, "branch never taken", ""
            yield number, "branch always taken", f"bra.uni {found[2]};"
        elif (found := re.match(r"@!?(%p\d+)\s+(.*)", line)) and _GUARDED.match(found[2]):
            yield number, "predicate removed", found[2]
        else:
            continue
        for comparison in _comparisons(lines, definitions, found[1]):
            yield comparison, "comparison off by one", _off_by_one(lines[comparison])


def _comparisons(lines: list[str], definitions: dict[str, list[int]], predicate: str) -> Iterator[int]:
    """Lines of the setp that a predicate is made of."""
    for number in definitions[predicate]:
        line = lines[number].strip()
        if line.startswith("setp"):
            yield number
        elif re.match(r"(and|or|not|xor)\.pred", line):
            for source in re.findall(r"%p\d+", line)[1:]:
                yield from _comparisons(lines, definitions, source)


def _off_by_one(line: str) -> str:
    return re.sub(r"setp\.(\w+)\.", lambda found: f"setp.{_OTHER_COMPARISON[found[1]]}.", line, count=1)


def _masks(lines: list[str]) -> Iterator[Change]:
    """Comparisons that decide which scores become minus infinity."""
    definitions = _definitions(lines)
    for line in lines:
        if "0fFF800000" in line and (found := re.search(r"selp\.f32.*(%p\d+);", line)):
            for comparison in _comparisons(lines, definitions, found[1]):
                yield comparison, "mask off by one", _off_by_one(lines[comparison])


def equivalence(mutant: Mutant) -> str:
    """Why a survivor is the prefill kernel in other words; "" where no reason is known."""
    before, behind = (mutant.ptx.split("\n")[part] for part in (slice(mutant.line - 1), slice(mutant.line, None)))
    if mutant.kind == "commit removed" and not any("cp.async.wait" in line for line in before):
        return "the next commit takes the copies along before anything waits for them"
    if mutant.kind.startswith("wait") and not any("cp.async" in line for line in behind):
        if mutant.kind == "wait for one group fewer":
            return "the last group is empty"
        if not any("st.shared" in line for line in behind):
            return "copies that a block without keys leaves under way land where nothing looks any more"
    if mutant.kind == "branch never taken" and not any(_GUARDED.search(line) for line in before):
        return "only packed calls have blocks without work"
    if re.match(r"and\.b32\s+\S+ \S+ (504|56);", mutant.before):
        return "the bits that the mask takes away are 0, or an or sets them again"
    return ""
