"""The kernels take their arguments in the order in which ``problem`` and ``decode_problem`` list them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from cute_attn.decode_problem import DecodeArguments
from cute_attn.kernels.decode import DecodeKernel
from cute_attn.kernels.prefill import PrefillKernel
from cute_attn.problem import PrefillArguments


@pytest.mark.parametrize(("kernel", "arguments"), [(PrefillKernel, PrefillArguments), (DecodeKernel, DecodeArguments)])
def test_parameters_are_the_fields(kernel: type, arguments: Any) -> None:
    parameters = list(inspect.signature(kernel.__call__).parameters)
    assert parameters == ["self", *arguments._fields, "stream"]
