"""Launches found without a GPU: grids, attributes and the exact bytes of every parameter."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import numpy as np
import pytest
import torch
from cutlass.cute.runtime import from_dlpack

from layouts.simulator.arguments import map_leaves
from layouts.simulator.errors import SimulatorError
from layouts.simulator.launch import capture, launch_of_ptx
from layouts.simulator.recorder import Recorder
from layouts.simulator.simulate import simulate
from tests.simulator import kernels

ROOT = Path(__file__).parents[2]
ADDRESS = 0x7F00_0010_0000
STREAM = cuda.CUstream(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dump")


@pytest.fixture(scope="module")
def scale(folder: Path) -> Any:
    return kernels.compile_scale(kernels.scale, folder)


@pytest.fixture(scope="module")
def plain_scale(folder: Path) -> Any:
    """Compiled without TVM-FFI."""
    return kernels.compile_scale(kernels.scale_and_negate, folder, options="", env_stream=False)


class Addresses:
    """Fake device memory: a megabyte for each array asked for."""

    def __init__(self) -> None:
        self.arrays: list[Any] = []

    def __call__(self, array: Any) -> int:
        self.arrays.append(array)
        return ADDRESS + (len(self.arrays) - 1 << 20)


def matrix_bytes(address: int, rows: int, columns: int, stride: int) -> bytes:
    return struct.pack("<QiiQ", address, rows, columns, stride)


SCALE_PARAMETERS = (
    matrix_bytes(ADDRESS, 100, 7, 7),
    matrix_bytes(ADDRESS + (1 << 20), 25, 8, 16),
    struct.pack("<i", -5),
    struct.pack("<f", 2.5),
)


def scale_arguments() -> list[Any]:
    return [np.zeros((100, 7), np.float32), torch.zeros(50, 8)[::2], -5, 2.5]


def test_parameters_hold_addresses_sizes_strides_and_scalars(scale: Any) -> None:
    addresses = Addresses()
    arguments = scale_arguments()
    (launch,) = capture(scale, arguments, addresses)
    assert launch.kernel in launch.ptx
    assert (launch.grid, launch.block, launch.cluster) == ((4, 1, 1), (32, 1, 1), (1, 1, 1))
    assert (launch.smem_bytes, launch.cooperative) == (0, False)
    assert launch.parameters == SCALE_PARAMETERS
    assert addresses.arrays[0] is arguments[0]
    assert addresses.arrays[1] is arguments[1]


def test_a_repeated_call_sees_its_own_arguments(scale: Any) -> None:
    capture(scale, scale_arguments(), Addresses())
    (launch,) = capture(scale, [np.zeros((1, 9), np.float32)[:, 2:], torch.zeros(5, 3), 1, 0], Addresses())
    assert launch.grid == (1, 1, 1)
    assert launch.parameters[:2] == (matrix_bytes(ADDRESS, 1, 7, 9), matrix_bytes(ADDRESS + (1 << 20), 5, 3, 3))


@pytest.mark.parametrize("empty", [np.zeros((0, 3), np.float32), torch.zeros(0, 3), np.zeros((2, 3), np.float32)[:0]])
def test_empty_arrays(scale: Any, empty: Any) -> None:
    (launch,) = capture(scale, [np.zeros((1, 7), np.float32), empty, 1, 0], Addresses())
    assert launch.parameters[1] == matrix_bytes(ADDRESS + (1 << 20), 0, 3, 3)


@pytest.mark.parametrize("scalars", [(cutlass.Int32(-5), cutlass.Float32(2.5)), (np.int64(-5), np.float32(2.5))])
def test_scalars_of_numpy_and_of_the_dsl(scale: Any, scalars: tuple[Any, Any]) -> None:
    (launch,) = capture(scale, [*scale_arguments()[:2], *scalars], Addresses())
    assert launch.parameters == SCALE_PARAMETERS


def test_strides_of_views(scale: Any) -> None:
    flat = np.zeros(1000, np.float32)
    reversed_rows, broadcast = flat[:60].reshape(6, 10)[::-1, :4], np.broadcast_to(flat[:10], (3, 10))
    (launch,) = capture(scale, [reversed_rows, broadcast, 0, 0.0], Addresses())
    assert launch.parameters[0] == struct.pack("<Qiiq", ADDRESS, 6, 4, -10)
    assert launch.parameters[1] == matrix_bytes(ADDRESS + (1 << 20), 3, 10, 0)


def test_dtypes_and_nested_arguments(folder: Path) -> None:
    compiled = kernels.compile_many_dtypes(folder)
    ones = torch.ones(2, 3)
    tensors = (ones.bfloat16(), ones.to(torch.float8_e4m3fn), ones.to(torch.int8).numpy(), np.ones((2, 3), bool))
    (launch,) = capture(compiled, [tensors, True, -3, 4096], Addresses())
    assert launch.smem_bytes == 4096
    assert launch.parameters[:4] == tuple(matrix_bytes(ADDRESS + (i << 20), 2, 3, 3) for i in range(4))
    assert launch.parameters[4:] == (b"\x01", b"\xfd")
    with pytest.raises(ValueError, match="expected dtype=bfloat16"):
        capture(compiled, [tensors[1:] + tensors[:1], True, -3, 4096], Addresses())
    with pytest.raises(SimulatorError, match="232449 bytes of shared memory; sm_90 allows 232448"):
        capture(compiled, [tensors, True, -3, 227 * 1024 + 1], Addresses())


@dataclass
class Pair:
    array: Any
    others: tuple[Any, ...]


def test_arrays_are_found_in_containers() -> None:
    arguments = [Pair(1, (2, [3])), 4]
    assert map_leaves(arguments, lambda value: value * 10) == [Pair(10, (20, [30])), 40]
    assert arguments == [Pair(1, (2, [3])), 4]


def test_clusters_and_tma_descriptors(folder: Path) -> None:
    compiled = kernels.compile_copy_by_tma(folder)
    arguments = [np.zeros((256, 192), np.float16), np.zeros(64, np.float16)]
    (launch,) = capture(compiled, arguments, Addresses())
    assert (launch.grid, launch.block, launch.cluster) == ((4, 3, 1), (64, 1, 1), (2, 1, 1))
    assert launch.smem_bytes == kernels.TMA_SMEM_BYTES
    assert [len(parameter) for parameter in launch.parameters] == [128, 8, 16]
    assert launch.parameters[0][:8] == struct.pack("<Q", ADDRESS)  # the descriptor starts with its tensor's address
    arguments[0] = arguments[0][:192]
    with pytest.raises(SimulatorError, match=r"grid of \(3, 3, 1\).*clusters \(2, 1, 1\)"):
        capture(compiled, arguments, Addresses())


def test_several_launches_in_order_without_tvm_ffi(plain_scale: Any) -> None:
    first, second = capture(plain_scale, [*scale_arguments(), STREAM], Addresses())
    assert "scale_kernel" in first.kernel
    assert first.parameters == SCALE_PARAMETERS
    assert "negate_kernel" in second.kernel
    assert (second.grid, second.block, second.smem_bytes) == ((3, 2, 1), (16, 4, 2), 1024)
    assert second.parameters == SCALE_PARAMETERS[1:2]


def test_tensors_of_from_dlpack_keep_what_was_marked_dynamic(plain_scale: Any) -> None:
    addresses = Addresses()
    x = np.arange(700, dtype=np.float32).reshape(100, 7)
    tensor = from_dlpack(x).mark_layout_dynamic()
    first, _ = capture(plain_scale, [tensor, *scale_arguments()[1:], STREAM], addresses)
    # Arrays are asked for while arguments are converted, tensors of from_dlpack when the call is made.
    assert first.parameters[0] == matrix_bytes(ADDRESS + (1 << 20), 100, 7, 7)
    view = addresses.arrays[1]
    assert (view.shape, view.strides, view.dtype) == (x.shape, x.strides, np.uint32)
    assert view.ctypes.data == x.ctypes.data
    assert tensor.data_ptr == x.ctypes.data


@pytest.mark.parametrize(
    ("index", "wrong", "message"),
    [
        (0, from_dlpack(np.zeros((4, 8), np.float32)), "0 dynamic sizes and strides, the compiled function takes 3"),
        (0, 5, "value 0 of the arguments is no tensor"),
        (4, None, "takes 5 values, the arguments make 4"),
    ],
)
def test_what_the_dsl_does_not_check_without_tvm_ffi(plain_scale: Any, index: int, wrong: Any, message: str) -> None:
    arguments = [*scale_arguments(), STREAM]
    arguments[index] = wrong
    with pytest.raises(SimulatorError, match=message):
        capture(plain_scale, arguments, Addresses())


@pytest.mark.parametrize(
    ("index", "wrong", "error", "message"),
    [
        (0, np.zeros((4, 8), np.float16), ValueError, "expected dtype=float32"),
        (1, np.zeros(4, np.float32), ValueError, "expected ndim=2"),
        (1, np.zeros((8, 4), np.float32).T, ValueError, r"Mismatched y.strides\[1\].*expected to be 1"),
        (2, 1.5, TypeError, "expected int"),
        (0, np.zeros((4, 8), np.complex64), SimulatorError, "dtype complex64; allowed: int8"),
        (0, np.zeros((4, 8), ">f4"), SimulatorError, "byte order"),
        (0, torch.zeros(4, 8, device="meta"), SimulatorError, "on meta"),
        (0, from_dlpack(np.zeros((4, 8), np.float32)), SimulatorError, "pass the numpy array or torch tensor itself"),
    ],
)
def test_wrong_arguments(scale: Any, index: int, wrong: Any, error: type[Exception], message: str) -> None:
    arguments = scale_arguments()
    arguments[index] = wrong
    with pytest.raises(error, match=message):
        capture(scale, arguments, Addresses())
    assert capture(scale, scale_arguments(), Addresses())[0].parameters == SCALE_PARAMETERS


def test_wrong_addresses_counts_and_grids(scale: Any) -> None:
    with pytest.raises(ValueError, match="Misaligned Tensor data on argument #0"):
        capture(scale, scale_arguments(), lambda array: ADDRESS + 2)
    with pytest.raises(TypeError, match="Expects 4 parameters"):
        capture(scale, scale_arguments()[:3], Addresses())
    with pytest.raises(SimulatorError, match=r"grid of \(0, 1, 1\)"):
        capture(scale, [np.zeros((0, 7), np.float32), *scale_arguments()[1:]], Addresses())

    def unknown(array: Any) -> int:
        raise KeyError("no such array")

    with pytest.raises(KeyError, match="no such array"):
        capture(scale, scale_arguments(), unknown)


def test_ptx_and_host_code_must_be_there(folder: Path, scale: Any) -> None:
    compiled = kernels.compile_scale(kernels.scale, folder / "missing")
    with pytest.raises(SimulatorError, match="--keep-ptx --dump-dir FOLDER"):
        capture(compiled, scale_arguments(), Addresses())

    class Loaded:
        __ptx__ = scale.__ptx__

    with pytest.raises(SimulatorError, match="Loaded has no ir_module"):
        capture(Loaded(), scale_arguments(), Addresses())


def test_programs_die_quietly_in_any_order(tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import gc
        from pathlib import Path
        from tests.simulator import test_launch, kernels
        folder = Path({str(tmp_path)!r})
        kept = [kernels.compile_scale(kernels.scale, folder) for _ in range(3)]
        for compiled in kept:
            test_launch.capture(compiled, test_launch.scale_arguments(), test_launch.Addresses())
        del compiled, kept[1]
        gc.collect()
        launches = test_launch.capture(kept[1], test_launch.scale_arguments(), test_launch.Addresses())
        print(launches[0].grid)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "(4, 1, 1)\n", "")


def test_importing_the_module_stays_light() -> None:
    heavy = "{'cutlass', 'torch', 'tvm_ffi', 'cuda'}"
    script = f"import sys, layouts.simulator.launch; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_what_the_recorder_tells_of_its_device() -> None:
    recorder = Recorder({}, 90)
    recorder.start(num_sms=78)
    answer = ctypes.c_int()
    device_attribute = recorder.functions["_cudaDeviceGetAttribute"]
    answers = {}
    for attribute in (16, 75, 76, 97):
        assert device_attribute(ctypes.addressof(answer), attribute, 0) == 0
        answers[attribute] = answer.value
    assert answers == {16: 78, 75: 9, 76: 0, 97: 227 * 1024}
    blocks_per_sm = recorder.functions["_cudaOccupancyMaxActiveBlocksPerMultiprocessor"]
    for threads, smem_bytes, expected in ((128, 0, 16), (128, 100 * 1024, 2), (1024, 0, 2)):
        assert blocks_per_sm(ctypes.addressof(answer), None, threads, smem_bytes) == 0
        assert answer.value == expected
    recorder.check()
    assert device_attribute(ctypes.addressof(answer), 1000, 0) != 0
    with pytest.raises(SimulatorError, match="device attribute 1000"):
        recorder.check()
    recorder.start(num_sms=78)
    assert recorder.refusal("_cudaMalloc")() != 0
    with pytest.raises(SimulatorError, match="calls _cudaMalloc, which the simulator does not model"):
        recorder.check()


PTX = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry two(
    .param .u64 .ptr .global .align 16 two_pointer,  // with a comment
    .param .u32 two_count, .param .f32 two_scale,
    .param .align 8 .b8 two_struct[12],
    .param .b16 two_half
)
.maxntid 128
.reqnctapercluster 2, 1, 1
{ ret; }
.visible .entry none() { ret; }
"""


def ptx_launch(*arguments: Any, kernel: str | None = "two") -> Any:
    return launch_of_ptx(PTX, arguments, (3, 2), 64, 512, Addresses(), kernel)


def test_ptx_arguments() -> None:
    launch = ptx_launch(np.zeros(3), -1, 2, bytes(range(12)), 1.5)
    assert (launch.kernel, launch.grid, launch.block) == ("two", (3, 2, 1), (64, 1, 1))
    assert (launch.cluster, launch.smem_bytes) == ((2, 1, 1), 512)
    expected = struct.pack("<Q", ADDRESS), b"\xff" * 4, struct.pack("<f", 2), bytes(range(12)), struct.pack("<e", 1.5)
    assert launch.parameters == expected
    launch = ptx_launch(None, cutlass.Int32(7), np.float32(0.5), b"x" * 12, 65535)
    assert launch.parameters[:3] == (bytes(8), struct.pack("<i", 7), struct.pack("<f", 0.5))
    assert ptx_launch(kernel="none").parameters == ()


@pytest.mark.parametrize(
    ("index", "wrong", "message"),
    [
        (0, 1.5, r"two_pointer \(.u64\) does not take 1.5 of type float"),
        (1, np.zeros(3), r"two_count \(.u32\) is no 64-bit pointer"),
        (1, 1 << 32, "two_count .* holds -2147483648 to 4294967295, got 4294967296"),
        (1, "7", "two_count .* does not take '7' of type str"),
        (2, None, "two_scale .* is no 64-bit pointer, got None"),
        (3, b"short", "two_struct .* has 12 bytes, got 5"),
        (3, 7, "two_struct .* takes bytes, got 7 of type int"),
    ],
)
def test_wrong_ptx_arguments(index: int, wrong: Any, message: str) -> None:
    arguments: list[Any] = [np.zeros(3), 1, 2.0, bytes(12), 0]
    arguments[index] = wrong
    with pytest.raises(SimulatorError, match=message):
        ptx_launch(*arguments)


def test_wrong_ptx_launches() -> None:
    with pytest.raises(SimulatorError, match=r"two takes 5 arguments, got 1: parameter two_pointer \(.u64\)"):
        ptx_launch(0)
    with pytest.raises(SimulatorError, match=r"several entries; entry= takes one of \['two', 'none'\]"):
        ptx_launch(kernel=None)
    with pytest.raises(SimulatorError, match="no entry three"):
        ptx_launch(kernel="three")
    with pytest.raises(SimulatorError, match=r"grid is \(1, 0\)"):
        launch_of_ptx(PTX, (), (1, 0), 1, 0, Addresses(), "none")


def test_ptx_of_the_dsl_takes_the_captured_bytes(scale: Any) -> None:
    (launch,) = capture(scale, scale_arguments(), Addresses())
    again = launch_of_ptx(launch.ptx, SCALE_PARAMETERS, launch.grid, launch.block, launch.smem_bytes, Addresses())
    assert again == launch


NOTHING = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 p) { ret; }\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": (1.5, 1)}, r"grid is \(1.5, 1\); allowed: one to three positive integers"),
        ({"grid": None}, "grid is None; allowed: one to three"),
        ({"grid": "1"}, "grid is '1'; allowed"),
        ({"block": (1024, 2)}, r"block is \(1024, 2\); allowed: at most 1024 threads"),
        ({"smem_bytes": -1}, "smem_bytes is -1; allowed: 0 to 232448"),
        ({"smem_bytes": 2**40}, "smem_bytes is 1099511627776; allowed: 0 to"),
        ({"arguments": [np.array([object()])]}, "an array of dtype object; allowed: numbers"),
        ({"arguments": [np.broadcast_to(np.zeros(1, np.int32), 32)]}, "an array that is read-only"),
        ({"arguments": [torch.zeros(1, device="meta")]}, "a tensor on meta; allowed: tensors on the CPU"),
    ],
)
def test_launches_that_no_gpu_would_take_are_refused(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"arguments": [np.zeros(32, np.int32)], "grid": 1, "block": 32, **changes}
    with pytest.raises(SimulatorError, match=message):
        simulate(NOTHING, **given)


def test_a_kernel_that_does_not_end_is_an_error() -> None:
    endless = NOTHING.replace("ret;", "L: bra L;")
    with pytest.raises(SimulatorError, match="k has not ended after 1,000 steps: max_steps allows more"):
        simulate(endless, [np.zeros(1, np.int32)], grid=1, block=32, max_steps=1000)


def test_one_of_several_entries_is_chosen() -> None:
    two = NOTHING + NOTHING.split("64\n")[1].replace(" k(", " other(")
    assert simulate(two, [np.zeros(1, np.int32)], grid=1, block=32, entry="other").kernel == "other"
    with pytest.raises(SimulatorError, match="several entries; entry= takes one of"):
        simulate(two, [np.zeros(1, np.int32)], grid=1, block=32)
