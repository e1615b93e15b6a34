"""What a kernel became: registers, spills, shared memory and instruction counts, read from its machine code.

Needs no GPU. The tools come from the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm (the extra
``cute_attn[inspect]``) or from a CUDA toolkit on PATH.
"""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cute_attn.compiler.compiling import compile_spec
from cute_attn.problem import KernelSpec

TOOL_PACKAGES = {"cuobjdump": "nvidia-cuda-cuobjdump", "nvdisasm": "nvidia-cuda-nvdisasm"}

RESERVED_SMEM_BYTES = 1024  # per block; an architecture's limit does not count them


@dataclass(frozen=True)
class Instruction:
    """A kind of instruction that says how a kernel moves and computes: its opcode, modifiers and what it does."""

    label: str
    opcode: str
    modifiers: tuple[str, ...]
    meaning: str


# The instructions that matter for attention on mma.sync, in the order of the data's way through the kernel.
INSTRUCTIONS = (
    Instruction("LDGSTS.128", "LDGSTS", ("128",), "16-byte cp.async, global to shared memory"),
    Instruction("LDGSTS", "LDGSTS", (), "cp.async of every width"),
    Instruction("LDSM", "LDSM", ("M88",), "ldmatrix, shared memory to fragments"),
    Instruction("LDSM.T", "LDSM", ("MT88",), "ldmatrix, transposed"),
    Instruction("LDS", "LDS", (), "plain load from shared memory"),
    Instruction("STS", "STS", (), "plain store to shared memory"),
    Instruction("STSM", "STSM", (), "stmatrix, fragments to shared memory"),
    Instruction("HMMA", "HMMA", ("16816",), "16x8x16 tensor core multiply"),
    Instruction("MUFU.EX2", "MUFU", ("EX2",), "exponential"),
    Instruction("FFMA", "FFMA", (), "fp32 multiply-add"),
    Instruction("FMUL", "FMUL", (), "fp32 multiply"),
    Instruction("FMNMX", "FMNMX", (), "fp32 maximum"),
    Instruction("FADD", "FADD", (), "fp32 add"),
    Instruction("SHFL", "SHFL", (), "exchange between lanes"),
    Instruction("BAR", "BAR", (), "barrier of the block"),
    Instruction("BRA", "BRA", (), "branch"),
    Instruction("STG.128", "STG", ("128",), "16-byte store to global memory"),
    Instruction("STG", "STG", (), "store of every width to global memory"),
    Instruction("LDG", "LDG", (), "plain load from global memory"),
    Instruction("STL", "STL", (), "store to local memory (a spill)"),
    Instruction("LDL", "LDL", (), "load from local memory (a spill)"),
)


@dataclass(frozen=True)
class KernelReport:
    """The machine code of one kernel in numbers.

    Attributes:
        kernel: the name of its spec.
        gpu_arch: the architecture it was compiled for.
        registers: per thread.
        barriers: hardware barriers of a block.
        stack_bytes: per thread; above zero means spills or indexed local arrays.
        spill_store_bytes: spilled by one thread, as ptxas counted.
        spill_load_bytes: read back by one thread, as ptxas counted.
        smem_bytes: shared memory of a block, static and dynamic, that the compiled kernel asks for.
        config_smem_bytes: shared memory of a block that the config foresees.
        code_instructions: instructions in all, padding excluded.
        opcodes: how often each opcode, modifiers included ("LDSM.16.M88.4"), stands in the code.
    """

    kernel: str
    gpu_arch: str
    registers: int
    barriers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    smem_bytes: int
    config_smem_bytes: int
    code_instructions: int
    opcodes: Mapping[str, int]

    def count(self, opcode: str, *modifiers: str) -> int:
        """How many instructions have this opcode and all of these modifiers: ``count("LDGSTS", "128")``."""
        wanted = set(modifiers)
        return sum(
            number
            for name, number in self.opcodes.items()
            if name.split(".")[0] == opcode and wanted <= set(name.split(".")[1:])
        )

    @property
    def spills(self) -> bool:
        """Whether anything lives in local memory."""
        return self.stack_bytes > 0 or self.count("STL") > 0 or self.count("LDL") > 0

    @property
    def instructions(self) -> dict[str, int]:
        """Counts of the instructions in ``INSTRUCTIONS``, by label."""
        return {kind.label: self.count(kind.opcode, *kind.modifiers) for kind in INSTRUCTIONS}


def inspect_kernel(spec: KernelSpec) -> KernelReport:
    """Compile a kernel and read its machine code.

    Raises:
        ToolMissingError: cuobjdump or nvdisasm is not installed.
        KernelCompileError: the kernel does not compile.
    """
    tools = {name: find_tool(name) for name in TOOL_PACKAGES}
    with tempfile.TemporaryDirectory(prefix="cute_attn_inspect_") as folder:
        remarks = Path(folder, "remarks.yaml")
        compiled = compile_spec(spec, f"remarks{{ptx}} --remark-output {shlex.quote(str(remarks))} --remark-filter .*")
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.__cubin__)
        resources = _run(tools["cuobjdump"], "--dump-resource-usage", str(cubin))
        sass = _run(tools["nvdisasm"], "-c", str(cubin))
        return read_report(spec, resources, sass, remarks.read_text())


def read_report(spec: KernelSpec, resources: str, sass: str, remarks: str) -> KernelReport:
    """Put together what cuobjdump, nvdisasm and the compiler's remarks say of one kernel."""
    opcodes = count_opcodes(sass)
    return KernelReport(
        kernel=spec.name,
        gpu_arch=spec.arch.gpu_arch,
        registers=_number(r"REG:(\d+)", resources),
        barriers=_number(r"used (\d+) barriers", remarks, default=0),
        stack_bytes=_number(r"STACK:(\d+)", resources),
        spill_store_bytes=_number(r"(\d+) bytes spill stores", remarks),
        spill_load_bytes=_number(r"(\d+) bytes spill loads", remarks),
        smem_bytes=_static_smem(spec, resources) + _number(r"memory allocated: (\d+) bytes", remarks, default=0),
        config_smem_bytes=spec.smem_bytes,
        code_instructions=sum(number for name, number in opcodes.items() if name != "NOP"),
        opcodes=opcodes,
    )


def _static_smem(spec: KernelSpec, resources: str) -> int:
    """Static shared memory; from sm_90 on the tools add the part that CUDA reserves for itself."""
    reserved = RESERVED_SMEM_BYTES if spec.arch.capability >= 90 else 0
    return max(0, _number(r"SHARED:(\d+)", resources) - reserved)


# nvdisasm prints "/*0010*/  @!P0 LDGSTS.E.BYPASS.128 [R5], [R2.64] ;", the guard being optional.
_INSTRUCTION = re.compile(
    r"^\s+(?:/\*[0-9a-f]+\*/\s+)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)\s", re.MULTILINE
)


def count_opcodes(sass: str) -> dict[str, int]:
    """Opcodes with their modifiers in a disassembly, most frequent first."""
    return dict(Counter(_INSTRUCTION.findall(sass)).most_common())


def _number(pattern: str, text: str, default: int | None = None) -> int:
    match = re.search(pattern, text)
    if match is not None:
        return int(match[1])
    if default is None:
        raise RuntimeError(f"the compiler's output has nothing like {pattern!r}:\n{text[:2000]}")
    return default


class ToolMissingError(RuntimeError):
    """A program that reads machine code is not installed."""


def find_tool(name: str) -> str:
    """Path of cuobjdump or nvdisasm: from NVIDIA's package if it is installed, else from PATH.

    Raises:
        ToolMissingError: neither has it.
    """
    package = TOOL_PACKAGES[name]
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name in (name, f"{name}.exe"):
            return str(file.locate())
    on_path = shutil.which(name)
    if on_path is None:
        raise ToolMissingError(
            f"{name} is not installed: pip install 'cute-attn[inspect]', or put a CUDA toolkit on PATH"
        )
    return on_path


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout


def table(report: KernelReport) -> str:
    """The report as aligned lines of text."""
    rows = [
        ("kernel", report.kernel, ""),
        ("registers", report.registers, "per thread"),
        ("stack", report.stack_bytes, "bytes per thread"),
        ("spill stores", report.spill_store_bytes, "bytes per thread"),
        ("spill loads", report.spill_load_bytes, "bytes per thread"),
        ("shared memory", report.smem_bytes, f"bytes per block; the config foresees {report.config_smem_bytes}"),
        ("barriers", report.barriers, ""),
        ("instructions", report.code_instructions, "in all"),
    ]
    rows += [(f"  {kind.label}", report.instructions[kind.label], kind.meaning) for kind in INSTRUCTIONS]
    kernel, *numbers = rows
    lines = [f"{label:<14}{value:>8}  {meaning}".rstrip() for label, value, meaning in numbers]
    return "\n".join([f"{kernel[0]:<14}  {kernel[1]}", *lines])
