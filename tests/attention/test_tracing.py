"""What a recorder writes of calls, by the stand-in driver."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from attention_examples import Tensors

from cubin_runtime.attention import Runtime, TensorView, paged_decode
from cubin_runtime.attention.tracing import Constant, Recorder, Scalar, Tensor, TracedCall
from cubin_runtime.errors import UsageError

GOOD = Tensors()
_contiguous = TensorView.contiguous
MASK = _contiguous(0x7F0000006000, "uint16", (4, 3, 2))


@pytest.fixture
def decode(runtime: Runtime) -> Callable[..., Any]:
    """The plain function on made-up tensors with some options."""

    def call(tensors: Tensors = GOOD, **options: Any) -> Any:
        *given, out, lse = tensors.positional
        asked = {"max_seq_len": 1000, **tensors.named, **options}
        return paged_decode(*given, out=out, lse=lse, runtime=runtime, **asked)

    return call


def definitions(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("definitions/*/*.json"))]


def workloads(folder: Path) -> list[dict[str, Any]]:
    paths = sorted(folder.glob("workloads/*/*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_a_dense_call_is_described(decode: Callable[..., Any], tmp_path: Path) -> None:
    with Recorder(tmp_path):
        decode()
    (found,) = definitions(tmp_path)
    assert (found["op_type"], found["name"].startswith("paged_decode_dense_bf16_bf16_bf16_")) == ("gqa_paged", True)
    assert {name: axis.get("value") for name, axis in found["axes"].items()} == {
        "group": 8,
        "head_dim": 128,
        "kv_heads": 8,
        "page_size": 64,
        "q_heads": 64,
        "batch": None,
        "columns": None,
        "pages": None,
    }
    assert found["constraints"] == ["q_heads == kv_heads * group"]
    assert found["inputs"]["q"] == {"shape": ["batch", "q_heads", "head_dim"], "dtype": "bfloat16"}
    assert found["inputs"]["window_left"] == {"shape": None, "dtype": "int32"}
    assert list(found["outputs"]) == ["out"]


def test_its_workload_has_sizes_and_numbers(decode: Callable[..., Any], tmp_path: Path) -> None:
    with Recorder(tmp_path):
        decode(softmax_scale=0.5, window_left=100)
    (found,) = workloads(tmp_path)
    assert found["workload"]["axes"] == {"batch": 4, "columns": 16, "pages": 100}
    inputs = found["workload"]["inputs"]
    assert inputs["softmax_scale"] == {"type": "scalar", "value": 0.5}
    assert inputs["window_left"] == {"type": "scalar", "value": 100}
    assert inputs["q"] == {"type": "random"}
    assert found["definition"] == definitions(tmp_path)[0]["name"]


def test_ragged_and_dense_are_told_apart(decode: Callable[..., Any], tmp_path: Path) -> None:
    with Recorder(tmp_path):
        decode()
        decode(GOOD.ragged(7), max_q_len=4)
    dense, ragged = definitions(tmp_path)
    assert "_dense_" in dense["name"]
    assert "_ragged_" in ragged["name"]
    assert ragged["inputs"]["q"]["shape"] == ["tokens", "q_heads", "head_dim"]
    assert ragged["inputs"]["q_cu_seq_lens"]["shape"] == ["batch_plus_1"]
    assert ragged["constraints"][1] == "batch_plus_1 == batch + 1"


def test_unsigned_words_go_by_their_bits(decode: Callable[..., Any], tmp_path: Path) -> None:
    with Recorder(tmp_path):
        decode(GOOD.draft(3, mask=MASK))
    (found,) = definitions(tmp_path)
    assert found["inputs"]["mask"]["dtype"] == "int16"
    assert found["inputs"]["mask"]["shape"] == ["batch", "q_len", "mask_words"]


def test_the_reference_takes_the_inputs_by_name(decode: Callable[..., Any], tmp_path: Path) -> None:
    with Recorder(tmp_path):
        decode(GOOD.draft(3, mask=MASK), window_left=5)
    (found,) = definitions(tmp_path)
    run = ast.parse(found["reference"]).body[-1]
    assert isinstance(run, ast.FunctionDef)
    assert (run.name, [argument.arg for argument in run.args.args]) == ("run", list(found["inputs"]))


def test_equal_calls_are_written_once(decode: Callable[..., Any], tmp_path: Path) -> None:
    with Recorder(tmp_path):
        decode()
        decode(GOOD.changed("q", pointer=0x7F0000009000))
    with Recorder(tmp_path):
        decode()
    assert (len(definitions(tmp_path)), len(workloads(tmp_path))) == (1, 1)


def test_other_sizes_are_another_workload_of_one_definition(decode: Callable[..., Any], tmp_path: Path) -> None:
    with Recorder(tmp_path):
        decode()
        decode(GOOD.changed("page_table", shape=(4, 32), strides=(32, 1)))
    assert (len(definitions(tmp_path)), len(workloads(tmp_path))) == (1, 2)


def test_nothing_is_written_outside(decode: Callable[..., Any], tmp_path: Path) -> None:
    with Recorder(tmp_path):
        pass
    decode()
    assert list(tmp_path.iterdir()) == []


def test_a_call_that_is_refused_is_not_written(decode: Callable[..., Any], tmp_path: Path) -> None:
    with Recorder(tmp_path), pytest.raises(UsageError):
        decode(GOOD.changed("q", dtype="float32"))
    assert list(tmp_path.iterdir()) == []


def test_two_recorders_write_both(decode: Callable[..., Any], tmp_path: Path) -> None:
    with Recorder(tmp_path / "outer"), Recorder(tmp_path / "inner"):
        decode()
    assert definitions(tmp_path / "outer") == definitions(tmp_path / "inner") != []


def test_any_operator_can_describe_itself(tmp_path: Path) -> None:
    query = _contiguous(0x1000, "bfloat16", (4, 1, 128, 576))
    call = TracedCall(
        op_type="mla_paged",
        name="mla_decode_dense",
        inputs=(Tensor("query", query, ("batch", "q_len", Constant("heads"), Constant("width"))), Scalar("scale", 0.1)),
        outputs=(Tensor("out", query, ("batch", "q_len", Constant("heads"), Constant("width"))),),
        reference="def run(query, scale):\n    return query\n",
    )
    Recorder(tmp_path).add(call)
    assert workloads(tmp_path)[0]["workload"]["axes"] == {"batch": 4, "q_len": 1}
    with pytest.raises(UsageError, match="out: 3 for axis batch, which is 4 elsewhere"):
        replace(
            call, outputs=(Tensor("out", replace(query, shape=(3, 1, 128, 576)), call.outputs[0].axes),)
        ).definition()


def test_every_axis_and_dtype_is_one_that_flashinfer_bench_knows(decode: Callable[..., Any], tmp_path: Path) -> None:
    with Recorder(tmp_path):
        decode(GOOD.draft(3, mask=MASK, sinks=_contiguous(0x7F0000007000, "float32", (8, 8))))
        decode(GOOD.ragged(7, lse=_contiguous(0x7F0000008000, "float32", (7, 64))), max_q_len=4)
    for found in definitions(tmp_path):
        shapes = [part["shape"] or [] for part in found["inputs"].values()]
        variable = {name for name, axis in found["axes"].items() if axis["type"] == "var"}
        assert variable <= {axis for shape in shapes for axis in shape} <= set(found["axes"])
        parts = {**found["inputs"], **found["outputs"]}
        assert {part["dtype"] for part in parts.values()} <= {"bfloat16", "float32", "int16", "int32"}
