"""Reading machine code: the parsers on known text, and one kernel through the real tools."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace

import pytest

from cute_attn.arch import arch_by_name
from cute_attn.compiler import inspect
from cute_attn.compiler.inspect import ToolMissingError, count_opcodes, find_tool, inspect_kernel, read_report, table
from tests.compiler_fixtures import spec

SASS = """
.text.kernel:
.L_x_0:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P0 LDGSTS.E.BYPASS.128 [R5], [R2.64] ;
        /*0020*/              @!P6 LDGSTS.E.BYPASS.LTC128B.128 [R5+0x800], [R2.64], !PT ;
        /*0030*/                   LDGSTS.E [R5], [R2.64] ;
        /*0040*/                   LDSM.16.M88.4 R8, [R4] ;
        /*0050*/                   LDSM.16.MT88.4 R8, [R4] ;
        /*0060*/                   LDSM.16.MT88.2 R8, [R4] ;
                                   HMMA.16816.F32.BF16 R12, R8, R2, R12 ;
        /*0080*/             @!UP0 UIADD3 UR4, UR4, 0x1, URZ ;
        /*0090*/                   STG.E.128 desc[UR4][R2.64], R8 ;
        /*00a0*/                   NOP ;
        /*00b0*/                   NOP ;
"""

RESOURCES = """
Resource usage:
 Function kernel:
  REG:168 STACK:16 SHARED:1024 LOCAL:0 CONSTANT[0]:580 TEXTURE:0 SURFACE:0 SAMPLER:0
"""

REMARKS = """
  - Remark:      'Shared memory allocated: 49152 bytes'
ptxas         .     16 bytes stack frame, 20 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers
"""


def test_opcodes_are_counted_with_and_without_guards_and_addresses() -> None:
    opcodes = count_opcodes(SASS)
    assert sum(opcodes.values()) == 12
    assert opcodes["LDGSTS.E.BYPASS.128"] == 1
    assert opcodes["HMMA.16816.F32.BF16"] == 1
    assert opcodes["UIADD3"] == 1
    assert opcodes["NOP"] == 2


def test_report_holds_the_tools_figures() -> None:
    report = read_report(spec(), RESOURCES, SASS, REMARKS)
    assert report.kernel == spec().name
    assert report.gpu_arch == "sm_90a"
    assert (report.registers, report.barriers) == (168, 2)
    assert (report.stack_bytes, report.spill_store_bytes, report.spill_load_bytes) == (16, 20, 24)
    assert report.config_smem_bytes == spec().config.smem_bytes(64, 64)
    assert report.code_instructions == 10
    assert report.spills


def test_shared_memory_leaves_out_what_cuda_reserves() -> None:
    assert read_report(spec(arch="sm_90a"), RESOURCES, SASS, REMARKS).smem_bytes == 49152
    assert read_report(spec(arch="sm_80"), RESOURCES, SASS, REMARKS).smem_bytes == 49152 + 1024


def test_instructions_are_counted_by_opcode_and_modifiers() -> None:
    report = read_report(spec(), RESOURCES, SASS, REMARKS)
    assert report.count("LDGSTS") == 3
    assert report.count("LDGSTS", "128") == 2
    assert report.count("LDSM", "MT88") == 2
    assert report.count("LD") == 0
    counts = report.instructions
    assert (counts["LDSM"], counts["LDSM.T"], counts["HMMA"], counts["STG.128"]) == (1, 2, 1, 1)


def test_spills_show_in_the_stack_or_in_the_code() -> None:
    clean = read_report(spec(), RESOURCES.replace("STACK:16", "STACK:0"), SASS, REMARKS)
    assert not clean.spills
    assert replace(clean, opcodes={"STL.64": 1}).spills
    assert replace(clean, stack_bytes=8).spills


def test_output_of_another_compiler_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="nothing like"):
        read_report(spec(), "no resources", SASS, REMARKS)


def test_table_has_a_line_for_every_figure() -> None:
    text = table(read_report(spec(), RESOURCES, SASS, REMARKS))
    lines = {line[:14].strip(): line[14:].split() for line in text.splitlines()}
    assert lines["kernel"] == [spec().name]
    assert lines["registers"][0] == "168"
    assert lines["spill stores"][0] == "20"
    assert lines["LDGSTS.128"][0] == "2"
    assert {kind.label for kind in inspect.INSTRUCTIONS} <= set(lines)


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> None:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ToolMissingError, match=r"nvdisasm is not installed: pip install 'cute-attn\[inspect\]'"):
        find_tool("nvdisasm")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_real_kernel(arch: str) -> None:
    """Compiles one kernel with the DSL (seconds)."""
    report = inspect_kernel(replace(spec(), arch=arch_by_name(arch)))
    assert 64 <= report.registers <= 255
    assert report.smem_bytes == report.config_smem_bytes
    for label in ("LDGSTS.128", "LDSM", "LDSM.T", "HMMA", "MUFU.EX2", "STG.128", "BAR", "SHFL"):
        assert report.instructions[label] > 0, label
