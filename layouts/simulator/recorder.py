"""The CUDA functions that compiled host code calls, played by a recorder: it answers, and takes notes of launches."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layouts.simulator.errors import SimulatorError

Dim3 = tuple[int, int, int]

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_FAILED = 999  # cudaErrorUnknown
_LIBRARY_HANDLE = 1
_KIB = 1024

# Shared memory that a block may have, in KiB, by compute capability (CUDA programming guide, technical specifications).
_SMEM_KIB = dict.fromkeys((80, 87), 163) | dict.fromkeys((86, 89, 120, 121), 99)
_SMEM_KIB |= dict.fromkeys((90, 100, 101, 103, 110), 227)
_THREADS_PER_BLOCK = 1024
_BLOCK_LIMITS = (1024, 1024, 64)
_GRID_LIMITS = (2**31 - 1, 65535, 65535)
_THREADS_PER_SM = dict.fromkeys((80, 90, 100, 101, 103), 2048)
_FEWEST_THREADS_PER_SM = 1536
_RESERVED_SMEM = 1 * _KIB  # of a block, for the system

# Launch attributes (cudaLaunchAttributeID) that decide what a launch is, and those that do not change what it computes.
_COOPERATIVE, _CLUSTER = 2, 4
_HARMLESS_ATTRIBUTES = {
    1: "access policy window",
    3: "synchronization policy",
    5: "cluster scheduling policy",
    6: "programmatic stream serialization",
    7: "programmatic event",
    8: "priority",
    9: "memory synchronization domain map",
    10: "memory synchronization domain",
    12: "launch completion event",
    14: "preferred shared memory carveout",
}


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem_bytes", ctypes.c_size_t),
        ("stream", _POINTER),
        ("attributes", _POINTER),
        ("attribute_count", ctypes.c_uint32),
    )


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int32),
        ("padding", ctypes.c_uint8 * 4),
        ("value", ctypes.c_uint32 * 16),
    )


@dataclass(frozen=True)
class RecordedLaunch:
    """A launch as the host code asked for it; see ``layouts.simulator.launch.Launch``."""

    kernel: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    smem_bytes: int
    parameters: tuple[bytes, ...]
    cooperative: bool


class Recorder:
    """A CUDA runtime of one device that launches nothing.

    Attributes:
        functions: the C functions by the name that host code calls them by. They must outlive it.
        launches: what was launched, in order.
        num_sms: how many multiprocessors the device says it has.
    """

    def __init__(self, parameter_sizes: Mapping[str, tuple[int, ...]], capability: int) -> None:
        """
        Args:
            parameter_sizes: bytes of each parameter, by kernel.
            capability: compute capability, such as 90.
        """
        self.launches: list[RecordedLaunch] = []
        self.num_sms = 0
        self._failure: BaseException | None = None
        self._parameter_sizes = parameter_sizes
        self._capability = capability
        self._kernels: list[str] = []
        self.functions = self._make_functions()

    def start(self, num_sms: int) -> None:
        """Forget earlier launches."""
        self.launches, self._failure, self.num_sms = [], None, num_sms

    def check(self) -> None:
        """Raises what a function has raised since the start: C code cannot pass exceptions on."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def refusal(self, name: str) -> Any:
        """A function that reports that the host code calls what is not modelled."""

        def refuse() -> None:
            raise SimulatorError(f"the host code calls {name}, which the simulator does not model")

        return self._callback(refuse)

    def _make_functions(self) -> dict[str, Any]:
        pointer, number, size = _POINTER, _INT, ctypes.c_size_t
        launch_numbers = (number,) * 6
        return {
            "_cudaLaunchKernelEx": self._callback(self._launch_ex, pointer, pointer, pointer),
            "_cudaLaunchKernel": self._callback(self._launch, pointer, *launch_numbers, pointer, size, pointer),
            "_cudaLibraryLoadData": self._callback(self._load_library, pointer),
            "_cudaLibraryGetKernel": self._callback(self._get_kernel, pointer, pointer, pointer),
            "_cudaGetDevice": self._callback(self._get_device, pointer),
            "_cudaDeviceGetAttribute": self._callback(self._device_attribute, pointer, number, number),
            "_cuKernelGetAttribute": self._callback(self._kernel_attribute, pointer, number, pointer, number),
            "_cudaOccupancyMaxActiveBlocksPerMultiprocessor": self._callback(
                self._blocks_per_sm, pointer, pointer, number, size
            ),
            "_cudaSetDevice": self._callback(_nothing),
            "_cudaFuncSetAttribute": self._callback(_nothing),
            "_cudaKernelSetAttributeForDevice": self._callback(_nothing),
        }

    def _callback(self, function: Callable[..., None], *argument_types: Any) -> Any:
        """A C function that returns a cudaError_t: 0, or 999 after an exception, which ``check`` raises later."""

        @functools.wraps(function)
        def call(*arguments: Any) -> int:
            try:
                function(*arguments)
            except BaseException as error:
                self._failure = self._failure or error
                return _FAILED
            return 0

        return ctypes.CFUNCTYPE(_INT, *argument_types)(call)

    def _launch_ex(self, config_address: int, kernel: int, parameters: int) -> None:
        config = _LaunchConfig.from_address(config_address)
        attributes = _attributes(config)
        name = self._kernel_name(kernel)
        self._accept(
            RecordedLaunch(
                kernel=name,
                grid=_dim3(config.grid),
                block=_dim3(config.block),
                cluster=_cluster(attributes),
                smem_bytes=config.smem_bytes,
                parameters=self._read_parameters(name, parameters),
                cooperative=bool(attributes.get(_COOPERATIVE, (0,))[0]),
            )
        )

    def _launch(self, kernel: int, *rest: int) -> None:
        *extents, parameters, smem_bytes, _stream = rest
        name = self._kernel_name(kernel)
        values = self._read_parameters(name, parameters)
        grid, block = _dim3(extents[:3]), _dim3(extents[3:])
        self._accept(RecordedLaunch(name, grid, block, (1, 1, 1), smem_bytes, values, False))

    def _kernel_name(self, handle: int | None) -> str:
        name = self._kernels[handle - 1] if handle else "that was not loaded"
        if name not in self._parameter_sizes:
            raise SimulatorError(
                f"the host code launches a kernel {name}; in the PTX are {list(self._parameter_sizes)}"
            )
        return name

    def _read_parameters(self, kernel: str, addresses: int) -> tuple[bytes, ...]:
        sizes = self._parameter_sizes[kernel]
        if not sizes:
            return ()
        pointers = (_POINTER * len(sizes)).from_address(addresses)
        return tuple(ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True))

    def _accept(self, launch: RecordedLaunch) -> None:
        """Notes the launch, if CUDA would."""
        for what, extents, limits in (("grid", launch.grid, _GRID_LIMITS), ("block", launch.block, _BLOCK_LIMITS)):
            if not all(1 <= extent <= limit for extent, limit in zip(extents, limits, strict=True)):
                raise SimulatorError(f"{launch.kernel} with a {what} of {extents}; allowed: 1, 1, 1 to {limits}")
        threads = _product(launch.block)
        if threads > _THREADS_PER_BLOCK:
            raise SimulatorError(f"{launch.kernel} with {threads} threads a block; allowed: {_THREADS_PER_BLOCK}")
        if launch.smem_bytes > self._smem_limit():
            raise SimulatorError(
                f"{launch.kernel} with {launch.smem_bytes} bytes of shared memory; sm_{self._capability} allows "
                f"{self._smem_limit()}"
            )
        if any(blocks % extent for blocks, extent in zip(launch.grid, launch.cluster, strict=True)):
            raise SimulatorError(
                f"{launch.kernel} with a grid of {launch.grid}, no multiple of clusters {launch.cluster}"
            )
        self.launches.append(launch)

    def _load_library(self, library: int) -> None:
        _pointer_at(library).value = _LIBRARY_HANDLE

    def _get_kernel(self, kernel: int, library: int, name: int) -> None:
        self._kernels.append(ctypes.string_at(name).decode())
        _pointer_at(kernel).value = len(self._kernels)

    def _get_device(self, device: int) -> None:
        _int_at(device).value = 0

    def _kernel_attribute(self, value: int, attribute: int, kernel: int, device: int) -> None:
        _int_at(value).value = 0  # asked for is static shared memory, to learn how much remains

    def _device_attribute(self, value: int, attribute: int, device: int) -> None:
        answers = {
            1: _THREADS_PER_BLOCK,
            **dict(zip((2, 3, 4), _BLOCK_LIMITS, strict=True)),
            **dict(zip((5, 6, 7), _GRID_LIMITS, strict=True)),
            8: 48 * _KIB,
            10: 32,  # lanes of a warp
            16: self.num_sms,
            39: self._threads_per_sm(),
            75: self._capability // 10,
            76: self._capability % 10,
            81: self._smem_limit() + _RESERVED_SMEM,
            97: self._smem_limit(),
        }
        if attribute not in answers:
            raise SimulatorError(f"the host code asks for device attribute {attribute}; known: {sorted(answers)}")
        _int_at(value).value = answers[attribute]

    def _blocks_per_sm(self, blocks: int, kernel: int, threads: int, smem_bytes: int) -> None:
        """As threads and shared memory allow; registers are for ptxas to know."""
        by_smem = (self._smem_limit() + _RESERVED_SMEM) // (smem_bytes + _RESERVED_SMEM)
        _int_at(blocks).value = min(self._threads_per_sm() // threads, by_smem)

    def _smem_limit(self) -> int:
        if self._capability not in _SMEM_KIB:
            raise SimulatorError(f"no limits are known for sm_{self._capability}; known: {sorted(_SMEM_KIB)}")
        return _SMEM_KIB[self._capability] * _KIB

    def _threads_per_sm(self) -> int:
        return _THREADS_PER_SM.get(self._capability, _FEWEST_THREADS_PER_SM)


def _attributes(config: _LaunchConfig) -> dict[int, tuple[int, ...]]:
    """The values of a launch's attributes by their id.

    Raises:
        SimulatorError: there is one that is not modelled.
    """
    if not config.attribute_count:
        return {}
    attributes = (_LaunchAttribute * config.attribute_count).from_address(config.attributes)
    values = {attribute.id: tuple(attribute.value) for attribute in attributes}
    unknown = values.keys() - _HARMLESS_ATTRIBUTES.keys() - {_COOPERATIVE, _CLUSTER}
    if unknown:
        raise SimulatorError(f"a launch with the attributes {sorted(unknown)} of cudaLaunchAttributeID: not modelled")
    return values


def _cluster(attributes: Mapping[int, tuple[int, ...]]) -> Dim3:
    x, y, z = (extent or 1 for extent in attributes.get(_CLUSTER, (1, 1, 1))[:3])
    return x, y, z


def _dim3(extents: Sequence[int]) -> Dim3:
    x, y, z = extents
    return x, y, z


def _product(extents: Dim3) -> int:
    return extents[0] * extents[1] * extents[2]


def _pointer_at(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p.from_address(address)


def _int_at(address: int) -> ctypes.c_int:
    return ctypes.c_int.from_address(address)


def _nothing() -> None:
    pass
