"""Calls of torch tensors that bring a workspace: each launch has the regions of the one that it brings."""

from __future__ import annotations

from typing import Any

import pytest

from cubin_runtime.attention import Runtime, paged_decode
from cubin_runtime.errors import WorkspaceError
from cubin_runtime.kernels.native.decode.params import PAGED_DECODE_TMA
from cubin_runtime.launch.workspace import Workspace
from cubin_runtime.testing import StandIn
from tests.attention.fast_path_calls import FullPaths
from tests.attention.host_tensors import memory_of_host_tensors

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def runtime(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime.memory = memory_of_host_tensors(monkeypatch)
    return runtime


@pytest.fixture
def call(runtime: Runtime) -> dict[str, Any]:
    rows = {name: torch.zeros(2, 32, 128, dtype=torch.bfloat16) for name in ("q", "out")}
    caches = {name: torch.zeros(8, 64, 4, 128, dtype=torch.bfloat16) for name in ("k_cache", "v_cache")}
    lengths = {"page_table": torch.zeros(2, 4, dtype=torch.int32), "seq_lens": torch.ones(2, dtype=torch.int32)}
    return {**rows, **caches, **lengths, "max_seq_len": 256, "runtime": runtime}


def test_the_workspace_of_each_call_is_sent(
    runtime: Runtime, standin: StandIn, full_paths: FullPaths, call: dict[str, Any]
) -> None:
    context = runtime.driver.primary_context(0)
    workspaces = [Workspace.allocate(runtime.driver, context, 16 << 20) for _ in range(3)]
    for workspace in workspaces * 3:
        paged_decode(**call, workspace=workspace)
        sent = PAGED_DECODE_TMA.unpack(bytes.fromhex(standin.calls("cuLaunchKernelEx")[-1].seen["parameter0"]))
        assert workspace.address <= sent["status"] < sent["partial_out"] < workspace.address + workspace.nbytes
    assert full_paths.count == 1


def test_a_workspace_of_another_stream_is_refused(runtime: Runtime, standin: StandIn, call: dict[str, Any]) -> None:
    workspace = Workspace.allocate(runtime.driver, runtime.driver.primary_context(0), 16 << 20)
    for _ in range(3):
        paged_decode(**call, workspace=workspace)
    workspace.release()
    workspace.claim(runtime.driver.create_stream())
    for _ in range(2):
        with pytest.raises(WorkspaceError, match="belongs to stream"):
            paged_decode(**call, workspace=workspace)
    assert len(standin.calls("cuLaunchKernelEx")) == 3
