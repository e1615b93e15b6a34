"""Compiling many kernels at once, in subprocesses that run ``python -m cute_attn build``.

The compiler is not thread safe, so each worker is a process. They are plain subprocesses: multiprocessing would run
the user's script again, which breaks one that has no main guard. A worker reads specs from its standard input, one
line of JSON each, and answers each with a marked line on its standard output; other lines there are the compiler's.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Literal, cast

from cute_attn.compiler import cache, keys
from cute_attn.compiler.compiling import KernelCompileError
from cute_attn.problem import KernelSpec

MAX_WORKERS = 16  # each takes about half a gigabyte
COMPILE_SECONDS = 600.0  # a compile takes seconds; one of minutes hangs
PROTOCOL_OPTION = "--from-stdin"
ANSWER_MARK = "cute_attn answers: "


@dataclass(frozen=True)
class Outcome:
    """What became of one kernel.

    Attributes:
        spec: the kernel.
        status: "found" on disk; "compiled" now; "failed" to compile; or "not stored", where the kernel may be fine but
            the folder or the worker process is not.
        seconds: spent on it.
        reason: why it failed or is not stored.
    """

    spec: KernelSpec
    status: Literal["found", "compiled", "failed", "not stored"]
    seconds: float
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether the kernel is on disk."""
        return self.status in ("found", "compiled")


def prepare(specs: Sequence[KernelSpec], progress: bool = True) -> None:
    """Have kernels loaded in this process, compiling what the disk lacks in subprocesses.

    Raises:
        KernelCompileError: a kernel does not compile; all others are compiled before this is raised.
    """
    missing = [spec for spec in dict.fromkeys(specs) if not cache.holds(spec)]
    # A single one is faster compiled here than in a process that first has to import the DSL.
    if len(missing) > 1 and cache.is_writable():
        remember_failures(build(missing, progress=progress))
    errors = []
    for spec in specs:
        try:
            cache.load(spec)
        except KernelCompileError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def build(specs: Sequence[KernelSpec], jobs: int | None = None, progress: bool = True) -> list[Outcome]:
    """Have kernels on disk, for any architectures, using at most ``jobs`` processes (by default one a core).

    Args:
        specs: the kernels.
        jobs: at most so many worker processes.
        progress: show a bar on standard error if that is a terminal, else one line.

    Returns:
        One outcome a kernel, in the order of ``specs``. A kernel that fails does not keep others from being compiled.

    Raises:
        OSError: the cache's folder cannot be made.
    """
    missing = [spec for spec in dict.fromkeys(specs) if not cache.holds(spec)]
    compiled = {outcome.spec: outcome for outcome in _build_missing(missing, jobs or MAX_WORKERS, progress)}
    return [compiled.get(spec) or Outcome(spec, "found", 0.0) for spec in specs]


def _build_missing(specs: Sequence[KernelSpec], jobs: int, progress: bool) -> list[Outcome]:
    if not specs:
        return []
    folder = cache.current_store().root
    folder.mkdir(parents=True, exist_ok=True)
    with _Pool(folder) as pool, ThreadPoolExecutor(min(jobs, _cores(), len(specs))) as threads:
        futures = [threads.submit(pool.build, spec) for spec in specs]
        try:
            _watch(futures, progress)
        except BaseException:  # the user pressed Ctrl-C: do not compile what is still waiting
            pool.stop()
            threads.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def remember_failures(outcomes: Sequence[Outcome]) -> None:
    """Have this process not compile again what a worker found not to compile."""
    for outcome in outcomes:
        if outcome.status == "failed":
            cache.remember_failure(outcome.spec, outcome.reason)


def serve(requests: IO[str], answers: IO[str]) -> None:
    """A worker's side: build each spec that comes in, and answer with its outcome."""
    for line in requests:
        outcome = build_here(keys.spec_of(json.loads(line)))
        answers.write(f"\n{ANSWER_MARK}{json.dumps(asdict(outcome))}\n")
        answers.flush()


def build_here(spec: KernelSpec) -> Outcome:
    """Have one kernel on disk, compiling it in this process if need be."""
    start = time.perf_counter()
    try:
        outcome = Outcome(spec, "compiled" if cache.ensure(spec) else "found", 0.0)
    except KernelCompileError as error:
        outcome = Outcome(spec, "failed", 0.0, error.reason)
    except OSError as error:
        outcome = Outcome(spec, "not stored", 0.0, cache.unwritable(error))
    return replace(outcome, seconds=time.perf_counter() - start)


def _watch(futures: Sequence[Future[Outcome]], progress: bool) -> None:
    from tqdm import tqdm

    terminal = sys.stderr is not None and sys.stderr.isatty()
    if progress and not terminal:
        kernels = f"{len(futures)} kernel{'s' * (len(futures) != 1)}"
        print(f"cute_attn: compiling {kernels} (kept in {cache.cache_dir()})", file=sys.stderr)
    bar = tqdm(total=len(futures), desc="cute_attn: compiling", unit="kernel", disable=not (progress and terminal))
    with bar:
        for future in as_completed(futures):
            future.result()
            bar.update()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Pool:
    """Worker processes: started when needed, kept while there is work, replaced when they die."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = _environment()
        self._workers: list[_Worker] = []
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._stopped = False

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def build(self, spec: KernelSpec) -> Outcome:
        start = time.perf_counter()
        try:
            worker = self._take()
            outcome = worker.build(spec)
        except OSError as error:
            return Outcome(spec, "not stored", time.perf_counter() - start, f"no compiling process: {error}")
        except _WorkerDied as error:
            return Outcome(spec, "failed", time.perf_counter() - start, str(error))
        self._idle.put(worker)
        return outcome

    def stop(self) -> None:
        self._stopped = True
        for worker in self._workers:
            worker.stop()

    def _take(self) -> _Worker:
        if self._stopped:
            raise _WorkerDied("stopped")
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            worker = _Worker(self._folder, self._environment)
            self._workers.append(worker)
            return worker


class _WorkerDied(Exception):
    """A worker process ended before it answered."""


class _Worker:
    """One subprocess that builds specs, one after the other."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as the process that writes it
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cute_attn", "build", PROTOCOL_OPTION],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
            env=environment,
            cwd=folder,  # Python looks for modules in the current folder first: this one holds none
        )
        self._requests = cast(IO[str], self._process.stdin)
        self._answers = cast(IO[str], self._process.stdout)

    def build(self, spec: KernelSpec) -> Outcome:
        with self._time_limit(), contextlib.suppress(BrokenPipeError):
            self._requests.write(json.dumps(keys.describe(spec)) + "\n")
            self._requests.flush()
            for line in self._answers:
                if line.startswith(ANSWER_MARK):
                    return Outcome(**{**json.loads(line.removeprefix(ANSWER_MARK)), "spec": spec})
        raise _WorkerDied(self._last_words())

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):  # of a request that was not read any more
            self._requests.close()
        self._answers.close()
        self._log.close()

    @contextlib.contextmanager
    def _time_limit(self) -> Iterator[None]:
        timer = threading.Timer(COMPILE_SECONDS, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _last_words(self) -> str:
        status = self._process.wait()
        self._log.seek(0)
        log = self._log.read().decode(errors="replace").strip()
        return f"the compiling process ended with status {status}: {log[-2000:] or 'it said nothing'}"


def _environment() -> dict[str, str]:
    """The environment in which a worker finds what this process imports, and does not start workers of its own."""
    return {
        **os.environ,
        "CUTE_ATTN_COMPILE": "lazy",
        "CUTE_ATTN_CACHE_DIR": str(cache.cache_dir()),
        "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path),
        "PYTHONSAFEPATH": "1",
    }
