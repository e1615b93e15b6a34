"""Micro-kernels of the instructions of whole warps and of memory: shuffles, matrices, atomics, loads, moves."""

from __future__ import annotations

from layouts.simulator.fragments import mma_form
from layouts.simulator.instructions.elementwise import NUMPY_TYPES
from tests.simulator.recording.micro import MicroKernel, Tolerance, expand_all

_EVERY = "0xffffffff"


def warp_kernels() -> list[MicroKernel]:
    return [*_shuffles(), *_votes(), *_matrix_moves(), *_products(), *_atomics(), *_loads(), *_moves()]


def _shuffles() -> list[MicroKernel]:
    """With distances and lane numbers that differ by lane, in segments of 32, 16, 8 and 4 lanes."""
    kernels = []
    for mode, segment in ((mode, segment) for mode in ("idx", "up", "down", "bfly") for segment in (32, 16, 8, 4)):
        limit = (32 - segment) << 8 | (0 if mode == "up" else 31)
        body = f"shfl.sync.{mode}.b32 %r20|%p21, %r0, %r1, {limit:#x}, {_EVERY};"
        kernels.append(MicroKernel(f"shfl.sync.{mode}.b32 {segment}", ("b32", "order_b32"), ("b32", "pred"), body))
    for mode in ("idx", "bfly", "down"):
        body = f"shfl.sync.{mode}.b32 %r20|%p21, %r0, 3, 0x1c0f, {_EVERY};"
        kernels.append(MicroKernel(f"shfl.sync.{mode}.b32 clamp", ("b32",), ("b32", "pred"), body))
    return kernels


def _votes() -> list[MicroKernel]:
    """Plain, and of a predicate that holds in all lanes of one warp and in none of another."""
    uniform = "and.b32 %t5, %t0, 64;\nsetp.ne.u32 %q0, %t5, 0;\n"
    kernels = []
    for mode in ("any", "all", "uni"):
        name = f"vote.sync.{mode}.pred"
        body = uniform + f"{name} %p20, %p0, {_EVERY};\n{name} %p21, %q0, {_EVERY};\n{name} %p22, !%q0, {_EVERY};"
        kernels.append(MicroKernel(name, ("pred",), ("pred", "pred", "pred"), body))
    body = f"vote.sync.ballot.b32 %r20, %p0, {_EVERY};\nvote.sync.ballot.b32 %r21, !%p0, {_EVERY};"
    kernels.append(MicroKernel("vote.sync.ballot.b32", ("pred",), ("b32", "b32"), body))
    for opcode in expand_all("redux.sync.{add,min,max}.{u32,s32}", "redux.sync.{and,or,xor}.b32"):
        kernels.append(MicroKernel(opcode, ("b32",), ("b32",), f"{opcode} %r20, %r0, {_EVERY};"))
        if opcode.endswith("s32") or "xor" in opcode:
            half = (
                "and.b32 %t5, %t0, 16;\nsetp.ne.u32 %q0, %t5, 0;\nmov.b32 %r20, 0;\n"
                f"@%q0 bra upper;\n{opcode} %r20, %r0, 0x0000ffff;\nbra met;\nupper:\n"
                f"{opcode} %r20, %r0, 0xffff0000;\nmet:"
            )
            kernels.append(MicroKernel(f"{opcode} halves", ("b32",), ("b32",), half))
    return kernels


def _braces(letter: str, first: int, count: int) -> str:
    return "{" + ", ".join(f"{letter}{first + i}" for i in range(count)) + "}"


_ROW = (
    "shl.b32 %t5, %r1, 4;\nand.b32 %t6, %t0, 0x60;\nshl.b32 %t6, %t6, 4;\n"
    "add.u32 %t5, %t5, %t6;\nadd.u32 %t5, %t5, %t3;\n"
)
"""%t5: the address of one of the warp's 32 rows of 16 bytes, in an order that the second operand gives."""


def _matrix_moves() -> list[MicroKernel]:
    fill = "st.shared.v4.b32 [%t4], {%r0, %r2, %r3, %r4};\nbar.sync 0;\n"
    operands = ("b32", "order_b32", "b32", "b32", "b32")
    kernels = []
    for count, trans in ((count, trans) for count in (1, 2, 4) for trans in ("", ".trans")):
        name = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
        body = f"{fill}{_ROW}{name} {_braces('%r', 20, count)}, [%t5];"
        kernels.append(MicroKernel(name, operands, ("b32",) * count, body))
        name = f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
        sources = "{" + ", ".join(f"%r{i}" for i in (0, 2, 3, 4)[:count]) + "}"
        body = f"{fill}{_ROW}{name} [%t5], {sources};\nbar.sync 0;\nld.shared.v4.b32 {_braces('%r', 20, 4)}, [%t4];"
        kernels.append(MicroKernel(name, operands, ("b32",) * 4, body))
    name = "movmatrix.sync.aligned.m8n8.trans.b16"
    kernels.append(MicroKernel(name, ("b32",), ("b32",), f"{name} %r20, %r0;"))
    return kernels


_PRODUCTS = expand_all(
    "m16n8k{8,16}.row.col.{f16,f32}.f16.f16", "m16n8k{8,16}.row.col.f32.bf16.bf16", "m16n8k{4,8}.row.col.f32.tf32.tf32",
    "m16n8k{16,32}.row.col{,.satfinite}.s32.{s8,u8}.{s8,u8}", "m16n8k{16,32}.row.col.{f16,f32}.{e4m3,e5m2}.{e4m3,e5m2}",
)  # fmt: skip
_ROUNDING = {"f16": Tolerance(2.0**-9, 2.0**-6), "f32": Tolerance(2.0**-18, 2.0**-17)}
_ROUNDING_OF_BYTES = Tolerance(2.0**-9, 2.0**-5)  # Hopper keeps some 14 bits of the sums of 8-bit floats


def _products() -> list[MicroKernel]:
    """Each form of mma with small integers, whose sums are exact in any order, and with arbitrary values."""
    kernels = []
    for shape in _PRODUCTS:
        opcode = f"mma.sync.aligned.{shape}"
        accumulator, a, b = shape.split(".")[-3:]
        opcode = f"{opcode}.{accumulator}"
        kernels.append(_product(opcode, "small", f"small_{a}", f"small_{b}", f"small_{accumulator}", None))
        if accumulator == "s32":
            kernels.append(_product(opcode, "any", "b32", "b32", "b32", None))
        else:
            tolerance = _ROUNDING_OF_BYTES if a in ("e4m3", "e5m2") else _ROUNDING[accumulator]
            kernels.append(_product(opcode, "any", f"unit_{a}", f"unit_{b}", f"unit_{accumulator}", tolerance))
    return kernels


def _product(opcode: str, which: str, a: str, b: str, c: str, tolerance: Tolerance | None) -> MicroKernel:
    form = mma_form(opcode)
    counts = (form.a_registers, form.b_registers, form.c_registers)
    inputs = (a,) * counts[0] + (b,) * counts[1] + (c,) * counts[2]
    starts = (0, counts[0], counts[0] + counts[1])
    sources = ", ".join(_braces("%r", start, count) for start, count in zip(starts, counts, strict=True))
    result = {"f16": "f16x2", "f32": "f32", "s32": "s32"}[form.accumulator]
    body = f"{opcode} {_braces('%r', 20, counts[2])}, {sources};"
    return MicroKernel(f"{opcode} {which}", inputs, (result,) * counts[2], body, tolerance)


_ATOMICS = expand_all(
    "add.{u32,s32,u64,f32,f64}", "{min,max}.{u32,s32,u64,s64}", "{and,or,xor}.{b32,b64}", "exch.{b32,b64}",
    "cas.{b32,b64}", "{inc,dec}.u32",
)  # fmt: skip


def _atomics() -> list[MicroKernel]:
    """Each thread on a cell of its own: what it gets, and what stands there after; then all of a warp on one cell."""
    kernels = []
    for operation, space in ((operation, space) for operation in _ATOMICS for space in ("global", "shared")):
        kind = operation.split(".")[1]
        bits = NUMPY_TYPES[kind].itemsize * 8
        letter, inputs = ("%r" if bits == 32 else "%d"), (kind,) * (3 if "cas" in operation else 2)
        cell = f"[%a{len(inputs) + 1}]" if space == "global" else "[%t4]"
        values = ", ".join(f"{letter}{1 + i}" for i in range(len(inputs) - 1))
        start = f"st.{space}.b{bits} {cell}, {letter}0;\n"
        end = f"\nld.{space}.b{bits} {letter}21, {cell};"
        body = f"{start}atom.{space}.{operation} {letter}20, {cell}, {values};{end}"
        kernels.append(MicroKernel(f"atom.{space}.{operation}", inputs, (kind, kind), body))
        if "exch" not in operation and "cas" not in operation:
            body = f"{start}mov.b{bits} {letter}20, 0;\nred.{space}.{operation} {cell}, {values};{end}"
            kernels.append(MicroKernel(f"red.{space}.{operation}", inputs, (kind, kind), body))
    for operation in expand_all("add.{u32,s32}", "{min,max}.{u32,s32}", "{and,or,xor}.b32"):
        kind = operation.split(".")[1]
        body = (
            "shr.u32 %t5, %t0, 5;\nshl.b32 %t5, %t5, 4;\nadd.u32 %t5, %t5, %t3;\nst.shared.b32 [%t4], 0;\nbar.sync 0;\n"
            f"atom.shared.{operation} %t6, [%t5], %r0;\nbar.sync 0;\nld.shared.b32 %r20, [%t5];"
        )
        kernels.append(MicroKernel(f"atom.shared.{operation} one cell", (kind,), (kind,), body))
    return kernels


def _loads() -> list[MicroKernel]:
    """Widths, vectors and the extension of narrow values, through global and shared memory."""
    kernels = []
    for kind in ("u8", "s8", "u16", "s16", "b8", "b16"):
        body = f"st.shared.b32 [%t4], %r0;\nld.shared.{kind} %r20, [%t4+{1 if kind[1:] == '8' else 2}];"
        kernels.append(MicroKernel(f"ld.shared.{kind}", ("b32",), ("b32",), body))
        body = f"st.shared.b32 [%t4], %r0;\nst.shared.{kind} [%t4+2], %r1;\nld.shared.b32 %r20, [%t4];"
        kernels.append(MicroKernel(f"st.shared.{kind}", ("b32", "b32"), ("b32",), body))
    for count in (2, 4):
        bits = f"v{count}.b32"
        body = (
            f"st.shared.{bits} [%t4], {_braces('%r', 0, count)};\nld.shared.{bits} {_braces('%r', 20, count)}, [%t4];"
        )
        kernels.append(MicroKernel(f"ld.shared.{bits}", ("b32",) * count, ("b32",) * count, body))
    body = "st.shared.v2.b64 [%t4], {%d0, %d1};\nld.shared.v2.b64 {%d20, %d21}, [%t4];"
    kernels.append(MicroKernel("ld.shared.v2.b64", ("b64", "b64"), ("b64", "b64"), body))
    for width in (4, 8, 16):
        body = (
            f"and.b32 %t5, %t2, {~(width // 4 - 1) & 0xFFFFFFFF:#x};\nsub.u32 %t5, %t2, %t5;\n"
            "mul.wide.u32 %a8, %t5, 4;\nsub.u64 %a8, %a0, %a8;\n"
            "st.shared.v4.b32 [%t4], {0, 0, 0, 0};\nand.b32 %t6, %t0, 15;\n"
            f"min.u32 %t6, %t6, {width};\ncp.async.ca.shared.global [%t4], [%a8], {width}, %t6;\n"
            "cp.async.commit_group;\ncp.async.wait_group 0;\nld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%t4];"
        )
        kernels.append(MicroKernel(f"cp.async.ca {width}", ("b32",), ("b32",) * 4, body))
    return kernels


def _moves() -> list[MicroKernel]:
    bodies = {
        "mov.b32 pack": (("b16", "b16"), ("b32",), "mov.b32 %r20, {%h0, %h1};"),
        "mov.b32 unpack": (("b32",), ("b16", "b16"), "mov.b32 {%h20, %h21}, %r0;"),
        "mov.b64 pack": (("b32", "b32"), ("b64",), "mov.b64 %d20, {%r0, %r1};"),
        "mov.b64 unpack": (("b64",), ("b32", "b32"), "mov.b64 {%r20, %r21}, %d0;"),
        "mov.b64 pack 4": (("b16",) * 4, ("b64",), "mov.b64 %d20, {%h0, %h1, %h2, %h3};"),
        "activemask.b32": (("b32",), ("b32",), "activemask.b32 %r20;"),
        "elect.sync": (("b32",), ("pred",), f"elect.sync %t5|%p20, {_EVERY};"),
    }
    return [MicroKernel(name, *parts) for name, parts in bodies.items()]
