"""What a recorder of forms writes of context attention, by the stand-in driver."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from cubin_runtime.attention import Runtime, context_attention, plan_context_attention
from cubin_runtime.debug.tracing import Recorder
from tests.attention.context_calls import BATCH, HEADS, TOKENS, even_call, paged_call, ragged_call, view
from tests.attention.tracing_files import definitions, workloads

FORMS: dict[str, tuple[dict[str, Any], str, list[str], list[str]]] = {
    "ragged_ragged": (ragged_call(), "gqa_ragged", ["tokens"], ["kv_tokens"]),
    "ragged_paged": (paged_call(), "gqa_paged", ["tokens"], ["pages", "page_size"]),
    "dense_dense": (even_call(), "gqa_ragged", ["batch", "q_len"], ["batch", "kv_len"]),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_keys_is_described(stub_runtime: Runtime, tmp_path: Path, form: str) -> None:
    given, op_type, tokens, keys = FORMS[form]
    with Recorder(tmp_path):
        context_attention(**given, max_seq_len=300, runtime=stub_runtime)
    (found,) = definitions(tmp_path)
    assert (found["op_type"], found["name"].startswith(f"context_attention_{form}_bf16_")) == (op_type, True)
    assert found["inputs"]["q"]["shape"] == [*tokens, "q_heads", "head_dim"]
    assert found["inputs"]["k"]["shape"] == [*keys, "kv_heads", "head_dim"]
    assert found["outputs"]["out"]["shape"] == [*tokens, "q_heads", "value_dim"]
    run = ast.parse(found["reference"]).body[-1]
    assert isinstance(run, ast.FunctionDef)
    assert (run.name, [argument.arg for argument in run.args.args]) == ("run", list(found["inputs"]))


def test_axes_and_dtypes_are_ones_that_flashinfer_bench_knows(stub_runtime: Runtime, tmp_path: Path) -> None:
    more = {"sinks": view("float32", HEADS), "lse": view("float32", TOKENS, HEADS)}
    with Recorder(tmp_path):
        for given in (ragged_call(), paged_call(**more), paged_call(page_table=view("int32", BATCH, 2, 16))):
            context_attention(**given, max_seq_len=300, runtime=stub_runtime)
    assert len(definitions(tmp_path)) == 3
    for found in definitions(tmp_path):
        shapes = [part["shape"] or [] for part in found["inputs"].values()]
        variable = {name for name, axis in found["axes"].items() if axis["type"] == "var"}
        assert variable <= {axis for shape in shapes for axis in shape} <= set(found["axes"])
        parts = {**found["inputs"], **found["outputs"]}
        assert {part["dtype"] for part in parts.values()} <= {"bfloat16", "float32", "int32"}


def test_options_are_numbers_of_the_workload_or_part_of_the_definition(stub_runtime: Runtime, tmp_path: Path) -> None:
    with Recorder(tmp_path):
        for causal in (True, False):
            options: dict[str, Any] = {"causal": causal, "window_left": 50, "logit_soft_cap": 2.5, "softmax_scale": 0.5}
            context_attention(**ragged_call(), max_seq_len=300, runtime=stub_runtime, **options)
    assert ["causal=True" in one["reference"].splitlines()[-1] for one in definitions(tmp_path)].count(True) == 1
    inputs = workloads(tmp_path)[0]["workload"]["inputs"]
    names = ("window_left", "logit_soft_cap", "softmax_scale", "max_seq_len")
    assert [inputs[name]["value"] for name in names] == [50, 2.5, 0.5, 300]


def test_runs_of_plans_and_bound_steps_are_written_like_calls(stub_runtime: Runtime, tmp_path: Path) -> None:
    given = paged_call()
    plan = plan_context_attention(**given, max_seq_len=1024, runtime=stub_runtime)
    step = plan.bind(**given, max_seq_len=300)
    with Recorder(tmp_path / "calls"):
        context_attention(**given, max_seq_len=300, runtime=stub_runtime)
    with Recorder(tmp_path / "runs"):
        plan.run(**given, max_seq_len=300)
    with Recorder(tmp_path / "steps"):
        step.step()
    wanted = workloads(tmp_path / "calls")
    assert len(wanted) == 1
    assert [workloads(tmp_path / name) for name in ("runs", "steps")] == [wanted, wanted]
