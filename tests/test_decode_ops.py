"""Decode's torch ops as torch sees them: checked by ``opcheck``, fake, compiled, exported, and intercepted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import cute_attn
from cute_attn import ContiguousCache, PagedCache, decode_launch, decode_ops
from cute_attn.decode_ops import CacheParts
from cute_attn.decode_options import DecodeOptions
from tests import decode_cases as cases
from tests.decode_cases import call, contiguous, lengths, normal, paged

OPS = {name: getattr(torch.ops.cute_attn, name).default for name in decode_ops.SCHEMAS}
OPTIONS: dict[str, DecodeOptions] = {
    "plain": DecodeOptions(),
    "all": DecodeOptions(5, 0.3, 2.0, cases.sinks(), num_splits=3),
    "split size": DecodeOptions(split_size=64),
}


def op_arguments(inputs: str, options: DecodeOptions) -> tuple[Any, ...]:
    arguments = cases.INPUTS[inputs]()
    cache = arguments["cache"]
    return arguments["q"], cache.k, cache.v, arguments["lengths"], *CacheParts.of(cache), *options


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("inputs", ["contiguous", "paged", "two tables", "int8", "scales on the device", "one query"])
@pytest.mark.parametrize("options", OPTIONS)
def test_opcheck(op: str, inputs: str, options: str) -> None:
    arguments = op_arguments(inputs, OPTIONS[options])
    if "out" in op:
        arguments = (*arguments[:4], torch.empty_like(arguments[0]), *arguments[4:])
    torch.library.opcheck(OPS[op], arguments)


def test_opcheck_merge() -> None:
    outs, lses = [normal(3, 4, 16), normal(3, 4, 17)[..., :16]], [normal(3, 4).float(), normal(4, 3).float().T]
    torch.library.opcheck(torch.ops.cute_attn.merge.default, (outs, lses))


def test_schema_names_the_cache_and_the_options() -> None:
    arguments = OPS["decode"]._schema.arguments
    assert [argument.name for argument in arguments[:4]] == ["q", "k", "v", "lengths"]
    assert [argument.name for argument in arguments[4:]] == [*CacheParts._fields, *DecodeOptions._fields]
    assert [argument.default_value for argument in arguments[4:]] == [*CacheParts(), *DecodeOptions()]


class TestFake:
    """Fake CUDA tensors, on a machine with or without a GPU."""

    @pytest.fixture(autouse=True)
    def _mode(self) -> Iterator[None]:
        with FakeTensorMode():
            yield

    @staticmethod
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    def test_contiguous(self) -> None:
        q, k = self.empty(2, 3, 8, 64), self.empty(2, 100, 2, 64)
        counts = self.empty(2, dtype=torch.int32)
        out, lse = cute_attn.decode(q, ContiguousCache(k, k), counts, window=9, return_lse=True)
        assert (out.shape, out.dtype, out.device.type) == ((2, 3, 8, 64), torch.bfloat16, "cuda")
        assert out.is_contiguous()
        assert (lse.shape, lse.dtype, lse.device.type) == ((2, 3, 8), torch.float32, "cuda")
        into = torch.empty_like(out)
        assert cute_attn.decode(q, ContiguousCache(k, k), counts, out=into) is into

    @pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
    def test_paged(self, dtype: torch.dtype) -> None:
        q, pool = self.empty(2, 8, 64), self.empty(50, 16, 2, 64, dtype=dtype)
        counts, scale = self.empty(2, dtype=torch.int32), self.empty(1, dtype=torch.float32)
        for table in (self.empty(2, 7, dtype=torch.int32), self.empty(2, 2, 7, dtype=torch.int32)):
            out, lse = cute_attn.decode(q, PagedCache(pool, pool, table, (scale, 0.5)), counts, return_lse=True)
            assert out.shape == (2, 8, 64)
            assert lse.shape == (2, 8)

    def test_merge(self) -> None:
        out, lse = cute_attn.merge([self.empty(2, 8, 64)] * 2, [self.empty(2, 8, dtype=torch.float32)] * 2)
        assert (out.shape, out.dtype) == ((2, 8, 64), torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((2, 8), torch.float32)

    def test_wrong_arguments_are_named(self) -> None:
        q, k, counts = self.empty(2, 3, 8, 64), self.empty(2, 100, 2, 64), self.empty(2, dtype=torch.int32)
        with pytest.raises(ValueError, match=r"q: head_dim is 32; allowed: 64, that of the cache"):
            cute_attn.decode(self.empty(2, 3, 8, 32), ContiguousCache(k, k), counts)
        with pytest.raises(ValueError, match=r"lengths: length is 3; allowed: 2, the batch of q"):
            cute_attn.decode(q, ContiguousCache(k, k), self.empty(3, dtype=torch.int32))


def test_meta_tensors() -> None:
    q = torch.empty(2, 3, 8, 64, dtype=torch.float16, device="meta")
    k = torch.empty(2, 100, 2, 64, dtype=torch.float16, device="meta")
    counts = torch.empty(2, dtype=torch.int32, device="meta")
    assert cute_attn.decode(q, ContiguousCache(k, k), counts).device.type == "meta"


def sized(batch: int, q_len: int, capacity: int) -> tuple[Tensor, ...]:
    """q, k, v and lengths; sizes all differ, because torch.compile takes sizes that start out equal for one size."""
    q = normal(batch, q_len, 4, 16)
    k, v = normal(batch, capacity, 2, 16), normal(batch, capacity, 2, 17)[..., :16].contiguous()
    return q, k, v, torch.arange(batch, dtype=torch.int32) + capacity - batch


def pages(batch: int, columns: int, pool: int) -> tuple[Tensor, ...]:
    """q, k, v, lengths and a page table."""
    k, v = normal(pool, 8, 2, 16), normal(pool, 8, 2, 32)[..., :16].contiguous()
    table = torch.randint(0, pool, (batch, columns), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    return normal(batch, 4, 16), k, v, torch.arange(batch, dtype=torch.int32) + columns * 8 - batch, table


def into_new_tensor(q: Tensor, k: Tensor, v: Tensor, counts: Tensor) -> Any:
    out = torch.zeros(q.shape, dtype=q.dtype)
    return cute_attn.decode(q, ContiguousCache(k, v), counts, out=out, return_lse=True)


def partial_results(q: Tensor, k: Tensor, v: Tensor, counts: Tensor) -> Any:
    parts = [cute_attn.decode(q, ContiguousCache(k, v), counts - i, return_lse=True) for i in range(2)]
    return cute_attn.merge([out for out, _ in parts], [lse for _, lse in parts])


def under_autocast(q: Tensor, k: Tensor, v: Tensor, counts: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return cute_attn.decode(q.float(), ContiguousCache(k, v), counts)


SIZED = [sized(*sizes) for sizes in ((3, 5, 20), (4, 2, 31), (6, 9, 130))]
PAGED = [pages(*sizes) for sizes in ((3, 5, 20), (6, 2, 31), (7, 9, 130))]
COMPILED: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "with lse": (lambda q, k, v, n: cute_attn.decode(2 * q, ContiguousCache(k, v), n, return_lse=True), SIZED),
    "all options": (
        lambda q, k, v, n: cute_attn.decode(
            q, ContiguousCache(k, v), n, window=5, scale=0.3, softcap=2.0, sinks=cases.sinks(), num_splits=2
        ),
        SIZED,
    ),
    "cache from outside": (
        lambda q, cache, n: cute_attn.decode(q, cache, n) + 1,
        [(q, ContiguousCache(k, v), n) for q, k, v, n in SIZED],
    ),
    "paged": (lambda q, k, v, n, table: cute_attn.decode(q, PagedCache(k, v, table), n), PAGED),
    "paged cache from outside": (
        lambda q, cache, n: cute_attn.decode(q, cache, n, split_size=64) + 1,
        [(q, PagedCache(k, v, table), n) for q, k, v, n, table in PAGED],
    ),
    "quantised": (
        lambda q, k, v, n, table: cute_attn.decode(
            q, PagedCache(k.to(torch.int8), v.to(torch.int8), table, (0.5, torch.full((1,), 0.25))), n
        ),
        PAGED,
    ),
    "changing window": (
        lambda q, k, v, n, window: cute_attn.decode(q, ContiguousCache(k, v), n, window=window),
        [(*tensors, window) for tensors, window in zip(SIZED, (2, 3, 50), strict=True)],
    ),
    "out": (into_new_tensor, SIZED),
    "merge": (partial_results, SIZED),
    "autocast": (under_autocast, SIZED),
}


@pytest.mark.parametrize("case", COMPILED)
def test_one_compile_serves_all_sizes(case: str) -> None:
    function, arguments = COMPILED[case]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for values in arguments:
        torch.testing.assert_close(compiled(*values), function(*values), rtol=0, atol=0)
    assert counter.frame_count == 1


def test_compiled_wrong_arguments_are_named() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(cute_attn.decode, backend="aot_eager")
    with pytest.raises(Exception, match=r"q: head_dim is 8; allowed: 16, that of the cache"):
        compiled(normal(3, 2, 4, 8), contiguous(), lengths())


class Decode(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        return cute_attn.decode(q, ContiguousCache(k, v), counts, return_lse=True)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    batch, q_len, capacity = (torch.export.Dim(name) for name in ("batch", "q_len", "capacity"))
    shapes = ({0: batch, 1: q_len}, {0: batch, 1: capacity}, {0: batch, 1: capacity}, {0: batch})
    exported = torch.export.export(Decode(), SIZED[0], dynamic_shapes=shapes, strict=strict)
    targets = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert torch.ops.cute_attn.decode_lse.default in targets
    torch.testing.assert_close(exported.module()(*SIZED[2]), Decode()(*SIZED[2]))


def test_make_fx_records_the_op() -> None:
    cache = contiguous()
    graph = make_fx(lambda q, n: cute_attn.decode(q, cache, n))(normal(3, 2, 4, 16), lengths()).graph
    assert OPS["decode"] in [node.target for node in graph.nodes if node.op == "call_function"]


def test_vmap() -> None:
    cache, n = contiguous(), lengths()
    q = torch.stack([normal(3, 2, 4, 16), normal(3, 2, 4, 16) + 1])
    expected = torch.stack([cute_attn.decode(one, cache, n) for one in q])
    assert torch.equal(torch.vmap(lambda x: cute_attn.decode(x, cache, n))(q), expected)


def test_vmap_over_the_cache() -> None:
    q, n = normal(3, 2, 4, 16), lengths()
    k = torch.stack([contiguous().k, contiguous().v])
    expected = torch.stack([cute_attn.decode(q, ContiguousCache(x, x), n) for x in k])
    assert torch.equal(torch.vmap(lambda x: cute_attn.decode(q, ContiguousCache(x, x), n))(k), expected)


def total(q: Tensor) -> Tensor:
    return cute_attn.decode(q, contiguous(), lengths()).float().sum()


def test_derivatives_are_refused() -> None:
    q = normal(3, 2, 4, 16)
    with pytest.raises(ValueError, match=r"q: requires_grad is True; allowed: False"):
        torch.func.grad(total)(q)
    with pytest.raises(ValueError, match=r"q: its tangent is a tensor; allowed: None"):
        torch.func.jvp(total, (q,), (q,))
    with forward_ad.dual_level(), pytest.raises(ValueError, match=r"q: its tangent is a tensor"):
        total(forward_ad.make_dual(q, q))


def test_plain_cuda_calls_skip_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def directly(*arguments: Any) -> tuple[str, None]:
        calls.append(arguments)
        return "out", None

    monkeypatch.setattr(decode_launch, "decode_directly", directly)
    arguments = call(paged())
    assert cute_attn.decode(**arguments, window=4, scale=0.5) == "out"
    q, cache, counts = arguments.values()
    assert calls == [(q, cache, counts, (4, 0.5, 0.0, None, 0, 0, None), None, False)]


def test_cpu_tensors_go_through_the_dispatcher() -> None:
    assert not decode_launch.dispatches_to_kernel(normal(3, 2, 4, 16), contiguous())


def test_a_page_beyond_the_pool_is_refused_on_a_cpu() -> None:
    cache = paged()
    wrong = cute_attn.PagedCache(cache.k, cache.v, torch.full_like(cache.page_table, 99), cache.scale)
    arguments = {**call(cache), "cache": wrong}
    with pytest.raises(ValueError, match=r"page_table: page 0 of sequence . is 99; allowed: 0 to"):
        cute_attn.decode(**arguments)
