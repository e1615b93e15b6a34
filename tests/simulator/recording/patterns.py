"""Access patterns as PTX kernels: each makes one access with 4 warps, whose addresses come from a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

KINDS = ("ld_shared", "st_shared", "ldmatrix", "stmatrix", "cp_async", "ld_global", "st_global")
THREADS = 128
TILE_BYTES = 32768
FAR_BYTES = 65536
INACTIVE = 0xFFFFFFFF
_WARP_BYTES = TILE_BYTES // 4

Places = Callable[[NDArray[np.int64]], NDArray[np.int64]]
Mask = Callable[[NDArray[np.int64]], NDArray[np.bool_]]

_HEAD = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry {name}(.param .u64 places, .param .u64 far, .param .u64 sink)
{{
    .reg .pred %p<4>;
    .reg .b16 %h<4>;
    .reg .b32 %r<32>;
    .reg .b64 %d<8>;
    .shared .align 1024 .b8 tile[{tile}];
    ld.param.u64 %d0, [places];
    ld.param.u64 %d1, [far];
    ld.param.u64 %d2, [sink];
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, tile;
    mad.wide.u32 %d0, %r0, 8, %d0;
    mad.wide.u32 %d2, %r0, 4, %d2;
    ld.global.v2.b32 {{%r2, %r3}}, [%d0];
    setp.ne.u32 %p0, %r2, {inactive};
    cvt.u64.u32 %d3, %r3;
    add.u64 %d1, %d1, %d3;
    shl.b32 %r5, %r0, 4;
    add.u32 %r5, %r5, %r1;
    mov.b32 %r10, 0;
    mov.b32 %r11, 0;
    mov.b32 %r12, 0;
    mov.b32 %r13, 0;
"""
# Values are used, so that no compiler drops their load, in a comparison that never holds and none can decide.
_TAIL = """    xor.b32 %r10, %r10, %r11;
    xor.b32 %r12, %r12, %r13;
    xor.b32 %r10, %r10, %r12;
    xor.b32 %r6, %r2, %r3;
    xor.b32 %r6, %r6, 0x5eed1e55;
    setp.eq.u32 %p1, %r10, %r6;
    @%p1 st.global.b32 [%d2], %r10;
    ret;
}
"""


@dataclass(frozen=True)
class Pattern:
    """An access and its addresses.

    Attributes:
        name: of the kernel.
        access: PTX, with %r4 for the shared address, %d1 for the global one, %r10 to %r13 for the values.
        places: from the number of a lane to its byte in the warp's 8 KB of shared memory.
        far: the same for its 16 KB of global memory.
        active: from the number of a lane to whether it takes part.
        collides: lanes write the same bytes, which the simulator would call a race.
    """

    name: str
    access: str
    places: Places | None = None
    far: Places | None = None
    active: Mask | None = None
    collides: bool = False

    def ptx(self) -> str:
        loads = self.access.startswith("ld") and self.places is not None
        fill = "".join(
            f"    st.shared.v4.b32 [%r5+{at}], {{%r0, %r0, %r0, %r0}};\n" for at in range(0, TILE_BYTES, 2048)
        )
        lines = "".join(f"    @%p0 {line}\n" for line in self.access.splitlines())
        if self.active is None:
            lines = lines.replace("@%p0 ", "")
        body = (f"{fill}    bar.sync 0;\n" if loads else "") + "    add.u32 %r4, %r1, %r2;\n" + lines
        if "cp.async" in self.access:
            body += "    cp.async.commit_group;\n    cp.async.wait_group 0;\n"
        return _HEAD.format(name=self.name, tile=TILE_BYTES, inactive=INACTIVE) + body + _TAIL

    def arrays(self) -> list[NDArray]:
        """The kernel's arguments: for each thread its two places, global memory, and what is never written."""
        thread = np.arange(THREADS)
        lane, warp = thread % 32, thread // 32
        table = np.zeros((THREADS, 2), np.uint32)
        if self.places is not None:
            table[:, 0] = self.places(lane) + warp * _WARP_BYTES
        if self.far is not None:
            table[:, 1] = self.far(lane) + warp * (FAR_BYTES // 4)
        if self.active is not None:
            table[~self.active(lane), 0] = INACTIVE
        return [table, np.zeros(FAR_BYTES // 4, np.uint32), np.zeros(THREADS, np.uint32)]


def _plain(step: int) -> Places:
    return lambda lane: lane * step


def _swizzled(lane: NDArray[np.int64]) -> NDArray[np.int64]:
    """16 bytes of 128-byte rows, a row a lane, as a kernel reads a column of a swizzled tile."""
    return lane * 128 + (lane % 8) * 16


def _swizzled_words(lane: NDArray[np.int64]) -> NDArray[np.int64]:
    return lane * 128 + (lane ^ 5) * 4


def _swizzled_rows(lane: NDArray[np.int64]) -> NDArray[np.int64]:
    return lane // 8 * 128 + ((lane % 8) ^ (lane // 8)) * 16


def _apart(step: int) -> Places:
    """Neighbouring places for lanes i and i + 16."""
    return lambda lane: (lane % 16 * 2 + lane // 16) * step


_VECTORS = {4: ("b32", "%r10"), 8: ("v2.b32", "{%r10, %r11}"), 16: ("v4.b32", "{%r10, %r11, %r12, %r13}")}


def _low(lane: NDArray[np.int64]) -> NDArray[np.bool_]:
    return lane < 16


def _even(lane: NDArray[np.int64]) -> NDArray[np.bool_]:
    return lane % 2 == 0


def _eighth(lane: NDArray[np.int64]) -> NDArray[np.bool_]:
    return lane % 8 == 0


def _first_two_of_four(lane: NDArray[np.int64]) -> NDArray[np.bool_]:
    return lane % 4 < 2


def _third(lane: NDArray[np.int64]) -> NDArray[np.bool_]:
    return lane % 3 == 0


def patterns() -> dict[str, Pattern]:
    """By name."""
    every = [*_shared(), *_matrices(), *_copies(), *_global()]
    return {pattern.name: pattern for pattern in every}


def _shared() -> list[Pattern]:
    result = []
    for width, (kind, values) in _VECTORS.items():
        shapes: dict[str, Places] = {
            "plain": _plain(width), "stride2": _plain(2 * width), "stride3": _plain(3 * width), "rows": _plain(128),
            "padded": _plain(128 + width), "reversed": lambda lane, w=width: (31 - lane) * w,  # type: ignore[misc]
            "swizzled": {4: _swizzled_words}.get(width, _swizzled),
        }  # fmt: skip
        for name, places in shapes.items():
            result.append(Pattern(f"ld_shared_{width}_{name}", f"ld.shared.{kind} {values}, [%r4];", places))
            result.append(Pattern(f"st_shared_{width}_{name}", f"st.shared.{kind} [%r4], {values};", places))
        repeated: dict[str, Places] = {
            "broadcast": _plain(0), "pairs": lambda lane, w=width: lane // 2 * w,  # type: ignore[misc]
            "pairs_2": lambda lane, w=width: (lane // 4 * 2 + lane % 2) * w,  # type: ignore[misc]
            "fours": lambda lane, w=width: lane // 4 * w,  # type: ignore[misc]
            "repeat8": lambda lane, w=width: lane % 8 * w,  # type: ignore[misc]
            "halves": lambda lane, w=width: lane % 16 * w,  # type: ignore[misc]
            "pairs_rows": lambda lane: lane // 2 * 128, "fours_rows": lambda lane: lane // 4 * 128,
        }  # fmt: skip
        for name, places in repeated.items():
            load, store = f"ld.shared.{kind} {values}, [%r4];", f"st.shared.{kind} [%r4], {values};"
            result.append(Pattern(f"ld_shared_{width}_{name}", load, places))
            result.append(Pattern(f"st_shared_{width}_{name}", store, places, collides=True))
            if name in ("pairs", "fours", "pairs_rows"):
                label = f"{width}_{name}_two_of_four_lanes"
                mask = _first_two_of_four
                result.append(Pattern(f"ld_shared_{label}", load, places, active=mask))
                result.append(Pattern(f"st_shared_{label}", store, places, active=mask, collides=True))
        for name, mask in {"low": _low, "even": _even, "third": _third, "eighth": _eighth}.items():
            for step in (width, 2 * width):
                label = f"{width}_{name}_lanes_{step}"
                load, store = f"ld.shared.{kind} {values}, [%r4];", f"st.shared.{kind} [%r4], {values};"
                result.append(Pattern(f"ld_shared_{label}", load, _plain(step), active=mask))
                result.append(Pattern(f"st_shared_{label}", store, _plain(step), active=mask))
    result.append(Pattern("ld_shared_1_plain", "ld.shared.u8 %r10, [%r4];", _plain(1)))
    result.append(Pattern("ld_shared_2_plain", "ld.shared.u16 %r10, [%r4];", _plain(2)))
    return result


def _matrices() -> list[Pattern]:
    shapes: dict[str, Places] = {
        "plain": _plain(16), "rows": _plain(128), "padded": _plain(144), "swizzled": _swizzled,
        "swizzled_rows": _swizzled_rows, "two_rows": _plain(64), "repeated": lambda lane: lane // 2 * 16,
        "one_row": _plain(0),
    }  # fmt: skip
    result = []
    for count, trans, (name, places) in (
        (c, t, item) for c in (1, 2, 4) for t in ("", ".trans") for item in shapes.items()
    ):
        values = "{" + ", ".join(f"%r{10 + i}" for i in range(count)) + "}"
        form = f"sync.aligned.m8n8.x{count}{trans}.shared.b16"
        label = f"x{count}{trans.replace('.', '_')}_{name}"
        result.append(Pattern(f"ldmatrix_{label}", f"ldmatrix.{form} {values}, [%r4];", places))
        if name not in ("repeated", "one_row"):
            result.append(Pattern(f"stmatrix_{label}", f"stmatrix.{form} [%r4], {values};", places))
    return result


def _copies() -> list[Pattern]:
    result = []
    for cache, width in (("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)):
        access = f"cp.async.{cache}.shared.global [%r4], [%d1], {width};"
        label = f"cp_async_{cache}_{width}"
        shapes: dict[str, tuple[Places, Places]] = {
            "plain": (_plain(width), _plain(width)), "padded": (_plain(128 + width), _plain(width)),
            "rows": (_plain(128), _plain(width)), "far_strided": (_plain(width), _plain(64)),
            "swizzled": ({4: _swizzled_words}.get(width, _swizzled), _plain(width)),
            "shifted": (lambda lane, w=width: (lane + 1) * w, _plain(width)),  # type: ignore[misc]
            "pairs_swapped": (lambda lane, w=width: (lane ^ 1) * w, _plain(width)),  # type: ignore[misc]
            "padded_rows": (lambda lane, w=width: lane * w + lane * w // 128 * 16, _plain(width)),  # type: ignore[misc]
            "far_shifted": (_plain(width), lambda lane, w=width: (lane + 1) * w),  # type: ignore[misc]
            "far_middle": (_plain(width), lambda lane, w=width: lane * w + 64),  # type: ignore[misc]
            "far_reversed": (_plain(width), lambda lane, w=width: (31 - lane) * w),  # type: ignore[misc]
            "far_pairs_swapped": (_plain(width), lambda lane, w=width: (lane ^ 1) * w),  # type: ignore[misc]
            "far_repeated": (_plain(width), lambda lane, w=width: lane % 8 * w),  # type: ignore[misc]
            "far_broadcast": (_plain(width), _plain(0)),
            "far_rows": (_plain(width), lambda lane, w=width: lane % 4 * 128 + lane // 4 * w),  # type: ignore[misc]
            "far_short_rows": (_plain(width), lambda lane, w=width: lane * w + lane // 4 * 16),  # type: ignore[misc]
            "apart": (_apart(width), _apart(width)),
            "scattered": (
                lambda lane, w=width: lane * 11 % 37 * w,  # type: ignore[misc]
                lambda lane, w=width: (lane * lane + 3 * lane) % 97 * w,  # type: ignore[misc]
            ),
            "rows_far_rows": (_plain(128), lambda lane, w=width: lane % 4 * 128 + lane // 4 * w),  # type: ignore[misc]
        }  # fmt: skip
        for name, (places, far) in shapes.items():
            result.append(Pattern(f"{label}_{name}", access, places, far))
        masks = {"low": _low, "even": _even, "third": _third, "eighth": _eighth, "two_of_four": _first_two_of_four}
        for name, mask in masks.items():
            result.append(Pattern(f"{label}_{name}_lanes", access, _plain(width), _plain(width), mask))
        # Every other run of lanes copies nothing and fills with zeros.
        zeros = f"and.b32 %r14, %r0, {width};\ncp.async.{cache}.shared.global [%r4], [%d1], {width}, %r14;"
        result.append(Pattern(f"{label}_zeros", zeros, _plain(width), _plain(width)))
    return result


def _global() -> list[Pattern]:
    kinds = {1: ("u8", "%r10"), 2: ("u16", "%r10"), **_VECTORS}
    result = []
    for width, (kind, values) in kinds.items():
        shapes: dict[str, Places] = {
            "plain": _plain(width), "stride2": _plain(2 * width), "rows": _plain(128), "stride3": _plain(3 * width),
            "misaligned": lambda lane, w=width: lane * w + max(w, 4),  # type: ignore[misc]
            "reversed": lambda lane, w=width: (31 - lane) * w,  # type: ignore[misc]
        }  # fmt: skip
        for name, far in shapes.items():
            result.append(Pattern(f"ld_global_{width}_{name}", f"ld.global.{kind} {values}, [%d1];", None, far))
            result.append(Pattern(f"st_global_{width}_{name}", f"st.global.{kind} [%d1], {values};", None, far))
        load = f"ld.global.{kind} {values}, [%d1];"
        result.append(Pattern(f"ld_global_{width}_broadcast", load, None, _plain(0)))
        result.append(Pattern(f"ld_global_{width}_third_lanes", load, None, _plain(width), _third))
    return result
