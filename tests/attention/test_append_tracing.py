"""What a recorder of forms writes of KV appends, by the stand-in driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cubin_runtime.attention import Runtime, append_kv, merge_states, plan_append_kv
from cubin_runtime.debug.tracing import Recorder
from tests.attention.copying_examples import (
    BATCH,
    DIM,
    KV_HEADS,
    append_call,
    merge_call,
    quantised_call,
    token_call,
    view,
)
from tests.attention.tracing_files import definitions, workloads

DENSE = {name: view("bfloat16", BATCH, 3, KV_HEADS, DIM, at=0x7F0000100000) for name in ("k", "v")}
FORMS: dict[str, dict[str, Any]] = {
    "ragged_bf16_bf16": append_call(),
    "ragged_bf16_e4m3": quantised_call(),
    "positions_bf16_bf16": token_call(),
    "dense_bf16_bf16": append_call(**DENSE, q_cu_seq_lens=None),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_described(stub_runtime: Runtime, tmp_path: Path, form: str) -> None:
    with Recorder(tmp_path) as recorder:
        append_kv(**FORMS[form], runtime=stub_runtime)
    (found,) = definitions(tmp_path)
    assert found["name"].startswith(f"append_kv_{form}_")
    assert list(found["inputs"]) == list(FORMS[form])
    assert list(found["outputs"]) == ["k_cache_out", "v_cache_out"]
    shapes = [part["shape"] or [] for part in found["inputs"].values()]
    variable = {name for name, axis in found["axes"].items() if axis["type"] == "var"}
    assert variable <= {axis for shape in shapes for axis in shape} <= set(found["axes"])
    assert recorder.untraced == {}


def test_scales_are_numbers_or_tensors(stub_runtime: Runtime, tmp_path: Path) -> None:
    with Recorder(tmp_path):
        append_kv(**quantised_call(), k_scale=0.5, v_scale=view("float32", 1), runtime=stub_runtime)
    inputs = workloads(tmp_path)[0]["workload"]["inputs"]
    assert (inputs["k_scale"], inputs["v_scale"]) == ({"type": "scalar", "value": 0.5}, {"type": "random"})


def test_runs_of_plans_and_bound_steps_are_written_like_calls(stub_runtime: Runtime, tmp_path: Path) -> None:
    given = quantised_call()
    plan = plan_append_kv(**given, k_scale=0.5, runtime=stub_runtime)
    step = plan.bind(**given, k_scale=0.25)
    with Recorder(tmp_path / "calls"):
        append_kv(**given, k_scale=0.25, runtime=stub_runtime)
    with Recorder(tmp_path / "runs"):
        plan.run(**given, k_scale=0.25)
    with Recorder(tmp_path / "steps"):
        step.step()
    wanted = workloads(tmp_path / "calls")
    assert len(wanted) == 1
    assert [workloads(tmp_path / name) for name in ("runs", "steps")] == [wanted, wanted]


def test_merges_are_counted(stub_runtime: Runtime, tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        merge_states(**merge_call(), runtime=stub_runtime)
    assert recorder.untraced == {"merge_states: no definition": 1}
