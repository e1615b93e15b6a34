"""How calls meet the rest of torch: streams, devices, graphs, torch.compile; and their time on the host."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import cute_attn
from benchmarks.timing import host_median_us
from tests.gpu.attend import attend, attend_with_lse, exact
from tests.gpu.cases import Case, plain
from tests.gpu.tensors import cumulative

CAUSAL = Case(plain(64, bounded_right=True))
CAUSAL_LSE = Case(plain(64, bounded_right=True, return_lse=True))
PACKED_LSE = Case(plain(64, bounded_right=True, varlen=True, return_lse=True))
SLEEP_CYCLES = 50_000_000  # some 30 milliseconds: anything that does not wait for it comes too early
MAX_HOST_US = 20.0  # the handed case's bound; benchmarks/results/host.json holds the figure that counts


def normal(*shape: int, device: str = "cuda") -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.float16)


def assert_causal(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    expected = exact(q, k, v, causal=True)
    assert (out.float() - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.kernels(CAUSAL)
def test_current_stream() -> None:
    q, k, v = (torch.zeros(2, 2, 130, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    attend(q, k, v, causal=True)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        for tensor in (q, k, v):
            tensor.normal_()
        out = attend(q, k, v, causal=True)
    side.synchronize()
    assert_causal(out, q, k, v)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.kernels(CAUSAL)
def test_tensors_on_another_device_than_the_current_one() -> None:
    q, k, v = (normal(2, 2, 130, 64, device="cuda:1") for _ in range(3))
    out = attend(q, k, v, causal=True)
    assert torch.cuda.current_device() == 0
    assert out.device == q.device
    assert_causal(out, q, k, v)
    first = [t.to("cuda:0") for t in (q, k, v)]
    assert torch.equal(attend(*first, causal=True).cpu(), out.cpu())


@pytest.mark.parametrize("argument", ["k", "v", "cu_seqlens_k"])
def test_tensors_on_a_cpu_beside_a_gpu_are_refused(argument: str) -> None:
    tensors: dict[str, Any] = {name: normal(9, 1, 64) for name in "qkv"}
    tensors |= {name: cumulative((9,), "cuda") for name in ("cu_seqlens_q", "cu_seqlens_k")}
    with pytest.raises(ValueError, match=rf"{argument}.*device.*cpu"):
        attend(**{**tensors, argument: tensors[argument].cpu()})


@pytest.mark.kernels(CAUSAL)
def test_stride_orders_back_to_back() -> None:
    """One kernel serves all: the strides of one call must not stay in force for the next."""
    dense = [normal(3, 4, 150, 64) for _ in range(3)]
    expected = attend(*dense, causal=True)
    for orders in itertools.product(((0, 1, 2), (0, 2, 1), (2, 1, 0), (1, 0, 2)), repeat=3):
        views = [_stored_in_order(t, order) for t, order in zip(dense, orders, strict=True)]
        assert torch.equal(attend(*views, causal=True), expected)


def _stored_in_order(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The same tensor with its leading dimensions in another order in memory."""
    inverse = sorted(range(3), key=order.__getitem__)
    return tensor.permute(*order, 3).contiguous().permute(*inverse, 3)


@pytest.mark.kernels(CAUSAL_LSE)
def test_graph_replays_with_new_inputs() -> None:
    q, k, v = (normal(2, 4, 300, 64) for _ in range(3))
    attend_with_lse(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend_with_lse(q, k, v, causal=True)
    for _ in range(5):
        for tensor in (q, k, v):
            tensor.normal_()
        out.fill_(float("nan"))
        graph.replay()
        eager_out, eager_lse = attend_with_lse(q, k, v, causal=True)
        assert torch.equal(out, eager_out)
        assert torch.equal(lse, eager_lse)


@pytest.mark.kernels(PACKED_LSE)
def test_graph_replays_with_new_lengths() -> None:
    q, k, v = (normal(600, heads, 64) for heads in (4, 2, 2))
    cu_seqlens = cumulative((100, 200, 300), "cuda")

    def call() -> Any:
        return attend_with_lse(q, k, v, causal=True, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for lengths in ((100, 200, 300), (600, 0, 0), (1, 599, 0), (0, 64, 536)):
        cu_seqlens.copy_(cumulative(lengths, "cuda"))
        out.fill_(float("nan"))
        graph.replay()
        eager_out, eager_lse = call()
        assert torch.equal(out, eager_out)
        assert torch.equal(lse, eager_lse)


def test_cold_call_in_a_capture_says_what_to_do() -> None:
    q, v = normal(1, 1, 16, 24), normal(1, 1, 16, 200)  # head dims that no other test uses
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="warmup"):
        attend(q, q, v)


@pytest.mark.kernels(Case(plain(64, head_dim_v=32)))
def test_capture_after_warmup() -> None:
    q, v = normal(1, 2, 100, 64), normal(1, 2, 100, 32)
    cute_attn.warmup(head_dim=64, head_dim_v=32, dtypes=(torch.float16,), causal=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, q, v)
    graph.replay()
    assert torch.equal(out, attend(q, q, v))


@pytest.mark.parametrize("op", ["prefill", "prefill_lse", "prefill_out", "prefill_out_lse"])
@pytest.mark.kernels(CAUSAL, CAUSAL_LSE)
def test_opcheck(op: str) -> None:
    tensors = [normal(2, 4, 33, 64), normal(2, 2, 50, 64), normal(2, 2, 50, 64)]
    if "out" in op:
        tensors.append(torch.empty_like(tensors[0]))
    torch.library.opcheck(getattr(torch.ops.cute_attn, op).default, (*tensors, 0))


@pytest.mark.hang_after(180)
@pytest.mark.kernels(CAUSAL_LSE)
def test_torch_compile_compiles_once_for_all_lengths() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = attend_with_lse(2 * q, k, v, causal=True)
        return out * lse.exp().unsqueeze(-1).to(out.dtype) + 1

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for batch, q_len, k_len in ((3, 30, 50), (5, 130, 70), (7, 96, 257)):  # no two sizes alike
        q, k, v = normal(batch, 4, q_len, 64) / 8, normal(batch, 2, k_len, 64), normal(batch, 2, k_len, 64)
        torch.testing.assert_close(compiled(q, k, v), model(q, k, v), rtol=1e-2, atol=1e-2)
    assert counter.frame_count == 1


@pytest.mark.kernels(CAUSAL)
def test_autocast_and_deterministic_mode() -> None:
    q, k, v = (torch.randn(1, 2, 100, 64, device="cuda") for _ in range(3))
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autocast("cuda", dtype=torch.float16):
            out = attend(q, k, v, causal=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert out.dtype == torch.float16
    assert_causal(out, q.half(), k.half(), v.half())


@pytest.mark.kernels(CAUSAL)
def test_agrees_with_torch_sdpa() -> None:
    q, k, v = (normal(2, 8, 777, 64) for _ in range(3))
    expected = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attend(q, k, v, causal=True), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.kernels(CAUSAL)
def test_host_time_of_an_eager_call() -> None:
    q, k, v = (normal(1, 1, 16, 64) for _ in range(3))
    tries = (host_median_us(lambda: cute_attn.attention(q, k, v, causal=True)) for _ in range(20))
    assert any(microseconds < MAX_HOST_US for microseconds in tries)  # a busy machine slows some of them down
