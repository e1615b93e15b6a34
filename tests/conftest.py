"""What holds for all tests."""

from __future__ import annotations

import faulthandler
from collections.abc import Generator
from pathlib import Path

import pytest

GPU_TESTS = Path(__file__).parent / "gpu"


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """The GPU tests' guard against kernels that hang, once loaded, is set for every test: it is for those alone.

    Others compile kernels, which takes as long as the machine is busy; pytest-timeout bounds them.
    """
    if GPU_TESTS not in item.path.parents:
        faulthandler.cancel_dump_traceback_later()
    return (yield)
