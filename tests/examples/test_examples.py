"""The examples without a GPU: each runs to its end on the stand-in driver, launches included."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cubin_runtime import Config, Runtime
from cubin_runtime.errors import DriverError
from cubin_runtime.launch.driver import Driver
from cubin_runtime.testing import CubinUnderTest, Device, GraphDriver, StandIn
from kernels_src.toolchain import Toolchain, ToolchainError, find_toolchain
from tests.attention.attention_examples import RELEASE_NAME
from tests.attention.stub_release import build_stub_release
from tests.docs.words import private_words
from tests.gpu.example_scripts import FOLDER, example_script

# Kernels that each sends: planned and plain calls, steps of the loop (whose launches are in graphs).
LAUNCHES = {"mla_decode": 2, "speculative_tree": 1, "flashinfer_swap": 1, "one_artifact": 1, "continuous_batching": 4}


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_stub_release(tmp_path_factory.mktemp("stubs"))


@pytest.fixture
def device(
    cubin_standin: StandIn, stubs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Device]:
    """A stand-in device, and a default runtime with stub kernels on it."""
    tree, pins = stubs
    config = Config(store=tmp_path / "store", sources=(str(tree),), pin_files=(pins,), offline=True)
    runtime = Runtime(config, driver=GraphDriver(cubin_standin.path), release=RELEASE_NAME)
    for kernel in runtime.native_release().kernels:
        cubin_standin.add_kernel(kernel.symbol, (kernel.struct_bytes,), kernel.threads)
    monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", runtime)
    with Device(runtime.driver, computes=False) as made:
        yield made


@pytest.fixture(scope="module")
def toolchain() -> Toolchain:
    try:
        return find_toolchain()
    except ToolchainError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", sorted(LAUNCHES))
def test_an_example_runs_to_its_end(
    name: str, device: Device, cubin_standin: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    example_script(name).main(device)
    assert len(cubin_standin.calls("cuLaunchKernelEx")) == LAUNCHES[name]
    assert 3 <= len(capsys.readouterr().out.splitlines()) <= 40


def test_the_loop_replays_the_graph_of_the_smallest_bucket(
    device: Device, cubin_standin: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    example_script("continuous_batching").main(device)
    said = capsys.readouterr().out
    assert "step  3: 5 requests by the graph for 8" in said
    assert "step  9: 4 requests by the graph for 4" in said
    steps = [line for line in said.splitlines() if line.startswith("step")]
    assert len(cubin_standin.calls("cuGraphLaunch")) == len(steps)


@pytest.mark.torch
def test_the_example_with_an_indexer_chooses_rows_and_plans(device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    example_script("sparse_mla").main(device)
    said = capsys.readouterr().out
    assert "chose (512, 512, 1, 0, 512) rows of 656 bytes" in said
    assert "sparse_mla_decode" in said


@pytest.mark.torch
def test_packed_rows_are_keys_within_the_rounding_of_e4m3() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    example, keys = example_script("sparse_mla"), torch.randn(20, 576, dtype=torch.bfloat16)
    rows = example.pack(keys)
    assert (rows.dtype, tuple(rows.shape)) == (torch.uint8, (20, 656))
    torch.testing.assert_close(example.unpack(rows), keys.double(), rtol=1 / 16, atol=2e-5)


def test_the_longest_path_of_right_drafts_is_accepted() -> None:
    example = example_script("speculative_tree")
    assert example.accept((-1, 0, 0, 1, 1, 2, 3), {0, 2, 5}) == [0, 2, 5]


def test_a_kernel_of_ones_own_is_compiled_pinned_fetched_and_launched(
    cubin_standin: StandIn, toolchain: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("NVCC", str(toolchain.nvcc))
    example = example_script("custom_kernel/custom_kernel")
    release = example.compile_release(tmp_path / "ahead", "sm_90a")
    cubin_standin.add_cubin(CubinUnderTest(release / example.FILE, example.RMS_NORM))
    with Device(GraphDriver(cubin_standin.path), computes=False) as device:
        example.main(device)
    assert cubin_standin.call("cuLaunchKernelEx")["grid"] == "64,1,1"
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()] == ["compiled", "pinned", "fetched", "checked", "launched"]


def test_the_kernel_s_own_test_runs_under_the_plugin(toolchain: Toolchain, tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER / "custom_kernel", tmp_path / "custom_kernel")
    compile_it = [str(toolchain.nvcc), "-arch=sm_90a", "-cubin", "rms_norm.cu"]
    subprocess.run(compile_it, cwd=folder, check=True, capture_output=True)
    command = [sys.executable, "-m", "pytest", "-p", "cubin_runtime.testing.plugin", "-rs", "-q", "--strict-markers"]
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout or "needs a CUDA device" in done.stdout


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("*.py")), ids=lambda file: file.name)
def test_an_example_is_short_and_says_how_to_run_it(file: Path) -> None:
    lines = file.read_text().splitlines()
    assert len(lines) <= 150
    assert file.name in "\n".join(lines[:12])


def run_example(
    tmp_path: Path, name: str, *, without: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script as a user does, with no CUDA driver."""
    variables = {
        **os.environ,
        "PYTHONPATH": str(FOLDER.parent),
        "CUBIN_RUNTIME_CACHE": str(tmp_path / "store"),
        "CUBIN_RUNTIME_OFFLINE": "1",
        **environment,
    }
    if without:
        (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules[{without!r}] = None\n")
        variables["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


@pytest.fixture
def without_driver() -> None:
    try:
        driver = Driver()
        driver.version()
    except DriverError:
        return
    pytest.skip("this machine has a CUDA driver")


@pytest.mark.usefixtures("without_driver")
def test_without_a_gpu_a_kernel_of_ones_own_is_compiled_checked_and_sent_to_the_stand_in(
    tmp_path: Path, toolchain: Toolchain, cubin_standin: StandIn
) -> None:
    done = run_example(tmp_path, "custom_kernel/custom_kernel", NVCC=str(toolchain.nvcc))
    assert done.returncode == 0, done.stderr
    first, *steps = done.stdout.splitlines()
    assert first.startswith("no GPU: launches go to a stand-in driver")
    assert [line.split()[0] for line in steps] == ["compiled", "pinned", "fetched", "checked", "launched"]


@pytest.mark.usefixtures("without_driver")
def test_without_kernels_an_example_says_what_installs_them(tmp_path: Path, cubin_standin: StandIn) -> None:
    done = run_example(tmp_path, "mla_decode")
    assert done.returncode == 4
    assert "'make install' in a clone" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_nvcc_the_example_says_where_it_is_looked_for(tmp_path: Path, cubin_standin: StandIn) -> None:
    done = run_example(tmp_path, "custom_kernel/custom_kernel", NVCC=str(tmp_path / "none"))
    assert done.returncode == 4
    assert "put nvcc on PATH, or set NVCC=" in done.stderr
    assert "pip install 'cubin-runtime[build]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", [*sorted(LAUNCHES), "custom_kernel/custom_kernel"])
def test_without_numpy_an_example_says_in_one_line_what_installs_it(tmp_path: Path, name: str) -> None:
    done = run_example(tmp_path, name, without="numpy")
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == "error: no module 'numpy': pip install numpy\n"


def test_without_torch_its_example_says_in_one_line_what_installs_it(tmp_path: Path) -> None:
    done = run_example(tmp_path, "sparse_mla", without="torch")
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == "error: no module 'torch': pip install torch\n"


def test_without_cuda_core_its_example_says_in_one_line_what_installs_it(tmp_path: Path) -> None:
    done = run_example(tmp_path, "cuda_core_object_code", without="cuda.core")
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == "error: no module 'cuda.core': pip install 'cuda-core[cu13]'\n"


@pytest.mark.usefixtures("without_driver")
def test_without_a_c_compiler_an_example_says_what_it_needs(tmp_path: Path) -> None:
    done = run_example(tmp_path, "mla_decode", CC=str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (4, "")
    assert "no stand-in driver, which needs a C compiler" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("*.py")), ids=lambda file: file.name)
def test_what_an_example_says_is_in_the_words_of_the_field(file: Path) -> None:
    strings = (node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant))
    assert [found for text in strings if isinstance(text, str) for found in private_words(text)] == []
