"""The torch ops as torch sees them: checked by ``opcheck``, fake, compiled, exported, and intercepted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import cute_attn
from cute_attn import launch, ops
from cute_attn.dispatch import intercepted
from cute_attn.options import Options

Tensors = tuple[Tensor, ...]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).half()


def dense(batch: int = 3, q_len: int = 5, k_len: int = 7) -> Tensors:
    """Sizes all differ, because torch.compile takes sizes that start out equal for one size."""
    return normal(batch, 4, q_len, 16), normal(batch, 2, k_len, 16), normal(batch, 2, k_len, 24)


def packed(*lengths: int) -> Tensors:
    """q, k, v, cu_seqlens of sequences with as many queries as keys."""
    total = sum(lengths)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return normal(total, 4, 16), normal(total, 2, 16), normal(total, 2, 24), cu_seqlens


OPS = {name: getattr(torch.ops.cute_attn, name).default for name in ops.SCHEMAS}
OPTIONS: dict[str, Callable[[], tuple[Tensors, Options]]] = {
    "plain": lambda: (dense(), Options()),
    "window": lambda: (dense(), Options(window_right=1, window_left=2, scale=0.3, config="seed_64x64_1stage")),
    "bshd": lambda: (tuple(x.transpose(1, 2) for x in dense()), Options(layout="bshd")),
    "packed": lambda: (
        packed(3, 0, 4)[:3],
        Options(0, cu_seqlens_q=packed(3, 0, 4)[3], cu_seqlens_k=packed(3, 0, 4)[3]),
    ),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("options", OPTIONS)
def test_opcheck(op: str, options: str) -> None:
    tensors, values = OPTIONS[options]()
    if "out" in op:
        tensors = (*tensors, OPS["prefill"](*tensors, *values))
    torch.library.opcheck(OPS[op], (*tensors, *values))


def test_schema_names_the_options() -> None:
    named = [argument for argument in OPS["prefill"]._schema.arguments if argument.name not in ("q", "k", "v")]
    assert [argument.name for argument in named] == list(Options._fields)
    assert [argument.default_value for argument in named] == list(Options())


class TestFake:
    """Fake CUDA tensors, on a machine with or without a GPU."""

    @pytest.fixture(autouse=True)
    def _mode(self) -> Iterator[None]:
        with FakeTensorMode():
            yield

    @staticmethod
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    def test_dense(self) -> None:
        q, k, v = self.empty(2, 8, 30, 64), self.empty(2, 2, 50, 64), self.empty(2, 2, 50, 32)
        out, lse = cute_attn.attention(q, k, v, causal=True, return_lse=True)
        assert (out.shape, out.dtype, out.device.type) == ((2, 8, 30, 32), torch.bfloat16, "cuda")
        assert out.is_contiguous()
        assert (lse.shape, lse.dtype, lse.device.type) == ((2, 8, 30), torch.float32, "cuda")
        into = torch.empty_like(out)
        assert cute_attn.attention(q, k, v, out=into) is into

    def test_bshd(self) -> None:
        q, k = self.empty(2, 30, 8, 64), self.empty(2, 50, 4, 64)
        out, lse = cute_attn.attention(q, k, k, layout="bshd", return_lse=True)
        assert out.shape == q.shape
        assert out.is_contiguous()
        assert lse.shape == (2, 8, 30)

    def test_packed(self) -> None:
        q, k, bounds = self.empty(30, 8, 64), self.empty(50, 2, 64), self.empty(4, dtype=torch.int32)
        out, lse = cute_attn.attention(q, k, k, cu_seqlens_q=bounds, cu_seqlens_k=bounds, return_lse=True)
        assert out.shape == q.shape
        assert lse.shape == (8, 30)

    def test_wrong_arguments_are_named(self) -> None:
        q, k = self.empty(2, 8, 30, 64), self.empty(2, 2, 50, 64)
        with pytest.raises(ValueError, match=r"k: head_dim is 32; allowed: 64, that of q"):
            cute_attn.attention(q, self.empty(2, 2, 50, 32), k)
        with pytest.raises(ValueError, match=r"v: device is cpu; allowed: cuda:0, that of q"):
            cute_attn.attention(q, k, self.empty(2, 2, 50, 64, device="cpu"))
        with pytest.raises(ValueError, match=r"out: shape is \(2, 8, 30, 32\); allowed: \(2, 8, 30, 64\)"):
            cute_attn.attention(q, k, k, out=self.empty(2, 8, 30, 32))


def test_meta_tensors() -> None:
    q = torch.empty(2, 8, 30, 64, dtype=torch.float16, device="meta")
    assert cute_attn.attention(q, q, q).device.type == "meta"


def into_new_tensor(q: Tensor, k: Tensor, v: Tensor) -> Any:
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    return cute_attn.attention(q, k, v, out=out, return_lse=True)


def under_autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return cute_attn.attention(q.float(), k.float(), v.float())


LENGTHS = ((3, 5, 7), (4, 90, 11), (5, 6, 130))
DENSE = [dense(*lengths) for lengths in LENGTHS]
PACKED = [packed(3, 2), packed(2, 0, 7), packed(1, 1, 1, 9, 4)]
COMPILED: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "causal with lse": (lambda q, k, v: cute_attn.attention(2 * q, k, v, causal=True, return_lse=True), DENSE),
    "all options": (
        lambda q, k, v: cute_attn.attention(q, k, v, window=(5, 1), scale=0.3, config="seed_64x64_1stage"),
        DENSE,
    ),
    "config": (lambda q, k, v: cute_attn.attention(q, k, v, config=cute_attn.PrefillConfig()), DENSE),
    "bshd": (
        lambda *x: cute_attn.attention(*(t.transpose(1, 2) for t in x), layout="bshd", causal=True) + 1,
        DENSE,
    ),
    "changing window": (
        lambda q, k, v, left: cute_attn.attention(q, k, v, window=(left, 0)),
        [(*tensors, left) for tensors, left in zip(DENSE, (2, 3, 50), strict=True)],
    ),
    "packed": (
        lambda q, k, v, bounds, longest: cute_attn.attention(
            q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=longest, max_seqlen_k=longest
        ),
        [(*tensors, longest) for tensors, longest in zip(PACKED, (3, 7, 9), strict=True)],
    ),
    "out": (into_new_tensor, DENSE),
    "out and its input": (
        lambda q, k, v, out: cute_attn.attention(q, k, v, out=out) + out,
        [(*tensors, normal(*tensors[0].shape[:3], 24)) for tensors in DENSE],
    ),
    "qkv": (
        lambda qkv: cute_attn.attention(*qkv.unbind(2), layout="bshd"),
        [(normal(batch + 3, length, 3, 7, 8),) for batch, length, _ in LENGTHS],
    ),
    "autocast": (under_autocast, DENSE),
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
    q, k, v = dense()
    compiled = torch.compile(cute_attn.attention, backend="aot_eager")
    with pytest.raises(Exception, match=r"k: head_dim is 8; allowed: 16, that of q"):
        compiled(q, k[..., :8], v)
    with pytest.raises(Exception, match=r"v: address of its first element is 0x.*; allowed: a multiple of 16"):
        compiled(q, k, torch.cat([v.new_zeros(1), v.flatten()])[1:].view(v.shape))


class Attention(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return cute_attn.attention(q, k, v, causal=True, return_lse=True)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    batch, q_len, k_len = (torch.export.Dim(name) for name in ("batch", "q_len", "k_len"))
    shapes = ({0: batch, 2: q_len}, {0: batch, 2: k_len}, {0: batch, 2: k_len})
    exported = torch.export.export(Attention(), dense(), dynamic_shapes=shapes, strict=strict)
    targets = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert torch.ops.cute_attn.prefill_lse.default in targets
    tensors = dense(5, 90, 33)
    torch.testing.assert_close(exported.module()(*tensors), Attention()(*tensors))


def test_make_fx_records_the_op() -> None:
    graph = make_fx(lambda q, k, v: cute_attn.attention(q, k, v))(*dense()).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [OPS["prefill"]]


def test_vmap() -> None:
    q, k, v = (torch.stack([x, x + 1]) for x in dense())
    expected = torch.stack([cute_attn.attention(*tensors) for tensors in zip(q, k, v, strict=True)])
    assert torch.equal(torch.vmap(cute_attn.attention)(q, k, v), expected)


def total(q: Tensor) -> Tensor:
    return cute_attn.attention(q, *DENSE[0][1:]).float().sum()


TANGENT = r"q: its tangent is a tensor; allowed: None, as attention has no forward-mode derivative"
GRADIENT = r"q: requires_grad is True; allowed: False, as attention has no backward"
DERIVATIVES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "grad": (torch.func.grad(total), GRADIENT),
    "vjp": (lambda q: torch.func.vjp(total, q), GRADIENT),
    "vmap of grad": (lambda q: torch.vmap(torch.func.grad(total))(q[None]), GRADIENT),
    "jvp": (lambda q: torch.func.jvp(total, (q,), (q,)), TANGENT),
    "jacfwd": (torch.func.jacfwd(total), TANGENT),
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_derivatives_are_refused(derivative: str) -> None:
    differentiate, message = DERIVATIVES[derivative]
    with pytest.raises(ValueError, match=message):
        differentiate(DENSE[0][0])


def test_tangents_are_refused() -> None:
    q, k, v = dense()
    with forward_ad.dual_level():
        assert intercepted()
        dual = forward_ad.make_dual(q, q)
        for context in (torch.enable_grad, torch.no_grad):
            with context(), pytest.raises(ValueError, match=TANGENT):
                cute_attn.attention(dual, k, v)
        assert torch.equal(cute_attn.attention(dual.detach(), k, v), cute_attn.attention(q, k, v))
    assert not intercepted()


class OpNames(TorchDispatchMode):
    """Records every op that is called under it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_see_the_op() -> None:
    tensors = dense()
    with OpNames() as mode:
        cute_attn.attention(*tensors)
    assert mode.names[0] == "cute_attn.prefill.default"


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dispatch mode": OpNames,
    "fake tensors": FakeTensorMode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "function mode": lambda: torch.device("meta"),
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_what_intercepts_ops_is_noticed(context: str) -> None:
    with CONTEXTS[context]():
        assert intercepted()
    assert not intercepted()


def test_transforms_and_tracers_are_noticed() -> None:
    def noticed(x: Tensor) -> Tensor:
        assert intercepted()
        return x + 0

    x = torch.ones(2)
    torch.vmap(noticed)(x)
    torch.func.jvp(noticed, (x,), (x,))
    torch.jit.trace(noticed, x, check_trace=False)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_gradient_modes_do_not_intercept(context: Callable[[], AbstractContextManager[Any]]) -> None:
    with context():
        assert not intercepted()


def test_plain_cuda_calls_skip_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def directly(*arguments: Any) -> tuple[str, None]:
        calls.append(arguments)
        return "out", None

    monkeypatch.setattr(launch, "attend_directly", directly)
    q, k, v = dense()
    assert cute_attn.attention(q, k, v, causal=True, window=(4, 9), scale=0.5) == "out"
    assert calls == [(q, k, v, (0, 4, 0.5, "bhsd", None, None, None), None, False)]


def test_cpu_tensors_go_through_the_dispatcher() -> None:
    assert not launch.dispatches_to_kernel(*dense())
