"""Recorded calls as files: what is written comes back, and what is damaged is refused."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cubin_runtime.debug.recorded.call import RecordedCall, RecordedTensor
from cubin_runtime.debug.recorded.call_file import parse_call, read_call, write_call
from cubin_runtime.dtypes import ITEM_BYTES
from cubin_runtime.errors import CorruptError, MissingError, StoreError
from cubin_runtime.tensor import TensorView
from tests.attention.recorded_calls import call_bytes, decode_call, mla_call


@pytest.mark.parametrize("call", [decode_call(), decode_call(ragged=True), mla_call(), decode_call(error="it failed")])
def test_a_call_comes_back(call: RecordedCall, tmp_path: Path) -> None:
    write_call(call, tmp_path / "call")
    assert read_call(tmp_path / "call") == call


def test_only_the_file_is_left(tmp_path: Path) -> None:
    write_call(decode_call(), tmp_path / "call")
    write_call(mla_call(), tmp_path / "call")
    assert [file.name for file in tmp_path.iterdir()] == ["call"]
    assert read_call(tmp_path / "call").operator == "mla_decode"


def test_its_header_is_that_of_safetensors() -> None:
    data = call_bytes(decode_call())
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert header["k_cache"]["dtype"] == "BF16"
    assert header["k_cache"]["shape"] == [3, 16, 1, 32]
    assert all(isinstance(value, str) for value in header["__metadata__"].values())
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    assert (size % 8, max(ends)) == (0, len(data) - 8 - size)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="none/call cannot be written"):
        write_call(decode_call(), tmp_path / "none" / "call")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="nothing does not exist"):
        read_call(tmp_path / "nothing")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match="not a regular file"):
        read_call(tmp_path / "pipe")


def test_a_folder_is_refused_and_closed(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StoreError, match="Is a directory"):
        read_call(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_over_the_limit_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "call").write_bytes(bytes(100))
    with pytest.raises(CorruptError, match="100 bytes, at most 99"):
        read_call(tmp_path / "call", max_bytes=99)


@pytest.mark.parametrize("at", [0, 7, 20, -1])
def test_a_changed_byte_is_noticed(at: int) -> None:
    data = bytearray(call_bytes(decode_call()))
    data[at] ^= 1
    with pytest.raises(CorruptError, match=r"^here: "):
        parse_call(bytes(data), "here")


@pytest.mark.parametrize("page", [(1 << 62) + 1, (1 << 64) - 1])
def test_a_page_id_past_the_limit_is_refused(page: int) -> None:
    call = decode_call()
    assert len(call.page_ids) == 3
    with pytest.raises(CorruptError, match="page_ids: expected int64 numbers in increasing order"):
        parse_call(call_bytes(replace(call, page_ids=(1, 2, page))), "here")


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_a_tensor_of_any_dtype_is_written_and_read(dtype: Any) -> None:
    call = decode_call()
    mask = RecordedTensor(TensorView.contiguous(1 << 20, dtype, (3,)), bytes(range(3 * ITEM_BYTES[dtype])))
    data = call_bytes(replace(call, tensors={**call.tensors, "mask": mask}))
    assert parse_call(data, "call").tensors["mask"] == mask


def _with_form_of_q(change: dict[str, Any]) -> bytes:
    """A file whose call says something else of ``q``."""
    data = call_bytes(decode_call())
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    call = json.loads(header["__metadata__"]["call"])
    call["tensors"]["q"] |= change
    header["__metadata__"]["call"] = json.dumps(call)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


@pytest.mark.parametrize("change", [{"dtype": []}, {"strides": [1 << 62, 32, 1]}, {"dtype": "x" * 10_000}])
def test_a_form_that_no_tensor_has_is_refused_in_few_words(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptError, match=r"^here: q: ") as refused:
        parse_call(_with_form_of_q(change), "here")
    assert len(str(refused.value)) < 1000
