"""What a recorder writes of MLA decodes, by the stand-in driver."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cubin_runtime.attention import Runtime, mla_decode
from cubin_runtime.debug.tracing import Recorder
from tests.attention.latent_examples import BATCH, HEADS, latent_call, ragged_call, view
from tests.attention.tracing_files import definitions, workloads

MASK = view("uint16", BATCH, 3, 2)


@pytest.fixture
def decode(stub_runtime: Runtime) -> Callable[..., Any]:
    """The plain function on made-up tensors with some options."""

    def call(given: dict[str, Any] | None = None, **options: Any) -> Any:
        asked = {"max_seq_len": 1000, "softmax_scale": 0.5, "runtime": stub_runtime}
        return mla_decode(**{**asked, **(given or latent_call()), **options})

    return call


def test_a_dense_call_is_described(decode: Callable[..., Any], tmp_path: Path) -> None:
    with Recorder(tmp_path):
        decode()
    (found,) = definitions(tmp_path)
    assert (found["op_type"], found["name"].startswith("mla_decode_dense_bf16_bf16_bf16_")) == ("mla_paged", True)
    assert {name: axis.get("value") for name, axis in found["axes"].items()} == {
        "head_dim_qk": 576,
        "kv_lora_rank": 512,
        "page_size": 64,
        "q_heads": HEADS,
        "qk_rope_head_dim": 64,
        "batch": None,
        "columns": None,
        "pages": None,
    }
    assert found["constraints"] == ["head_dim_qk == kv_lora_rank + qk_rope_head_dim"]
    assert found["inputs"]["kv_cache"]["shape"] == ["pages", "page_size", "head_dim_qk"]
    assert found["outputs"]["out"]["shape"] == ["batch", "q_heads", "kv_lora_rank"]


def test_the_constraint_holds_of_the_axes(decode: Callable[..., Any], tmp_path: Path) -> None:
    with Recorder(tmp_path):
        decode(latent_call(latent=256))
    (found,) = definitions(tmp_path)
    axes = {name: axis["value"] for name, axis in found["axes"].items() if "value" in axis}
    assert axes["head_dim_qk"] == axes["kv_lora_rank"] + axes["qk_rope_head_dim"] == 320


def test_values_in_memory_of_their_own_are_an_input(decode: Callable[..., Any], tmp_path: Path) -> None:
    narrow = ("float8_e4m3fn", "float8_e4m3fn", "bfloat16")
    with Recorder(tmp_path):
        decode(latent_call(dtypes=narrow, v_cache=view("float8_e4m3fn", 100, 64, 512, pointer=0x7F0020000000)))
    (found,) = definitions(tmp_path)
    assert found["inputs"]["v_cache"]["shape"] == ["pages", "page_size", "kv_lora_rank"]
    assert "v_cache[:, :, None]" in found["reference"]


def test_rope_columns_in_memory_of_their_own_are_an_input(decode: Callable[..., Any], tmp_path: Path) -> None:
    parts = {"q": view("bfloat16", BATCH, HEADS, 512), "q_rope": view("bfloat16", BATCH, HEADS, 64)}
    with Recorder(tmp_path):
        decode(latent_call(**parts))
    (found,) = definitions(tmp_path)
    shapes = [found["inputs"][name]["shape"][-1] for name in ("q", "q_rope", "kv_cache")]
    assert shapes == ["kv_lora_rank", "qk_rope_head_dim", "head_dim_qk"]
    assert (found["axes"]["qk_rope_head_dim"]["value"], found["axes"]["head_dim_qk"]["value"]) == (64, 576)


def test_ragged_and_dense_are_told_apart(decode: Callable[..., Any], tmp_path: Path) -> None:
    with Recorder(tmp_path):
        decode()
        decode(ragged_call(7), max_q_len=4)
    dense, ragged = definitions(tmp_path)
    assert "_dense_" in dense["name"]
    assert "_ragged_" in ragged["name"]
    assert ragged["inputs"]["q"]["shape"] == ["tokens", "q_heads", "head_dim_qk"]
    assert ragged["inputs"]["max_q_len"] == {"shape": None, "dtype": "int32"}
    assert ragged["constraints"][1] == "batch_plus_1 == batch + 1"


def test_its_workload_has_sizes_and_numbers(decode: Callable[..., Any], tmp_path: Path) -> None:
    with Recorder(tmp_path):
        decode(softmax_scale=0.25)
    (found,) = workloads(tmp_path)
    assert found["workload"]["axes"] == {"batch": BATCH, "columns": 16, "pages": 100}
    assert found["workload"]["inputs"]["softmax_scale"] == {"type": "scalar", "value": 0.25}


def test_the_reference_takes_the_inputs_by_name(decode: Callable[..., Any], tmp_path: Path) -> None:
    with Recorder(tmp_path):
        decode(latent_call(BATCH, 3, mask=MASK, lse=view("float32", BATCH, 3, HEADS)))
    (found,) = definitions(tmp_path)
    run = ast.parse(found["reference"]).body[-1]
    assert isinstance(run, ast.FunctionDef)
    assert (run.name, [argument.arg for argument in run.args.args]) == ("run", list(found["inputs"]))


def test_both_forms_of_the_cache_are_one_definition(decode: Callable[..., Any], tmp_path: Path) -> None:
    with Recorder(tmp_path):
        decode()
        decode(latent_call(kv_cache=view("bfloat16", 100, 1, 64, 576, pointer=0x7F0010000000)))
    assert (len(definitions(tmp_path)), len(workloads(tmp_path))) == (1, 1)


def test_batch_invariance_is_a_tag(decode: Callable[..., Any], tmp_path: Path) -> None:
    with Recorder(tmp_path):
        decode(batch_invariant=True)
    assert "batch_invariant" in definitions(tmp_path)[0]["tags"]
