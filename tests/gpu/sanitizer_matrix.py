"""A few small launches for compute-sanitizer: ``python -m tests.gpu.sanitizer_matrix [prefill | decode | roles]``."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from cute_attn import ContiguousCache, PagedCache, PrefillConfig
from cute_attn.configs import parse_config
from cute_attn.decode_configs import RolesConfig
from tests.gpu.attend import attend, attend_with_lse
from tests.gpu.cases import Case, Shape, plain
from tests.gpu.decode_cases import DecodeCase
from tests.gpu.decode_cases import plain as plain_decode
from tests.gpu.decode_check import run_decode
from tests.gpu.decode_tensors import make_decode_tensors
from tests.gpu.tensors import cumulative

BASE = PrefillConfig()
CAUSAL_LSE = plain(64, bounded_right=True, return_lse=True)
DENSE = Shape.dense(150, 170, heads_kv=1, group=2)
PACKED = Shape((70, 0, 1, 100), (130, 3, 40, 65), heads_kv=1, group=2)

# Each way through the kernel once: masks, packing, paddings, stages, stores.
CASES = (
    Case(CAUSAL_LSE, DENSE),
    Case(plain(128, "bfloat16"), DENSE),
    Case(plain(256, bounded_right=True), DENSE),
    Case(plain(40, bounded_right=True, return_lse=True), DENSE),
    Case(plain(192, head_dim_v=128, bounded_left=True, bounded_right=True), DENSE, window=(60, 10)),
    Case(plain(128, "bfloat16", bounded_right=True, varlen=True, return_lse=True), PACKED),
    Case(plain(64, bounded_left=True, bounded_right=True, varlen=True, return_lse=True), PACKED, window=(60, 10)),
    Case(plain(64, bounded_right=True), DENSE, config=parse_config("seed_64x64_1stage", 64)),
    Case(plain(128, bounded_right=True), DENSE, config=parse_config("seed_128x32_2stage", 128)),
    Case(CAUSAL_LSE, DENSE, config=replace(BASE, num_stages=4)),
    Case(CAUSAL_LSE, DENSE, config=replace(BASE, q_in_regs=True)),
    Case(CAUSAL_LSE, DENSE, config=replace(BASE, o_fp32=False)),
    Case(CAUSAL_LSE, DENSE, config=replace(BASE, o_store="shuffle")),
)


# The decode kernels: each kind of cache, one and several parts.
DECODE_CASES = (
    DecodeCase(plain_decode(128, return_lse=True), (150, 0, 1), num_splits=1),
    DecodeCase(plain_decode(128, page_size=64), (150, 0, 300), num_splits=3, storage="heads first"),
    DecodeCase(
        plain_decode(80, "float16", page_size=16, bounded_left=True), (150, 40), q_len=3, window=50, num_splits=2
    ),
    DecodeCase(plain_decode(128, "float16", "int8", page_size=8, sinks=True), (150, 7), group=9, split_size=64),
    DecodeCase(plain_decode(64, "bfloat16", "float8_e4m3fn", softcap=True), (150, 300), group=20, num_splits=2),
)

# Decode in the arrangement of roles, with mbarriers between warps.
ROLES_CASES = (
    DecodeCase(plain_decode(128, page_size=64), (150, 0, 300), num_splits=2, config=RolesConfig(16)),
    DecodeCase(plain_decode(128, "float16", "int8"), (300, 3), num_splits=2, config=RolesConfig(8, row_max="none")),
)


def main() -> None:
    """Launch each case of the matrices named once."""
    names = sys.argv[1:] or list(MATRICES)
    for name in names:
        MATRICES[name]()
    torch.cuda.synchronize()
    print(f"launched {' '.join(names)}")


def _prefill_matrix() -> None:
    """Inputs are made on the CPU, so that hardly any other kernel is checked along."""
    generator = torch.Generator().manual_seed(0)
    for case in CASES:
        problem, shape = case.problem, case.shape

        def tensor(heads: int, lengths: tuple[int, ...], dim: int, case: Case = case) -> torch.Tensor:
            packed = case.problem.varlen
            size = (sum(lengths), heads, dim) if packed else (len(lengths), heads, lengths[0], dim)
            values = torch.randn(size, generator=generator).to(getattr(torch, case.problem.dtype))
            return values.to("cuda")

        q = tensor(shape.heads_q, shape.q_lens, problem.head_dim)
        k = tensor(shape.heads_kv, shape.k_lens, problem.head_dim)
        v = tensor(shape.heads_kv, shape.k_lens, problem.head_dim_v)
        lengths = {}
        if problem.varlen:
            lengths["cu_seqlens_q"] = cumulative(shape.q_lens, "cpu").to("cuda")
            lengths["cu_seqlens_k"] = cumulative(shape.k_lens, "cpu").to("cuda")
        call = attend_with_lse if problem.return_lse else attend
        result = call(q, k, v, **case.options, **lengths, config=case.config)
        out = result if isinstance(result, torch.Tensor) else result[0]
        if not out.cpu().isfinite().all():
            raise SystemExit(f"not finite: {case}")


def _decode_matrix() -> None:
    for case in DECODE_CASES:
        _decode(case)


def _roles_matrix() -> None:
    for case in ROLES_CASES:
        _decode(case)


def _decode(case: DecodeCase) -> None:
    tensors = make_decode_tensors(case, "cpu")
    cache = tensors.cache
    scale = None if cache.scale is None else case.scales
    k, v = cache.k.to("cuda"), cache.v.to("cuda")
    moved = (
        PagedCache(k, v, cache.page_table.to("cuda"), scale)
        if isinstance(cache, PagedCache)
        else ContiguousCache(k, v, scale)
    )
    sinks = None if tensors.sinks is None else tensors.sinks.to("cuda")
    on_device = replace(
        tensors, q=tensors.q.to("cuda"), cache=moved, lengths=tensors.lengths.to("cuda"), sinks=sinks,
        out=tensors.out.to("cuda"),
    )  # fmt: skip
    if not run_decode(case, on_device).out.cpu().isfinite().all():
        raise SystemExit(f"not finite: {case}")


MATRICES = {"prefill": _prefill_matrix, "decode": _decode_matrix, "roles": _roles_matrix}


if __name__ == "__main__":
    main()
