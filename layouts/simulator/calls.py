"""How Python arguments reach compiled host code: through TVM-FFI, or as the DSL passes them without it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from layouts.simulator.arguments import (
    AddressOf,
    DeviceTensor,
    array_behind,
    device_tensor,
    is_array,
    is_dsl_tensor,
    map_leaves,
)
from layouts.simulator.errors import SimulatorError

# Takes the addresses of a C function's arguments and of its result.
PackedCall = Callable[..., None]
Call = Callable[[Sequence[Any], AddressOf], None]

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int32
_TvmFfiFunction = ctypes.CFUNCTYPE(_INT, _POINTER, _POINTER, _INT, _POINTER)
_TENSOR_TYPE = re.compile(r"!llvm\.struct<\(ptr(<\d+>)?, struct<.*")  # of MLIR: the data, then sizes and strides


def tvm_ffi_call(host_code: PackedCall) -> Call:
    """A call through TVM-FFI, as on a GPU: it turns Python values into C ones, and errors into exceptions.

    Args:
        host_code: a function with the signature that TVM-FFI calls.
    """
    import tvm_ffi
    from tvm_ffi.utils.unpack_dataclass import unpack_dataclass_to_tuple

    def safe_call(handle: int | None, arguments: int | None, count: int, result: int | None) -> int:
        error = _INT(0)
        variables = (_POINTER(handle), _POINTER(arguments), _INT(count), _POINTER(result), error)
        host_code(*map(ctypes.addressof, variables))
        return error.value

    c_function = _TvmFfiFunction(safe_call)
    c_address = ctypes.cast(c_function, _POINTER).value
    function = tvm_ffi.Function.__from_extern_c__(c_address, keep_alive_object=c_function)

    def call(arguments: Sequence[Any], address_of: AddressOf) -> None:
        on_device = [map_leaves(argument, lambda value: _for_tvm_ffi(value, address_of)) for argument in arguments]
        function(*map(unpack_dataclass_to_tuple, on_device))

    return call


def _for_tvm_ffi(value: Any, address_of: AddressOf) -> Any:
    if is_array(value):
        return device_tensor(value, address_of)
    if is_dsl_tensor(value):
        raise SimulatorError(
            f"{value} of from_dlpack: with --enable-tvm-ffi pass the numpy array or torch tensor itself"
        )
    return _plain(value)


def plain_call(host_code: PackedCall, types: Sequence[str], execution_args: Any) -> Call:
    """A call without TVM-FFI: the DSL turns Python values into C ones, and does not check dtypes and sizes.

    Args:
        host_code: the function that the DSL compiled.
        types: of its arguments, as MLIR writes them.
        execution_args: the DSL's converter of the function's arguments.
    """

    def call(arguments: Sequence[Any], address_of: AddressOf) -> None:
        prepared = _PlainArguments(arguments, address_of)
        pointers, _owners = execution_args.generate_execution_args(prepared.values, {})
        # The pointers own what they point to; only their numbers go on.
        addresses = [pointer if isinstance(pointer, int) else pointer.value for pointer in pointers]
        _check(addresses, types, prepared.made + prepared.given)
        error = _INT(0)
        with ExitStack() as stack:
            for tensor in prepared.given:
                stack.enter_context(_at_device_address(tensor, address_of))
            host_code(*addresses, ctypes.addressof(error))
        if error.value:
            raise SimulatorError(f"the host code returned the CUDA error {error.value}")

    return call


class _PlainArguments:
    """Arguments as the DSL's converter takes them.

    Attributes:
        values: the arguments, with arrays as tensors of from_dlpack on the device.
        made: these tensors.
        given: tensors of from_dlpack among the arguments. They lie on the CPU.
    """

    def __init__(self, arguments: Sequence[Any], address_of: AddressOf) -> None:
        self.made: list[Any] = []
        self.given: list[Any] = []
        self._sources: list[DeviceTensor] = []  # must outlive the tensors made of them
        self.values = tuple(
            map_leaves(argument, lambda value: self._convert(value, address_of)) for argument in arguments
        )

    def _convert(self, value: Any, address_of: AddressOf) -> Any:
        from cutlass.cute.runtime import from_dlpack

        if is_array(value):
            self._sources.append(device_tensor(value, address_of))
            self.made.append(from_dlpack(self._sources[-1]).mark_layout_dynamic())  # as the DSL does with arrays
            return self.made[-1]
        if is_dsl_tensor(value):
            self.given.append(value)
        return _plain(value)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _check(addresses: Sequence[int], types: Sequence[str], tensors: Sequence[Any]) -> None:
    """Whether the host code finds what it expects behind the addresses: it looks without asking."""
    if len(addresses) != len(types):
        raise SimulatorError(
            f"the host code takes {len(types)} values, the arguments make {len(addresses)}; None makes none, so that a "
            "stream must be a CUstream"
        )
    by_address = {tensor.__c_pointers__()[0]: tensor for tensor in tensors}
    for index, (address, expected) in enumerate(zip(addresses, types, strict=True)):
        tensor = by_address.get(address)
        if (tensor is not None) != bool(_TENSOR_TYPE.fullmatch(expected)):
            raise SimulatorError(f"value {index} of the arguments is {tensor or 'no tensor'}; expected {expected}")
        if tensor is not None:
            _check_dynamic(tensor, expected)


def _check_dynamic(tensor: Any, expected: str) -> None:
    takes = len(re.findall(r"\bi(?:32|64)\b", expected))
    has = sum(tensor.dynamic_shapes_mask) + sum(tensor.dynamic_strides_mask)
    if has != takes:
        raise SimulatorError(
            f"{tensor} has {has} dynamic sizes and strides, the compiled function takes {takes}: pass a tensor of "
            "from_dlpack with what was marked dynamic at compile time, or compile with --enable-tvm-ffi"
        )


@contextmanager
def _at_device_address(tensor: Any, address_of: AddressOf) -> Iterator[None]:
    """Lets a tensor of from_dlpack, whose C form starts with its data's address, lie elsewhere for a while."""
    data = ctypes.c_uint64.from_address(tensor.__c_pointers__()[0])
    on_cpu = data.value
    data.value = address_of(array_behind(tensor))
    try:
        yield
    finally:
        data.value = on_cpu
