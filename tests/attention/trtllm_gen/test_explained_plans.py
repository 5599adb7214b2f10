"""What ``explain`` says of shapes is what a plan of the same call launches, and the memory that it needs."""

from __future__ import annotations

from typing import Any

import pytest

from cubin_runtime.attention import Runtime
from cubin_runtime.attention import trtllm_gen as operators
from cubin_runtime.cli.example_call import Shapes, example_call, example_decision
from cubin_runtime.kernels.trtllm_gen.traits import Policy

MLA = {"heads_q": 128, "heads_kv": 1, "head_dim": 576, "head_dim_v": 512}
SHAPES: dict[str, dict[str, Any]] = {
    "decode": {"batch": 512},
    "decode with an LSE": {"batch": 512, "lse": True},
    "decode of long keys": {"kv_len": 1 << 16, "batch": 4, "heads_q": 64, "lse": True},
    "decode of ragged queries": {"batch": 256, "q_len": 4, "tokens": 300},
    "batch-invariant decode": {"batch_invariant": True, "batch": 7},
    "batch-invariant MLA": {**MLA, "batch_invariant": True, "batch": 2},
    "MLA": {**MLA, "batch": 64, "kv_len": 1 << 14},
    "prefill": {"operation": "context", "q_len": 512, "batch": 2, "dtype_kv": "bf16"},
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.filterwarnings("ignore:.*never run there")
def test_a_plan_launches_what_is_explained(runtime: Runtime, capability: tuple[int, int], name: str) -> None:
    facts = runtime.driver.device(0)
    sm = {"sm": 10 * capability[0] + capability[1], "multiprocessors": facts.multiprocessors}
    shapes = Shapes(**sm, occupancy="const:0", **SHAPES[name])
    plan = operators.plan(example_call(shapes), runtime=runtime)
    told = example_decision(shapes, runtime.trtllm_gen_release().finder, Policy.BEST)
    assert (told.meta.symbol, told.grid, told.attributes) == (
        plan.kernel,
        plan.decision.grid,
        plan.decision.attributes,
    )
    assert plan.workspace_bytes - 15 == told.workspace_bytes
    assert plan.counter_bytes == told.counter_bytes
