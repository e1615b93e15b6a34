"""Attention of CUDA tensors, written to be quick: what the host does here delays every small call.

A call's plan depends on its options and the kinds of its tensors. A call like the latest one with its options is
recognised by a guard, any other by its signature; what is left are the checks of what neither says (addresses), the
allocation of the results, and the launch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from cute_attn.call import Call, guarded_tensors
from cute_attn.checks import check_no_gradient
from cute_attn.dispatch import intercepted
from cute_attn.guards import LatestPlans
from cute_attn.memory import ALIGNMENT, check_addresses, check_apart
from cute_attn.options import NUM_PLAIN_OPTIONS, Options
from cute_attn.plan import Kernel, Plan, make_plan

MAX_PLANS = 4096  # of about 2 KB each

_plans: dict[tuple[Any, ...], Plan] = {}
latest: LatestPlans[Plan] = LatestPlans()


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], out: Tensor | None = None, return_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) by the kernel, on the current stream of the tensors' device.

    Args:
        options: the fields of ``Options``.
        out: where the result goes; None allocates it.
    """
    return run(find_plan(q, k, v, options, out, return_lse), (q, k, v), options, out)


def attend_directly(
    q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], out: Tensor | None, return_lse: bool
) -> tuple[Tensor, Tensor | None] | None:
    """``attend``, quicker for a call like the latest with its options; None where the dispatcher must be asked.

    To be called where ``dispatch.watched`` is false.
    """
    tensors = guarded_tensors(q, k, v, options, out)
    packed, shared = options[-1] is not None, options[-1] is options[-2]
    kind = (options[:NUM_PLAIN_OPTIONS], return_lse, packed, shared, out is None)
    plan = latest.find(kind, tensors)
    if plan is None:
        if not dispatches_to_kernel(q, k, v):
            return None
        plan = find_plan(q, k, v, options, out, return_lse)
        latest.keep(kind, tensors, plan)
    return run(plan, (q, k, v), options, out)


def dispatches_to_kernel(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Torch's dispatcher would do nothing but call ``attend``, which takes it 4 microseconds."""
    return q.is_cuda and type(q) is type(k) is type(v) is Tensor and not intercepted()


def find_plan(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], out: Tensor | None, return_lse: bool) -> Plan:
    """The plan that serves a call, made if it is the first of its kind."""
    if q.requires_grad or k.requires_grad or v.requires_grad:
        check_no_gradient(q=q, k=k, v=v)
    if out is not None and out.requires_grad:
        check_no_gradient(out=out)
    window_right, window_left, scale, layout, config, cu_seqlens_q, cu_seqlens_k = options
    signature: tuple[Any, ...] = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.get_device(), k.get_device(), v.get_device(), window_right, window_left, scale, layout, config, return_lse,
    )  # fmt: skip
    if cu_seqlens_q is not None or cu_seqlens_k is not None or out is not None:
        signature += (_kind(cu_seqlens_q), _kind(cu_seqlens_k), _kind(out))
    plan = _plans.get(signature)
    if plan is None:
        plan = _add_plan(signature, Call(q, k, v, Options(*options), out, return_lse))
    return plan


def run(
    plan: Plan, qkv: tuple[Tensor, Tensor, Tensor], options: tuple[Any, ...], out: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of a call that the plan serves."""
    q, k, v = qkv
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT:
        check_addresses(q=q, k=k, v=v)
    if out is not None:
        if out.data_ptr() % ALIGNMENT:
            check_addresses(out=out)
        check_apart(out, q=q, k=k, v=v)
        increment_version(out)  # autograd must notice that out is overwritten
    else:
        out = plan.allocate(*plan.out, q.dtype)
    lse = None if plan.lse is None else plan.allocate(*plan.lse, torch.float32)

    kernel = plan.kernel
    cu_seqlens_q, cu_seqlens_k = options[NUM_PLAIN_OPTIONS:]
    if kernel is None:
        _fill_unseen(out, lse, cu_seqlens_q)
    elif plan.one_device or torch.cuda.current_device() == q.get_device():
        _launch(kernel, plan, (q, k, v, out), (lse, cu_seqlens_q, cu_seqlens_k))
    else:
        with torch.cuda.device(q.get_device()):
            _launch(kernel, plan, (q, k, v, out), (lse, cu_seqlens_q, cu_seqlens_k))
    return out, lse


def _kind(x: Tensor | None) -> tuple[Any, ...] | None:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.get_device())


def _add_plan(signature: tuple[Any, ...], call: Call) -> Plan:
    plan = make_plan(call)
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
    _plans[signature] = plan
    return plan


def _fill_unseen(out: Tensor, lse: Tensor | None, cu_seqlens_q: Tensor | None) -> None:
    """The result where no query sees a key. Rows of no sequence stay as they are, as a kernel leaves them."""
    if cu_seqlens_q is None:
        out.zero_()
        if lse is not None:
            lse.fill_(-math.inf)
        return
    # A mask, because the number of rows that sequences own is known on the device only.
    owned = torch.arange(out.shape[0], device=out.device) < cu_seqlens_q[-1:]
    out.masked_fill_(owned[:, None, None], 0.0)
    if lse is not None:
        lse.masked_fill_(owned, -math.inf)


def _launch(kernel: Kernel, plan: Plan, rows: tuple[Tensor, ...], others: tuple[Tensor | None, ...]) -> None:
    """Calls the kernel with the fields of ``PrefillArguments``: q, k, v and out in ``rows``, the next in ``others``."""
    if plan.views is not None:
        rows = tuple(x.as_strided(*view) for x, view in zip(rows, plan.views, strict=True))
    if plan.signed_q is not None:
        rows = (plan.signed_q(rows[0]), *rows[1:])
    kernel(*rows, *others, *plan.scalars)
