"""The path of a call on a GPU, walked with CPU tensors, a made-up device and a kernel that is the reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_attn
from cute_attn import api, launch, ops, plan, reference
from cute_attn.compiler import cache, workers
from cute_attn.guards import LatestPlans
from cute_attn.memory import kernel_strides
from cute_attn.options import Options
from cute_attn.problem import KernelSpec, PrefillArguments, PrefillProblem

LOG2_E = math.log2(math.e)


class ReferenceKernel:
    """What ``cache.load`` gives for a spec, computed by the reference from ``PrefillArguments``."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.calls: list[PrefillArguments] = []

    def __call__(self, *fields: Any) -> None:
        arguments = PrefillArguments(*fields)
        self.calls.append(arguments)
        self._check(arguments)
        problem = self.spec.problem
        out, lse = reference.attention(
            arguments.q,
            arguments.k,
            arguments.v,
            scale=arguments.scale_log2 / LOG2_E,
            window=(
                arguments.window_left if problem.bounded_left else None,
                arguments.window_right if problem.bounded_right else None,
            ),
            cu_seqlens_q=arguments.cu_seqlens_q,
            cu_seqlens_k=arguments.cu_seqlens_k,
            return_lse=True,
            layout="bhsd" if arguments.heads_second else "bshd",
        )
        arguments.out.copy_(out)
        if arguments.lse is not None:
            arguments.lse.copy_(lse)

    def _check(self, arguments: PrefillArguments) -> None:
        """What a compiled kernel relies on."""
        problem = self.spec.problem
        for name in ("q", "k", "v", "out"):
            x = getattr(arguments, name)
            assert x.dtype == getattr(torch, problem.dtype)
            assert x.dim() == (3 if problem.varlen else 4)
            assert x.shape[-1] == (problem.head_dim if name in "qk" else problem.head_dim_v)
            assert kernel_strides(name, x.shape, x.stride()) == x.stride()
            assert x.data_ptr() % 16 == 0
        assert (arguments.lse is not None) == problem.return_lse
        assert (arguments.cu_seqlens_q is not None) == (arguments.cu_seqlens_k is not None) == problem.varlen
        assert arguments.scale_log2 >= 2.0**-126
        length = 0 if problem.varlen else 1 + arguments.heads_second
        assert arguments.window_left <= arguments.k.shape[length]
        assert arguments.window_right <= arguments.q.shape[length]


class Machine:
    """A machine with one sm_90 device, as far as the path of a call can see."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capability = (9, 0)
        self.capturing = False
        self.devices = 1
        self.current_device = -1  # as CPU tensors call theirs
        self.entered: list[int] = []
        self.kernels: dict[KernelSpec, ReferenceKernel] = {}
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: self.capability)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: self.devices)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current_device)
        monkeypatch.setattr(torch.cuda, "device", self._device)
        monkeypatch.setattr(cache, "load", self._load)
        monkeypatch.setattr(launch, "_plans", {})
        monkeypatch.setattr(launch, "latest", LatestPlans())
        monkeypatch.setattr(plan, "_kernels", {})
        monkeypatch.setattr(launch, "dispatches_to_kernel", lambda q, k, v: True)

    @contextmanager
    def _device(self, device: int) -> Iterator[None]:
        self.entered.append(device)
        yield

    def _load(self, spec: KernelSpec) -> ReferenceKernel:
        assert spec not in self.kernels
        return self.kernels.setdefault(spec, ReferenceKernel(spec))

    @property
    def kernel(self) -> ReferenceKernel:
        """The only kernel that was loaded."""
        (kernel,) = self.kernels.values()
        return kernel

    @property
    def arguments(self) -> PrefillArguments:
        """Those of the latest call of the only kernel."""
        return self.kernel.calls[-1]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).half()


def dense(q_len: int = 5, k_len: int = 7) -> dict[str, Any]:
    return {"q": normal(2, 4, q_len, 16), "k": normal(2, 2, k_len, 16), "v": normal(2, 2, k_len, 24)}


def packed(*lengths: int) -> dict[str, Any]:
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    total = sum(lengths)
    tensors = {"q": normal(total, 4, 16), "k": normal(total, 2, 16), "v": normal(total, 2, 24)}
    return tensors | {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}


def swapped(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: x.transpose(1, 2).contiguous() for name, x in arguments.items()} | {"layout": "bshd"}


def views() -> dict[str, Any]:
    """Slices of one buffer, with one sequence whose stride nothing says anything about."""
    q, k, v = normal(1, 9, 3, 4, 16).as_strided((1, 9, 3, 4, 16), (5, 192, 64, 16, 1)).unbind(2)
    return {"q": q, "k": k, "v": v, "layout": "bshd"}


INPUTS = {
    "bhsd": dense,
    "bshd": lambda: swapped(dense()),
    "packed": lambda: packed(3, 0, 6),
    "views": views,
    "contiguous with odd strides": lambda: {
        name: normal(1, 1, 5, 16).as_strided((1, 1, 5, 16), (3, 7, 16, 1)) for name in "qkv"
    },
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "wide window": {"window": (2**40, 2**31)},
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -0.3},
    "zero scale": {"scale": 0.0},
    "vanishing scale": {"scale": -1e-300},
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("options", OPTIONS)
def test_results(machine: Machine, inputs: str, options: str) -> None:
    arguments = INPUTS[inputs]() | OPTIONS[options]
    exact, exact_lse = reference.attention(**arguments, return_lse=True)
    out, lse = cute_attn.attention(**arguments, return_lse=True)
    torch.testing.assert_close((out, lse), (exact, exact_lse), rtol=1e-3, atol=1e-3)
    assert out.is_contiguous()
    for into in (torch.full_like(exact, math.nan), torch.full_like(exact, math.nan)):
        assert cute_attn.attention(**arguments, out=into) is into
        assert torch.equal(into, out)


def test_ops_come_to_the_same(machine: Machine) -> None:
    """Through torch's dispatcher, which leaves out options that have their default."""
    implementation = ops.Implementation(launch.attend)
    q, k, v = dense().values()
    out, lse = cute_attn.attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(implementation.prefill(q, k, v, 0), out)
    torch.testing.assert_close(implementation.prefill_lse(q, k, v, 0, -1), (out, lse), rtol=0, atol=0)
    into = torch.empty_like(out)
    implementation.prefill_out(q, k, v, into, 0)
    assert torch.equal(into, out)
    into.zero_()
    torch.testing.assert_close(implementation.prefill_out_lse(q, k, v, into, *Options(0)), lse, rtol=0, atol=0)
    assert torch.equal(into, out)
    arguments = packed(3, 4)
    expected = cute_attn.attention(**arguments)
    q, k, v = (arguments.pop(name) for name in "qkv")
    assert torch.equal(implementation.prefill(q, k, v, *Options(**arguments)), expected)


def test_arguments_in_order(machine: Machine) -> None:
    arguments = packed(3, 4)
    out, lse = cute_attn.attention(**arguments, window=(2, 3), scale=0.25, return_lse=True)
    assert machine.arguments == PrefillArguments(
        q=arguments["q"],
        k=arguments["k"],
        v=arguments["v"],
        out=out,
        lse=lse,
        cu_seqlens_q=arguments["cu_seqlens_q"],
        cu_seqlens_k=arguments["cu_seqlens_k"],
        scale_log2=0.25 * LOG2_E,
        window_left=2,
        window_right=3,
        heads_second=1,
    )
    assert machine.kernel.spec.problem == PrefillProblem(
        "float16", 16, 24, bounded_left=True, bounded_right=True, varlen=True, return_lse=True
    )
    assert machine.kernel.spec.arch.gpu_arch == "sm_90a"


def test_kernels_get_the_tensors_themselves(machine: Machine) -> None:
    """Views would take longer to make than everything else of a call."""
    for arguments, heads_second in ((dense(), 1), (swapped(dense()), 0)):
        out = cute_attn.attention(**arguments)
        assert machine.arguments.heads_second == heads_second
        assert machine.arguments.out is out
        assert all(getattr(machine.arguments, name) is arguments[name] for name in "qkv")


def test_one_kernel_serves_all_sizes_layouts_and_widths(machine: Machine) -> None:
    for causal, q_len, k_len in itertools.product((False, True), (1, 5, 64), (7, 80)):
        for arguments in (dense(q_len, k_len), swapped(dense(q_len, k_len))):
            expected = reference.attention(**arguments, causal=causal, window=(None, 3), scale=q_len)
            out = cute_attn.attention(**arguments, causal=causal, window=(None, 3), scale=q_len)
            torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
    assert len(machine.kernel.calls) == 24


def test_options_choose_kernels(machine: Machine) -> None:
    q, k, v = dense().values()
    calls: list[dict[str, Any]] = [
        {},
        {"causal": True},
        {"window": (1, None)},
        {"return_lse": True},
        {"config": "seed_64x64_1stage"},
        {"config": cute_attn.PrefillConfig(64, 64)},
    ]
    for options in calls:
        cute_attn.attention(q, k, v, **options)
    cute_attn.attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    cute_attn.attention(q[..., :8], k[..., :8], v)
    cute_attn.attention(q, k, v[..., :8])
    cute_attn.attention(**packed(3, 4))
    assert len(machine.kernels) == len(calls) + 4
    assert all(len(kernel.calls) == 1 for kernel in machine.kernels.values())
    for options in calls:
        cute_attn.attention(q, k, v, **options)
    assert len(machine.kernels) == len(calls) + 4


def test_a_known_call_is_not_planned_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [make() for make in INPUTS.values()]
    for arguments in inputs:
        out = cute_attn.attention(**arguments)
        cute_attn.attention(**arguments, out=out)
    calls = sum(len(kernel.calls) for kernel in machine.kernels.values())
    monkeypatch.setattr(launch, "make_plan", None)
    for arguments in inputs:
        out = cute_attn.attention(**arguments)
        cute_attn.attention(**arguments, out=out)
    assert sum(len(kernel.calls) for kernel in machine.kernels.values()) == 2 * calls


def test_plans_are_bounded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_PLANS", 3)
    for q_len in range(1, 8):
        cute_attn.attention(**dense(q_len))
        assert len(launch._plans) <= 3
    assert len(machine.kernel.calls) == 7


def misaligned(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].reshape(x.shape)


@pytest.mark.parametrize("argument", ["q", "k", "v", "out"])
def test_a_known_call_is_still_checked(machine: Machine, argument: str) -> None:
    """Nothing that an earlier call got right may be wrong later."""
    arguments = dense() | {"out": normal(2, 4, 5, 24)}
    cute_attn.attention(**arguments)

    def refused(change: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            cute_attn.attention(**(arguments | {argument: change(arguments[argument])}))

    refused(misaligned, f"{argument}: address")
    refused(
        Tensor.bfloat16, "dtype is torch.bfloat16; allowed: torch.float16|dtype is torch.float16; allowed: torch.bfl"
    )
    refused(lambda x: x[:, :, 1:], "length is|shape is")
    refused(lambda x: x[..., :8], "head_dim is 8|shape is|head_dim is 16; allowed: 8")
    refused(lambda x: x.mT.contiguous().mT, f"{argument}: stride")
    leaf = arguments[argument].clone().requires_grad_()
    refused(lambda x: leaf, f"{argument}: requires_grad")
    with torch.no_grad():
        cute_attn.attention(**(arguments | {argument: leaf}))
    refused(lambda x: leaf, f"{argument}: requires_grad")


@pytest.mark.parametrize("argument", ["q", "k", "v"])
def test_a_wrong_call_compiles_nothing(machine: Machine, argument: str) -> None:
    arguments = dense()
    for change in (misaligned, Tensor.float, lambda x: x.mT.contiguous().mT, lambda x: x[0]):
        with pytest.raises(ValueError, match=r"^[qkv]: "):
            cute_attn.attention(**(arguments | {argument: change(arguments[argument])}))
    assert not machine.kernels


def test_a_known_out_may_not_share_memory(machine: Machine) -> None:
    q, k, v, out = (normal(2, 4, 5, 16) for _ in range(4))
    cute_attn.attention(q, k, v, out=out)
    with pytest.raises(ValueError, match="out: its memory is shared with k"):
        cute_attn.attention(q, k, v, out=k)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_known_cumulative_lengths_are_still_checked(machine: Machine, name: str) -> None:
    arguments = packed(3, 4)
    cute_attn.attention(**arguments)
    for wrong, message in ((arguments[name].long(), "dtype"), (arguments[name][:2], "length"), (None, "it is None")):
        with pytest.raises(ValueError, match=f"cu_seqlens_.: {message}"):
            cute_attn.attention(**(arguments | {name: wrong}))


@pytest.mark.parametrize(
    ("shape", "k_len"), [((0, 4, 5, 16), 7), ((2, 4, 0, 16), 7), ((2, 0, 5, 16), 7), ((2, 4, 5, 16), 0)]
)
def test_nothing_to_see_launches_nothing(machine: Machine, shape: tuple[int, ...], k_len: int) -> None:
    k = normal(shape[0], 2, k_len, 16)
    out, lse = cute_attn.attention(normal(*shape), k, k, return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert not machine.kernels


def test_no_packed_sequences_launch_nothing(machine: Machine) -> None:
    arguments = packed(4) | {name: torch.zeros(1, dtype=torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    out = normal(4, 4, 24)
    before = out.clone()
    cute_attn.attention(**arguments, out=out)
    assert torch.equal(out, before)
    assert not machine.kernels


def test_packed_sequences_without_keys_write_only_their_rows(machine: Machine) -> None:
    q, k, out = normal(5, 4, 16), normal(0, 2, 16), torch.full((5, 4, 16), math.nan, dtype=torch.float16)
    bounds = (torch.tensor([0, 1, 3], dtype=torch.int32), torch.zeros(3, dtype=torch.int32))
    _, lse = cute_attn.attention(q, k, k, cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1], out=out, return_lse=True)
    assert (out[:3] == 0).all()
    assert out[3:].isnan().all()
    assert (lse[:, :3] == -math.inf).all()
    assert not machine.kernels


def test_a_cold_call_in_a_capture_says_what_to_do(machine: Machine) -> None:
    machine.capturing = True
    message = (
        r"prefill_fp16_d16v24-.*-sm_90a is not loaded.*call cute_attn\.warmup\(\.\.\.\) or run the same attention once"
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            cute_attn.attention(**dense())
    assert not machine.kernels
    machine.capturing = False
    cute_attn.attention(**dense())
    machine.capturing = True
    cute_attn.attention(**dense())
    cute_attn.attention(**dense(9, 11))
    cute_attn.attention(**swapped(dense(3, 4)))


def test_unsupported_device(machine: Machine) -> None:
    machine.capability = (7, 5)
    with pytest.raises(
        ValueError, match=r"q: device is cuda:-1; allowed: a supported GPU, but compute capability 7\.5 is"
    ):
        cute_attn.attention(**dense())


def test_config_that_does_not_fit(machine: Machine) -> None:
    machine.capability = (8, 6)
    x = normal(1, 1, 4, 256)
    with pytest.raises(ValueError, match=r"config: 128x128.* shared memory at head_dim 256 .* is \d+ bytes"):
        cute_attn.attention(x, x, x, config=cute_attn.PrefillConfig(128, 128))
    with pytest.raises(ValueError, match="config: it is 'fast'; allowed"):
        cute_attn.attention(x, x, x, config="fast")
    cute_attn.attention(x, x, x)


@pytest.mark.parametrize(("devices", "current", "entered"), [(1, -1, []), (2, -1, []), (2, 1, [-1])])
def test_the_device_of_the_tensors_is_entered(machine: Machine, devices: int, current: int, entered: list[int]) -> None:
    machine.devices, machine.current_device = devices, current
    cute_attn.attention(**dense())
    assert machine.entered == entered
    assert len(machine.kernel.calls) == 1


class TestWarmup:
    @pytest.fixture(autouse=True)
    def _workers(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prepared: list[KernelSpec] = []
        self.run: list[tuple[plan.KernelKey, torch.device]] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(workers, "prepare", self.prepared.extend)

    @pytest.fixture
    def recorded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(api, "_run_once", lambda key, device: self.run.append((key, device)))

    @pytest.mark.usefixtures("recorded")
    def test_defaults(self) -> None:
        names = cute_attn.warmup(head_dim=64, devices=[0])
        assert [name.split("-")[0] for name in names] == [
            "prefill_bf16_d64",
            "prefill_bf16_d64_right",
            "prefill_fp16_d64",
            "prefill_fp16_d64_right",
        ]
        assert sorted(spec.name for spec in self.prepared) == names
        assert {device for _, device in self.run} == {torch.device("cuda", 0)}
        assert len(self.run) == 4

    @pytest.mark.usefixtures("recorded")
    def test_everything(self) -> None:
        names = cute_attn.warmup(
            head_dim=(64, 128), head_dim_v=32, dtypes=[torch.float16], causal=True, window=(9, 9), varlen=(False, True),
            return_lse=(False, True), config="seed_64x64_1stage", devices=["cuda:0", torch.device("cuda", 1), 2],
        )  # fmt: skip
        problems = {
            PrefillProblem("float16", dim, 32, True, True, varlen, lse)
            for dim, varlen, lse in itertools.product((64, 128), (False, True), (False, True))
        }
        assert {spec.problem for spec in self.prepared} == problems
        assert len(names) == len(self.prepared) == 8
        assert {(key.problem, key.device) for key, _ in self.run} == set(itertools.product(problems, range(3)))

    @pytest.mark.usefixtures("recorded")
    @pytest.mark.parametrize("device", ["cuda:0", torch.device("cuda", 0), 0])
    def test_one_device(self, machine: Machine, device: torch.device | str | int) -> None:
        machine.current_device = 3
        cute_attn.warmup(64, devices=device)
        assert {device.index for _, device in self.run} == {0}

    @pytest.mark.usefixtures("recorded")
    def test_current_device(self, machine: Machine) -> None:
        machine.current_device = 3
        cute_attn.warmup(64)
        assert {device.index for _, device in self.run} == {3}

    @pytest.mark.parametrize("varlen", [False, True])
    @pytest.mark.parametrize("return_lse", [False, True])
    @pytest.mark.parametrize("config", [None, "seed_64x64_1stage"])
    def test_a_capture_can_follow(self, machine: Machine, varlen: bool, return_lse: bool, config: str | None) -> None:
        problem = PrefillProblem("float16", 16, 24, True, True, varlen, return_lse)
        api._run_once(plan.KernelKey(problem, config, -1), torch.device("cpu"))
        machine.capturing = True
        arguments = (packed(3, 4) if varlen else dense()) | {"return_lse": return_lse, "config": config}
        cute_attn.attention(**arguments, causal=True, window=(3, 0))
        assert len(machine.kernel.calls) == 2

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"head_dim": 60}, "head_dim: it is 60; allowed: a multiple of 8 from 8 to 256"),
            ({"head_dim": (64, 0)}, "head_dim: it is 0; allowed: a multiple of 8"),
            ({"head_dim": 64, "head_dim_v": 512}, "head_dim_v: it is 512; allowed: a multiple of 8"),
            (
                {"head_dim": 64, "dtypes": [torch.float32]},
                "dtypes: one of them is torch.float32; allowed: torch.float16",
            ),
            ({"head_dim": 64, "causal": 2}, "causal: it is 2; allowed: True or False"),
            ({"head_dim": 64, "window": 5}, "window: it is 5; allowed: None or"),
            ({"head_dim": 64, "config": "fast"}, "config: it is 'fast'; allowed"),
            ({"head_dim": 64, "varlen": "yes"}, "varlen: it is 'yes'; allowed: True or False"),
            ({"head_dim": 64, "devices": ["cpu"]}, "devices: one of them is 'cpu'; allowed: CUDA devices"),
            ({"head_dim": 64, "devices": ["gpu"]}, "devices: one of them is 'gpu'; allowed: CUDA devices"),
        ],
    )
    @pytest.mark.parametrize("gpu", [True, False])
    def test_wrong_arguments_are_named(
        self, arguments: dict[str, Any], message: str, gpu: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            cute_attn.warmup(**arguments)
        assert message in str(caught.value)
        assert not self.prepared
