"""Replaying without a GPU: recorded outputs beside the reference."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cubin_runtime.debug.recorded import replay_call
from cubin_runtime.debug.recorded.call import RecordedCall, RecordedTensor
from cubin_runtime.debug.recorded.call_file import write_call
from cubin_runtime.debug.recorded.replay import ReplayReport
from cubin_runtime.debug.recorded.snapshot import span_of
from cubin_runtime.errors import CorruptError, UsageError
from cubin_runtime.tensor import TensorView
from tests.attention.recorded_calls import context_call, decode_call, mla_call


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "call"


def replayed(call: RecordedCall, file: Path) -> ReplayReport:
    write_call(call, file)
    return replay_call(file)


def changed(call: RecordedCall, name: str, data: bytes) -> RecordedCall:
    return replace(call, tensors={**call.tensors, name: replace(call.tensors[name], data=data)})


def integers(*values: int) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()


@pytest.mark.parametrize(
    "call",
    [
        decode_call(),
        decode_call(ragged=True),
        mla_call(),
        mla_call(separate_values=True),
        mla_call(separate_rope=True),
        context_call(),
        context_call(even=True),
    ],
)
def test_a_right_output_is_within_tolerance(call: RecordedCall, file: Path) -> None:
    report = replayed(call, file)
    assert (report.ok, report.device, report.replayed, report.same_bits) == (True, "", (), None)
    assert [one.name for one in report.recorded] == ["out"]
    assert 0 < report.recorded[0].error < report.recorded[0].tolerance


def test_a_wrong_row_is_named(file: Path) -> None:
    call = decode_call()
    bits = bytearray(call.tensors["out"].data)
    bits[3 * 64 : 4 * 64] = bits[2 * 64 : 3 * 64]  # request 1, head 1 as head 0
    report = replayed(changed(call, "out", bytes(bits)), file)
    assert not report.ok
    assert (report.recorded[0].wrong, report.recorded[0].first) == (1, (1, 1))
    assert "1 of 4 rows are off, the first at token 1, head 1: WRONG" in str(report)


def test_values_in_memory_of_their_own_count_for_the_output(file: Path) -> None:
    call = mla_call(separate_values=True)
    values = call.tensors["v_cache"].data
    assert not replayed(changed(call, "v_cache", values[::-1]), file).ok


def test_a_nan_is_wrong(file: Path) -> None:
    call = decode_call()
    report = replayed(changed(call, "out", b"\xff" * len(call.tensors["out"].data)), file)
    assert (report.ok, report.recorded[0].wrong) == (False, 4)


def test_a_length_over_the_bound_is_told(file: Path) -> None:
    report = replayed(changed(decode_call(), "seq_lens", integers(17, 65)), file)
    assert report.notes[0] == "seq_lens: 1 of 2 are outside 0 to 64, the bound"


def test_a_page_outside_the_pool_is_told(file: Path) -> None:
    report = replayed(changed(decode_call(), "page_table", integers(1, 8, 0, 0, 2, 0, 0, 99)), file)
    assert report.notes == ("page_table: 1 entries that are read are outside the 8 pages",)


def test_a_table_with_no_page_of_the_pool_is_told(file: Path) -> None:
    call = changed(decode_call(), "page_table", integers(*[99] * 8))
    for name in ("k_cache", "v_cache"):
        call = changed(call, name, b"")
    report = replayed(replace(call, page_ids=()), file)
    assert report.no_reference == "page_table: all entries that are read are outside the 8 pages"


@pytest.mark.parametrize("view", [("int32", (2, 2, 32)), ("bfloat16", (1,)), ("bfloat16", (2, 2, 1))])
def test_an_output_that_does_not_fit_is_refused(view: tuple[Any, tuple[int, ...]], file: Path) -> None:
    call, out = decode_call(), TensorView.contiguous(9 << 20, *view)
    tensors = {**call.tensors, "out": RecordedTensor(out, bytes(span_of(out)), output=True)}
    with pytest.raises(CorruptError, match="an output that does not fit its call"):
        replayed(replace(call, tensors=tensors), file)


def test_a_failed_call_has_its_error_and_no_output(file: Path) -> None:
    report = replayed(decode_call(error="cuStreamSynchronize returned 700"), file)
    assert (report.ok, report.recorded) == (True, ())
    assert "the call failed: cuStreamSynchronize returned 700" in str(report)


def test_an_operator_without_a_reference_is_told(file: Path) -> None:
    report = replayed(decode_call(operator="other"), file)
    assert report.no_reference == "there is no reference for other"
    assert "q: bfloat16 [2, 2, 32], strides [64, 32, 1]" in str(report)


def _without(call: RecordedCall, name: str) -> RecordedCall:
    return replace(call, tensors={other: tensor for other, tensor in call.tensors.items() if other != name})


@pytest.mark.parametrize(
    "call",
    [
        _without(decode_call(), "seq_lens"),
        replace(decode_call(), options={}),
        changed(decode_call(ragged=True), "q_cu_seq_lens", integers(0, 2, 1)),
        changed(decode_call(ragged=True), "q_cu_seq_lens", integers(0, 2, 2_000_000_000)),
    ],
)
def test_parts_that_do_not_fit_are_refused(call: RecordedCall, file: Path) -> None:
    with pytest.raises(CorruptError, match="with inconsistent arguments"):
        replayed(call, file)


def test_numpy_is_asked_for(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(UsageError, match=r"needs numpy: pip install 'cubin-runtime\[replay\]'"):
        replay_call(file)


TRTLLM: dict[str, Any] = {"max_q": 1, "max_kv": 64, "bmm1": 0.25, "bmm2": 1.0, "window_left": -1}


def trtllm_call(**options: Any) -> RecordedCall:
    """The decode as trtllm-gen has it, whose caches are [pages, heads, page size, head_dim]."""
    ours = decode_call()
    names = {"k_cache": "key", "v_cache": "value", "q": "query", "page_table": "block_tables"}
    tensors = {names.get(name, name): tensor for name, tensor in ours.tensors.items()}
    for name in ("key", "value"):
        view = replace(tensors[name].view, shape=(8, 1, 16, 32))
        tensors[name] = replace(tensors[name], view=view)
    given = {**TRTLLM, "skip_softmax_factor": 0.0, "top_k": 0, **options}
    return replace(ours, operator="trtllm_gen.DecodeCall", tensors=tensors, options=given)


def test_a_trtllm_gen_decode_has_the_same_reference(file: Path) -> None:
    report = replayed(trtllm_call(), file)
    assert (report.ok, len(report.recorded)) == (True, 1)


def test_several_query_tokens_of_a_trtllm_gen_decode_have_a_reference(file: Path) -> None:
    call = trtllm_call(max_q=2)
    starts = RecordedTensor(TensorView.contiguous(7 << 20, "int32", (3,)), integers(0, 1, 2))
    report = replayed(replace(call, tensors={**call.tensors, "cum_seq_lens_q": starts}), file)
    assert (report.ok, report.no_reference, len(report.recorded)) == (True, "", 1)


def test_what_trtllm_gen_skips_has_none(file: Path) -> None:
    report = replayed(trtllm_call(skip_softmax_factor=1.0), file)
    assert report.no_reference == "there is no reference for sparse or skipped keys"


def test_an_operator_that_is_unknown_is_not_run_again(file: Path) -> None:
    write_call(decode_call(operator="other"), file)
    runtime: Any = object()
    assert replay_call(file, runtime=runtime).device == ""
