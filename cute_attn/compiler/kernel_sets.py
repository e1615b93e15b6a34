"""Which kernels are compiled ahead: those compiled on import, and those worth having in a filled cache."""

from __future__ import annotations

from itertools import product

from cute_attn.arch import Arch
from cute_attn.configs import default_config
from cute_attn.decode_configs import default_decode_config
from cute_attn.decode_problem import DecodeProblem
from cute_attn.problem import KernelSpec, PrefillProblem

DTYPES = ("float16", "bfloat16")
CORE_HEAD_DIMS = (64, 128)
ALL_HEAD_DIMS = (32, 64, 96, 128, 192, 256)

# (bounded_left, bounded_right): no mask, causal, and a window (a causal one is the same kernel).
MASKS = ((False, False), (False, True), (True, True))


# Decode: head groups of up to 8 share a kernel, and lengths, batches and splits are no part of one.
DECODE_ROWS = 8
DECODE_HEAD_DIMS = (64, 128)
CORE_PAGE_SIZES = (0, 64)
ALL_PAGE_SIZES = (0, 16, 64)
QUANTISED_DTYPES = ("int8", "float8_e4m3fn")


def core_kernels(arch: Arch) -> list[KernelSpec]:
    """What nearly every program calls."""
    return core_prefill_kernels(arch) + core_decode_kernels(arch)


def core_prefill_kernels(arch: Arch) -> list[KernelSpec]:
    """Dense, without log-sum-exp, causal and not, head dims 64 and 128."""
    return [
        _spec(arch, PrefillProblem(dtype, head_dim, head_dim, bounded_right=causal))
        for dtype, head_dim, causal in product(DTYPES, CORE_HEAD_DIMS, (False, True))
    ]


def core_decode_kernels(arch: Arch) -> list[KernelSpec]:
    """16-bit caches, contiguous and in pages of 64, head dim 128, groups of up to 8 heads."""
    return [
        _decode_spec(arch, DecodeProblem(dtype, dtype, 128, page_size))
        for dtype, page_size in product(DTYPES, CORE_PAGE_SIZES)
    ]


def all_kernels(arch: Arch) -> list[KernelSpec]:
    """Common head dims with every dtype, kind of mask, dense or packed, with and without log-sum-exp; decode's caches.

    Left out: head dims in between, a value head dim of its own, windows open on the right, chosen configs; of decode
    more rows than 8, sinks, softcaps and other page sizes. Those compile on first use.
    """
    prefill = [
        _spec(arch, PrefillProblem(dtype, head_dim, head_dim, left, right, varlen, return_lse))
        for head_dim, dtype, (left, right), varlen, return_lse in product(
            ALL_HEAD_DIMS, DTYPES, MASKS, (False, True), (False, True)
        )
    ]
    decode = [
        _decode_spec(arch, DecodeProblem(dtype, cache_dtype, head_dim, page_size, bounded_left=left))
        for dtype, head_dim, page_size, left in product(DTYPES, DECODE_HEAD_DIMS, ALL_PAGE_SIZES, (False, True))
        for cache_dtype in (dtype, *QUANTISED_DTYPES)
    ]
    return prefill + decode


def _spec(arch: Arch, problem: PrefillProblem) -> KernelSpec:
    return KernelSpec(problem, default_config(arch, problem.head_dim, problem.head_dim_v), arch)


def _decode_spec(arch: Arch, problem: DecodeProblem) -> KernelSpec:
    return KernelSpec(problem, default_decode_config(arch, problem, DECODE_ROWS), arch)
