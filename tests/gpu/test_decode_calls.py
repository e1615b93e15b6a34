"""How decode calls meet the rest of torch: streams, devices, graphs, torch.compile; and their time on the host."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import cute_attn
from benchmarks.timing import host_median_us
from cute_attn import ContiguousCache, PagedCache, decode, decode_ops, reference, workspace
from cute_attn.decode_ops import CacheParts
from cute_attn.decode_options import DecodeOptions
from tests.gpu.decode_cases import DecodeCase, plain
from tests.gpu.decode_check import FLOAT32, assert_semaphores_are_zero

CORE = DecodeCase(plain(128, "float16"))
CORE_LSE = DecodeCase(plain(128, "float16", return_lse=True))
PAGED_LSE = DecodeCase(plain(128, "float16", page_size=64, return_lse=True))
SLEEP_CYCLES = 50_000_000  # some 30 milliseconds: anything that does not wait for it comes too early
MAX_HOST_US = 20.0  # the handed case's bound; benchmarks/results/host.json holds the figure that counts


def half(*shape: int, device: str = "cuda") -> torch.Tensor:
    return torch.randn(shape, device=device).half()


def ints(*values: int, device: str = "cuda") -> torch.Tensor:
    return torch.tensor(values, device=device, dtype=torch.int32)


def contiguous(batch: int = 2, capacity: int = 3000, device: str = "cuda") -> ContiguousCache:
    return ContiguousCache(half(batch, capacity, 2, 128, device=device), half(batch, capacity, 2, 128, device=device))


def paged(batch: int, columns: int) -> PagedCache:
    table = torch.randperm(batch * columns, device="cuda").to(torch.int32).view(batch, columns)
    return PagedCache(half(batch * columns, 64, 2, 128), half(batch * columns, 64, 2, 128), table)


def assert_right(out: torch.Tensor, q: torch.Tensor, cache: Any, lengths: torch.Tensor) -> None:
    expected = reference.decode(q, cache, lengths, precision=FLOAT32)
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=1e-3)


@pytest.mark.kernels(CORE)
def test_current_stream() -> None:
    q, cache, lengths = half(2, 1, 8, 128), contiguous(), ints(3000, 100)
    decode(q, cache, lengths, num_splits=4)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        q.normal_()
        cache.k.normal_()
        out = decode(q, cache, lengths, num_splits=4)
    side.synchronize()
    assert_right(out, q, cache, lengths)


@pytest.mark.kernels(CORE)
def test_streams_at_one_time() -> None:
    """Each has semaphores of its own: 200 launches on 4 streams, none of which waits for another."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    inputs = [(half(4, 1, 8, 128), contiguous(4), ints(3000, 700, 64, 1)) for _ in streams]
    expected = [decode(*one, num_splits=16) for one in inputs]
    torch.cuda.synchronize()
    outs: list[list[torch.Tensor]] = [[] for _ in streams]
    for _ in range(50):
        for stream, one, results in zip(streams, inputs, outs, strict=True):
            with torch.cuda.stream(stream):
                results.append(decode(*one, num_splits=16))
    torch.cuda.synchronize()
    for results, right in zip(outs, expected, strict=True):
        assert all(torch.equal(out, right) for out in results)
    assert_semaphores_are_zero()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.kernels(CORE)
def test_tensors_on_another_device_than_the_current_one() -> None:
    q, cache, lengths = half(2, 1, 8, 128, device="cuda:1"), contiguous(device="cuda:1"), ints(3000, 5, device="cuda:1")
    out = decode(q, cache, lengths, num_splits=4)
    assert torch.cuda.current_device() == 0
    assert out.device == q.device
    assert_right(out, q, cache, lengths)


@pytest.mark.kernels(PAGED_LSE)
def test_graph_replays_with_changing_lengths() -> None:
    """100 replays; after each every semaphore is zero again."""
    batch, columns = 4, 40
    q, cache, lengths = half(batch, 1, 8, 128), paged(batch, columns), ints(1, 2, 3, 4)
    decode(q, cache, lengths, return_lse=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = decode(q, cache, lengths, return_lse=True)
    rng = random.Random(0)
    for _ in range(100):
        q.normal_()
        lengths.copy_(ints(*(rng.choice((0, 1, 64, 65, rng.randint(0, 64 * columns))) for _ in range(batch))))
        cache.page_table.copy_(torch.randperm(batch * columns).view(batch, columns))
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        eager_out, eager_lse = decode(q, cache, lengths, return_lse=True)
        assert torch.equal(out, eager_out)
        assert torch.equal(lse, eager_lse)
        assert_semaphores_are_zero()


@pytest.mark.parametrize("batch", [*range(1, 10), 32])
@pytest.mark.kernels(CORE)
def test_graphs_of_every_batch_with_poisoned_partial_results(batch: int) -> None:
    q, cache = half(batch, 1, 8, 128), contiguous(batch, 2000)
    lengths = ints(*(1 + 617 * i % 2000 for i in range(batch)))
    expected = decode(q, cache, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(q, cache, lengths)
    for kept in workspace._streams.values():
        kept.space.partials.fill_(float("nan"))
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.kernels(CORE)
def test_a_graph_survives_the_workspace_growing() -> None:
    q, cache, lengths = half(1, 1, 8, 128), contiguous(1), ints(2999)
    expected = decode(q, cache, lengths, num_splits=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(q, cache, lengths, num_splits=4)
    large = half(64, 1, 8, 128), contiguous(64, 4000), ints(*[4000] * 64)
    decode(*large, num_splits=60)
    filler = [torch.full((2**20,), float("nan"), device="cuda") for _ in range(50)]  # over whatever was freed
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
    del filler


@pytest.mark.kernels(CORE)
def test_graphs_replayed_at_one_time_beside_eager_calls() -> None:
    inputs = [(half(2, 1, 8, 128), contiguous(2), ints(3000, 900 + i)) for i in range(3)]
    expected = [decode(*one, num_splits=16) for one in inputs]
    graphs, outs = [], []
    for one in inputs[:2]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append([decode(*one, num_splits=16) for _ in range(8)])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    eager = []
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            eager.append(decode(*inputs[2], num_splits=16))
    torch.cuda.synchronize()
    for results, right in zip(outs, expected, strict=False):
        assert all(torch.equal(out, right) for out in results)
    assert all(torch.equal(out, expected[2]) for out in eager)
    assert_semaphores_are_zero()


def test_cold_call_in_a_capture_says_what_to_do() -> None:
    k = half(1, 100, 1, 208)  # a head dim that no other test uses without pages
    cache, lengths = ContiguousCache(k, k), ints(100)
    q = k[:, :1]
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="warmup_decode"):
        decode(q, cache, lengths, softcap=3.0)


@pytest.mark.kernels(DecodeCase(plain(96, "float16", page_size=16, bounded_left=True), group=4))
def test_capture_after_warmup() -> None:
    names = cute_attn.warmup_decode(96, dtypes=[torch.float16], page_size=16, window=True, rows=4)
    assert len(names) == 1
    k = half(9, 16, 2, 96)
    cache, lengths = PagedCache(k, k.clone(), ints(*range(9)).view(1, 9)), ints(140)
    q = half(1, 1, 8, 96)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(q, cache, lengths, window=100)
    graph.replay()
    assert torch.equal(out, decode(q, cache, lengths, window=100))


@pytest.mark.parametrize("op", decode_ops.SCHEMAS)
@pytest.mark.kernels(CORE, CORE_LSE)
def test_opcheck(op: str) -> None:
    q, cache = half(2, 1, 8, 128), contiguous(2, 100)
    arguments: tuple[Any, ...] = (q, cache.k, cache.v, ints(100, 3))
    if "out" in op:
        arguments = (*arguments, torch.empty_like(q))
    arguments = (*arguments, *CacheParts.of(cache), *DecodeOptions())
    torch.library.opcheck(getattr(torch.ops.cute_attn, op).default, arguments)


@pytest.mark.hang_after(180)
@pytest.mark.kernels(PAGED_LSE)
def test_torch_compile_compiles_once_for_all_sizes() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    def model(q: torch.Tensor, cache: PagedCache, lengths: torch.Tensor) -> torch.Tensor:
        out, lse = decode(2 * q, cache, lengths, return_lse=True)
        return out * lse.sigmoid().unsqueeze(-1).to(out.dtype) + 1

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for batch, columns in ((3, 5), (4, 7), (6, 11)):
        arguments = half(batch, 1, 8, 128), paged(batch, columns), ints(*(64 * columns - i for i in range(batch)))
        torch.testing.assert_close(compiled(*arguments), model(*arguments), rtol=1e-2, atol=1e-2)
    assert counter.frame_count == 1


@pytest.mark.hang_after(180)
@pytest.mark.kernels(CORE)
def test_torch_compile_with_cuda_graphs() -> None:
    """mode="reduce-overhead" captures the op, and replays it with new lengths."""
    q, cache, lengths = half(2, 1, 8, 128), contiguous(2, 2000), ints(2000, 1)
    compiled = torch.compile(lambda q, n: decode(q * 1, cache, n) + 0, mode="reduce-overhead")
    for step in range(6):
        lengths.copy_(ints(2000 - 300 * step, 1 + 100 * step))
        assert_right(compiled(q, lengths).clone(), q, cache, lengths)
    assert_semaphores_are_zero()


@pytest.mark.kernels(DecodeCase(plain(128, "bfloat16", "int8")), DecodeCase(plain(128, "bfloat16")))
def test_autocast_and_deterministic_mode() -> None:
    q, lengths = torch.randn(2, 1, 8, 128, device="cuda"), ints(100, 50)
    k = torch.randint(-127, 128, (2, 100, 2, 128), device="cuda")
    caches = [ContiguousCache(k.to(torch.int8), k.to(torch.int8), 0.02), ContiguousCache(*[(k * 0.02).bfloat16()] * 2)]
    torch.use_deterministic_algorithms(True)
    try:
        for cache in caches:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                out = decode(q, cache, lengths)
            assert torch.equal(out, decode(q.bfloat16(), cache, lengths))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.kernels(CORE, DecodeCase(plain(128, "float16", page_size=64)))
def test_agrees_with_torch_sdpa() -> None:
    q, cache = half(4, 1, 8, 128), contiguous(4, 777)
    out = decode(q, cache, ints(*[777] * 4))
    k, v = (x.transpose(1, 2).repeat_interleave(4, dim=1) for x in (cache.k, cache.v))
    expected = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.kernels(CORE, DecodeCase(plain(128, "float16", page_size=64)))
def test_host_time_of_an_eager_call(kind: str) -> None:
    q, lengths = half(1, 1, 8, 128), ints(60)
    cache: Any = contiguous(1, 64) if kind == "contiguous" else paged(1, 4)
    tries = (host_median_us(lambda: decode(q, cache, lengths)) for _ in range(20))
    best = min(tries)
    assert best < MAX_HOST_US, best  # a busy machine slows some of the tries down
