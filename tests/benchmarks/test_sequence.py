"""The timing of a sequence, on a stand-in for graphs and clocks."""

from __future__ import annotations

import gc
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.mark.parametrize("graph", [True, False])
def test_a_contestant_keeps_its_calls_as_long_as_it_is_replayed(monkeypatch: pytest.MonkeyPatch, graph: bool) -> None:
    from sequence import timing

    def called() -> None:
        pass

    alive: list[bool] = []
    kept = weakref.ref(called)
    layers: Any = SimpleNamespace(before=lambda layer: None, after=lambda layer: None)
    stream: Any = SimpleNamespace(synchronize=lambda: None)

    def measured(contestant: Any, stream: Any) -> float:
        gc.collect()
        alive.append(kept() is not None)
        return 1.0

    monkeypatch.setattr(timing.torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(timing, "_captured", lambda body: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(timing, "_measured", measured)
    contestant = timing._contestant("ours", [called], layers, timing.Method(graph=graph), stream)
    del called
    measured(contestant, stream)
    assert alive == [True, True]
