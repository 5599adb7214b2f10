"""What a recorder writes of calls, by the stand-in driver."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cubin_runtime.attention import Runtime, TensorView, paged_decode, plan_paged_decode
from cubin_runtime.debug.tracing import Constant, Recorder, Scalar, Tensor, TracedCall, record
from cubin_runtime.errors import UsageError
from tests.attention.attention_examples import Tensors
from tests.attention.tracing_files import definitions, workloads

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


@pytest.mark.parametrize("more", [{"window_left": 5}, {"mask": MASK}])
def test_positions_by_index_are_those_by_depth_without_a_mask_or_a_window(
    decode: Callable[..., Any], tmp_path: Path, more: dict[str, Any]
) -> None:
    window = {name: more[name] for name in ("window_left",) if name in more}
    given = GOOD.draft(3, **{name: more[name] for name in ("mask",) if name in more})
    with Recorder(tmp_path):
        decode(given, draft_position="index", **window)
        decode(given, draft_position="depth", **window)
    assert (len(definitions(tmp_path)), len(workloads(tmp_path))) == (1, 1)


def test_with_a_mask_and_a_window_positions_by_index_are_another_definition(
    decode: Callable[..., Any], tmp_path: Path
) -> None:
    with Recorder(tmp_path):
        for position in ("index", "depth"):
            decode(GOOD.draft(3, mask=MASK), draft_position=position, window_left=5)
    found = definitions(tmp_path)
    assert sorted("draft_position:index" in one["tags"] for one in found) == [False, True]
    assert sorted("by_index=True" in one["reference"] for one in found) == [False, True]


def test_tables_of_keys_and_of_values_are_written(decode: Callable[..., Any], tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        decode(GOOD.changed("page_table", shape=(4, 2, 16), strides=(32, 16, 1)))
    assert definitions(tmp_path)[0]["inputs"]["page_table"]["shape"] == ["batch", "tables", "columns"]
    assert recorder.untraced == {}


def test_the_keys_of_a_rank_are_written(decode: Callable[..., Any], tmp_path: Path) -> None:
    lengths = _contiguous(0x7F0000009000, "int32", (4,))
    with Recorder(tmp_path) as recorder:
        decode(replace(GOOD, global_seq_lens=lengths), cp_world=2, cp_rank=1, cp_interleave=4)
    inputs = workloads(tmp_path)[0]["workload"]["inputs"]
    assert [inputs[name]["value"] for name in ("cp_world", "cp_rank", "cp_interleave")] == [2, 1, 4]
    assert definitions(tmp_path)[0]["inputs"]["global_seq_lens"]["shape"] == ["batch"]
    assert recorder.untraced == {}


def test_runs_of_plans_and_bound_steps_are_written_like_calls(
    decode: Callable[..., Any], runtime: Runtime, tmp_path: Path
) -> None:
    names = ("q", "k_cache", "v_cache", "page_table", "seq_lens", "out")
    given = {name: getattr(GOOD, name) for name in names}
    plan = plan_paged_decode(**given, max_seq_len=1024, window_left=7, runtime=runtime)
    step = plan.bind(k_cache=GOOD.k_cache, v_cache=GOOD.v_cache, softmax_scale=0.5, max_seq_len=1000)
    moving = {name: given[name] for name in names if "cache" not in name}
    for _ in range(5):  # both have functions of their own
        plan.run(**given)
        step.step(**moving)
    with Recorder(tmp_path / "calls"):
        decode(softmax_scale=0.5, window_left=7)
    with Recorder(tmp_path / "runs"):
        plan.run(**given, softmax_scale=0.5, max_seq_len=1000)
    with Recorder(tmp_path / "steps"):
        step.step(**moving)
    wanted = workloads(tmp_path / "calls")
    assert len(wanted) == 1
    assert [workloads(tmp_path / name) for name in ("runs", "steps")] == [wanted, wanted]


def test_what_has_no_definition_is_counted_and_named_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Recorder(tmp_path) as recorder:
        for reason in ("one: reason", "other: reason", "one: reason"):
            record(reason)
        assert caplog.messages == []
    record("one: reason")
    assert recorder.untraced == {"one: reason": 2, "other: reason": 1}
    assert caplog.messages == [f"{tmp_path}: 3 calls are not recorded: 2 of one: reason; 1 of other: reason"]
