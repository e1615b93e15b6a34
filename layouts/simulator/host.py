"""The host code of a compiled DSL function, run on this CPU without a GPU, a driver or a C compiler.

The DSL leaves the host code as an MLIR module in the LLVM dialect. MLIR's own engine makes it executable here, with a
``Recorder`` in place of the CUDA runtime.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

from layouts.simulator.arguments import HARMLESS_FUNCTION, AddressOf
from layouts.simulator.calls import PackedCall, plain_call, tvm_ffi_call
from layouts.simulator.entry import Entry
from layouts.simulator.errors import SimulatorError
from layouts.simulator.recorder import RecordedLaunch, Recorder

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int32
_PackedFunction = ctypes.CFUNCTYPE(None, _POINTER)


class HostProgram:
    """The host code of one compiled function, ready to run again and again."""

    def __init__(self, compiled: Any, entries: dict[str, Entry], capability: int) -> None:
        """
        Args:
            compiled: what ``cute.compile`` gave.
            entries: its kernels, by name.
            capability: compute capability that they were compiled for, such as 90.

        Raises:
            SimulatorError: the compiled function has no host code to run, as those loaded from a file.
        """
        module = getattr(compiled, "ir_module", None)
        if module is None:
            raise SimulatorError(
                f"{type(compiled).__name__} has no ir_module: pass the object that cute.compile returned"
            )
        sizes = {name: tuple(parameter.size for parameter in entry.parameters) for name, entry in entries.items()}
        self._lock = threading.Lock()
        self._recorder = Recorder(sizes, capability)
        self._code = code = _HostCode(module, self._recorder)  # its functions are gone when it is
        if "cuda_load_to_device" in code.arguments:
            _load_kernels(code)
            self._recorder.check()
        name = compiled.function_name
        if f"__tvm_ffi_{name}" in code.arguments:
            self._call = tvm_ffi_call(code.function(f"__tvm_ffi_{name}"))
        else:
            self._call = plain_call(code.function(name), code.arguments[name], compiled.execution_args)

    def run(self, arguments: Sequence[Any], address_of: AddressOf, num_sms: int) -> list[RecordedLaunch]:
        """What the host code launches for these arguments.

        Args:
            arguments: as the compiled function takes them, with arrays on the CPU.
            address_of: gives the device address of an array's first element.
            num_sms: how many multiprocessors the device says it has.

        Raises:
            SimulatorError: the launch is not one that CUDA allows, or needs what is not modelled.
            Exception: whatever the host code raises about its arguments.
        """
        with self._lock:
            self._recorder.start(num_sms)
            try:
                self._call(arguments, address_of)
            except Exception:
                self._recorder.check()
                raise
            self._recorder.check()
            return self._recorder.launches


class _HostCode:
    """A module made executable.

    Attributes:
        arguments: the MLIR types of the arguments of each function that the module defines, by the function's name.
    """

    def __init__(self, module: Any, recorder: Recorder) -> None:
        from cutlass._mlir.execution_engine import ExecutionEngine

        functions = [op for op in module.body.operations if op.operation.name == "llvm.func"]
        self.arguments = {
            op.attributes["sym_name"].value: [str(argument.type) for argument in op.regions[0].blocks[0].arguments]
            for op in functions
            if len(op.regions[0].blocks)
        }
        with module.context:
            self._engine = ExecutionEngine(module, opt_level=0)
        declared = {op.attributes["sym_name"].value for op in functions} - self.arguments.keys()
        self._provided = _provided(declared, recorder)
        for name, function in self._provided.items():
            self._engine.raw_register_runtime(name, ctypes.cast(function, _POINTER))

    def function(self, name: str) -> PackedCall:
        """A function, called with the addresses of its arguments and, if it has one, of its result."""
        function = _PackedFunction(self._engine.raw_lookup(name))

        def call(*addresses: int) -> None:
            function((_POINTER * len(addresses))(*addresses))

        return call


def _provided(declared: set[str], recorder: Recorder) -> dict[str, Any]:
    """The C functions that host code needs from outside, by name."""
    import tvm_ffi

    error_name = ctypes.create_string_buffer(b"CUDA error")

    def get_error_name(code: int) -> int:
        return ctypes.addressof(error_name)

    def get_stream(device_type: int, device: int) -> None:
        return None

    def raise_cuda_error(raise_parts: int, code: int) -> None:
        # The caller only waits for an error to be raised; the recorder has the real one.
        tvm_ffi.LIB.TVMFFIErrorSetRaisedFromCStr(b"RuntimeError", b"CUDA error %d" % code)

    known = {
        **recorder.functions,
        "cuda_dialect_init_library_once": ctypes.CFUNCTYPE(_INT)(lambda: 0),  # loaded long ago
        "cuda_dialect_unload_library_once": HARMLESS_FUNCTION,
        "cuda_dialect_get_error_name": ctypes.CFUNCTYPE(_POINTER, _INT)(get_error_name),
        "TVMFFIEnvGetStream": ctypes.CFUNCTYPE(_POINTER, _INT, _INT)(get_stream),
        "CuteDSLRT_TVMFFISetRaisedCudaError": ctypes.CFUNCTYPE(None, _POINTER, _INT)(raise_cuda_error),
        "TVMFFIErrorSetRaisedFromCStr": tvm_ffi.LIB.TVMFFIErrorSetRaisedFromCStr,
        "TVMFFIErrorSetRaisedFromCStrParts": tvm_ffi.LIB.TVMFFIErrorSetRaisedFromCStrParts,
    }
    process = ctypes.CDLL(None)
    unknown = {name for name in declared - known.keys() if not hasattr(process, name) or name.startswith("_cu")}
    return known | {name: recorder.refusal(name) for name in unknown}


def _load_kernels(code: _HostCode) -> None:
    """Lets the host code ask for its kernels' handles, by which it names them when it launches."""
    library, device, error = _POINTER(), _INT(0), _INT(0)
    libraries = _POINTER(ctypes.addressof(library))
    code.function("cuda_load_to_device")(*map(ctypes.addressof, (libraries, device, error)))
