from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pytest

from cubin_runtime.cli.example_call import Shapes
from cubin_runtime.cli.recorded_cases import MAX_LINE_BYTES, CaseError, case_in, occupancy_of, problem_of, read_lines
from cubin_runtime.cli.recorded_decisions import MARKERS, decide_lines, record_of_case
from cubin_runtime.errors import MissingError, UsageError
from cubin_runtime.kernels.trtllm_gen.traits import Policy
from tests.kernels.example_cases import case_of
from tests.kernels.trtllm_examples import recorded_kernels

MLA = {"heads_q": 128, "heads_kv": 1, "head_dim": 576, "head_dim_v": 512}
MISSED = Shapes(head_dim=512, heads_q=16, heads_kv=1, q_len=4)


def decided(policy: Policy = Policy.BEST, **shapes):
    return record_of_case(case_of(Shapes(**shapes)), recorded_kernels(), policy)


@pytest.mark.parametrize(
    ("shapes", "kernel"),
    [
        ({}, "fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausalP32MultiCtasKvCga"),
        (MLA, "fmhaSm100fKernel_QkvBfloat16OBfloat16HQk576HV512"),
        ({**MLA, "top_k": 1024}, "StaticTokenSparse"),
        ({"operation": "context", "q_len": 512, "window": 128}, "SlidingOrChunkedCausalP32VarSeqQ128Kv128Persistent"),
        ({"operation": "ragged", "heads_kv": 32, "q_len": 512}, "SeparateQkvCausal"),
        ({"dtype_q": "e4m3", "dtype_kv": "e2m1", "dtype_out": "e4m3"}, "QE4m3KvE2m1OE4m3"),
        ({"dtype_q": "e4m3", "dtype_kv": "e4m3", "dtype_out": "e2m1"}, "QkvE4m3OE2m1"),
        ({"skip_softmax": 1000.0}, "SkipsSoftmax"),
    ],
)
def test_shapes_alone_find_their_kernel(shapes, kernel: str) -> None:
    assert kernel in decided(**shapes)["kernel"]


@pytest.mark.parametrize("change", [{"operation": "train"}, {"dtype_q": "fp64"}, {"batch": 0}, {"page": 0}])
def test_shapes_that_no_call_has_are_refused(change) -> None:
    with pytest.raises(UsageError):
        case_of(Shapes(**change))


def test_a_refusal_says_what_was_asked() -> None:
    record = record_of_case(case_of(MISSED), recorded_kernels(), Policy.REFERENCE)
    assert (record["ok"], record["error_kind"]) == (False, "missing_kernel_in_selection")
    assert record["error_select_params"]["headDimPerCtaV"] == 512


def test_a_type_that_no_kernel_takes_counts_as_an_argument_check() -> None:
    case = case_of(Shapes())
    case["tensors"]["query"]["dtype"] = "float64"
    record = record_of_case(case, recorded_kernels(), Policy.REFERENCE)
    assert (record["ok"], record["error_kind"]) == (False, "launcher_argument_check")


def test_floats_are_shown_with_nine_digits_and_pointers_in_hexadecimal() -> None:
    params = decided()["params"]
    assert (params["mScaleSoftmaxLog2"], params["mScaleSfO"]) == (0.127517432, -1)
    assert (params["ptrO"], params["ptrSfO"]) == ("0x7f1000000000", None)
    assert params["mNumHeadsQPerKvDivisor"] == "04000000000000800000000001000000"


def test_our_policy_finds_a_kernel_where_the_reference_misses_one() -> None:
    assert record_of_case(case_of(MISSED), recorded_kernels(), Policy.BEST)["ok"] is True


@pytest.mark.parametrize(("model", "clusters"), [("floor", 37), ("gpc18", 32), ("const:5", 5)])
def test_occupancy_models_answer_for_a_cluster_of_four(model: str, clusters: int) -> None:
    assert occupancy_of(case_of(Shapes(occupancy=model)))(None, 4, (1, 1, 1)) == clusters


@pytest.mark.parametrize("model", ["", "const:", "const:-1", "all"])
def test_other_models_are_refused(model: str) -> None:
    with pytest.raises(CaseError, match="max_active_clusters_model"):
        occupancy_of(case_of(Shapes(occupancy=model)))


@pytest.mark.parametrize("gone", ["api", "tensors", "scalars", "sm"])
def test_a_case_that_lacks_something_is_named(gone: str) -> None:
    case = case_of(Shapes())
    del case[gone]
    with pytest.raises(CaseError, match=gone):
        problem_of(case)


@pytest.mark.parametrize(
    "tensor", [None, {}, {"ptr": 5, "dtype": "bfloat16", "shape": [1], "strides": [1]}, {"ptr": "zz"}, []]
)
def test_a_tensor_of_another_form_is_refused(tensor) -> None:
    case = case_of(Shapes())
    case["tensors"]["query"] = tensor
    with pytest.raises(CaseError):
        problem_of(case)


def test_descriptors_are_marked_by_their_bytes() -> None:
    record = decided()
    assert [record["params_hex"][256 * place : 256 * place + 2] for place in range(7)] == [
        "c1", "c2", "00", "c4", "c5", "00", "00",
    ]  # fmt: skip
    assert list(record["tma"]) == list(MARKERS)


def lines_of(*cases) -> list[bytes]:
    return [json.dumps({"case": case, "kernel": "ignored"}).encode() for case in cases]


def test_a_file_gives_a_line_a_case() -> None:
    lines = lines_of(case_of(Shapes()), case_of(MISSED))
    records = [json.loads(line) for line in decide_lines(lines, recorded_kernels(), both=False, where="f")]
    assert [record["ok"] for record in records] == [True, False]
    assert "best" not in records[0]


def test_ours_comes_under_its_own_key() -> None:
    (line,) = decide_lines(lines_of(case_of(MISSED)), recorded_kernels(), both=True, where="f")
    record = json.loads(line)
    assert (record["ok"], record["best"]["ok"]) == (False, True)


@pytest.mark.parametrize("line", [b"{", b"[]", b"1", b'{"case": 1}', b"{}", b"[" * 100_000])
def test_a_line_without_a_case_is_named_by_its_number(line: bytes) -> None:
    good = lines_of(case_of(Shapes()))
    with pytest.raises(UsageError, match="f:2"):
        list(decide_lines([*good, line], recorded_kernels(), both=False, where="f"))


@pytest.mark.parametrize(("name", "pack"), [("c.jsonl", bytes), ("c.jsonl.gz", gzip.compress), ("c.xz", lzma.compress)])
def test_packed_files_are_read_like_others(tmp_path: Path, name: str, pack) -> None:
    (tmp_path / name).write_bytes(pack(b"one\n\n  \ntwo\n"))
    assert list(read_lines(tmp_path / name)) == [b"one\n", b"two\n"]


@pytest.mark.parametrize(
    ("name", "data"), [("c.gz", b"no"), ("c.gz", gzip.compress(b"x" * 99, mtime=0)[:-4]), ("c.xz", b"no")]
)
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=name):
        list(read_lines(tmp_path / name))


def test_a_file_that_is_not_there_is_missing(tmp_path: Path) -> None:
    with pytest.raises(MissingError):
        list(read_lines(tmp_path / "none.jsonl"))


def test_an_endless_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.gz").write_bytes(gzip.compress(b"x" * (MAX_LINE_BYTES + 1)))
    with pytest.raises(UsageError, match="a line of more than"):
        list(read_lines(tmp_path / "c.gz"))


def test_a_case_may_stand_alone() -> None:
    case = case_of(Shapes())
    assert case_in(json.dumps(case), "f") == case
