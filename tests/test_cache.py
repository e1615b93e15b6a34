"""The cache of compiled kernels: found again, compiled once, and never trusted when damaged."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from cute_attn.arch import arch_by_name
from cute_attn.compiler import cache, keys, store
from cute_attn.compiler.compiling import KernelCompileError
from cute_attn.compiler.store import Store
from tests import fake_compiler as compiler
from tests.compiler_fixtures import FakeCompiler, fake_compiler, forget_loaded, spec

__all__ = ["fake_compiler"]  # a fixture is used by its name alone

LOAD = """
    from tests.compiler_fixtures import spec
    from cute_attn.compiler import cache
    print(cache.load(spec())())
"""


# Keys


def test_specs_survive_json() -> None:
    description = json.loads(json.dumps(keys.describe(spec())))
    assert keys.spec_of(description) == spec()


def test_key_is_the_same_again() -> None:
    assert keys.key(spec()) == keys.key(spec())


@pytest.mark.parametrize(
    "other",
    [
        spec(head_dim=128),
        spec(dtype="bfloat16"),
        spec(arch="sm_80"),
        replace(spec(), config=replace(spec().config, swizzle=False)),
        replace(spec(), problem=replace(spec().problem, return_lse=True)),
    ],
    ids=lambda other: other.name,
)
def test_key_depends_on_the_spec(other: object) -> None:
    assert isinstance(other, type(spec()))
    assert keys.key(other) != keys.key(spec())


@pytest.mark.parametrize(
    ("target", "name", "value"),
    [
        (keys, "_version", lambda package: "99.0"),
        (keys, "_processor_features", lambda: "fpu sse2"),
        (keys, "fingerprinted_sources", lambda: "other"),
        (sys, "version_info", (3, 99, 0)),
    ],
)
def test_fingerprint_depends_on_the_tools(
    target: object, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, name, value)
    assert keys.fingerprint.__wrapped__() != keys.fingerprint()


def test_fingerprint_depends_on_the_compilers_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    before = keys.fingerprint.__wrapped__()
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert keys.fingerprint.__wrapped__() != before


def test_sources_are_all_that_decide_machine_code() -> None:
    package = Path(keys.__file__).parents[1]
    for source in keys.SOURCES:
        assert (package / source).exists(), source
    paths = [path for path, _ in keys._python_files(package / "kernels", "kernels")]
    assert sorted(paths) == sorted(f"kernels/{file.relative_to(package / 'kernels').as_posix()}" for file in
                                   (package / "kernels").rglob("*.py"))  # fmt: skip


# The folder


def test_cache_dir_is_chosen_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path))
    assert cache.cache_dir() == tmp_path


def test_cache_dir_is_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", "here")
    assert cache.cache_dir() == Path.cwd() / "here"


def test_cache_dir_of_nobody_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", "~nosuch/x")
    with pytest.raises(ValueError, match=r"CUTE_ATTN_CACHE_DIR: it is '~nosuch/x'; allowed"):
        cache.cache_dir()


def test_no_home_folder_is_an_unwritable_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(*_: object) -> str:
        raise RuntimeError("no home")

    monkeypatch.delenv("CUTE_ATTN_CACHE_DIR", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_dir", no_home)
    monkeypatch.setattr(cache, "_warned_of_folder", False)
    with pytest.warns(UserWarning, match="CUTE_ATTN_CACHE_DIR chooses another folder"):
        assert not cache.is_writable()
    assert not cache.contains(spec())


def test_cache_dir_is_the_users_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUTE_ATTN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.cache_dir().name == "cute_attn"


# Compiling once


def test_compiles_once_and_keeps_it_in_memory(fake_compiler: FakeCompiler) -> None:
    assert cache.loaded(spec()) is None
    kernel = cache.load(spec())
    assert cache.load(spec()) is kernel
    assert cache.loaded(spec()) is kernel
    assert fake_compiler.compiled == [spec().name]


def test_another_process_compiles_nothing(fake_compiler: FakeCompiler) -> None:
    name = cache.load(spec())()
    process = fake_compiler.start(LOAD)
    assert process.communicate()[0].split() == [name]
    assert len(fake_compiler.compiled) == 1


def test_four_processes_compile_once(fake_compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiler.SECONDS, "2")  # so that they meet
    processes = [fake_compiler.start(LOAD) for _ in range(4)]
    answers = [process.communicate()[0].strip() for process in processes]
    assert answers == [keys.symbol(spec())] * 4
    assert fake_compiler.compiled == [spec().name]


def test_threads_compile_one_at_a_time(fake_compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    active, most = 0, 0
    guard = threading.Lock()
    compile_kernel = compiler.compile_kernel

    def watched(*arguments: object) -> object:
        nonlocal active, most
        with guard:
            active += 1
            most = max(most, active)
        time.sleep(0.02)
        result = compile_kernel(*arguments)  # type: ignore[arg-type]
        with guard:
            active -= 1
        return result

    monkeypatch.setattr(compiler, "compile_kernel", watched)
    wanted = [spec(head_dim) for head_dim in (32, 64, 96, 128)] * 2
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(cache.load, wanted))
    assert most == 1
    assert len(fake_compiler.compiled) == 4


def test_ensure_says_whether_it_compiled(fake_compiler: FakeCompiler) -> None:
    assert not cache.contains(spec())
    assert cache.ensure(spec())
    assert not cache.ensure(spec())
    assert cache.contains(spec())
    assert cache.loaded(spec()) is None


def test_a_hit_takes_no_lock(fake_compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.load(spec())
    forget_loaded()
    monkeypatch.delattr(Store, "lock")
    monkeypatch.delattr(Store, "publish")
    assert cache.load(spec())() == keys.symbol(spec())


# Damage


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: content[: -len(store.SEAL) - 32],
        lambda content: bytes([content[0] ^ 1]) + content[1:],
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: b"\0" * len(content),
    ],
    ids=["empty", "half", "a byte short", "unsealed", "first bit", "last bit", "zeros"],
)
def test_a_damaged_file_is_compiled_again(damage, fake_compiler: FakeCompiler) -> None:  # type: ignore[no-untyped-def]
    cache.load(spec())
    path = fake_compiler.kernel_file(spec())
    good = path.read_bytes()
    path.write_bytes(damage(good))
    forget_loaded()
    assert cache.load(spec())() == keys.symbol(spec())
    assert len(fake_compiler.compiled) == 2
    assert path.read_bytes() == good


def test_a_killed_writer_does_no_harm(fake_compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiler.DEADLY, "prefill")
    process = fake_compiler.start(LOAD)
    process.communicate()
    assert process.returncode == -9
    monkeypatch.delenv(compiler.DEADLY)
    (temporary,) = fake_compiler.folder.rglob(f"{store.TEMPORARY}-*")

    assert cache.load(spec())() == keys.symbol(spec())
    assert temporary.exists(), "a young one may belong to a writer at work"

    os.utime(temporary, (0, 0))
    cache.load(spec(head_dim=128))
    assert not temporary.exists()


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "no space left")

    with pytest.raises(OSError, match="no space"):
        Store(tmp_path).publish("kernel.o", write)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_a_shared_folders_files_can_be_read_by_others(fake_compiler: FakeCompiler) -> None:
    umask = os.umask(0o022)
    try:
        cache.ensure(spec())
    finally:
        os.umask(umask)
    assert fake_compiler.kernel_file(spec()).stat().st_mode & 0o777 == 0o644


# Folders that cannot be written


def _check_works_with_one_warning() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for head_dim in (64, 128):
            assert cache.load(spec(head_dim))() == keys.symbol(spec(head_dim))
    assert [str(warning.message) for warning in caught if "CUTE_ATTN_CACHE_DIR" in str(warning.message)]
    assert len(caught) == 1


def test_a_folder_that_cannot_be_made(
    fake_compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    _check_works_with_one_warning()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(fake_compiler: FakeCompiler) -> None:
    fake_compiler.folder.mkdir()
    fake_compiler.folder.chmod(0o500)
    _check_works_with_one_warning()


def test_a_full_folder(fake_compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_file = os.replace

    def full(source: str, target: Path) -> None:
        if fake_compiler.folder in target.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", full)
    _check_works_with_one_warning()
    assert not list(fake_compiler.folder.rglob("*.o"))


def test_files_that_cannot_be_locked(fake_compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    import filelock

    def unlockable(*_: object, **__: object) -> None:
        raise NotImplementedError("this file system has no locks")

    monkeypatch.setattr(filelock.FileLock, "acquire", unlockable)
    assert cache.load(spec())() == keys.symbol(spec())
    assert fake_compiler.kernel_file(spec()).exists()


def test_a_lock_says_whether_it_waited(tmp_path: Path) -> None:
    with Store(tmp_path).lock("name") as waited:
        assert not waited
        second: list[bool] = []
        thread = threading.Thread(target=lambda: second.append(_waited(tmp_path)))
        thread.start()
        time.sleep(0.2)
        assert not second
    thread.join()
    assert second == [True]


def _waited(folder: Path) -> bool:
    with Store(folder).lock("name") as waited:
        return waited


def test_an_error_under_a_lock_comes_out(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="of the work"), Store(tmp_path).lock("name"):
        raise OSError("of the work")


# Kernels that do not compile


def test_a_failed_compile_names_the_kernel_and_is_remembered(
    fake_compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compiler.BROKEN, "prefill")
    for _ in range(3):
        with pytest.raises(KernelCompileError, match="ptxas is unhappy") as caught:
            cache.load(spec())
        assert spec().name in str(caught.value)
    assert len(fake_compiler.compiled) == 1
    with pytest.raises(KernelCompileError):
        cache.load(spec(head_dim=128))
    assert len(fake_compiler.compiled) == 2


def test_sources_that_change_meanwhile_are_not_kept(
    fake_compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.fingerprint()
    monkeypatch.setattr(keys, "sources_sha256", lambda: "edited")
    with pytest.raises(KernelCompileError, match="sources changed"):
        cache.load(spec())
    assert not fake_compiler.kernel_file(spec()).exists()


def test_importing_the_cache_leaves_the_dsl_alone(fake_compiler: FakeCompiler) -> None:
    process = fake_compiler.start("""
        import sys
        from cute_attn.compiler import cache
        from cute_attn.compiler.kernel_sets import core_kernels
        from cute_attn.arch import arch_by_name
        print([cache.contains(spec) for spec in core_kernels(arch_by_name("sm_80"))])
        print("cutlass" in sys.modules)
    """)
    assert process.communicate()[0].split("\n")[:2] == [str([False] * 12), "False"]


def test_a_real_kernel_comes_back_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles one kernel with the DSL (seconds)."""
    pytest.importorskip("cutlass")
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path))
    forget_loaded()
    real = replace(spec(), arch=arch_by_name("sm_80"))
    assert cache.ensure(real)
    start = time.perf_counter()
    assert callable(cache.load(real))
    assert time.perf_counter() - start < 1
    forget_loaded()
