"""PTX kernels on a GPU through the CUDA driver, which compiles them: arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 1024


class GpuError(Exception):
    """A call of the driver failed."""


class Gpu:
    """The first GPU, with one buffer that every launch uses from its start.

    Args:
        buffer_bytes: of that buffer.
        keep_modules: do not unload a kernel's module after its run: ncu, when it patches code, does not survive that.

    Raises:
        ImportError: there is no package cuda-bindings.
        GpuError: there is no GPU.
    """

    def __init__(self, buffer_bytes: int = 1 << 22, keep_modules: bool = False):
        from cuda.bindings import driver

        self.driver = driver
        self.buffer_bytes = buffer_bytes
        self.keep_modules = keep_modules
        self.call("cuInit", 0)
        self.device = self.call("cuDeviceGet", 0)
        self.start()

    def call(self, name: str, *arguments: Any) -> Any:
        """A function of the driver: its results without the status.

        Raises:
            GpuError: the status says that it failed.
        """
        status, *results = getattr(self.driver, name)(*arguments)
        if status != self.driver.CUresult.CUDA_SUCCESS:
            raise GpuError(f"{name}: {status.name}")
        return results[0] if len(results) == 1 else results

    def start(self) -> None:
        """Opens a context and allocates the buffer."""
        self.call("cuCtxSetCurrent", self.call("cuDevicePrimaryCtxRetain", self.device))
        self.buffer = int(self.call("cuMemAlloc", self.buffer_bytes))

    def restart(self) -> None:
        """After a kernel that failed: such a failure ends the context."""
        self.call("cuDevicePrimaryCtxReset", self.device)
        self.start()

    def run(self, ptx: str, entry: str, arrays: Sequence[NDArray], grid: int, block: int) -> None:
        """Launch a kernel of PTX text whose parameters are the addresses of arrays, and copy them all back.

        Raises:
            GpuError: it could not be compiled or launched, or it failed; ``restart`` is needed in the last case.
        """
        module = self.call("cuModuleLoadData", ptx.encode() + b"\0")
        try:
            function = self.call("cuModuleGetFunction", module, entry.encode())
            addresses = self._copy_in(arrays)
            values = [np.array([address], np.uint64) for address in addresses]
            pointers = np.array([value.ctypes.data for value in values], np.uint64)
            self.call("cuLaunchKernel", function, grid, 1, 1, block, 1, 1, 0, 0, pointers.ctypes.data, 0)
            self.call("cuCtxSynchronize")
            for array, address in zip(arrays, addresses, strict=True):
                self.call("cuMemcpyDtoH", array.ctypes.data, address, array.nbytes)
        finally:
            if not self.keep_modules:
                self.driver.cuModuleUnload(module)  # its status after a failure tells nothing new

    def _copy_in(self, arrays: Sequence[NDArray]) -> list[int]:
        addresses, end = [], self.buffer
        for array in arrays:
            addresses.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if end > self.buffer + self.buffer_bytes:
            raise GpuError(f"the arrays fill {end - self.buffer} bytes, the buffer has {self.buffer_bytes}")
        for array, address in zip(arrays, addresses, strict=True):
            self.call("cuMemcpyHtoD", address, array.ctypes.data, array.nbytes)
        return addresses

    def about(self) -> dict[str, Any]:
        """The GPU's name and capability, and versions of the driver and its package."""
        import cuda.bindings

        attribute = self.driver.CUdevice_attribute
        major, minor = (
            self.call("cuDeviceGetAttribute", which, self.device)
            for which in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        name = self.call("cuDeviceGetName", 256, self.device)
        return {
            "gpu": name.split(b"\0")[0].decode(),
            "capability": f"{major}.{minor}",
            "cuda driver": self.call("cuDriverGetVersion"),
            "cuda-bindings": cuda.bindings.__version__,
            "numpy": np.__version__,
        }
