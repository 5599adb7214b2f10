"""What a recorder of forms writes of calls on trtllm-gen kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cubin_runtime.attention.trtllm_gen import DecodeCall
from cubin_runtime.debug.tracing import Recorder
from cubin_runtime.debug.tracing.trtllm_gen import traced_trtllm_gen
from tests.attention.copying_examples import view
from tests.attention.tracing_files import definitions, workloads
from tests.attention.trtllm_calls import MadeUpMemory
from tests.attention.trtllm_operators import OPERATORS

pytestmark = pytest.mark.usefixtures("runtime")
BEGINS = {
    "decode": "trtllm_gen_decode_dense_paged_bf16_bf16_bf16_",
    "mla": "trtllm_gen_mla_decode_dense_paged_bf16_bf16_bf16_",
    "context": "trtllm_gen_context_ragged_paged_bf16_bf16_bf16_",
    "ragged": "trtllm_gen_context_ragged_ragged_bf16_bf16_bf16_",
}


@pytest.mark.parametrize("name", OPERATORS)
def test_each_operator_is_written(name: str, memory: MadeUpMemory, tmp_path: Path) -> None:
    function, arguments = OPERATORS[name]
    with Recorder(tmp_path) as recorder:
        function(**arguments(memory))
        function(**arguments(memory, bmm1_scale=memory.tensor("float32", 1)))
    found = definitions(tmp_path)
    assert [one["name"].startswith(BEGINS[name]) for one in found] == [True, True]
    assert {"bmm1_scale", "bmm1_scale_device"} <= {part for one in found for part in one["inputs"]}
    for one in found:
        shapes = [part["shape"] or [] for part in one["inputs"].values()]
        variable = {axis for axis, its in one["axes"].items() if its["type"] == "var"}
        assert variable <= {axis for shape in shapes for axis in shape} <= set(one["axes"])
    assert len(workloads(tmp_path)) == 2
    assert recorder.untraced == {}


def test_what_has_no_reference_is_counted(memory: MadeUpMemory, tmp_path: Path) -> None:
    function, arguments = OPERATORS["decode"]
    with Recorder(tmp_path) as recorder:
        function(**arguments(memory, sinks=memory.tensor("float32", 32), return_lse=True))
    assert recorder.untraced == {"trtllm-gen decode: a log-sum-exp with sinks": 1}
    assert definitions(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"skip_softmax_factor": 1.0}, "decode: keys of little weight are skipped"),
        ({"top_k": 64}, "decode: sparse keys"),
        ({"out": view("uint8", 4, 32, 64)}, "decode: FP4 keys, values or output"),
    ],
)
def test_each_reason_is_named(changes: dict[str, Any], words: str) -> None:
    cache = view("bfloat16", 64, 4, 32, 128)
    query, lengths = view("bfloat16", 4, 32, 128), view("int32", 4)
    made = DecodeCall(
        query=query, out=query, seq_lens=lengths, max_q=1, max_kv=64, key=cache, value=cache, block_tables=lengths
    )
    assert traced_trtllm_gen(replace(made, **changes)) == f"trtllm-gen {words}"
