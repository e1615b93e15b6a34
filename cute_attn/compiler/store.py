"""A folder of object files that many processes share.

A file appears whole or not at all, and is used only if its checksum fits: loading a damaged object file can stop the
process. Each file ends with its checksum, because a second file could get lost or out of step; the loader ignores what
follows an object.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SEAL = b"cute_attn sha256"
LOCK_SECONDS = 600.0  # longer than any compile: whoever holds a lock for so long is stopped or gone
STALE_SECONDS = 3600.0  # a temporary file of this age belongs to a killed writer
TEMPORARY = ".tmp"
LOCK = ".lock"


@dataclass(frozen=True)
class Store:
    """The object files in one folder, which is made when the first is written."""

    root: Path

    def has(self, name: str) -> bool:
        """Whether the file is there, damaged or not: fast, for deciding whether to compile ahead."""
        return (self.root / name).is_file()

    def find(self, name: str) -> Path | None:
        """Path of a file that is there and intact."""
        path = self.root / name
        try:
            return path if _is_intact(path.read_bytes()) else None
        except OSError:
            return None

    def publish(self, name: str, write: Callable[[Path], None]) -> Path:
        """Keep what ``write`` writes to the path that it is given, and return the path under which it is kept.

        Raises:
            OSError: the folder cannot be written, or is full.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        self._remove_stale_temporaries()
        # Not from tempfile, whose files no other user may read. The ending stays, as the compiler goes by it.
        temporary = self.root / f"{TEMPORARY}-{uuid.uuid4().hex}-{name}"
        try:
            write(temporary)
            _seal(temporary)
            os.replace(temporary, self.root / name)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        return self.root / name

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[bool]:
        """Hold a name's lock, which one process on this machine can; says whether another one held it first.

        Where files cannot be locked (read-only folders, some network ones) or a holder hangs, work goes on unlocked:
        the price is work done twice, never a wrong file.
        """
        with contextlib.ExitStack() as held:
            waited = False
            # Only getting the lock may fail quietly; errors of the work done under it must come out.
            with contextlib.suppress(OSError, NotImplementedError):
                waited = self._acquire(name, held)
            yield waited

    def _acquire(self, name: str, held: contextlib.ExitStack) -> bool:
        import filelock  # here because it takes 35 ms, and a process whose cache is full needs no lock

        self.root.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(self.root / f"{name}{LOCK}")
        try:
            held.enter_context(lock.acquire(timeout=0))
        except filelock.Timeout:
            held.enter_context(lock.acquire(timeout=LOCK_SECONDS))
            return True
        return False

    def _remove_stale_temporaries(self) -> None:
        oldest = time.time() - STALE_SECONDS
        for path in self.root.glob(f"{TEMPORARY}-*"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < oldest:
                    path.unlink()


def _seal(path: Path) -> None:
    with path.open("r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        file.write(SEAL + digest)


def _is_intact(content: bytes) -> bool:
    digest_size = hashlib.sha256().digest_size
    body, seal = content[: -len(SEAL) - digest_size], content[-len(SEAL) - digest_size :]
    return seal == SEAL + hashlib.sha256(body).digest()
