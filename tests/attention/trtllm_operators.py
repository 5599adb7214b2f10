"""FlashInfer's operators on trtllm-gen kernels, what they ran, and what the driver received."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cubin_runtime.attention import Runtime
from cubin_runtime.attention.trtllm_gen.plan_key import bounded
from cubin_runtime.attention.trtllm_gen.plans import AttentionPlan
from cubin_runtime.compat import flashinfer
from cubin_runtime.kernels.trtllm_gen.call import Call
from cubin_runtime.kernels.trtllm_gen.decision import decide_selected
from cubin_runtime.kernels.trtllm_gen.parameter_values import DESCRIPTORS
from cubin_runtime.kernels.trtllm_gen.params import KERNEL_PARAMS
from cubin_runtime.testing import StandIn
from tests.attention.trtllm_calls import (
    MadeUpMemory,
    context_arguments,
    decode_arguments,
    mla_arguments,
    ragged_arguments,
)

Operator = tuple[Callable[..., Any], Callable[..., dict[str, Any]]]
OPERATORS: dict[str, Operator] = {
    "decode": (flashinfer.trtllm_batch_decode_with_kv_cache, decode_arguments),
    "mla": (flashinfer.trtllm_batch_decode_with_kv_cache_mla, mla_arguments),
    "context": (flashinfer.trtllm_batch_context_with_kv_cache, context_arguments),
    "ragged": (flashinfer.trtllm_ragged_attention_deepseek, ragged_arguments),
}


class Spy:
    """Keeps the calls and plans that the operators ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[tuple[AttentionPlan, Call, tuple[int, int], int]] = []
        original = AttentionPlan.run

        def run(plan: AttentionPlan, call: Call, workspace: tuple[int, int], counters: int, stream: int) -> None:
            self.runs.append((plan, call, workspace, counters))
            return original(plan, call, workspace, counters, stream)

        monkeypatch.setattr(AttentionPlan, "run", run)


def main_launch(standin: StandIn) -> dict[str, str]:
    (first, *_) = [call.seen for call in standin.calls("cuLaunchKernelEx")]
    return first


def expected_parameters(runtime: Runtime, spy: Spy) -> bytes:
    """What a fresh plan for exactly the last call's tensors fills in; descriptors as the stand-in encodes them."""
    plan, given, workspace, counters = spy.runs[-1]
    call = bounded(given)
    fresh = AttentionPlan(runtime, call, 0).decision
    problem = call.problem(plan.device, workspace, counters)
    values = decide_selected(problem, fresh.selection).values
    encoded = {
        name: runtime.descriptors.encode(spec)  # type: ignore[arg-type]
        for name, spec in values.items()
        if name.startswith("tma") and spec is not None
    }
    return KERNEL_PARAMS.pack({**values, **dict.fromkeys(DESCRIPTORS), **encoded})


def reduced_mla(memory: MadeUpMemory, **changes: Any) -> dict[str, Any]:
    """MLA whose splits a kernel of its own merges: few requests, long KV."""
    return mla_arguments(memory, **{"max_seq_len": 16384, **changes})
