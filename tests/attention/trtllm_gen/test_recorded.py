"""Calls of trtllm-gen kernels recorded, and run again as they were, by the stand-in driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from cubin_runtime.attention import Runtime
from cubin_runtime.attention.trtllm_gen.plan_key import plan_key
from cubin_runtime.debug.recorded import CallRecorder, read_call, replay_call
from tests.attention.trtllm_calls import MadeUpMemory
from tests.attention.trtllm_operators import OPERATORS, Spy

KINDS = {"decode": "DecodeCall", "mla": "DecodeCall", "context": "ContextCall", "ragged": "RaggedCall"}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_call_is_written_and_run_again_as_it_was(
    runtime: Runtime, memory: MadeUpMemory, spy: Spy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    operator, arguments = OPERATORS[name]
    with monkeypatch.context() as patched, CallRecorder(tmp_path) as recorder:
        patched.setattr(runtime.driver, "read", lambda address, size: bytes(size))  # memory is made up
        operator(**arguments(memory))
    (file,) = recorder.files
    call = read_call(file)
    assert call.operator == f"trtllm_gen.{KINDS[name]}"
    assert call.kernels[0]["symbol"] == spy.runs[0][0].kernel
    assert call.origin["pin"].startswith("trtllm")
    assert replay_call(file, runtime=runtime).device
    (_, first, _, _), (_, again, _, _) = spy.runs
    assert plan_key(again) == plan_key(first)
    assert (again.bmm1.value, again.max_kv) == (first.bmm1.value, first.max_kv)


def test_scales_on_the_device_come_back(
    runtime: Runtime, memory: MadeUpMemory, spy: Spy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, arguments = OPERATORS["decode"]
    scale = memory.tensor("float32", 1)
    with monkeypatch.context() as patched, CallRecorder(tmp_path) as recorder:
        patched.setattr(runtime.driver, "read", lambda address, size: bytes(size))
        operator(**arguments(memory, bmm2_scale=scale))
    replay_call(recorder.files[0], runtime=runtime)
    assert read_call(recorder.files[0]).tensors["bmm2"].view.pointer == scale.pointer
    assert spy.runs[1][1].bmm2.pointer not in (0, scale.pointer)
