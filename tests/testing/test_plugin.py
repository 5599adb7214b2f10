"""The pytest plugin as a project meets it that has a cubin and a struct."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cubin_runtime.artifacts.tables.native_kernels import FILE_NAME
from cubin_runtime.errors import AbiError, CorruptError, UsageError
from cubin_runtime.launch.structs import Field, StructLayout
from cubin_runtime.testing import CubinUnderTest, Device, GraphDriver, StandIn, StandInDevice, missing_device
from kernels_src.toolchain import ToolchainError, find_toolchain

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
SCALE = StructLayout.declare(
    "ScaleParams", (Field("values", "ptr", ""), Field("count", "int32", ""), Field("factor", "float", ""))
)
SOURCE = """
struct ScaleParams { float* values; int count; float factor; };
extern "C" __global__ void __launch_bounds__(128) scale(const __grid_constant__ ScaleParams p) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.count) p.values[i] *= p.factor;
}
"""


@pytest.fixture(scope="session")
def scale_cubin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kernel that multiplies, compiled for sm_90a."""
    folder = tmp_path_factory.mktemp("scale")
    (folder / "scale.cu").write_text(SOURCE)
    try:
        nvcc = find_toolchain().nvcc
    except ToolchainError as error:
        pytest.skip(str(error))
    command = [str(nvcc), "-arch=sm_90a", "-cubin", "-o", "scale.cubin", "scale.cu"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "scale.cubin"


def test_the_page_s_tests_run_in_a_project_of_their_own(scale_cubin: Path, tmp_path: Path) -> None:
    (tmp_path / "scale.cubin").write_bytes(scale_cubin.read_bytes())
    (tmp_path / "test_scale.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)))
    command = [sys.executable, "-m", "pytest", "-p", "cubin_runtime.testing.plugin", "-q", "--strict-markers", "-rs"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    without = "2 passed, 1 skipped" in done.stdout and "needs a CUDA device" in done.stdout
    assert without or "3 passed" in done.stdout, done.stdout


def test_without_numpy_a_device_names_the_command_that_installs_it(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import sys\n\nsys.modules['numpy'] = None\n")
    (tmp_path / "test_device.py").write_text("def test_device(cubin_standin_device): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "cubin_runtime.testing.plugin", "-q"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "cubin_runtime.testing needs numpy: pip install 'cubin-runtime[testing]'" in done.stdout


def test_a_run_that_uses_no_fixture_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text(
        "import sys\n"
        "def test_nothing():\n"
        "    assert 'cubin_runtime.testing.plugin' in sys.modules\n"
        "    loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "    assert not loaded & {'numpy', 'torch', 'requests', 'cuda'}\n"
        "    assert not [n for n in sys.modules if n.startswith(('cubin_runtime.launch', 'cubin_runtime.artifacts'))]\n"
    )
    # Plugins of others import heavy modules themselves.
    command = [sys.executable, "-m", "pytest", "-p", "cubin_runtime.testing.plugin", "-q"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stdout


def test_a_struct_of_another_size_is_refused_before_any_launch(scale_cubin: Path) -> None:
    other = StructLayout.declare("ScaleParams", (Field("values", "ptr", ""),))
    with pytest.raises(AbiError, match="has 8 bytes; according to its ELF, the kernel takes one of 16 bytes"):
        CubinUnderTest(scale_cubin, other)


def test_a_symbol_that_the_cubin_lacks_is_named_with_those_it_has(scale_cubin: Path) -> None:
    with pytest.raises(UsageError, match=r"symbol='shift': expected one of scale"):
        CubinUnderTest(scale_cubin, SCALE, "shift")


def test_a_cubin_that_is_not_there_is_to_be_compiled(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"scale\.cubin: there is no such cubin; compile it first"):
        CubinUnderTest(tmp_path / "scale.cubin", SCALE)


def test_a_struct_is_a_layout(scale_cubin: Path) -> None:
    with pytest.raises(UsageError, match="struct: got dict, expected a StructLayout"):
        CubinUnderTest(scale_cubin, {"values": "ptr"})  # type: ignore[arg-type]


def test_a_file_that_is_no_cubin_is_named(tmp_path: Path) -> None:
    (tmp_path / "scale.cu").write_text(SOURCE)
    with pytest.raises(CorruptError, match=r"scale\.cu: not a cubin"):
        CubinUnderTest(tmp_path / "scale.cu", SCALE)


@pytest.mark.parametrize("grid", [(1, 1, 1, 1), (), 1.5, (2, None), "1"])
def test_a_grid_has_one_to_three_numbers(scale_cubin: Path, cubin_standin_device: StandInDevice, grid: Any) -> None:
    with pytest.raises(UsageError, match=r"grid=.*: expected one to three (numbers|integers)"):
        cubin_standin_device.launch(CubinUnderTest(scale_cubin, SCALE), grid=grid, block=1, values=0, count=0, factor=1)


def test_sizes_may_be_numpy_s(scale_cubin: Path, cubin_standin: StandIn, cubin_standin_device: StandInDevice) -> None:
    cubin = CubinUnderTest(scale_cubin, SCALE)
    cubin_standin_device.launch(cubin, grid=np.int64(8), block=(np.int32(64), 2), values=0, count=np.int32(3), factor=1)
    assert cubin_standin.call("cuLaunchKernelEx")["grid"] == "8,1,1"
    assert cubin_standin_device.launched(cubin) == {"values": 0, "count": 3, "factor": 1.0}


def test_a_launch_leaves_no_module_loaded(
    scale_cubin: Path, cubin_standin: StandIn, cubin_standin_device: StandInDevice
) -> None:
    cubin = CubinUnderTest(scale_cubin, SCALE)
    for _ in range(3):
        cubin_standin_device.launch(cubin, grid=1, block=1, values=0, count=0, factor=1)
    names = cubin_standin.names()
    assert names.count("cuModuleLoadData") == names.count("cuModuleUnload") == 3


@pytest.mark.parametrize(
    ("values", "dtype", "bits"),
    [
        ([1, 2], "int32", np.array([1, 2], np.int32)),
        ([1, 2], "bfloat16", np.array([0x3F80, 0x4000], np.uint16)),
        (np.array([0x3F80], np.uint16), "bfloat16", np.array([0x3F80], np.uint16)),
        (np.array([0x3C00], np.uint16), "float16", np.array([1], np.float16)),
        (np.array([1], np.uint8), "bfloat16", np.array([0x3F80], np.uint16)),
        (np.array([1], np.uint64), "float32", np.array([1], np.float32)),
        (np.array([1.0]), "float32", np.array([1], np.float32)),
        (np.array([7], np.uint8), None, np.array([7], np.uint8)),
    ],
)
def test_arrays_hold_what_their_dtype_makes_of_the_values(
    cubin_standin_device: Device, values: Any, dtype: Any, bits: np.ndarray
) -> None:
    got = cubin_standin_device.numpy(cubin_standin_device.array(values, dtype))
    assert (got.dtype, got.tolist()) == (bits.dtype, bits.tolist())


@pytest.mark.parametrize(
    ("values", "dtype", "words"),
    [
        ([1.5], "int32", "int32': does not hold 1.5"),
        ([300], "uint8", "does not hold 300"),
        ([1], "bf16", "'bf16': exp"),
    ],
)
def test_values_that_a_dtype_does_not_hold_are_refused(
    cubin_standin_device: Device, values: list[float], dtype: Any, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        cubin_standin_device.array(values, dtype)


def test_what_a_kernel_did_not_write_is_nan(cubin_standin_device: Device) -> None:
    out = cubin_standin_device.poisoned((2, 3), "float32")
    assert np.isnan(cubin_standin_device.numpy(out)).all()


def test_a_write_behind_an_array_is_noticed(cubin_standin_device: Device) -> None:
    view = cubin_standin_device.array(np.zeros(4, dtype=np.float32))
    cubin_standin_device.driver.fill(view.pointer, 0, 17, 0)
    with pytest.raises(AssertionError, match="wrote past the end of an array of 16 bytes"):
        cubin_standin_device.assert_guards()


def test_a_runtime_reads_a_release_from_a_temporary_store(cubin_runtime_at, tmp_path: Path) -> None:
    from tests.attention.attention_examples import RELEASE_NAME, describe_release
    from tests.kernels.decode_kernels import HOPPER

    tree, pins = describe_release(tmp_path / "described", HOPPER)
    runtime = cubin_runtime_at(tree, pins=(pins,), release=RELEASE_NAME)
    assert runtime.config.store == tmp_path / "store"
    assert len(runtime.native_release().kernels) == len(HOPPER)
    assert (tree / RELEASE_NAME / FILE_NAME).is_file()


def test_the_reason_of_a_skip_says_what_is_missing(cubin_standin: StandIn, tmp_path: Path) -> None:
    driver = GraphDriver(cubin_standin.path)
    assert missing_device(driver) == ""
    cubin_standin.without_device()
    assert missing_device(driver) == "needs a CUDA device: the driver sees none"
    assert "needs a CUDA device: cannot open" in missing_device(GraphDriver(tmp_path / "no-driver.so"))
