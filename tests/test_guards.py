"""What guards recognise, and what they do not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cute_attn.dispatch import watched
from cute_attn.guards import Guard, LatestPlans, guard_of


def tensors() -> tuple[Tensor, Tensor]:
    return torch.zeros(2, 3, 8, dtype=torch.float16), torch.zeros(4, dtype=torch.int32)


def guard() -> Guard:
    made = guard_of(tensors())
    assert made is not None, "this torch has no guards: every call takes the longer way"
    return made


def test_tensors_of_the_same_kinds_are_recognised() -> None:
    assert guard()(*tensors())
    _, lengths = tensors()
    assert guard()(torch.zeros(3, 3, 8, dtype=torch.float16)[1:], lengths)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "shape": lambda x: x[:1],
    "rank": lambda x: x[0],
    "strides": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "dtype": lambda x: x.bfloat16(),
    "gradient": lambda x: x.clone().requires_grad_(),
    "class": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "device": lambda x: x.to("meta"),
    "lazy negation": torch._neg_view,
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_kinds_are_not(change: str) -> None:
    q, lengths = tensors()
    assert not guard()(CHANGES[change](q), lengths)


def test_a_tensor_given_twice_is_not_recognised() -> None:
    q, _ = tensors()
    made = guard_of((q, q))
    assert made is not None
    assert not made(q, q)


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
        return function(*arguments, **(options or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
        return function(*arguments, **(options or {}))


CONTEXTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
    "function mode": FunctionMode,
    "dispatch mode": DispatchMode,
    "fake tensors": lambda: torch._subclasses.FakeTensorMode(),
    "forward mode": forward_ad.dual_level,
    "profiler": lambda: torch.autograd.profiler.profile(use_kineto=False),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts_are_seen_by_the_guard_or_watched(context: str) -> None:
    made, (q, lengths) = guard(), tensors()
    with CONTEXTS[context]():
        assert watched() or not made(q, lengths)
    assert not watched()
    assert made(q, lengths)


def test_transforms_are_seen() -> None:
    made, (q, lengths) = guard(), tensors()
    seen: list[bool] = []

    def inside(x: Tensor) -> Tensor:
        seen.append(watched() or not made(q, lengths))
        return x

    vmap(inside)(torch.ones(2))
    torch.jit.trace(inside, torch.ones(2), check_trace=False)
    assert seen == [True, True]


class Plan:
    def __init__(self, guard: Guard | None) -> None:
        self.guard = guard


def test_latest_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: LatestPlans[Plan] = LatestPlans()
    one, without = Plan(guard()), Plan(None)
    assert plans.find("kind", tensors()) is None
    plans.keep("kind", tensors(), one)
    plans.keep("other", tensors(), without)
    assert plans.find("kind", tensors()) is one
    assert plans.find("kind", (tensors()[0].bfloat16(), tensors()[1])) is None
    assert plans.find("other", tensors()) is None
    monkeypatch.setattr("cute_attn.guards.MAX_KINDS", 2)
    plans.keep("third", tensors(), one)
    assert plans.find("kind", tensors()) is None
    assert plans.find("third", tensors()) is one


def test_no_plan_is_kept_for_tensors_that_require_a_gradient() -> None:
    plans: LatestPlans[Plan] = LatestPlans()
    leaf = tensors()[0].requires_grad_()
    with torch.no_grad():
        plans.keep("kind", (leaf,), Plan(guard_of((leaf,))))
    assert plans.find("kind", (leaf,)) is None


def test_a_torch_without_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    assert guard_of(tensors()) is None
