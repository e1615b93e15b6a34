"""Host time of one eager call: how long Python is busy before the next call can be made."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import peers
from benchmarks.report import number, print_table, ratio, write_json
from benchmarks.timing import host_median_us
from benchmarks.workload import Inputs

OURS = "cute_attn"
HEAD_DIM = 128
ROUNDS = 7  # of all contenders in turn: for seconds at a time a busy machine makes everything slower by half
LENGTH = 16  # tiny, so that the device keeps up and the launch queue stays short


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="PATH", help="the committed one is benchmarks/results/host.json")


def run(arguments: argparse.Namespace) -> None:
    """Time each implementation's eager call; print and write microseconds."""
    inputs = _inputs()
    binds = {name: partial(peers.Contender, call, peers.as_tensor) for name, call in _our_calls(inputs).items()}
    binds |= {peer.name: partial(peer.bind, inputs) for peer in peers.PEERS}
    microseconds: dict[str, float] = {}
    missing: dict[str, str] = {}
    for name, bind in tqdm(list(binds.items()) * ROUNDS, disable=None):
        try:
            contender = bind()
            with contender.selected():
                microseconds[name] = min(host_median_us(contender.call), microseconds.get(name, math.inf))
        except Exception as exception:  # whatever keeps one contender from running must not hide the others' figures
            missing[name] = f"{type(exception).__name__}: {exception}".splitlines()[0][:200]
    _print(binds, microseconds, missing)
    if arguments.json:
        unit = f"microseconds, median of the quietest of {ROUNDS} rounds"
        write_json(arguments.json, "host", {"unit": unit, "host": microseconds, "missing": missing})


def _inputs() -> Inputs:
    q, k, v = (torch.randn(1, 1, LENGTH, HEAD_DIM, device="cuda", dtype=torch.float16) for _ in range(3))
    return Inputs(q, k, v, causal=True)


def _our_calls(inputs: Inputs) -> dict[str, Callable[[], object]]:
    from cute_attn import ContiguousCache, PagedCache, attention, decode

    q, k, v, _ = inputs
    out = torch.empty_like(q)
    packed_q, packed_k, packed_v = (t.squeeze(0).transpose(0, 1).contiguous() for t in (q, k, v))
    bshd_q, bshd_k, bshd_v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    cu_seqlens = torch.tensor([0, LENGTH], dtype=torch.int32, device="cuda")
    lengths: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": LENGTH,
        "max_seqlen_k": LENGTH,
    }
    new_token = torch.randn(1, 1, 8, HEAD_DIM, device="cuda", dtype=torch.float16)
    pool = torch.randn(64, LENGTH, 2, HEAD_DIM, device="cuda", dtype=torch.float16)
    contiguous = ContiguousCache(pool.view(1, -1, 2, HEAD_DIM), pool.view(1, -1, 2, HEAD_DIM))
    paged = PagedCache(pool, pool, torch.arange(64, dtype=torch.int32, device="cuda").view(1, 64))
    tokens = torch.full((1,), 4 * LENGTH, dtype=torch.int32, device="cuda")
    new_out = torch.empty_like(new_token)
    return {
        OURS: lambda: attention(q, k, v, causal=True),
        f"{OURS}, out given": lambda: attention(q, k, v, causal=True, out=out),
        f"{OURS}, with lse": lambda: attention(q, k, v, causal=True, return_lse=True),
        f"{OURS}, bshd": lambda: attention(bshd_q, bshd_k, bshd_v, causal=True, layout="bshd"),
        f"{OURS}, varlen": lambda: attention(packed_q, packed_k, packed_v, causal=True, **lengths),
        f"{OURS}.decode": lambda: decode(new_token, contiguous, tokens),
        f"{OURS}.decode, out given": lambda: decode(new_token, contiguous, tokens, out=new_out),
        f"{OURS}.decode, paged, with lse": lambda: decode(new_token, paged, tokens, return_lse=True),
    }


def _print(names: Iterable[str], microseconds: dict[str, float], missing: dict[str, str]) -> None:
    mine = microseconds.get(OURS)
    rows = [
        [name, number(ratio(microseconds.get(name), mine), 2), number(microseconds.get(name), 1), missing.get(name, "")]
        for name in names
    ]
    print_table(["eager call", f"/ {OURS}", "us", ""], rows)
