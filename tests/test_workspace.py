"""Which launches share partial results and semaphores, with CPU tensors and made-up streams and captures."""

from __future__ import annotations

import sys

import pytest
import torch

from cute_attn import workspace as module
from cute_attn.workspace import Workspace, semaphores_in_use

DEVICE = torch.device("cpu", 0)


class Machine:
    """Whether a capture is going on, and which."""

    capture: int | None = None


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    for name in ("_streams", "_arenas", "_captured"):
        monkeypatch.setattr(module, name, {})
    monkeypatch.setattr(module, "_kept", [])
    monkeypatch.setattr(module, "_low", set())
    monkeypatch.setattr(module, "ARENA_SEMAPHORES", 100)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: machine.capture is not None)
    monkeypatch.setattr(module, "_capture_id", lambda stream: machine.capture)
    return machine


def workspace(stream: int = 0, partials: int = 10, semaphores: int = 10) -> Workspace:
    return module.workspace(DEVICE, stream, partials, semaphores)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr()


def test_calls_of_one_stream_share(machine: Machine) -> None:
    first = workspace()
    assert workspace() is first
    assert workspace(semaphores=3, partials=0) is first
    assert first.partials.dtype == torch.float32
    assert (first.semaphores == 0).all()
    other = workspace(stream=1)
    assert not same(other.semaphores, first.semaphores)
    assert not same(other.partials, first.partials)
    assert workspace() is first


def test_buffers_grow(machine: Machine) -> None:
    first = workspace()
    larger = workspace(partials=5000)
    assert larger.partials.shape[0] >= 5000
    assert same(larger.semaphores, first.semaphores)
    largest = workspace(semaphores=5000)
    assert largest.semaphores.shape[0] >= 5000
    assert (largest.semaphores == 0).all()
    assert same(largest.partials, larger.partials)
    assert workspace() is largest


def test_a_graph_has_semaphores_of_its_own(machine: Machine) -> None:
    eager = workspace()
    machine.capture = 7
    first, second = workspace(), workspace(semaphores=4)
    assert same(first.semaphores, second.semaphores), "calls of one stream in one graph run one after another"
    assert not same(first.semaphores, eager.semaphores)
    assert not same(first.partials, second.partials), "torch's allocator knows when these are free"
    side = workspace(stream=1)
    machine.capture = 8
    other = workspace()
    places = {x.semaphores.data_ptr() for x in (eager, first, side, other)}
    assert len(places) == 4
    machine.capture = None
    assert workspace() is eager


def test_a_larger_call_in_a_graph_gets_new_semaphores(machine: Machine) -> None:
    workspace()
    machine.capture = 7
    small, large = workspace(semaphores=5), workspace(semaphores=20)
    assert large.semaphores.shape[0] == 20
    assert not same(small.semaphores, large.semaphores)
    assert same(workspace(semaphores=5).semaphores, large.semaphores)
    assert len(semaphores_in_use()) == 3


def test_a_full_arena_is_replaced_before_the_next_capture(machine: Machine) -> None:
    workspace()
    machine.capture = 7
    workspace(semaphores=60)
    machine.capture = 8
    alone = workspace(semaphores=60)  # no room: zeroed in the graph itself
    assert (alone.semaphores == 0).all()
    machine.capture = None
    workspace()  # a call that would need no memory otherwise
    machine.capture = 9
    roomy = workspace(semaphores=60)
    assert roomy.semaphores.untyped_storage().nbytes() == 4 * 100
    assert sum(x.shape[0] == 60 for x in semaphores_in_use()) == 3
    assert all((x == 0).all() for x in semaphores_in_use())


def test_memory_is_of_no_pool_and_no_mode() -> None:
    """Made by another thread: neither the caller's memory pool nor its inference mode reaches it."""
    with torch.inference_mode():
        made = module.lasting(torch.zeros, 5, torch.int32, torch.device("cpu"))
    assert not made.is_inference()
    assert made.tolist() == [0] * 5


def test_a_capture_of_unknown_number_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert len({module._capture_id(0) for _ in range(3)}) == 3


def test_semaphores_of_graphs_start_aligned(machine: Machine) -> None:
    """Kernels refuse a tensor that does not start at a multiple of 16 bytes."""
    workspace()
    for machine.capture in range(3):
        assert workspace(semaphores=5).semaphores.data_ptr() % 16 == 0
