"""Recognising a call that is like an earlier one, with one question to torch instead of a dozen about each tensor.

torch's compiled functions recognise their inputs by guards: one call compares the types, dtypes, devices, sizes,
strides and requires_grad of several tensors, and whatever else decides how torch dispatches them (autocast, transforms,
inference mode). They do not see whether gradients are enabled, so no plan is kept for tensors that require one, nor
what ``dispatch.watched`` tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

MAX_KINDS = 4096

Guard = Callable[..., bool]


def guard_of(tensors: Sequence[Tensor]) -> Guard | None:
    """Says whether other tensors, as many, are like these; None where that cannot be asked.

    Tensors given twice are never recognised.
    """
    sizes: list[Any] = [list(x.shape) for x in tensors]
    strides: list[Any] = [list(x.stride()) for x in tensors]
    try:
        guards = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    except (AttributeError, TypeError):  # of another torch
        return None
    check: Guard = guards.check
    return check


class Guarded(Protocol):
    """A plan with a guard for the tensors of the calls that it serves."""

    @property
    def guard(self) -> Guard | None: ...


P = TypeVar("P", bound=Guarded)


class LatestPlans(Generic[P]):
    """The latest plan of each kind of call, a kind being all that is not a tensor."""

    def __init__(self) -> None:
        self._plans: dict[object, P] = {}

    def find(self, kind: object, tensors: Sequence[Tensor]) -> P | None:
        """The kind's latest plan, if it serves these tensors."""
        plan = self._plans.get(kind)
        return plan if plan is not None and plan.guard is not None and plan.guard(*tensors) else None

    def keep(self, kind: object, tensors: Sequence[Tensor], plan: P) -> None:
        """Have a plan that serves the tensors found by the next call of the kind with such ones."""
        if any(x.requires_grad for x in tensors):
            return
        if len(self._plans) >= MAX_KINDS:
            self._plans.clear()
        self._plans[kind] = plan

    def clear(self) -> None:
        self._plans.clear()
