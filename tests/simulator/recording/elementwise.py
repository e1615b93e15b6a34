"""Micro-kernels of the instructions that work lane by lane: every form that the simulator models."""

from __future__ import annotations

import numpy as np

from layouts.simulator.instructions.elementwise import lookup
from tests.simulator.recording.micro import MicroKernel, Tolerance, expand_all, register

_INTEGERS = "{u16,u32,u64,s16,s32,s64}"
_ROUNDED = "{rn,rz,rm,rp}"
_HALVES = "{f16,f16x2}"
_BRAINS = "{bf16,bf16x2}"
_ORDER = "{eq,ne,lt,le,gt,ge}"
_FLOAT_ORDER = "{eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan}"
_BYTES = "{u8,s8,u16,s16,u32,s32,u64,s64}"

INTEGER = expand_all(
    f"{{add,sub}}.{_INTEGERS}", "{add,sub}.sat.s32", "add.{u16x2,s16x2}", f"{{mul,mad}}.{{lo,hi}}.{_INTEGERS}",
    "{mul,mad}.wide.{u16,s16,u32,s32}", "mad.hi.sat.s32", f"{{div,rem}}.{_INTEGERS}", "{neg,abs}.{s16,s32,s64}",
    f"{{min,max}}.{_INTEGERS}", "{min,max}.{u16x2,s16x2}", "{min,max}.relu.{s32,s16x2}", f"sad.{_INTEGERS}",
    "dp4a.{u32,s32}.{u32,s32}", "dp2a.{lo,hi}.{u32,s32}.{u32,s32}",
)  # fmt: skip
BITS = expand_all(
    "{and,or,xor,not}.{pred,b16,b32,b64}", "cnot.{b16,b32,b64}", "shl.{b16,b32,b64}", f"shr.{_INTEGERS}",
    "shr.{b16,b32,b64}", "shf.{l,r}.{clamp,wrap}.b32", "{popc,clz,brev}.{b32,b64}",
    "bfind{,.shiftamt}.{u32,s32,u64,s64}", "bfe.{u32,s32,u64,s64}", "bfi.{b32,b64}", "bmsk.{clamp,wrap}.b32",
    "szext.{clamp,wrap}.{u32,s32}", "prmt.b32{,.f4e,.b4e,.rc8,.ecl,.ecr,.rc16}",
)  # fmt: skip
COMPARE = expand_all(
    "setp.{eq,ne}.{b16,b32,b64}", f"setp.{_ORDER}.{{u16,u32,u64,s16,s32,s64}}", "setp.{lo,ls,hi,hs}.{u16,u32,u64}",
    f"setp.{_FLOAT_ORDER}{{,.ftz}}.f32", f"setp.{_FLOAT_ORDER}.f64", f"setp.{_FLOAT_ORDER}{{,.ftz}}.{{f16,f16x2}}",
    f"setp.{_FLOAT_ORDER}.{{bf16,bf16x2}}", "set.{lt,ge}.{u32,s32,f32}.{u32,s32,f32,f64}",
    "set.{lt,neu}.ftz.f32.f32", f"selp.{_INTEGERS}", "selp.{b16,b32,b64,f32,f64}",
    "slct.{b16,b32,b64,u16,s32,u64,f32,f64}.{s32,f32}",
    "slct.ftz.b32.f32",
)  # fmt: skip
COMBINED = expand_all("setp.{lt,eq}.{and,or,xor}.{s32,u32,f32,f16,bf16x2}", "set.gt.{and,or,xor}.{u32.s32,f32.f32}")
PAIRED = expand_all("setp.{lt,ne}.{s32,f32}", "setp.gt.{and,or,xor}.{s32,f32}")
FLOATING = expand_all(
    "{add,sub,mul}{,.rn,.rz,.rm,.rp}{,.ftz}{,.sat}.f32", "{add,sub,mul}{,.rn}.f64",
    f"fma.{_ROUNDED}{{,.ftz}}{{,.sat}}.f32", "{fma,mad}.rn.f64", "mad.{rn,rz}.f32",
    f"{{div,rcp,sqrt}}.{_ROUNDED}{{,.ftz}}.f32",
    "{div,rcp,sqrt}.rn.f64", "{neg,abs}{,.ftz}.f32", "{neg,abs}.f64", "copysign.{f32,f64}",
    "{min,max}{,.ftz}{,.NaN}{,.xorsign.abs}.f32", "{min,max}.f64",
    "testp.{finite,infinite,number,notanumber,normal,subnormal}.{f32,f64}",
)  # fmt: skip
HALF = expand_all(
    f"{{add,sub,mul}}{{,.rn}}{{,.ftz}}{{,.sat}}.{_HALVES}", f"{{add,sub,mul}}{{,.rn}}.{_BRAINS}",
    f"fma.rn{{,.ftz}}{{,.sat,.relu}}.{_HALVES}", f"fma.rn{{,.relu}}.{_BRAINS}", f"{{neg,abs}}{{,.ftz}}.{_HALVES}",
    f"{{neg,abs}}.{_BRAINS}", f"{{min,max}}{{,.ftz}}{{,.NaN}}{{,.xorsign.abs}}.{_HALVES}",
    f"{{min,max}}{{,.NaN}}{{,.xorsign.abs}}.{_BRAINS}",
)  # fmt: skip
CONVERT = expand_all(
    f"cvt{{,.sat}}.{_BYTES}.{_BYTES}", f"cvt.{{rni,rzi,rmi,rpi}}.{_BYTES}.{{f16,f32,f64}}",
    "cvt.{rni,rzi,rmi,rpi}.{u16,s16,u32,s32,u64,s64}.bf16", "cvt.{rni,rzi}.ftz{,.sat}.{u32,s32}.f32",
    f"cvt.{_ROUNDED}.{{f16,f32}}.{_BYTES}", f"cvt.rn.f64.{_BYTES}", "cvt.{rz,rm,rp}.f64.{u32,s32}",
    f"cvt.{_ROUNDED}.bf16.{{u16,s16,u32,s32,u64,s64}}", "cvt.rn.sat.f32.{u32,s32}", "cvt{,.sat}.f32.f16",
    "cvt.f32.bf16",
    "cvt.f64.{f16,bf16,f32}", f"cvt.{_ROUNDED}{{,.sat}}.f32.f64", f"cvt.{_ROUNDED}.ftz.f32.f64",
    f"cvt.{_ROUNDED}.{{f16,bf16}}.{{f64,bf16,f16}}", f"cvt.{_ROUNDED}{{,.ftz}}.f16.f32", "cvt.rn{,.ftz}.sat.f16.f32",
    "cvt.{rm,rp}.bf16.f32", "cvt.{rni,rzi,rmi,rpi}{,.ftz}.f32.f32", "cvt{,.ftz}.sat.f32.f32",
    "cvt.{rni,rzi,rmi,rpi}.{f16.f16,bf16.bf16,f64.f64}", "cvt.{rn,rz}{,.relu}.{bf16,f16,f16x2,bf16x2}.f32",
    "cvt.rna.tf32.f32", "cvt.{rn,rz}{,.relu}.tf32.f32", "cvt.rn.satfinite{,.relu}.{e4m3x2,e5m2x2}.{f32,f16x2}",
    "cvt.{rn,rz}.satfinite{,.relu}.{f16,bf16,f16x2,bf16x2}.f32", "cvt.rna.satfinite.tf32.f32",
    "cvt.{rz,rn}.relu.satfinite.f16x2.f32", "cvt.sat.{f16,f64}.f16", "cvt.sat.f64.{f32,f64}",
    "cvt.rn.sat.f16.{f64,s32,u8}", "cvt.rn.sat.f64.s32", "cvt.{rni,rzi}.sat.{f16.f16,f32.f32,f64.f64}",
    "cvt.ftz.f32.f16", "cvt.ftz.f64.f32", "cvt.{rmi,rpi}.ftz.{u8,s16,u64,s64}.f32", "cvt.rn.ftz.f32.s32",
    "cvt.{f16.f16,bf16.bf16,f64.f64}", "cvt.rn{,.relu}.f16x2.{e4m3x2,e5m2x2}", "cvt.pack.sat.{u16,s16}.s32",
    "cvt.pack.sat.{u8,s8,u4,s4,u2,s2}.s32.b32",
)  # fmt: skip


def _is_no_instruction(opcode: str) -> bool:
    """Of the combinations above: a rounding from a format to itself, and .sat where every value fits."""
    *modifiers, result, source = opcode.split(".")
    if result in ("f16", "bf16"):
        return result == source and not {"rn", "rz", "rm", "rp"}.isdisjoint(modifiers)
    if modifiers != ["cvt", "sat"] or source[0] not in "us" or result[0] not in "us":
        return False
    bits, source_bits = int(result[1:]), int(source[1:])
    fits = bits > source_bits if result[0] != source[0] else bits >= source_bits
    return fits and not (result[0] == "u" and source[0] == "s")


_TINY = 2.0**-125  # a result that one side flushes to zero and the other does not
APPROXIMATE = {
    "{rcp,rsqrt,sqrt}.approx{,.ftz}.f32": Tolerance(2.0**-22, _TINY),
    "div.{approx,full}{,.ftz}.f32": Tolerance(2.0**-21.5, _TINY),
    "ex2.approx{,.ftz}.f32": Tolerance(2.0**-22, _TINY),
    "lg2.approx{,.ftz}.f32": Tolerance(2.0**-22, 2.0**-22),
    "tanh.approx.f32": Tolerance(2.0**-10.5, 2.0**-125),
    "ex2.approx.{f16,f16x2}": Tolerance(2.0**-9.5, 2.0**-23),
    "ex2.approx.ftz.{bf16,bf16x2}": Tolerance(2.0**-6.5, _TINY),
    "tanh.approx.{f16,f16x2}": Tolerance(0.0, 2.0**-10.5),
    "tanh.approx.{bf16,bf16x2}": Tolerance(0.0, 2.0**-7.5),
    "{rcp,rsqrt}.approx.ftz.f64": Tolerance(2.0**-19, 2.0**-1021),
    "rsqrt.approx.f64": Tolerance(2.0**-50, 0.0),
}
_TABLES = (0x00, 0x80, 0xFE, 0x96, 0xE8, 0xCA, 0x1B, 0x6A, 0xF8, 0xEA, 0x3C, 0xD9, 0xFF)
_SELECTORS = (0x3210, 0x5410, 0x7632, 0x0123, 0x7531, 0x9810, 0xFBA8)


def elementwise_kernels() -> list[MicroKernel]:
    exact = [*INTEGER, *BITS, *COMPARE, *FLOATING, *HALF, *CONVERT]
    exact = [opcode for opcode in exact if not _is_no_instruction(opcode)]
    kernels = [_kernel(opcode) for opcode in exact]
    kernels += [_kernel(opcode, num_sources=3) for opcode in COMBINED]
    kernels += [_kernel(opcode, "pair", num_results=2, num_sources=2 + (opcode.count(".") > 2)) for opcode in PAIRED]
    for pattern, tolerance in APPROXIMATE.items():
        kernels += [_kernel(opcode, tolerance=tolerance) for opcode in expand_all(pattern)]
    kernels += [_angles(opcode) for opcode in expand_all("{sin,cos}.approx{,.ftz}.f32")]
    kernels += [_kernel("lop3.b32", f"{table:#04x}", immediate=f"{table:#x}") for table in _TABLES]
    kernels += [_kernel("prmt.b32", f"{selector:#06x}", immediate=f"{selector:#x}") for selector in _SELECTORS]
    return kernels


def _kernel(
    opcode: str,
    suffix: str = "",
    *,
    num_results: int | None = None,
    num_sources: int | None = None,
    immediate: str = "",
    tolerance: Tolerance | None = None,
) -> MicroKernel:
    """The types of the operands are those that the simulator reads; ptxas refuses wrong sizes."""
    with np.errstate(all="ignore"):
        found = lookup(opcode, num_results, num_sources)
    results = (found.result,) if isinstance(found.result, str) else found.result
    results = tuple({"u8": "u32", "s8": "s32"}.get(kind, kind) for kind in results)
    sources = found.sources[: len(found.sources) - bool(immediate)]
    targets = "|".join(register(kind, place, result=True) for place, kind in enumerate(results))
    given = [register(kind, place) for place, kind in enumerate(sources)] + [immediate] * bool(immediate)
    name = f"{opcode} {suffix}".strip()
    return MicroKernel(name, sources, results, f"{opcode} {targets}, {', '.join(given)};", tolerance)


def _angles(opcode: str) -> MicroKernel:
    return MicroKernel(opcode, ("angle_f32",), ("f32",), f"{opcode} %r20, %r0;", Tolerance(0.0, 2.0**-20.5))
