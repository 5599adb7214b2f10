"""The examples on a GPU: each compares its own results with float64; what they print is shown with ``-s``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from example_scripts import example_script

from cubin_runtime import Runtime
from cubin_runtime.testing import Device
from kernels_src.toolchain import ToolchainError, find_toolchain

pytestmark = pytest.mark.gpu


@pytest.fixture
def device(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    if runtime.driver.device(0).capability != (9, 0):
        pytest.skip("the examples' kernels are measured on compute capability 9.0")
    monkeypatch.setattr("cubin_runtime.attention.process.default.runtime", runtime)
    with Device(runtime.driver) as made:
        yield made
        made.assert_guards()


@pytest.mark.parametrize(
    "name", ["continuous_batching", "flashinfer_swap", "mla_decode", "one_artifact", "speculative_tree"]
)
def test_an_example_agrees_with_float64(name: str, device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    example_script(name).main(device)
    said = capsys.readouterr().out
    with capsys.disabled():
        print(f"\n== examples/{name}.py\n{said}", end="")
    assert "relative error" in said


def test_a_kernel_of_ones_own_agrees_with_float64(
    device: Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        monkeypatch.setenv("NVCC", str(find_toolchain().nvcc))
    except ToolchainError as error:
        pytest.skip(str(error))
    example_script("custom_kernel/custom_kernel").main(device)
    said = capsys.readouterr().out
    with capsys.disabled():
        print(f"\n== examples/custom_kernel/custom_kernel.py\n{said}", end="")
    assert "with float64: off by at most" in said
