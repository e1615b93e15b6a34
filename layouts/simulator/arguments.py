"""Arrays on the CPU as host code wants to see them: tensors that claim to lie on a GPU, at addresses of our choice."""

from __future__ import annotations

import copy
import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from layouts.simulator.errors import SimulatorError

AddressOf = Callable[[Any], int]

# A C function that does no harm whenever it is called, even while Python shuts down: what calls back into C for
# clean-up gets this one, because a Python function may be gone by then.
HARMLESS_FUNCTION = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value

CUDA_DEVICE = 2  # DLPack's number for CUDA memory

# DLPack's (code, bits, lanes) of each dtype, by the name that numpy, ml_dtypes or torch gives it.
DLPACK_DTYPES: dict[str, tuple[int, int, int]] = {
    **{f"int{bits}": (0, bits, 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (1, bits, 1) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (2, bits, 1) for bits in (16, 32, 64)},
    "bfloat16": (4, 16, 1),
    "bool": (6, 8, 1),
    "float8_e3m4": (7, 8, 1),
    "float8_e4m3": (8, 8, 1),
    "float8_e4m3b11fnuz": (9, 8, 1),
    "float8_e4m3fn": (10, 8, 1),
    "float8_e4m3fnuz": (11, 8, 1),
    "float8_e5m2": (12, 8, 1),
    "float8_e5m2fnuz": (13, 8, 1),
    "float8_e8m0fnu": (14, 8, 1),
    "float4_e2m1fn_x2": (17, 4, 2),
}


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("dl_tensor", _DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_CAPSULE_NAME = b"dltensor"


class DeviceTensor:
    """A tensor in CUDA memory at an address that nobody can read: DLPack's description of one, without the data.

    It must outlive whatever was made from it through DLPack.
    """

    def __init__(self, address: int, shape: Sequence[int], strides: Sequence[int], dtype: tuple[int, int, int]) -> None:
        """
        Args:
            address: of the first element, in bytes.
            shape: elements along each dimension.
            strides: elements from one index to the next, for each dimension.
            dtype: DLPack's code, bits and lanes.
        """
        rank = len(shape)
        self._shape = (ctypes.c_int64 * rank)(*shape)
        self._strides = (ctypes.c_int64 * rank)(*strides)
        sizes, steps = ctypes.addressof(self._shape), ctypes.addressof(self._strides)
        tensor = _DLTensor(address, CUDA_DEVICE, 0, rank, *dtype, sizes, steps, 0)
        self._managed = _DLManagedTensor(tensor, None, HARMLESS_FUNCTION)

    def __dlpack__(self, **_: object) -> Any:
        return _new_capsule(ctypes.addressof(self._managed), _CAPSULE_NAME, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA_DEVICE, 0


@dataclass(frozen=True)
class _Description:
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


def is_array(value: object) -> bool:
    """Whether an argument is an array with memory of its own: of numpy, or a tensor of torch."""
    return isinstance(value, np.ndarray) or _is_torch(value)


def device_tensor(array: Any, address_of: AddressOf) -> DeviceTensor:
    """The array as a tensor on the GPU.

    Args:
        array: a numpy array or a torch tensor on the CPU, of any strides.
        address_of: gives the address of an array's first element.

    Raises:
        SimulatorError: the dtype has no DLPack number, the strides are no multiple of the element, or the tensor is
            not on the CPU.
    """
    described = _describe_torch(array) if _is_torch(array) else _describe_numpy(array)
    if described.dtype not in DLPACK_DTYPES:
        raise SimulatorError(f"an array of dtype {described.dtype}; allowed: {', '.join(DLPACK_DTYPES)}")
    return DeviceTensor(address_of(array), described.shape, described.strides, DLPACK_DTYPES[described.dtype])


def is_dsl_tensor(value: object) -> bool:
    """Whether an argument is a tensor that the DSL's ``from_dlpack`` made."""
    runtime = sys.modules.get("cutlass.cute.runtime")
    return runtime is not None and type(value) is runtime._Tensor


def array_behind(tensor: Any) -> np.ndarray:
    """The memory of a tensor that ``from_dlpack`` made of an array on the CPU.

    Returns:
        A view of the same shape and strides, in unsigned integers of the elements' size.

    Raises:
        SimulatorError: the elements are smaller than a byte, or the tensor is not on the CPU.
    """
    bits = tensor.element_type.width
    if bits % 8 or tensor.memspace.name != "generic":
        raise SimulatorError(f"{tensor} with elements of {bits} bits; allowed: elements of whole bytes, on the CPU")
    strides = tuple(stride * bits // 8 for stride in tensor.stride)
    size = bits // 8 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, strides, strict=True))
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * max(size, 0)).from_address(tensor.data_ptr))
    return np.ndarray(tensor.shape, f"u{bits // 8}", memory, strides=strides)


def map_leaves(argument: Any, change: Callable[[Any], Any]) -> Any:
    """The argument with every value in it changed; tuples, lists and dataclasses are containers."""
    if isinstance(argument, (tuple, list)):
        items = [map_leaves(item, change) for item in argument]
        return type(argument)(*items) if hasattr(argument, "_fields") else type(argument)(items)
    if is_dataclass(argument) and not isinstance(argument, type):
        changed = copy.copy(argument)
        for member in fields(argument):
            object.__setattr__(changed, member.name, map_leaves(getattr(argument, member.name), change))
        return changed
    return change(argument)


def _is_torch(value: object) -> bool:
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    return torch is not None and isinstance(value, torch.Tensor)


def _describe_torch(tensor: Any) -> _Description:
    if tensor.device.type != "cpu":
        raise SimulatorError(f"a tensor on {tensor.device}; the simulator takes tensors on the CPU")
    return _Description(tuple(tensor.shape), tensor.stride(), str(tensor.dtype).removeprefix("torch."))


def _describe_numpy(array: np.ndarray) -> _Description:
    if any(stride % array.itemsize for stride in array.strides):
        raise SimulatorError(f"strides of {array.strides} bytes are no multiples of the {array.itemsize}-byte elements")
    if not array.dtype.isnative:
        raise SimulatorError(f"an array of {array.dtype.str}, in the byte order of another machine")
    if array.size == 0 and not any(array.strides):  # as numpy writes them; torch's pass the host code's checks
        strides = tuple(np.cumprod([1, *(max(1, extent) for extent in array.shape[:0:-1])])[::-1].tolist())
    else:
        strides = tuple(stride // array.itemsize for stride in array.strides)
    return _Description(array.shape, strides, array.dtype.name)
