"""Device memory that decode's blocks share: partial results, and the semaphores by which the last block is found.

Every launch leaves its semaphores at zero, for the next launch that uses them. Two launches that may run at one time
must not share any, so:

- eager calls of one stream, which run one after another, share a buffer that only they use;
- a captured call takes semaphores from an arena that was zeroed before, for its graph and stream alone, and keeps them:
  the graph may be replayed at any time, beside any other work. Its partial results come from torch's allocator, that
  is from the graph's own pool, where nothing moves after the capture.

A buffer that has become too small is replaced by a larger one; torch hands the old memory on when the launches that
use it are done.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cute_attn.configs import round_up
from cute_attn.memory import ALIGNMENT

SEMAPHORE_BYTES = 4
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


class _Kept(NamedTuple):
    """A stream's workspace, and how many elements it has of each."""

    space: Workspace
    partials: int
    semaphores: int


@dataclass
class _Arena:
    """Zeroed semaphores for captured graphs, handed out from the start and never taken back."""

    buffer: Tensor
    used: int = 0

    @property
    def free(self) -> int:
        return self.buffer.shape[0] - self.used

    def take(self, semaphores: int) -> Tensor:
        start = self.used
        self.used += round_up(semaphores, ALIGNMENT // SEMAPHORE_BYTES)  # kernels take tensors that start aligned
        return self.buffer[start : start + semaphores]


_streams: dict[tuple[int | None, int], _Kept] = {}  # by device index and stream
_arenas: dict[int | None, list[_Arena]] = {}  # by device index; all live as long as the process, as graphs may
_low: set[int | None] = set()  # devices whose arena is to be replaced before the next capture
_captured: dict[tuple[int | None, int, int], Tensor] = {}  # the latest, by device index, capture and stream
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
        and found.partials >= partials
        and found.semaphores >= semaphores
        and device.index not in _low
    ):
        return found.space
    with _LOCK:
        if not capturing:
            return _for_stream(device, stream, partials, semaphores)
        return Workspace(
            torch.empty(partials, dtype=torch.float32, device=device),
            _for_capture(device, stream, semaphores),
        )


def prepare(device: torch.device) -> None:
    """Have an arena with room for the next captures; not to be called during one."""
    arenas = _arenas.setdefault(device.index, [])
    if not arenas or arenas[-1].free < ARENA_SEMAPHORES // 2:
        arenas.append(_Arena(lasting(torch.zeros, ARENA_SEMAPHORES, torch.int32, device)))
    _low.discard(device.index)


def lasting(make: Callable[..., Tensor], size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that outlives the call that it is made in, ready for every stream.

    What a caller allocates may go to a pool of memory that is given back as a whole, as torch.compile's for CUDA
    graphs, and under inference mode be of its own kind. Both are a matter of the thread and the stream, so this uses
    others.
    """

    def run() -> Tensor:
        if device.type != "cuda":
            return make(size, dtype=dtype, device=device)
        with torch.cuda.device(device):
            made = make(size, dtype=dtype, device=device)
            torch.cuda.current_stream().synchronize()
        return made

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def semaphores_in_use() -> list[Tensor]:
    """All that were ever handed out; zero while no launch is under way."""
    return [*(found.space.semaphores for found in _streams.values()), *_kept]


def _for_stream(device: torch.device, stream: int, partials: int, semaphores: int) -> Workspace:
    prepare(device)
    old = _streams.get((device.index, stream))
    made = Workspace(
        _enlarged(old and old.space.partials, torch.empty, partials, torch.float32, device),
        _enlarged(old and old.space.semaphores, torch.zeros, semaphores, torch.int32, device),
    )
    _streams[device.index, stream] = _Kept(made, made.partials.shape[0], made.semaphores.shape[0])
    return made


def _enlarged(
    old: Tensor | None, make: Callable[..., Tensor], size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    if old is not None and old.shape[0] >= size:
        return old
    if old is not None and device.type == "cuda":
        old.record_stream(torch.cuda.current_stream(device))  # launches that use it may still be under way
    return lasting(make, _with_room(size), dtype, device)


def _for_capture(device: torch.device, stream: int, semaphores: int) -> Tensor:
    """Calls of one stream in one graph run one after another, and share."""
    key = (device.index, _capture_id(stream), stream)
    found = _captured.get(key)
    if found is None or found.shape[0] < semaphores:
        arena = next((arena for arena in _arenas.get(device.index, []) if arena.free >= semaphores), None)
        # Without room the graph zeroes semaphores of its own each time that it is replayed.
        found = torch.zeros(semaphores, dtype=torch.int32, device=device) if arena is None else arena.take(semaphores)
        _captured[key] = found
        _kept.append(found)
        if arena is None or arena.free < ARENA_SEMAPHORES // 2:
            _low.add(device.index)
    return found


def _with_room(size: int) -> int:
    return max(SMALLEST, 1 << max(size - 1, 0).bit_length())


def _capture_id(stream: int) -> int:
    """The number of the capture that a stream takes part in, which no other capture of the process has."""
    try:
        from cuda.bindings import runtime

        error, _, number, *_ = runtime.cudaStreamGetCaptureInfo(stream)
        if int(error) == 0:
            return int(number)
    except (ImportError, AttributeError):
        pass
    return -next(_unknown)  # one for each call: it costs semaphores, and shares none


_unknown = itertools.count(1)
