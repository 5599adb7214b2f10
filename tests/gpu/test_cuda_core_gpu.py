"""cuda.core beside us on a device: its streams, and our cubins as its object code."""

from __future__ import annotations

import pytest
from example_scripts import example_script

from cubin_runtime.attention import Runtime

pytestmark = pytest.mark.gpu


def test_a_cubin_launched_by_cuda_core_gives_the_bits_of_a_plan(
    runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    core = pytest.importorskip("cuda.core", reason="needs cuda-core")
    device = core.Device(0)
    device.set_current()
    example_script("cuda_core_object_code").run_both(runtime, device)
    assert "outputs equal" in capsys.readouterr().out
