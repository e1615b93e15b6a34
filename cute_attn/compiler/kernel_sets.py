"""Which kernels are compiled ahead: those compiled on import, and those worth having in a filled cache."""

from __future__ import annotations

from itertools import product

from cute_attn.arch import Arch
from cute_attn.configs import default_config
from cute_attn.problem import KernelSpec, PrefillProblem

DTYPES = ("float16", "bfloat16")
CORE_HEAD_DIMS = (64, 128)
ALL_HEAD_DIMS = (32, 64, 96, 128, 192, 256)

# (bounded_left, bounded_right): no mask, causal, and a window (a causal one is the same kernel).
MASKS = ((False, False), (False, True), (True, True))


def core_kernels(arch: Arch) -> list[KernelSpec]:
    """What nearly every program calls: dense, without log-sum-exp, causal and not, head dims 64 and 128."""
    return [
        _spec(arch, PrefillProblem(dtype, head_dim, head_dim, bounded_right=causal))
        for dtype, head_dim, causal in product(DTYPES, CORE_HEAD_DIMS, (False, True))
    ]


def all_kernels(arch: Arch) -> list[KernelSpec]:
    """Common head dims with every dtype, kind of mask, dense or packed, with and without log-sum-exp.

    Left out: head dims in between, a value head dim of its own, windows open on the right, chosen configs. Those
    compile on first use.
    """
    return [
        _spec(arch, PrefillProblem(dtype, head_dim, head_dim, left, right, varlen, return_lse))
        for head_dim, dtype, (left, right), varlen, return_lse in product(
            ALL_HEAD_DIMS, DTYPES, MASKS, (False, True), (False, True)
        )
    ]


def _spec(arch: Arch, problem: PrefillProblem) -> KernelSpec:
    return KernelSpec(problem, default_config(arch, problem.head_dim, problem.head_dim_v), arch)
