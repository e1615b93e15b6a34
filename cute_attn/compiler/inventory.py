"""What the cache holds: listing and deleting compiled kernels, whoever made them."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cute_attn.compiler.cache import cache_dir, current_store
from cute_attn.compiler.store import LOCK, TEMPORARY

# Only files of this form are listed and deleted: the user may have put the cache into a folder that holds other things.
_FOLDER = re.compile(r"[0-9a-f]{16}")
_FILE = re.compile(r"(?P<kernel>.+)-(?P<gpu_arch>sm_\w+)-[0-9a-f]{16}\.o")


@dataclass(frozen=True)
class CachedKernel:
    """A kernel on disk.

    Attributes:
        kernel: the names of its problem and config.
        gpu_arch: the architecture it was compiled for.
        size_bytes: of its object file.
        age_seconds: since it was written.
        stale: another compiler, Python, processor or state of the sources made it, so that it is never used.
        path: of its object file.
    """

    kernel: str
    gpu_arch: str
    size_bytes: int
    age_seconds: float
    stale: bool
    path: Path


def cached_kernels() -> list[CachedKernel]:
    """The kernels on disk, newest first.

    Raises:
        OSError: the folder is none, or cannot be read.
    """
    try:
        os.listdir(cache_dir())  # glob would take a folder that cannot be read for an empty one
    except FileNotFoundError:
        return []
    now, current = time.time(), current_store().root
    kernels = []
    for path in cache_dir().glob("*/*.o"):
        match = _FILE.fullmatch(path.name)
        if match is None or not _FOLDER.fullmatch(path.parent.name) or path.name.startswith(TEMPORARY):
            continue
        with contextlib.suppress(OSError):  # another process may delete it meanwhile
            status = path.stat()
            kernels.append(
                CachedKernel(
                    kernel=match["kernel"],
                    gpu_arch=match["gpu_arch"],
                    size_bytes=status.st_size,
                    age_seconds=max(0.0, now - status.st_mtime),
                    stale=path.parent != current,
                    path=path,
                )
            )
    return sorted(kernels, key=lambda kernel: kernel.age_seconds)


def delete(kernels: Sequence[CachedKernel]) -> None:
    """Delete kernels, and the folders that hold no others. One that is gone already is no error.

    Raises:
        OSError: a file may not be deleted.
    """
    for kernel in kernels:
        kernel.path.unlink(missing_ok=True)
        kernel.path.with_name(f"{kernel.path.name}{LOCK}").unlink(missing_ok=True)
    for folder in {kernel.path.parent for kernel in kernels}:
        _delete_if_unused(folder)


def _delete_if_unused(folder: Path) -> None:
    leftovers = list(folder.iterdir()) if folder.is_dir() else []
    if all(path.name.startswith(TEMPORARY) or path.name.endswith(LOCK) for path in leftovers):
        for path in leftovers:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another process may just have put a kernel there
            folder.rmdir()
