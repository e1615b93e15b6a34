"""From a kernel's description to compiled code: fake tensors in, a compiled object out."""

from __future__ import annotations

import shlex
import tempfile
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_attn.compiler.cubin import frame_bytes
from cute_attn.kernels.prefill import DTYPES, PrefillKernel
from cute_attn.problem import KernelSpec, PrefillArguments, PrefillProblem

# ptxas's --register-usage-level, in the order tried. How it allots 255 registers is close to chance where a kernel
# needs about so many: at one level it spills a value or two, at another none. Level 5 is its default; 0 was faster on
# an H200.
REGISTER_LEVELS = (0, 5, 8)


def fake_arguments(problem: PrefillProblem) -> PrefillArguments:
    """Stand-ins for the arguments, with every size and stride symbolic except the head dims."""

    def rows(head_dim: int) -> Any:
        leading = 2 if problem.varlen else 3
        shape = (*(cute.sym_int32() for _ in range(leading)), head_dim)
        stride = (*(cute.sym_int64(divisibility=8) for _ in range(leading)), 1)
        return make_fake_tensor(DTYPES[problem.dtype], shape, stride=stride, assumed_align=16)

    def plain(dtype: Any, rank: int) -> Any:
        shape = tuple(cute.sym_int32() for _ in range(rank))
        stride = (*(cute.sym_int64() for _ in range(rank - 1)), 1)
        return make_fake_tensor(dtype, shape, stride=stride, assumed_align=4)

    return PrefillArguments(
        q=rows(problem.head_dim),
        k=rows(problem.head_dim),
        v=rows(problem.head_dim_v),
        out=rows(problem.head_dim_v),
        lse=plain(cutlass.Float32, 2 if problem.varlen else 3) if problem.return_lse else None,
        cu_seqlens_q=plain(cutlass.Int32, 1) if problem.varlen else None,
        cu_seqlens_k=plain(cutlass.Int32, 1) if problem.varlen else None,
        scale_log2=cutlass.Float32(1.0),
        window_left=cutlass.Int32(0),
        window_right=cutlass.Int32(0),
        heads_second=cutlass.Int32(1),
    )


def compile_kernel(spec: KernelSpec, options: str = "") -> Any:
    """Compiles a kernel for ``spec.arch``, whatever this machine has, without a spill if one of the levels allows it.

    Args:
        options: more of the DSL's options, such as "--keep-ptx".

    Returns:
        The DSL's compiled object, with its machine code as ``__cubin__``.

    Raises:
        ValueError: the config does not fit the architecture.
    """
    spec.config.check_fits(spec.arch, spec.problem.head_dim, spec.problem.head_dim_v)
    fewest, spilled = None, 0
    for level in REGISTER_LEVELS:
        compiled = _compile(spec, f"--ptxas-options='--register-usage-level={level}' {options}")
        frame = frame_bytes(compiled.__cubin__)
        if fewest is None or frame < spilled:
            fewest, spilled = compiled, frame
        if spilled == 0:
            break
    return fewest


def _compile(spec: KernelSpec, options: str) -> Any:
    with tempfile.TemporaryDirectory(prefix="cute_attn_compile_") as folder:
        return cute.compile(
            PrefillKernel(spec.problem, spec.config),
            *fake_arguments(spec.problem),
            make_fake_stream(use_tvm_ffi_env_stream=True),
            options=f"--enable-tvm-ffi --gpu-arch {spec.arch.gpu_arch} --keep-cubin --dump-dir {shlex.quote(folder)} "
            f"{options}",
        )
