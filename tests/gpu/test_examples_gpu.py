"""The examples on a GPU: each compares its own results with float64."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cubin_runtime import Runtime
from cubin_runtime.testing import Device
from kernels_src.toolchain import ToolchainError, find_toolchain
from tests.gpu.example_scripts import example_script

pytestmark = pytest.mark.gpu


@pytest.fixture
def device(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    if runtime.driver.device(0).capability != (9, 0):
        pytest.skip("the examples' kernels are measured on compute capability 9.0")
    monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", runtime)
    with Device(runtime.driver) as made:
        yield made
        made.assert_guards()


def shown(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What an example printed; shown, and kept with the other results of a GPU run."""
    said = capsys.readouterr().out
    with capsys.disabled():
        print(f"\n== {name}\n{said}", end="")
    if folder := os.environ.get("CUBIN_RUNTIME_GPU_OUT"):
        (Path(folder) / f"example_{name}.txt").write_text(said)
    return said


@pytest.mark.parametrize(
    "name", ["continuous_batching", "flashinfer_swap", "mla_decode", "one_artifact", "speculative_tree"]
)
def test_an_example_agrees_with_float64(name: str, device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    example_script(name).main(device)
    assert "relative error" in shown(name, capsys)


def test_the_example_with_an_indexer_agrees_with_float64(device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    example_script("sparse_mla").main(device)
    assert shown("sparse_mla", capsys).count("relative error") == 2


def test_a_kernel_of_ones_own_agrees_with_float64(
    device: Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        monkeypatch.setenv("NVCC", str(find_toolchain().nvcc))
    except ToolchainError as error:
        pytest.skip(str(error))
    example_script("custom_kernel/custom_kernel").main(device)
    assert "with float64: off by at most" in shown("custom_kernel", capsys)
