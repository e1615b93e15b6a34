"""Attention on whatever this machine has: what ran, how exact it is, and how fast.

    python -m cute_attn.demo

On a GPU the compiled kernel is timed next to FlashAttention-2 as torch ships it. Without one, the same calls take the
reference path on small shapes. Every result is held against attention in float64, and the exit status is 1 if one is
further off than twice the error of the same arithmetic done by torch in the input's own dtype.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import cute_attn
from cute_attn import reference
from cute_attn.arch import arch_of
from cute_attn.configs import default_config
from cute_attn.options import window_widths

LENGTH = {"cuda": 4096, "cpu": 256}
REPEATS = {"cuda": 20, "cpu": 3}
ALLOWED_RATIO = 2.0  # our error over that of torch in the same dtype
ALLOWED_ULPS = 2.0  # beside it, in units of the largest output
SPEED = "TFLOP/s"  # this column and those after it compare kernels
HEADER = ("attention", "max error", "torch's error", "check", "ms", SPEED, "FA2 ms", "over FA2")


@dataclass(frozen=True)
class Case:
    """One call of attention.

    Attributes:
        title: what is special about it.
        dtype: of q, k, v.
        heads: of queries, and of keys and values.
        head_dim: of all tensors.
        options: keyword arguments of ``cute_attn.attention``.
        lengths: of the sequences, when they are packed.
    """

    title: str
    dtype: torch.dtype = torch.float16
    heads: tuple[int, int] = (16, 16)
    head_dim: int = 128
    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[float, ...] = ()


CASES = (
    Case("full"),
    Case("causal", options={"causal": True}),
    Case("causal, head dim 64", head_dim=64, options={"causal": True}),
    Case("bf16, 4 key heads", torch.bfloat16, (16, 4), options={"causal": True}),
    Case("window of 64 keys", options={"causal": True, "window": (63, 0)}),
    Case("packed sequences", options={"causal": True}, lengths=(0.5, 0.125, 0.0, 0.375)),
)


class Row(NamedTuple):
    """What the table says of a case; times in milliseconds, None where there is nothing to say.

    Speed is not compared on a CPU, where no kernel of this package runs.
    """

    title: str
    error: float
    torch_error: float
    exact: bool
    milliseconds: float
    tflops: float | None
    flash_milliseconds: float | None


def main() -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    length = LENGTH[device.type]
    print(f"cute_attn {cute_attn.__version__}, torch {torch.__version__}")
    print(f"{_what_runs(device)}; {length} queries and keys\n")
    rows = [run(case, length, device) for case in CASES]
    print(table(rows))
    wrong = [row.title for row in rows if not row.exact]
    print(f"\nwrong: {', '.join(wrong)}" if wrong else "\nall within twice the error of torch in the same dtype")
    if device.type == "cpu":
        print(f"no GPU is needed to compile a kernel and look at it: {sys.executable} -m cute_attn inspect --help")
    return 1 if wrong else 0


def _what_runs(device: torch.device) -> str:
    if device.type == "cpu":
        return "no CUDA device: the reference path on the CPU, which is slow"
    arch = arch_of(torch.cuda.get_device_capability(device))
    tilings = ", ".join(f"{default_config(arch, d, d).name} at head dim {d}" for d in (64, 128))
    return f"kernels for {arch.gpu_arch} on {torch.cuda.get_device_name(device)}: {tilings}"


def run(case: Case, length: int, device: torch.device) -> Row:
    """Runs a case, checks it against float64 and times it."""
    q, k, v = _inputs(case, length, device)
    options = dict(case.options)
    if case.lengths:
        bounds = [0]
        for share in case.lengths:
            bounds.append(bounds[-1] + round(share * length))
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
        options |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}

    out = _tensor(cute_attn.attention(q, k, v, **options))
    expected = _tensor(reference.attention(q, k, v, **options, precision=reference.FLOAT64))
    rounded = _tensor(reference.attention(q, k, v, **options, precision=reference.Precision(case.dtype)))
    error, torch_error = _distance(out, expected), _distance(rounded, expected)
    ulps = ALLOWED_ULPS * torch.finfo(case.dtype).eps * expected.abs().max().item()

    milliseconds = _median_milliseconds(lambda: cute_attn.attention(q, k, v, **options), device)
    flash = _flash_attention_2(case, q, k, v)
    return Row(
        title=case.title,
        error=error,
        torch_error=torch_error,
        exact=error <= ALLOWED_RATIO * torch_error + ulps,  # false for NaN
        milliseconds=milliseconds,
        tflops=_flops(case, length) / milliseconds * 1e-9 if device.type == "cuda" else None,
        flash_milliseconds=_median_milliseconds(flash, device) if flash else None,
    )


def _inputs(case: Case, length: int, device: torch.device) -> tuple[Tensor, ...]:
    generator = torch.Generator(device).manual_seed(0)
    heads, kv_heads = case.heads

    def normal(heads: int) -> Tensor:
        shape = (length, heads, case.head_dim) if case.lengths else (1, heads, length, case.head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(case.dtype)

    return normal(heads), normal(kv_heads), normal(kv_heads)


def _tensor(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """``out`` of a call that does not ask for the log-sum-exp."""
    assert isinstance(result, Tensor)
    return result


def _distance(out: Tensor, expected: Tensor) -> float:
    return (out.double() - expected).abs().max().item()


def _flops(case: Case, length: int) -> float:
    """Two matrix products over the pairs of query and key that see each other."""
    left, right = window_widths(case.options.get("causal", False), case.options.get("window"))
    pairs = 0
    for share in case.lengths or (1.0,):
        positions = torch.arange(round(share * length))
        pairs += int(reference.visible_keys(positions, positions, left, right).sum())
    return 4.0 * case.heads[0] * case.head_dim * pairs


def _flash_attention_2(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor] | None:
    """The same work by torch's FlashAttention-2; None where it cannot do it."""
    if q.device.type != "cuda" or case.lengths or "window" in case.options:
        return None
    causal, grouped = case.options.get("causal", False), case.heads[0] != case.heads[1]

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return call


def _median_milliseconds(call: Callable[[], object], device: torch.device) -> float:
    call()
    return statistics.median(_milliseconds(call, device) for _ in range(REPEATS[device.type]))


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def table(rows: list[Row]) -> str:
    """The rows as aligned text."""
    cells = [HEADER, *(_cells(row) for row in rows)]
    if all(row.tflops is None for row in rows):
        cells = [line[: HEADER.index(SPEED)] for line in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]).rstrip()
        for line in cells
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _cells(row: Row) -> tuple[str, ...]:
    flash = row.flash_milliseconds or math.nan
    return (
        row.title,
        f"{row.error:.1e}",
        f"{row.torch_error:.1e}",
        "ok" if row.exact else "WRONG",
        f"{row.milliseconds:.3f}",
        "-" if row.tflops is None else f"{row.tflops:.3g}",
        *(("-", "-") if row.flash_milliseconds is None else (f"{flash:.3f}", f"{flash / row.milliseconds:.2f}x")),
    )


if __name__ == "__main__":
    sys.exit(main())
