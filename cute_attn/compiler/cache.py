"""Compiled kernels: in this process's memory, else from disk, else compiled and kept on disk.

The folder is CUTE_ATTN_CACHE_DIR, by default the user's cache folder. Kernels of one compiler and one state of the
sources share a sub-folder of it, so that those of another are seen to be stale.
"""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cute_attn.compiler import keys
from cute_attn.compiler.compiling import KernelCompileError, compile_spec
from cute_attn.compiler.store import Store
from cute_attn.errors import argument_error
from cute_attn.problem import KernelSpec

Kernel = Callable[..., Any]

NO_FOLDER = Path(os.devnull) / "cute_attn"  # nothing can be found in it or written to it

_LOCK = threading.RLock()
_kernels: dict[KernelSpec, Kernel] = {}
_failures: dict[KernelSpec, str] = {}
_warned_of_folder = False


def cache_dir() -> Path:
    """The folder that holds compiled kernels; it need not exist yet, and cannot where the user has no home folder.

    Raises:
        ValueError: CUTE_ATTN_CACHE_DIR starts with the home folder of a user who has none.
    """
    chosen = os.environ.get("CUTE_ATTN_CACHE_DIR")
    if chosen:
        try:
            return Path(chosen).expanduser().absolute()
        except RuntimeError:
            allowed = "a path, in which ~ or ~user has a home folder"
            raise argument_error("CUTE_ATTN_CACHE_DIR", "it", repr(chosen), allowed) from None
    import platformdirs

    try:
        return Path(platformdirs.user_cache_dir("cute_attn")).expanduser()
    except RuntimeError:  # no home folder
        return NO_FOLDER


def unwritable(error: OSError) -> str:
    """What to tell a user whose cache folder cannot be used."""
    return f"cannot write the cache {cache_dir()} ({error.strerror or error}): set CUTE_ATTN_CACHE_DIR"


def current_store() -> Store:
    """The kernels of this compiler and these sources."""
    return Store(cache_dir() / keys.fingerprint()[:16])


def loaded(spec: KernelSpec) -> Kernel | None:
    """The kernel if this process has loaded it already; never touches the disk."""
    return _kernels.get(spec)


def contains(spec: KernelSpec) -> bool:
    """Whether the disk has a file for this kernel, damaged or not: the fast question, for an import."""
    return current_store().has(keys.file_name(spec))


def holds(spec: KernelSpec) -> bool:
    """Whether the disk has this kernel, intact."""
    return current_store().find(keys.file_name(spec)) is not None


def load(spec: KernelSpec) -> Kernel:
    """The compiled kernel, from memory, else from disk, else compiled now (seconds) and kept on disk.

    It takes the fields of the problem's arguments (``PrefillArguments``) positionally and launches on torch's current
    stream.

    Raises:
        KernelCompileError: it does not compile. The next call raises the same without compiling again.
    """
    kernel = _kernels.get(spec)
    if kernel is not None:
        return kernel
    with _LOCK:
        if spec not in _kernels:
            _kernels[spec] = _load(spec)
        return _kernels[spec]


def ensure(spec: KernelSpec) -> bool:
    """Have the kernel on disk without loading it, for any architecture; says whether it had to be compiled.

    Raises:
        KernelCompileError: it does not compile.
        OSError: the cache's folder cannot be written, or is full.
    """
    store, name = current_store(), keys.file_name(spec)
    if store.find(name) is not None:
        return False
    with _LOCK, store.lock(name):
        if store.find(name) is not None:
            return False
        store.publish(name, _compile(spec))
        return True


def is_writable() -> bool:
    """Whether compiled kernels can be kept on disk; warns, once a process, if not."""
    store = current_store()
    try:
        store.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=store.root):
            return True
    except OSError as error:
        _warn_of_folder(store.root, error)
        return False


def remember_failure(spec: KernelSpec, reason: str) -> None:
    """Have ``load`` raise at once for a kernel that was found not to compile elsewhere."""
    _failures[spec] = reason


def _load(spec: KernelSpec) -> Kernel:
    store, name = current_store(), keys.file_name(spec)
    path = store.find(name)
    if path is not None:
        return _open(spec, path)
    with store.lock(name):
        path = store.find(name)  # another process may have made it while this one waited
        return _open(spec, path) if path is not None else _compile_and_open(spec, store, name)


def _compile_and_open(spec: KernelSpec, store: Store, name: str) -> Kernel:
    write = _compile(spec)
    try:
        return _open(spec, store.publish(name, write))
    except OSError as error:
        _warn_of_folder(store.root, error)
    with tempfile.TemporaryDirectory(prefix="cute_attn_") as folder:
        return _open(spec, Store(Path(folder)).publish(name, write))


def _compile(spec: KernelSpec) -> Callable[[Path], None]:
    """Compile a kernel, and return what writes its object file."""
    if spec in _failures:
        raise KernelCompileError(spec, _failures[spec])
    try:
        name = keys.symbol(spec)
        compiled = compile_spec(spec)
        if keys.sources_sha256() != keys.fingerprinted_sources():
            raise KernelCompileError(spec, "the package's sources changed after this process started; start it again")
    except KernelCompileError as error:
        remember_failure(spec, error.reason)
        raise

    def write(path: Path) -> None:
        compiled.export_to_c(str(path), function_name=name)

    return write


def _open(spec: KernelSpec, path: Path) -> Kernel:
    """Load an object file. What comes back is a bare TVM-FFI function, which is the fastest to call."""
    from cutlass.cute.runtime import load_module

    kernel: Kernel = load_module(str(path), enable_tvm_ffi=True)[keys.symbol(spec)]
    return kernel


def _warn_of_folder(folder: Path, error: OSError) -> None:
    global _warned_of_folder
    if not _warned_of_folder:
        _warned_of_folder = True
        warnings.warn(
            f"cute_attn cannot keep compiled kernels in {folder} ({error}): every process compiles its own. "
            "CUTE_ATTN_CACHE_DIR chooses another folder.",
            stacklevel=2,
        )
