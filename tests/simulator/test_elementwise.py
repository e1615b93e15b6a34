"""The table of elementwise instructions: what it finds, and that it refuses what it does not know."""

from __future__ import annotations

import re

import numpy as np
import pytest

from layouts.simulator.errors import UnknownInstructionError
from layouts.simulator.instructions import elementwise
from layouts.simulator.instructions.elementwise import is_elementwise, lookup, numpy_type

# Each base opcode's forms, as in the PTX of our kernels and in inline assembly of others.
_FORMS = (
    "add.s32 add.s64 add.u16 add.f32 add.rn.ftz.f32 add.rz.ftz.sat.f32 add.f64 add.f16 add.rn.bf16x2 add.sat.s32 "
    "add.u16x2 sub.s16 sub.f32 mul.lo.s32 mul.hi.u32 mul.wide.s16 mul.wide.u32 mul.f32 mul.rn.f16x2 mad.lo.s64 "
    "mad.wide.u16 mad.hi.sat.s32 fma.rn.f32 fma.rn.ftz.f32 fma.rm.f32 fma.rn.f64 fma.rn.relu.bf16x2 "
    "fma.rn.ftz.sat.f16 mad.rn.f32 div.s32 div.u64 rem.u32 div.rn.f32 div.full.ftz.f32 div.approx.f32 "
    "rcp.approx.ftz.f32 rcp.rn.f32 rcp.approx.ftz.f64 sqrt.approx.ftz.f32 sqrt.rn.f32 rsqrt.approx.ftz.f32 "
    "ex2.approx.ftz.f32 ex2.approx.f16x2 ex2.approx.ftz.bf16x2 lg2.approx.f32 sin.approx.f32 cos.approx.ftz.f32 "
    "tanh.approx.f32 tanh.approx.bf16x2 min.s32 min.relu.s32 max.u64 max.s16x2 max.f32 max.ftz.NaN.f32 "
    "min.xorsign.abs.f32 max.NaN.f16x2 max.NaN.xorsign.abs.bf16x2 abs.s32 abs.f32 neg.s64 neg.ftz.f32 neg.bf16x2 "
    "neg.f16x2 copysign.f32 testp.finite.f32 shl.b32 shl.b64 shr.u32 shr.s16 shr.b64 shf.l.wrap.b32 shf.r.clamp.b32 "
    "and.pred or.b32 xor.b16 not.b32 not.pred cnot.b32 lop3.b32 bfe.u32 bfe.s64 bfi.b32 bfind.u32 "
    "bfind.shiftamt.s64 brev.b32 popc.b64 clz.b32 prmt.b32 prmt.b32.f4e bmsk.clamp.b32 szext.wrap.s32 sad.u32 "
    "dp4a.u32.s32 dp2a.lo.s32.u32 selp.b32 selp.f32 slct.f32.s32 slct.ftz.b32.f32 set.lt.u32.f32 setp.lt.s32 "
    "setp.eq.and.b32 setp.neu.ftz.f32 setp.nan.or.f64 setp.gt.bf16 setp.hs.u16 setp.le.f16x2 cvt.u64.u32 "
    "cvt.s64.s32 cvt.sat.u8.s32 cvt.s8.s32 cvt.rn.f32.s32 cvt.rzi.s32.f32 cvt.rni.ftz.sat.u8.f32 cvt.rmi.f32.f32 "
    "cvt.rn.f16x2.f32 cvt.rn.relu.bf16x2.f32 cvt.f32.f16 cvt.f32.bf16 cvt.rz.f16.f32 cvt.rn.bf16.f32 "
    "cvt.rna.tf32.f32 cvt.rn.satfinite.e4m3x2.f32 cvt.rn.satfinite.relu.e5m2x2.f16x2 cvt.rn.f16x2.e4m3x2 "
    "cvt.pack.sat.u8.s32.b32 cvt.pack.sat.s16.s32 cvt.rn.f32.f64 cvt.f64.f32 cvt.ftz.f64.f32 cvt.sat.f32.f32"
)
FORMS = _FORMS.split()

REFUSED = {
    "add.cc.u32": ".cc",
    "addc.u32": "'addc'",
    "add.s32.f32x2": ".f32x2",
    "add.f32x2": ".f32x2",
    "add.sat.u32": ".u32",
    "add.ftz.f64": ".ftz",
    "add.ftz.rn.f32": ".rn",
    "add.rna.f32": ".rna",
    "add.rz.f64": ".rz",
    "add.sat.bf16": ".sat",
    "add": "add",
    "mul.s32": ".s32",
    "mul.wide.u64": ".u64",
    "fma.f32": ".f32",
    "fma.rn.relu.f32": ".relu",
    "fma.rn.oob.f16": ".oob",
    "div.f32": ".f32",
    "ex2.f32": ".f32",
    "ex2.approx.ftz.f16": ".ftz",
    "min.abs.f32": ".abs",
    "min.relu.u32": ".u32",
    "shl.s32": ".s32",
    "lop3.and.b32": ".and",
    "prmt.b32.xyz": ".xyz",
    "setp.lo.s32": ".lo",
    "setp.lt.b32": ".lt",
    "setp.lt.xor.and.s32": ".and",
    "setp.lt.ftz.bf16": ".ftz",
    "selp.pred": ".pred",
    "cvt.f16.f32": "rounding None",
    "cvt.rn.f32.f16": "rounding rn",
    "cvt.rn.s32.f32": "rounding rn",
    "cvt.rs.f16x2.f32": ".rs",
    "cvt.ftz.s32.s64": ".ftz",
    "cvt.rn.ftz.f32.f16x2": ".f16x2",
    "cvt.rn.e4m3x2.f32": ".satfinite",
    "cvt.rn.satfinite.e4m3x2.bf16x2": ".bf16x2",
    "cvt.rn.satfinite.e2m1x2.f32": ".e2m1x2",
    "cvt.rn.ftz.f16.f64": ".ftz",
    "cvt.rn.sat.bf16.s32": ".sat",
    "cvt.rn.relu.f16.f64": ".relu",
    "frobnicate.b32": "'frobnicate'",
}


@pytest.mark.parametrize("opcode", FORMS)
def test_each_form_is_found_and_its_types_are_known(opcode: str) -> None:
    found = lookup(opcode)
    results = (found.result,) if isinstance(found.result, str) else found.result
    for kind in (*results, *found.sources):
        assert isinstance(numpy_type(kind), np.dtype)
    assert is_elementwise(opcode)


@pytest.mark.parametrize("opcode", FORMS)
def test_a_modifier_that_is_not_known_is_refused(opcode: str) -> None:
    base, *modifiers = opcode.split(".")
    for place in range(len(modifiers) + 1):
        changed = ".".join([base, *modifiers[:place], "strange", *modifiers[place:]])
        with pytest.raises(UnknownInstructionError, match=re.escape(changed)) as error:
            lookup(changed)
        assert ".strange" in str(error.value)


@pytest.mark.parametrize("opcode", REFUSED)
def test_what_is_not_modelled_is_refused_by_name(opcode: str) -> None:
    with pytest.raises(UnknownInstructionError, match=re.escape(opcode)) as error:
        lookup(opcode)
    assert REFUSED[opcode] in str(error.value)


def test_the_number_of_operands_is_checked() -> None:
    assert lookup("setp.lt.s32").result == "pred"
    assert lookup("setp.lt.s32", num_results=2).result == ("pred", "pred")
    assert lookup("max.f32", num_sources=3).sources == ("f32", "f32", "f32")
    with pytest.raises(UnknownInstructionError, match="1 destinations, not 2"):
        lookup("add.s32", num_results=2)
    with pytest.raises(UnknownInstructionError, match="2 destinations, not 1"):
        lookup("setp.lt.f16x2", num_results=1)
    with pytest.raises(UnknownInstructionError, match="2 sources, not 3"):
        lookup("max.s32", num_sources=3)
    with pytest.raises(UnknownInstructionError, match=r"\.xorsign"):
        lookup("max.xorsign.abs.f32", num_sources=3)
    with pytest.raises(UnknownInstructionError, match="2 sources, not 3"):
        lookup("setp.lt.s32", num_sources=3)


def test_a_lookup_is_kept() -> None:
    assert lookup("add.s32") is lookup("add.s32")


def test_types() -> None:
    assert numpy_type("pred") == np.bool_
    assert numpy_type("bf16") == np.uint16
    assert numpy_type("f16x2") == np.uint32
    assert numpy_type("e4m3x2") == np.uint16
    assert numpy_type("tf32") == np.float32
    with pytest.raises(UnknownInstructionError, match="b128"):
        numpy_type("b128")


def test_a_second_factory_for_a_type_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"add\.s32 has two factories"):
        elementwise.elementwise("add", types=["s32"])(lambda form: lookup("sub.s32"))
