"""Skips without a GPU, compiles the kernels of all collected tests at once, and ends tests that hang."""

from __future__ import annotations

import contextlib
import faulthandler
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO

# Kernels are compiled below, all at once; waiting for the core ones on import would only come on top.
os.environ.setdefault("CUTE_ATTN_COMPILE", "lazy")

import pytest
import torch

from cute_attn.compiler import workers
from cute_attn.compiler.compiling import KernelCompileError
from cute_attn.problem import KernelSpec
from tests.gpu.cases import Case
from tests.gpu.decode_cases import DecodeCase
from tests.gpu.test_prefill import SEED

HERE = Path(__file__).parent
TEST_SECONDS = 60.0  # a test takes milliseconds, a few take seconds; @pytest.mark.hang_after(seconds) changes it
_stderr: list[IO[str]] = []


def pytest_configure(config: pytest.Config) -> None:
    # A duplicate of the real standard error: during tests pytest catches what is written there.
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        _stderr.append(os.fdopen(os.dup(2), "w"))


def pytest_report_header() -> str:
    return f"random calls: seed {SEED} (CUTE_ATTN_TEST_SEED repeats them)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in _of_this_folder(items):
        item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile what the chosen tests need, with every core, before the first of them runs."""
    if session.config.option.collectonly or not torch.cuda.is_available():
        return
    specs = {spec for item in _of_this_folder(session.items) for spec in _specs(item)}
    with contextlib.suppress(KernelCompileError):  # the tests that call such a kernel fail, and say why
        workers.prepare(sorted(specs, key=lambda spec: spec.name))


def _of_this_folder(items: list[pytest.Item]) -> list[pytest.Item]:
    return [item for item in items if HERE in item.path.parents]


def _specs(item: pytest.Item) -> Iterator[KernelSpec]:
    parameters = (
        item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    )
    marked = [needed for marker in item.iter_markers("kernels") for needed in marker.args]
    for needed in (*parameters, *marked):
        if isinstance(needed, (Case, DecodeCase)):
            yield needed.spec
        elif isinstance(needed, KernelSpec):
            yield needed


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A kernel that hangs blocks Python inside CUDA, where no exception reaches it: only ending the process helps."""
    marker = item.get_closest_marker("hang_after")
    seconds = marker.args[0] if marker else TEST_SECONDS
    faulthandler.dump_traceback_later(seconds, exit=True, file=_stderr[0])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _exact_float32() -> Iterator[None]:
    """The reference's float32 products must not be rounded to TF32, nor fp16 sums to fp16."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32, matmul.allow_fp16_reduced_precision_reduction
    matmul.allow_tf32, matmul.allow_fp16_reduced_precision_reduction = False, False
    yield
    matmul.allow_tf32, matmul.allow_fp16_reduced_precision_reduction = before
