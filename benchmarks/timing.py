"""Medians of device time and of host time."""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable, Mapping

import torch

FLUSH_BYTES = 256 * 2**20  # written before every timed call: several times any L2, so inputs come from memory
WARMUP_ROUNDS = 3
MIN_ROUNDS, MAX_ROUNDS = 10, 200

Call = Callable[[], object]


def device_medians_ms(calls: Mapping[str, Call], budget_ms: float = 100.0) -> dict[str, float]:
    """Median device time of each call, in milliseconds.

    The calls take turns, so that a change of clock or temperature meets all of them alike. Each is timed for about
    ``budget_ms``, with the L2 cache overwritten before every run.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    warm = _rounds(calls, flush, WARMUP_ROUNDS)
    slowest = max(statistics.median(times) for times in warm.values())
    rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, round(budget_ms / slowest)))
    return {name: statistics.median(times) for name, times in _rounds(calls, flush, rounds).items()}


def _rounds(calls: Mapping[str, Call], flush: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            start.record()
            call()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}


def host_median_us(call: Call, calls: int = 100, repeats: int = 20) -> float:
    """Median host time of one call, in microseconds, while the device runs behind.

    Each of the ``repeats`` times ``calls`` calls in a row, few enough for the launch queue not to fill.
    """
    timeit.timeit(call, number=calls)
    seconds = timeit.repeat(call, setup=torch.cuda.synchronize, repeat=repeats, number=calls)
    return statistics.median(seconds) / calls * 1e6
