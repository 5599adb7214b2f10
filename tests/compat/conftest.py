"""The operators under FlashInfer's names on a recording driver that poses as SM100, without any release."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from standin_build import StandIn
from trtllm_calls import MadeUpMemory

from cubin_runtime import Config
from cubin_runtime.attention import Runtime
from cubin_runtime.launch.driver import Driver


@pytest.fixture
def standin(standin: StandIn) -> StandIn:
    standin.pose_as(10, 0)
    return standin


@pytest.fixture
def memory() -> MadeUpMemory:
    return MadeUpMemory()


@pytest.fixture
def runtime(
    standin: StandIn, memory: MadeUpMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Runtime]:
    config = Config(store=tmp_path / "store", sources=(), offline=True)
    made = Runtime(config, driver=Driver(standin.path), memory=memory)
    monkeypatch.setattr("cubin_runtime.compat.arguments.default_runtime", lambda: made)
    yield made
    made.driver.set_current(None)
