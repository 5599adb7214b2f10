"""Bound steps: what they send, and what they keep alive."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from cubin_runtime.attention import Runtime, plan_paged_decode
from cubin_runtime.errors import UsageError
from cubin_runtime.testing import StandIn
from tests.attention.attention_examples import Tensors

GOOD = Tensors()
CACHES = ("k_cache", "v_cache")
NAMES = ("q", *CACHES, "page_table", "seq_lens", "out")


def parameters(standin: StandIn) -> list[str]:
    return [call.seen["parameter0"] for call in standin.calls("cuLaunchKernelEx")]


def test_steps_send_what_a_run_sends(runtime: Runtime, standin: StandIn) -> None:
    given = {name: getattr(GOOD, name) for name in NAMES}
    plan = plan_paged_decode(**given, max_seq_len=1024, runtime=runtime)
    workspace = plan.prepare()
    plan.run(**given, workspace=workspace)
    layer = plan.bind(**{name: given[name] for name in CACHES}, workspace=workspace)
    moving = {name: view for name, view in given.items() if name not in CACHES}
    for _ in range(3):
        layer.step(**moving)
    every = plan.bind(**given, workspace=workspace)
    gc.collect()
    taken = [bytearray(b"\xff" * size) for size in range(16, 4096, 16) for _ in range(8)]  # memory that was let go of
    for _ in range(3):
        every.step()
    del taken
    assert len(set(parameters(standin))) == 1
    assert len(parameters(standin)) == 7
    moved = {**moving, "q": replace(given["q"], pointer=0x7F0000009000)}
    layer.step(**moved)
    plan.run(**{**given, "q": moved["q"]}, workspace=workspace)
    assert len(set(parameters(standin)[7:])) == 1
    assert parameters(standin)[7] != parameters(standin)[0]


def test_a_closed_step_says_so_by_name_and_by_position(runtime: Runtime, standin: StandIn) -> None:
    given = {name: getattr(GOOD, name) for name in NAMES}
    layer = plan_paged_decode(**given, max_seq_len=1024, runtime=runtime).bind(**{name: given[name] for name in CACHES})
    moving = {name: view for name, view in given.items() if name not in CACHES}
    layer.step(**moving)
    earlier = layer.step
    layer.close()
    for step in (layer.step, earlier):
        with pytest.raises(UsageError, match="step: the bound step is closed"):
            step(**moving)
        with pytest.raises(UsageError, match="step: the bound step is closed"):
            step(*moving.values())
    assert len(parameters(standin)) == 1
