"""Device memory that decode's blocks share: partial results, and the semaphores by which the last block is found.

Every launch leaves its semaphores at zero, for the next launch that uses them. Two launches that may run at one time
must not share any, so:

- eager calls of one stream, which run one after another, share a buffer that only they use;
- a captured call takes semaphores from an arena that was zeroed before, for its graph and stream alone, and keeps them:
  the graph may be replayed at any time, beside any other work. Its partial results come from torch's allocator, that
  is from the graph's own pool, where nothing moves after the capture.

A buffer that has become too small is replaced by a larger one; torch hands the old memory to later work of the same
stream only.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

ARENA_SEMAPHORES = 2**20  # 4 MiB: 256 graphs with 4096 rows of blocks each
SMALLEST = 1024  # elements of a new buffer


class Workspace(NamedTuple):
    """What one launch gets.

    Attributes:
        partials: float32, of any values.
        semaphores: int32, all zero.
    """

    partials: Tensor
    semaphores: Tensor


@dataclass
class _Arena:
    """Zeroed semaphores for captured graphs, handed out from the start and never taken back."""

    buffer: Tensor
    used: int = 0

    @property
    def free(self) -> int:
        return self.buffer.shape[0] - self.used

    def take(self, semaphores: int) -> Tensor:
        self.used += semaphores
        return self.buffer[self.used - semaphores : self.used]


_streams: dict[tuple[int, int], Workspace] = {}  # by device index and stream
_arenas: dict[int, list[_Arena]] = {}  # by device index; all live as long as the process, as graphs may
_captured: dict[tuple[int, int, int], Tensor] = {}  # the latest, by device index, capture and stream
_kept: list[Tensor] = []  # all of the captured ones, as their graphs may be replayed at any time
_LOCK = threading.Lock()


def workspace(device: torch.device, stream: int, partials: int, semaphores: int) -> Workspace:
    """At least so many elements of each, for a launch on the current stream of the current device.

    Args:
        device: with its index.
        stream: the handle of the current stream.
        partials: float32 elements.
        semaphores: int32 elements.
    """
    capturing = torch.cuda.is_current_stream_capturing()
    found = _streams.get((device.index, stream))
    if (
        found is not None
        and not capturing
        and found.partials.shape[0] >= partials
        and found.semaphores.shape[0] >= semaphores
    ):
        return found
    with _LOCK:
        if not capturing:
            return _for_stream(device, stream, partials, semaphores)
        return Workspace(
            torch.empty(partials, dtype=torch.float32, device=device),
            _for_capture(device, stream, semaphores),
        )


def semaphores_in_use() -> list[Tensor]:
    """All that were ever handed out; zero while no launch is under way."""
    return [*(found.semaphores for found in _streams.values()), *_kept]


def _for_stream(device: torch.device, stream: int, partials: int, semaphores: int) -> Workspace:
    arenas = _arenas.setdefault(device.index, [])
    if not arenas or arenas[-1].free < ARENA_SEMAPHORES // 2:
        arenas.append(_Arena(torch.zeros(ARENA_SEMAPHORES, dtype=torch.int32, device=device)))
        if device.type == "cuda":  # a graph on any stream may use it from now on
            torch.cuda.current_stream(device).synchronize()
    old = _streams.get((device.index, stream), Workspace(torch.empty(0), torch.empty(0)))
    made = Workspace(
        old.partials
        if old.partials.shape[0] >= partials > 0
        else torch.empty(_with_room(partials), dtype=torch.float32, device=device),
        old.semaphores
        if old.semaphores.shape[0] >= semaphores > 0
        else torch.zeros(_with_room(semaphores), dtype=torch.int32, device=device),
    )
    _streams[device.index, stream] = made
    return made


def _for_capture(device: torch.device, stream: int, semaphores: int) -> Tensor:
    """Calls of one stream in one graph run one after another, and share."""
    key = (device.index, _capture_id(stream), stream)
    found = _captured.get(key)
    if found is None or found.shape[0] < semaphores:
        arena = next((arena for arena in _arenas.get(device.index, []) if arena.free >= semaphores), None)
        # Without room the graph zeroes semaphores of its own each time that it is replayed.
        zeros = torch.zeros(semaphores, dtype=torch.int32, device=device) if arena is None else arena.take(semaphores)
        _captured[key] = found = zeros
        _kept.append(zeros)
    return found


def _with_room(size: int) -> int:
    return max(SMALLEST, 1 << max(size - 1, 0).bit_length())


def _capture_id(stream: int) -> int:
    """The number of the capture that a stream takes part in, which no other capture of the process has."""
    from cuda.bindings import runtime

    error, _, number, *_ = runtime.cudaStreamGetCaptureInfo(stream)
    if int(error) != 0:
        raise RuntimeError(f"cudaStreamGetCaptureInfo failed: {error}")
    return int(number)
