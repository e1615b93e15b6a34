"""Decode of CUDA tensors, written to be quick: what the host does here delays every small call.

As in ``launch``: a call like the latest one with its cache and options is recognised by a guard, any other by its
signature; what is left are the checks of what neither says, the allocation of the results, and the launch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from cute_attn.caches import Cache, Scale
from cute_attn.checks import check_no_gradient
from cute_attn.decode_call import DecodeCall, guarded_tensors
from cute_attn.decode_options import DecodeOptions
from cute_attn.decode_plan import DecodePlan, make_decode_plan
from cute_attn.dispatch import intercepted
from cute_attn.guards import LatestPlans
from cute_attn.memory import ALIGNMENT, check_addresses, check_apart
from cute_attn.workspace import workspace

MAX_PLANS = 4096  # of about 2 KB each
SINKS = DecodeOptions._fields.index("sinks")

_plans: dict[tuple[Any, ...], DecodePlan] = {}
latest: LatestPlans[DecodePlan] = LatestPlans()


def decode(
    q: Tensor,
    cache: Cache,
    lengths: Tensor,
    options: tuple[Any, ...],
    out: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) by the kernel, on the current stream of the tensors' device.

    Args:
        options: the fields of ``DecodeOptions``.
        out: where the result goes; None allocates it.
    """
    return run(find_plan(q, cache, lengths, options, out, return_lse), (q, cache, lengths), options[SINKS], out)


def decode_directly(
    q: Tensor, cache: Cache, lengths: Tensor, options: tuple[Any, ...], out: Tensor | None, return_lse: bool
) -> tuple[Tensor, Tensor | None] | None:
    """``decode``, quicker for a call like the latest with its options; None where the dispatcher must be asked.

    To be called where ``dispatch.watched`` is false.
    """
    sinks = options[SINKS]
    tensors = guarded_tensors(q, cache, lengths, sinks, out)
    chosen = options if sinks is None else (*options[:SINKS], True, *options[SINKS + 1 :])
    kind = (cache.key, chosen, return_lse, out is None, len(tensors))
    plan = latest.find(kind, tensors)
    if plan is None:
        if not dispatches_to_kernel(q, cache):
            return None
        plan = find_plan(q, cache, lengths, options, out, return_lse)
        latest.keep(kind, tensors, plan)
    return run(plan, (q, cache, lengths), sinks, out)


def dispatches_to_kernel(q: Tensor, cache: Cache) -> bool:
    """Torch's dispatcher would do nothing but call ``decode``, which takes it microseconds."""
    return q.is_cuda and type(q) is Tensor and cache.key is not None and not intercepted()


def find_plan(
    q: Tensor, cache: Cache, lengths: Tensor, options: tuple[Any, ...], out: Tensor | None, return_lse: bool
) -> DecodePlan:
    """The plan that serves a call, made if it is the first of its kind."""
    k, v, sinks, chosen = cache.k, cache.v, options[SINKS], options
    if q.requires_grad or k.requires_grad or v.requires_grad:
        check_no_gradient(q=q, k=k, v=v)
    if sinks is not None:
        check_no_gradient(sinks=sinks)
        chosen = (*options[:SINKS], _kind(sinks), *options[SINKS + 1 :])
    signature: tuple[Any, ...] = (
        q.shape, q.stride(), q.dtype, q.get_device(), cache.key, lengths.shape, lengths.is_contiguous(), lengths.dtype,
        lengths.get_device(), chosen, return_lse, None if out is None else _kind(out),
    )  # fmt: skip
    plan = _plans.get(signature)
    if plan is None:
        plan = _add_plan(signature, DecodeCall(q, cache, lengths, DecodeOptions(*options), out, return_lse))
    return plan


def run(
    plan: DecodePlan, inputs: tuple[Tensor, Cache, Tensor], sinks: Tensor | None, out: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of a call that the plan serves; ``inputs``: q, cache and lengths."""
    q, cache, lengths = inputs
    if q.data_ptr() % ALIGNMENT:
        check_addresses(q=q)
    if out is not None:
        if out.requires_grad:
            check_no_gradient(out=out)
        if out.data_ptr() % ALIGNMENT:
            check_addresses(out=out)
        check_apart(out, q=q, k=cache.k, v=cache.v)
        increment_version(out)  # autograd must notice that out is overwritten
    else:
        out = plan.allocate(*plan.out, q.dtype)
    lse = None if plan.lse is None else plan.allocate(*plan.lse, torch.float32)

    if plan.kernel is None:
        _fill_unseen(out, lse, sinks)
    elif plan.one_device or torch.cuda.current_device() == q.get_device():
        _launch(plan, cache, (q, cache.k_bits, cache.v_bits, out, lse), lengths, sinks)
    else:
        with torch.cuda.device(q.get_device()):
            _launch(plan, cache, (q, cache.k_bits, cache.v_bits, out, lse), lengths, sinks)
    return out, lse


def _kind(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.get_device()


def _add_plan(signature: tuple[Any, ...], call: DecodeCall) -> DecodePlan:
    plan = make_decode_plan(call)
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
    _plans[signature] = plan
    return plan


def _fill_unseen(out: Tensor, lse: Tensor | None, sinks: Tensor | None) -> None:
    """The result where no query sees a token."""
    out.zero_()
    if lse is not None:
        if sinks is None:
            lse.fill_(-math.inf)
        else:
            lse.copy_(sinks)


def _launch(
    plan: DecodePlan, cache: Cache, rows: tuple[Tensor | None, ...], lengths: Tensor, sinks: Tensor | None
) -> None:
    """Calls the kernel with the fields of ``DecodeArguments``: q, k, v, out and lse in ``rows``."""
    if plan.views is not None:
        rows = tuple(
            x if x is None or view is None else x.as_strided(*view) for x, view in zip(rows, plan.views, strict=True)
        )
    if plan.signed_q is not None:
        q, *rest = rows
        assert q is not None
        rows = (plan.signed_q(q), *rest)
    k_scale: Scale | None = plan.k_scale
    v_scale: Scale | None = plan.v_scale
    if plan.scales_on_device:
        k_scale = cache.k_scale if isinstance(cache.k_scale, Tensor) else k_scale
        v_scale = cache.v_scale if isinstance(cache.v_scale, Tensor) else v_scale
    space = plan.nothing
    if space is None:
        stream = _current_stream(plan.device.index)
        space = workspace(plan.device, stream, plan.partials, plan.semaphores)
    assert plan.kernel is not None
    plan.kernel(*rows, lengths, cache.k_page_table, cache.v_page_table, sinks, k_scale, v_scale, *space, *plan.scalars)


def _current_stream(device: int) -> int:
    """The handle of torch's current stream."""
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream
