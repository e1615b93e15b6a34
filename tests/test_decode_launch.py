"""The path of a decode call on a GPU, walked with CPU tensors, a made-up device and a kernel that is the reference."""

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
from cute_attn import (
    ContiguousCache,
    PagedCache,
    decode_api,
    decode_launch,
    decode_ops,
    decode_plan,
    reference,
    workspace,
)
from cute_attn.arch import arch_of
from cute_attn.compiler import cache as kernel_cache
from cute_attn.compiler import workers
from cute_attn.decode_configs import DecodeConfig, default_decode_config
from cute_attn.decode_options import DecodeOptions
from cute_attn.decode_problem import DecodeArguments, DecodeProblem
from cute_attn.guards import LatestPlans
from cute_attn.problem import KernelSpec
from tests import decode_cases as cases
from tests.decode_cases import FP8, call, contiguous, lengths, normal, paged

LOG2_E = math.log2(math.e)
STREAM = 17


class ReferenceKernel:
    """What the kernel cache gives for a spec, computed by the reference from ``DecodeArguments``."""

    def __init__(self, spec: KernelSpec) -> None:
        self.problem: Any = spec.problem
        self.config: Any = spec.config
        self.calls: list[DecodeArguments] = []

    def __call__(self, *fields: Any) -> None:
        arguments = DecodeArguments(*fields)
        self.calls.append(arguments)
        self._check(arguments)
        problem = self.problem
        out, lse = reference.decode(
            arguments.q,
            self._cache(arguments),
            arguments.lengths,
            scale=arguments.scale_log2 / LOG2_E,
            window=arguments.window if problem.bounded_left else None,
            softcap=arguments.softcap if problem.softcap else None,
            sinks=arguments.sinks,
            return_lse=True,
        )
        arguments.out.copy_(out)
        if arguments.lse is not None:
            arguments.lse.copy_(lse)
        arguments.partials.fill_(math.nan)

    def _cache(self, arguments: DecodeArguments) -> Any:
        # The host folded what it knew of the scales into scale_log2 and v_factor.
        scale = (arguments.k_scale, arguments.v_factor * arguments.v_scale) if self.problem.quantised else None
        dtype = getattr(torch, self.problem.cache_dtype)
        k, v = arguments.k.view(dtype), arguments.v.view(dtype)
        if self.problem.page_size == 0:
            return ContiguousCache(k, v, scale)
        table = torch.stack([arguments.k_page_table, arguments.v_page_table], dim=1)
        return PagedCache(k, v, table, scale)

    def _check(self, arguments: DecodeArguments) -> None:
        """What a compiled kernel relies on."""
        problem = self.problem
        batch, q_len, heads, head_dim = arguments.q.shape
        assert head_dim == problem.head_dim
        assert arguments.out.shape == arguments.q.shape
        for name in ("q", "k", "v", "out"):
            x = getattr(arguments, name)
            assert x.dtype == (torch.int8 if problem.quantised and name in "kv" else getattr(torch, problem.dtype))
            multiple = 16 // x.element_size()
            assert x.stride(3) == 1
            assert all(stride % multiple == 0 for stride in x.stride()[:3])
            assert x.data_ptr() % 16 == 0
        assert (arguments.lse is not None) == problem.return_lse
        if arguments.lse is not None:
            assert arguments.lse.shape == (batch, q_len, heads)
            assert arguments.lse.is_contiguous()
        assert arguments.lengths.shape == (batch,)
        assert (arguments.k_page_table is not None) == (arguments.v_page_table is not None) == (problem.page_size > 0)
        assert (arguments.sinks is not None) == problem.sinks
        for scale in (arguments.k_scale, arguments.v_scale):
            assert (scale is not None) == problem.quantised
            assert scale is None or (scale.shape == (1,) and scale.dtype == torch.float32)
        assert arguments.scale_log2 >= 2.0**-126
        assert arguments.num_splits >= 1
        rows = heads // arguments.k.shape[2] * q_len
        blocks = -(-rows // self.config.tile_m) * arguments.k.shape[2] * batch
        if arguments.num_splits > 1:
            assert arguments.semaphores.shape[0] >= blocks
            parts = blocks * arguments.num_splits * self.config.partial_elements(head_dim)
            assert arguments.partials.shape[0] >= parts
            assert arguments.partials.data_ptr() % 16 == 0
        assert (arguments.semaphores == 0).all()


class Properties:
    """Of the made-up device."""

    multi_processor_count = 132


class Machine:
    """A machine with one sm_90 device, as far as the path of a call can see."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capability = (9, 0)
        self.capture: int | None = None
        self.devices = 1
        self.current_device = -1  # as CPU tensors call theirs
        self.entered: list[int] = []
        self.kernels: dict[KernelSpec, ReferenceKernel] = {}
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: self.capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capture is not None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: self.devices)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current_device)
        monkeypatch.setattr(torch.cuda, "device", self._device)
        monkeypatch.setattr(kernel_cache, "load", self._load)
        monkeypatch.setattr(decode_launch, "_plans", {})
        monkeypatch.setattr(decode_launch, "latest", LatestPlans())
        monkeypatch.setattr(decode_launch, "_current_stream", lambda device: STREAM)
        monkeypatch.setattr(decode_plan, "_kernels", {})
        monkeypatch.setattr(decode_plan, "_devices", {})
        monkeypatch.setattr(decode_launch, "dispatches_to_kernel", lambda q, cache: True)
        for name in ("_streams", "_arenas", "_captured"):
            monkeypatch.setattr(workspace, name, {})
        monkeypatch.setattr(workspace, "_kept", [])
        monkeypatch.setattr(workspace, "_low", set())
        monkeypatch.setattr(workspace, "_capture_id", lambda stream: self.capture)

    @contextmanager
    def _device(self, device: int) -> Iterator[None]:
        self.entered.append(device)
        yield

    def _load(self, spec: KernelSpec) -> ReferenceKernel:
        return self.kernels.setdefault(spec, ReferenceKernel(spec))

    @property
    def kernel(self) -> ReferenceKernel:
        """The only kernel that was loaded."""
        (kernel,) = self.kernels.values()
        return kernel

    @property
    def arguments(self) -> DecodeArguments:
        """Those of the latest call of the only kernel."""
        return self.kernel.calls[-1]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize("case", cases.ALL)
def test_results(machine: Machine, case: str) -> None:
    arguments = cases.make(case)
    exact, exact_lse = reference.decode(**cases.for_reference(arguments), return_lse=True)
    out, lse = cute_attn.decode(**arguments, return_lse=True)
    torch.testing.assert_close((out, lse), (exact, exact_lse), rtol=2e-3, atol=2e-3)
    assert out.is_contiguous()
    for into in (torch.full_like(exact, math.nan), torch.full_like(exact, math.nan)):
        assert cute_attn.decode(**arguments, out=into) is into
        assert torch.equal(into, out)


def test_ops_come_to_the_same(machine: Machine) -> None:
    """Through torch's dispatcher, which leaves out options that have their default."""
    implementation = decode_ops.Implementation(decode_launch.decode)
    cache = paged(torch.int8, (0.05, torch.tensor(0.04)))
    arguments = call(cache)
    out, lse = cute_attn.decode(**arguments, window=5, return_lse=True)
    q, _, counts = arguments.values()
    rest = (*decode_ops.CacheParts.of(cache), 5)
    assert torch.equal(implementation.decode(q, cache.k, cache.v, counts, *rest), out)
    same = implementation.decode_lse(q, cache.k, cache.v, counts, *rest)
    torch.testing.assert_close(same, (out, lse), rtol=0, atol=0)
    into = torch.empty_like(out)
    implementation.decode_out(q, cache.k, cache.v, counts, into, *rest)
    assert torch.equal(into, out)
    into.zero_()
    same_lse = implementation.decode_out_lse(q, cache.k, cache.v, counts, into, *rest)
    assert same_lse is not None
    assert torch.equal(same_lse, lse)
    assert torch.equal(into, out)


def test_arguments_in_order(machine: Machine) -> None:
    cache = paged(FP8, (0.5, 0.25), two_tables=True)
    arguments, sinks = call(cache), cases.sinks()
    out, lse = cute_attn.decode(
        **arguments, scale=0.125, window=3, softcap=2, sinks=sinks, num_splits=9, return_lse=True
    )
    got = machine.arguments
    assert got.q is arguments["q"]
    assert got.k is cache.k_bits
    assert got.v is cache.v_bits
    assert got.k.data_ptr() == cache.k.data_ptr()
    assert got.out is out
    assert got.lse is lse
    assert got.lengths is arguments["lengths"]
    assert got.k_page_table is cache.k_page_table
    assert got.v_page_table is cache.v_page_table
    assert got.sinks is sinks
    assert got.k_scale == got.v_scale == 1
    assert got.scale_log2 == pytest.approx(0.125 * 0.5 * LOG2_E)
    tiles = -(-cases.CAPACITY // machine.kernel.config.tile_tokens)
    assert got[-5:] == (0.25, 2.0, 3, min(9, tiles), 0)
    assert machine.kernel.problem == DecodeProblem(
        "float16", "float8_e4m3fn", 16, 8, bounded_left=True, softcap=True, sinks=True, return_lse=True
    )


def test_scales_on_host_and_device_come_to_the_same_bits(machine: Machine) -> None:
    """The kernel multiplies as float32: scale_log2 by k_scale, and v_factor by v_scale."""
    for scale in (0.05, 0.3, 1 / 3, 7e-4):
        factors = []
        for k_scale, v_scale in itertools.product((scale, torch.tensor(scale)), repeat=2):
            cute_attn.decode(**call(contiguous(torch.int8, (k_scale, v_scale))), scale=0.37)
            got = machine.arguments
            k_factor = torch.tensor(got.scale_log2) * got.k_scale
            v_factor = torch.tensor(got.v_factor) * got.v_scale
            factors.append((float(k_factor), float(v_factor)))
        assert len(set(factors)) == 1


def test_kernels_get_the_tensors_themselves(machine: Machine) -> None:
    """Views would take longer to make than everything else of a call."""
    for arguments in (call(), call(contiguous(torch.bfloat16), torch.bfloat16)):
        out = cute_attn.decode(**arguments)
        got = list(machine.kernels.values())[-1].calls[-1]
        assert got.out is out
        assert got.q is arguments["q"]
        assert got.k is arguments["cache"].k


def test_one_kernel_serves_all_sizes_and_numbers(machine: Machine) -> None:
    for batch, q_len, heads, capacity in itertools.product((1, 3), (1, 2, 9), (2, 8), (5, 70)):
        k = normal(batch, capacity, 2, 16)
        q, cache = normal(batch, q_len, heads, 16), ContiguousCache(k, k)
        counts = torch.full((batch,), capacity - 1, dtype=torch.int32)
        for options in (
            {"window": 1 + q_len, "scale": 0.1},
            {"window": 3, "num_splits": 2},
            {"window": 5, "split_size": 9},
        ):
            expected = reference.decode(q, cache, counts, scale=options.get("scale"), window=int(options["window"]))
            torch.testing.assert_close(cute_attn.decode(q, cache, counts, **options), expected, rtol=2e-3, atol=2e-3)
    assert len(machine.kernels) == len({spec.config for spec in machine.kernels}), "but for the rows of a tile"


def test_options_choose_kernels(machine: Machine) -> None:
    calls: list[dict[str, Any]] = [
        {},
        {"window": 3},
        {"softcap": 2.0},
        {"sinks": cases.sinks()},
        {"return_lse": True},
        {"config": default_config().name.replace("_s3", "_s2")},
    ]
    others = [
        call(dtype=torch.bfloat16),
        call(paged()),
        call(contiguous(torch.int8)),
        call(contiguous(FP8)),
        call(contiguous(FP8), torch.bfloat16),
    ]
    for _ in range(2):
        for options in calls:
            cute_attn.decode(**call(), **options)
        for arguments in others:
            cute_attn.decode(**arguments)
        assert len(machine.kernels) == len(calls) + len(others)
    assert all(len(kernel.calls) == 2 for kernel in machine.kernels.values())


def test_a_known_call_is_not_planned_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> int:
        for case in cases.ALL:
            arguments = cases.make(case)
            out = cute_attn.decode(**arguments)
            cute_attn.decode(**arguments, out=out)
        return sum(len(kernel.calls) for kernel in machine.kernels.values())

    calls = run()
    monkeypatch.setattr(decode_launch, "make_decode_plan", None)
    assert run() == 2 * calls


def test_plans_are_bounded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_launch, "MAX_PLANS", 3)
    for window in range(1, 8):
        cute_attn.decode(**call(), window=window)
        assert len(decode_launch._plans) <= 3
    assert len(machine.kernel.calls) == 7


def misaligned(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].reshape(x.shape)


@pytest.mark.parametrize("argument", ["q", "out"])
def test_a_known_call_is_still_checked(machine: Machine, argument: str) -> None:
    """Nothing that an earlier call got right may be wrong later."""
    arguments = call() | {"out": normal(3, 2, 4, 16)}
    cute_attn.decode(**arguments)

    def refused(change: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            cute_attn.decode(**(arguments | {argument: change(arguments[argument])}))

    refused(misaligned, f"{argument}: address")
    refused(Tensor.bfloat16, "dtype is torch.float16|dtype is torch.bfloat16")
    refused(lambda x: x[:2], "lengths: length|shape is")
    refused(lambda x: x[..., :8], "head_dim is 8|shape is")
    refused(lambda x: x.mT.contiguous().mT, f"{argument}: stride")
    leaf = arguments[argument].clone().requires_grad_()
    refused(lambda x: leaf, f"{argument}: requires_grad")
    with torch.no_grad():
        cute_attn.decode(**(arguments | {argument: leaf}))
    refused(lambda x: leaf, f"{argument}: requires_grad")


def test_known_options_are_still_checked(machine: Machine) -> None:
    arguments = call() | {"sinks": cases.sinks(), "window": 1, "softcap": 1.0}
    cute_attn.decode(**arguments)
    for changes, message in (
        ({"lengths": lengths().long()}, "lengths: dtype"),
        ({"lengths": lengths(1, 2)}, "lengths: length is 2"),
        ({"sinks": cases.sinks().half()}, "sinks: dtype"),
        ({"sinks": cases.sinks()[:2]}, "sinks: shape"),
        ({"sinks": cases.sinks().requires_grad_()}, "sinks: requires_grad"),
        ({"window": True}, "window: it is True"),
        ({"softcap": True}, "softcap: its type is bool"),
        ({"cache": contiguous(torch.bfloat16)}, "cache: dtype"),
        ({"cache": contiguous(batch=2)}, "cache: batch"),
    ):
        with pytest.raises(ValueError, match=message):
            cute_attn.decode(**(arguments | changes))


def test_a_wrong_call_compiles_nothing(machine: Machine) -> None:
    arguments = call()
    for change in (misaligned, Tensor.float, lambda x: x.mT.contiguous().mT, lambda x: x[0, 0]):
        with pytest.raises(ValueError, match=r"^q: "):
            cute_attn.decode(**(arguments | {"q": change(arguments["q"])}))
    with pytest.raises(ValueError, match=r"^lengths: stride"):
        cute_attn.decode(**(arguments | {"lengths": torch.zeros(6, dtype=torch.int32)[::2]}))
    assert not machine.kernels


def test_a_known_out_may_not_share_memory(machine: Machine) -> None:
    arguments = call()
    cute_attn.decode(**arguments, out=normal(3, 2, 4, 16))
    with pytest.raises(ValueError, match="out: its memory is shared with q"):
        cute_attn.decode(**arguments, out=arguments["q"])


@pytest.mark.parametrize("shape", [(0, 2, 4, 16), (3, 0, 4, 16), (3, 2, 0, 16)])
def test_nothing_to_see_launches_nothing(machine: Machine, shape: tuple[int, ...]) -> None:
    cache = contiguous(batch=shape[0])
    out, lse = cute_attn.decode(normal(*shape), cache, lengths(1, 2, 3)[: shape[0]], return_lse=True)
    assert out.shape == shape
    assert lse.shape == shape[:3]
    assert not machine.kernels


def test_no_capacity_launches_nothing(machine: Machine) -> None:
    none, sinks = normal(3, 0, 2, 16), cases.sinks()
    out, lse = cute_attn.decode(
        normal(3, 2, 4, 16), ContiguousCache(none, none), lengths(0, 0, 0), sinks=sinks, return_lse=True
    )
    assert (out == 0).all()
    assert torch.equal(lse, sinks.expand(3, 2, 4))
    assert not machine.kernels


def default_config() -> DecodeConfig:
    """The one that small fp16 calls get."""
    return default_decode_config(arch_of(90), DecodeProblem("float16", "float16", 16), 2)


class TestSplits:
    def splits(self, machine: Machine, batch: int, capacity: int, **options: Any) -> tuple[int, int]:
        k = normal(1, 1, 2, 16).expand(batch, capacity, 2, 16)
        counts = torch.zeros(batch, dtype=torch.int32)
        cute_attn.decode(normal(batch, 1, 4, 16), ContiguousCache(k, k), counts, **options)
        got = list(machine.kernels.values())[-1].calls[-1]
        return got.num_splits, got.split_size

    def test_chosen_by_shapes(self, machine: Machine) -> None:
        assert self.splits(machine, 1, 1) == (1, 0)
        few, _ = self.splits(machine, 1, 100_000)
        assert few > 32
        assert self.splits(machine, 132, 100_000)[0] < few / 8

    def test_lengths_play_no_part(self, machine: Machine) -> None:
        k = normal(1, 1, 2, 16).expand(2, 10_000, 2, 16)
        chosen = set()
        for counts in ((0, 0), (1, 10_000), (5000, 5000)):
            cute_attn.decode(normal(2, 1, 4, 16), ContiguousCache(k, k), lengths(*counts))
            chosen.add(machine.arguments.num_splits)
        assert len(chosen) == 1

    def test_a_window_counts_as_its_tokens(self, machine: Machine) -> None:
        tile = default_config().tile_tokens
        assert self.splits(machine, 1, 1_000_000, window=tile)[0] <= 2

    def test_by_argument(self, machine: Machine) -> None:
        tile = default_config().tile_tokens
        for wanted in (1, 2, 7):
            assert self.splits(machine, 3, 100 * tile, num_splits=wanted) == (wanted, 0)
        assert self.splits(machine, 3, 3 * tile - 1, num_splits=500) == (3, 0)

    def test_by_size(self, machine: Machine) -> None:
        tile = default_config().tile_tokens
        for size in (1, tile, tile + 1, 5 * tile):
            rounded = -(-size // tile) * tile
            for batch, capacity in ((1, 20 * tile), (7, 33 * tile + 1)):
                assert self.splits(machine, batch, capacity, split_size=size) == (-(-capacity // rounded), rounded)
        assert self.splits(machine, 3, tile, split_size=2**60) == (1, tile)
        assert self.splits(machine, 3, 99 * tile, split_size=tile, window=tile + 1) == (3, tile)

    def test_too_many_are_refused(self, machine: Machine) -> None:
        tile = default_config().tile_tokens
        with pytest.raises(ValueError, match="split_size: it is 1; allowed: at least"):
            self.splits(machine, 1, 70_000 * tile, split_size=1)

    def test_one_split_needs_no_workspace(self, machine: Machine) -> None:
        self.splits(machine, 2, 1)
        assert not workspace._streams
        machine.capture = 3
        self.splits(machine, 2, 1)
        assert not workspace._captured


def test_calls_of_a_stream_share_a_workspace_and_graphs_have_their_own(machine: Machine) -> None:
    arguments = call(ContiguousCache(*(normal(3, 900, 2, 16) for _ in range(2))))

    def semaphores() -> int:
        cute_attn.decode(**arguments, num_splits=3)
        return int(machine.arguments.semaphores.data_ptr())

    eager = semaphores()
    assert semaphores() == eager
    machine.capture = 1
    first = semaphores()
    assert first != eager
    assert semaphores() == first
    machine.capture = 2
    assert semaphores() not in (eager, first)
    machine.capture = None
    assert semaphores() == eager


def test_a_cold_call_in_a_capture_says_what_to_do(machine: Machine) -> None:
    machine.capture = 1
    message = r"decode_fp16_d16-.*-sm_90a is not loaded.*call cute_attn\.warmup_decode\(\.\.\.\) or run the same"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            cute_attn.decode(**call())
    assert not machine.kernels
    machine.capture = None
    cute_attn.decode(**call())
    machine.capture = 1
    cute_attn.decode(**call())
    cute_attn.decode(**(call() | {"q": normal(3, 3, 4, 16)}))


def test_limits(machine: Machine) -> None:
    q, k = normal(1, 1, 1, 16), normal(1, 1, 1, 16)
    many = 65536
    with pytest.raises(ValueError, match="lengths: length is 65536; allowed: at most 65535"):
        cute_attn.decode(
            q.expand(many, 1, 1, 16),
            ContiguousCache(*(k.expand(many, 1, 1, 16),) * 2),
            torch.zeros(many, dtype=torch.int32),
        )
    with pytest.raises(ValueError, match="q: query tokens x heads that share a head of the cache is 16777217; allowed"):
        cute_attn.decode(q.expand(1, 2**24 + 1, 1, 16), ContiguousCache(k, k), lengths(1))


def test_unsupported_device(machine: Machine) -> None:
    machine.capability = (7, 5)
    with pytest.raises(
        ValueError, match=r"q: device is cuda:-1; allowed: a supported GPU, but compute capability 7\.5"
    ):
        cute_attn.decode(**call())


@pytest.mark.parametrize(("devices", "current", "entered"), [(1, -1, []), (2, -1, []), (2, 1, [-1])])
def test_the_device_of_the_tensors_is_entered(machine: Machine, devices: int, current: int, entered: list[int]) -> None:
    machine.devices, machine.current_device = devices, current
    cute_attn.decode(**call())
    assert machine.entered == entered
    assert len(machine.kernel.calls) == 1


class TestWarmup:
    @pytest.fixture(autouse=True)
    def _workers(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prepared: list[KernelSpec] = []
        self.run: list[tuple[decode_plan.DecodeKey, torch.device]] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(workers, "prepare", self.prepared.extend)

    @pytest.fixture
    def recorded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(decode_api, "_run_once", lambda key, device: self.run.append((key, device)))

    @pytest.mark.usefixtures("recorded")
    def test_defaults(self) -> None:
        names = cute_attn.warmup_decode(head_dim=64, rows=4, devices=[0])
        assert [name.split("-")[0] for name in names] == ["decode_bf16_d64", "decode_fp16_d64"]
        assert sorted(spec.name for spec in self.prepared) == names
        assert {device for _, device in self.run} == {torch.device("cuda", 0)}

    @pytest.mark.usefixtures("recorded")
    def test_every_number_of_rows(self) -> None:
        cute_attn.warmup_decode(head_dim=64, dtypes=[torch.float16], devices=0)
        problem = DecodeProblem("float16", "float16", 64)
        assert {spec.config for spec in self.prepared} == {
            default_decode_config(arch_of(90), problem, rows) for rows in range(1, 1000)
        }

    @pytest.mark.usefixtures("recorded")
    def test_everything(self) -> None:
        cute_attn.warmup_decode(
            head_dim=(64, 128), dtypes=[torch.float16], cache_dtypes=[torch.int8, torch.bfloat16, torch.float16],
            page_size=(0, 16), window=(False, True), softcap=True, sinks=(False, True), return_lse=False,
            rows=(4, 32), devices=["cuda:0", 1],
        )  # fmt: skip
        problems = {
            DecodeProblem("float16", kind, dim, size, window, True, sinks, False)
            for kind, dim, size, window, sinks in itertools.product(
                ("int8", "float16"), (64, 128), (0, 16), (False, True), (False, True)
            )
        }
        assert {spec.problem for spec in self.prepared} == problems
        assert {(key.problem, key.device) for key, _ in self.run} == set(itertools.product(problems, range(2)))

    @pytest.mark.parametrize("page_size", [0, 8])
    @pytest.mark.parametrize("flag", [False, True])
    @pytest.mark.parametrize("kind", ["float16", "int8", "float8_e4m3fn"])
    def test_a_capture_can_follow(self, machine: Machine, page_size: int, flag: bool, kind: str) -> None:
        problem = DecodeProblem("float16", kind, 16, page_size, flag, flag, flag, flag)
        decode_api._run_once(
            decode_plan.DecodeKey(problem, default_decode_config(arch_of(90), problem, 4), -1), torch.device("cpu")
        )
        machine.capture = 1
        dtype = getattr(torch, kind)
        arguments: dict[str, Any] = call(paged(dtype) if page_size else contiguous(dtype))
        if flag:
            arguments |= {"window": 3, "softcap": 2.0, "sinks": cases.sinks(), "return_lse": True}
        cute_attn.decode(**arguments)
        assert len(machine.kernel.calls) == 2

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"head_dim": 40}, "head_dim: it is 40; allowed: a multiple of 16 from 16 to 256"),
            (
                {"head_dim": 64, "dtypes": [torch.float32]},
                "dtypes: one of them is torch.float32; allowed: torch.float16",
            ),
            (
                {"head_dim": 64, "cache_dtypes": [torch.uint8]},
                "cache_dtypes: one of them is torch.uint8; allowed: torch.",
            ),
            (
                {"head_dim": 64, "page_size": 12},
                "page_size: it is 12; allowed: 0 (a contiguous cache), or a multiple of 8",
            ),
            ({"head_dim": 64, "rows": 0}, "rows: it is 0; allowed: None, or ints from 1"),
            ({"head_dim": 64, "window": 5}, "window: it is 5; allowed: True or False"),
            ({"head_dim": 64, "sinks": "yes"}, "sinks: it is 'yes'; allowed: True or False"),
            ({"head_dim": 64, "config": "fast"}, "config: it is 'fast'; allowed"),
            ({"head_dim": 64, "devices": ["cpu"]}, "devices: one of them is 'cpu'; allowed: CUDA devices"),
        ],
    )
    @pytest.mark.parametrize("gpu", [True, False])
    def test_wrong_arguments_are_named(
        self, arguments: dict[str, Any], message: str, gpu: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            cute_attn.warmup_decode(**arguments)
        assert message in str(caught.value)
        assert not self.prepared


def test_options_are_in_the_order_that_the_launch_unpacks() -> None:
    assert DecodeOptions._fields == ("window", "scale", "softcap", "sinks", "num_splits", "split_size", "config")
