"""The blocks of docs/trtllm_gen.md, run by the stand-in driver on host tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cubin_runtime.attention import Runtime
from cubin_runtime.testing import StandIn
from tests.attention.host_tensors import memory_of_host_tensors
from tests.docs.pages import BLOCKS

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def on_host(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *shape, device, **options: make(*shape, **options)


def test_the_blocks_run_in_their_order(
    runtime: Runtime, standin: StandIn, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    runtime.memory = memory_of_host_tensors(monkeypatch)
    caches = {name: torch.zeros(12, 64, 4, 128, dtype=torch.bfloat16) for name in ("k_cache", "v_cache")}
    rows = {name: torch.zeros(3, 32, 128, dtype=torch.bfloat16) for name in ("q", "out")}
    lengths = {"page_table": torch.zeros(3, 4, dtype=torch.int32), "seq_lens": torch.ones(3, dtype=torch.int32)}
    names = {**caches, **rows, **lengths, "max_seq_len": 256}
    for name in ("empty", "zeros"):
        monkeypatch.setattr(torch, name, on_host(getattr(torch, name)))
    for block in BLOCKS:
        if (block.page, block.kind) == ("docs/trtllm_gen.md", "python"):
            exec(compile(block.text, block.page, "exec"), names)
    assert names["report"].kernels
    assert len(standin.calls("cuLaunchKernelEx")) == 1
