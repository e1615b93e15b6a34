"""Decode against cuDNN and flash-attn-4: microseconds and GB/s of cache read, 32 query heads, 8 heads of the cache."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from benchmarks.prepare import device_arch
from benchmarks.report import geometric_mean, number, print_table, ratio, write_json
from benchmarks.timing import device_medians_ms

HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
GRAPH_CALLS, GRAPH_REPLAYS = 32, 15
RIVAL = "cuDNN"
OURS = "bf16"
DEVICE = "cuda"
MAX_ERROR = 1e-2  # of the largest element of the result
CHECKED = 8  # sequences of a row, those at both ends and some between
SCALE = 0.05  # of a quantised cache


class Row(NamedTuple):
    """One row of the table: ``graph`` times calls in a CUDA graph, where the cache may stay in the L2."""

    batch: int
    length: int
    graph: bool = False

    @property
    def name(self) -> str:
        return f"({self.batch}, {self.length})" + (" graph" if self.graph else "")


ROWS = (
    Row(1, 512, True), Row(1, 2048, True), Row(1, 8192, True), Row(1, 1024), Row(1, 8192), Row(1, 131072),
    Row(8, 1024), Row(8, 8192), Row(32, 2048), Row(32, 8192), Row(128, 1024), Row(128, 8192),
)  # fmt: skip
QUICK_ROWS = (Row(1, 2048, True), Row(8, 8192), Row(32, 8192))


class Kind(NamedTuple):
    """A kind of cache: its dtype, and tokens of a page or 0."""

    dtype: str
    page_size: int = 0


# Contenders of ours, by name.
KINDS = {
    OURS: Kind("bfloat16"),
    "page 64": Kind("bfloat16", 64),
    "page 16": Kind("bfloat16", 16),
    "int8": Kind("int8"),
    "fp8": Kind("float8_e4m3fn"),
}
Call = Callable[[], Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="three rows, timed for a third as long")
    parser.add_argument("--configs", type=lambda text: text.split(","), default=[], metavar="NAME,...",
                        help="time these configs too, with a contiguous bf16 cache; 'seed' is the seed's")  # fmt: skip
    parser.add_argument("--budget-ms", type=float, default=60.0, help="timed milliseconds per contender and row")
    parser.add_argument("--json", type=Path, metavar="PATH", help="the committed one is benchmarks/results/decode.json")


@dataclass
class Cell:
    """Figures of one row: microseconds by contender, and why a contender has none."""

    row: Row
    microseconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def gb_per_s(self, name: str) -> float | None:
        """Of keys and values read."""
        element_bytes = 1 if KINDS.get(name, KINDS[OURS]).dtype in ("int8", "float8_e4m3fn") else 2
        cache = self.row.batch * self.row.length * HEADS_KV * HEAD_DIM * 2 * element_bytes
        return cache / self.microseconds[name] / 1e3 if name in self.microseconds else None


def run(arguments: argparse.Namespace) -> None:
    """Time the table, print it and write what was asked for."""
    rows = QUICK_ROWS if arguments.quick else ROWS
    budget_ms = arguments.budget_ms / 3 if arguments.quick else arguments.budget_ms
    configs = {name: _config_name(name) for name in arguments.configs}
    _compile(configs)
    bandwidth = _read_bandwidth_gb_per_s()
    cells = []
    with tqdm(rows, disable=None, unit="row") as progress:
        for row in progress:
            progress.set_postfix_str(row.name)
            cells.append(_measure(row, configs, budget_ms))
    names = [*KINDS, *configs, *PEERS]
    _print(cells, names, bandwidth)
    if arguments.json:
        write_json(arguments.json, "decode", _content(cells, names, bandwidth))


def _config_name(name: str) -> str:
    from cute_attn.decode_configs import parse_decode_config, seed_config
    from cute_attn.decode_problem import DecodeProblem

    if name == "seed":
        problem = DecodeProblem("bfloat16", "bfloat16", HEAD_DIM)
        return seed_config(device_arch(), problem, HEADS // HEADS_KV).name
    return parse_decode_config(name).name


def _compile(configs: dict[str, str]) -> None:
    """Have all kernels loaded, compiled with every core."""
    from cute_attn.compiler import workers
    from cute_attn.decode_configs import default_decode_config, parse_decode_config
    from cute_attn.decode_problem import DecodeProblem
    from cute_attn.problem import KernelSpec

    arch, rows = device_arch(), HEADS // HEADS_KV
    problems = [DecodeProblem("bfloat16", kind.dtype, HEAD_DIM, kind.page_size) for kind in KINDS.values()]
    specs = [KernelSpec(problem, default_decode_config(arch, problem, rows), arch) for problem in problems]
    specs += [KernelSpec(problems[0], parse_decode_config(name), arch) for name in configs.values()]
    workers.prepare(specs)


def _read_bandwidth_gb_per_s() -> float:
    """What a sum over 4 GB reads."""
    numbers = torch.zeros(2**30, dtype=torch.float32, device=DEVICE)
    milliseconds = device_medians_ms({"sum": numbers.sum}, 60.0)["sum"]
    return numbers.numel() * 4 / milliseconds / 1e6


def _measure(row: Row, configs: dict[str, str], budget_ms: float) -> Cell:
    """Time every contender that can run this row and gives the right result."""
    cell = Cell(row)
    inputs = Inputs.of(row)
    calls: dict[str, Call] = {}
    makers: dict[str, Callable[[], Call]] = {name: partial(inputs.ours, kind) for name, kind in KINDS.items()}
    makers |= {name: partial(inputs.ours, KINDS[OURS], config) for name, config in configs.items()}
    makers |= {name: partial(peer, inputs) for name, peer in PEERS.items()}
    for name, make in makers.items():
        try:
            call = make()
            torch.full_like(inputs.q, float("nan"))  # where the result will lie: no earlier one is taken for it
            cell.errors[name] = inputs.error(call(), KINDS.get(name, KINDS[OURS]))
        # A contender that cannot run, for whatever reason of its own, must not end the others' measurement.
        except Exception as exception:
            cell.missing[name] = f"{type(exception).__name__}: {(str(exception).splitlines() or [''])[0][:200]}"
            continue
        if cell.errors[name] <= MAX_ERROR:
            calls[name] = call
        else:
            cell.missing[name] = f"WRONG: relative error {cell.errors[name]:.2g}"
    if row.graph:
        cell.microseconds = {name: _graph_us(call) for name, call in calls.items()}
    elif calls:
        medians = device_medians_ms(calls, budget_ms)
        cell.microseconds = {name: 1e3 * milliseconds for name, milliseconds in medians.items()}
    return cell


def _graph_us(call: Call) -> float:
    """Median microseconds of a call in a CUDA graph of several."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            call()
    times = []
    for _ in range(GRAPH_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / GRAPH_CALLS * 1e3)
    return statistics.median(times[3:])


@dataclass
class Inputs:
    """Queries, and each kind of cache of the same row, made when first asked for.

    Attributes:
        q: (batch, 1, HEADS, HEAD_DIM) bf16.
        k, v: (batch, length, HEADS_KV, HEAD_DIM) bf16.
        lengths: int32 (batch,).
    """

    row: Row
    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor

    @staticmethod
    def of(row: Row) -> Inputs:
        torch.manual_seed(0)
        batch, length, _ = row

        def normal(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_()

        k, v = (normal(batch, length, HEADS_KV, HEAD_DIM) for _ in range(2))
        lengths = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
        return Inputs(row, normal(batch, 1, HEADS, HEAD_DIM), k, v, lengths)

    def quantised(self, x: Tensor, kind: Kind) -> Tensor:
        dtype = getattr(torch, kind.dtype)
        if dtype == torch.bfloat16:
            return x
        x = x / SCALE
        return (x.round().clamp_(-127, 127) if dtype == torch.int8 else x.clamp_(-448, 448)).to(dtype)

    def cache(self, kind: Kind) -> Any:
        from cute_attn import ContiguousCache, PagedCache

        k, v = self.quantised(self.k, kind), self.quantised(self.v, kind)
        scale = None if k.dtype == torch.bfloat16 else SCALE
        if not kind.page_size:
            return ContiguousCache(k, v, scale)
        batch, length, _ = self.row
        order = torch.randperm(batch * length // kind.page_size, device=DEVICE)
        pools = []
        for x in (k, v):
            pages = x.view(-1, kind.page_size, HEADS_KV, HEAD_DIM)
            pool = torch.empty_like(pages)
            pool[order] = pages
            pools.append(pool)
        table = order.to(torch.int32).view(batch, -1)
        return PagedCache(pools[0], pools[1], table, scale)

    def ours(self, kind: Kind, config: str | None = None) -> Call:
        from cute_attn import decode

        cache = self.cache(kind)
        return lambda: decode(self.q, cache, self.lengths, config=config)

    def error(self, out: Any, kind: Kind) -> float:
        """Relative to float32 attention, the worst of some sequences."""
        out = out[0] if isinstance(out, tuple) else out
        out = out.reshape(self.q.shape)
        worst = 0.0
        for sequence in {round(i * (self.row.batch - 1) / (CHECKED - 1)) for i in range(CHECKED)}:
            k, v = (self.quantised(x[sequence : sequence + 1], kind).float() for x in (self.k, self.v))
            if kind.dtype != "bfloat16":
                k, v = k * SCALE, v * SCALE
            k, v = (x.repeat_interleave(HEADS // HEADS_KV, dim=2).transpose(1, 2) for x in (k, v))
            q = self.q[sequence : sequence + 1].float().transpose(1, 2)
            with sdpa_kernel(SDPBackend.MATH):
                exact = scaled_dot_product_attention(q, k, v).transpose(1, 2)
            difference = (out[sequence : sequence + 1].float() - exact).abs().max() / exact.abs().max()
            worst = max(worst, float("inf") if bool(difference.isnan()) else float(difference))
        return worst


def _cudnn(inputs: Inputs) -> Call:
    q, k, v = (x.transpose(1, 2).contiguous() for x in (inputs.q, inputs.k, inputs.v))

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return call


def _flash_attn_4(inputs: Inputs) -> Call:
    from flash_attn.cute import flash_attn_func

    return lambda: flash_attn_func(inputs.q, inputs.k, inputs.v)


PEERS: dict[str, Callable[[Inputs], Call]] = {RIVAL: _cudnn, "FA4": _flash_attn_4}
PEER_DESCRIPTIONS = {RIVAL: "torch SDPA CUDNN_ATTENTION, bf16", "FA4": "flash-attn-4, flash_attn.cute, bf16"}


def _print(cells: list[Cell], names: list[str], bandwidth: float) -> None:
    print(f"microseconds (GB/s of cache read); a sum over 4 GB reads {bandwidth:.0f} GB/s")
    header = ["(batch, length)", f"{OURS} / {RIVAL}", *names]
    rows = [[cell.row.name, number(_speedup(cell), 3), *(_shown(cell, name) for name in names)] for cell in cells]
    mean = number(geometric_mean(_speedup(cell) for cell in cells), 3)
    print_table(header, rows, [["geometric mean", mean, *("" for _ in names)]])
    for name in names:
        for reason in sorted({cell.missing[name] for cell in cells if name in cell.missing}):
            print(f"{name}: {reason}")


def _shown(cell: Cell, name: str) -> str:
    gb_per_s = cell.gb_per_s(name)
    if gb_per_s is None:
        return "WRONG" if cell.missing.get(name, "").startswith("WRONG") else "-"
    return f"{cell.microseconds[name]:.1f} ({gb_per_s:.0f})"


def _speedup(cell: Cell) -> float | None:
    """The rival's time over ours."""
    return ratio(cell.microseconds.get(RIVAL), cell.microseconds.get(OURS))


def _content(cells: list[Cell], names: list[str], bandwidth: float) -> dict[str, Any]:
    return {
        "unit": "microseconds, median",
        "heads": [HEADS, HEADS_KV],
        "head_dim": HEAD_DIM,
        "peers": PEER_DESCRIPTIONS,
        "read_bandwidth_gb_per_s": bandwidth,
        "geometric_mean_ratio": geometric_mean(_speedup(cell) for cell in cells),
        "rows": [
            {
                "batch": cell.row.batch,
                "length": cell.row.length,
                "graph": cell.row.graph,
                "ratio": _speedup(cell),
                "microseconds": cell.microseconds,
                "gb_per_s": {name: cell.gb_per_s(name) for name in names if name in cell.microseconds},
                "relative_error": cell.errors,
                "missing": cell.missing,
            }
            for cell in cells
        ],
    }
