"""Traces on full disks and behind damaged lines."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cubin_runtime.debug.tracing import Constant, Recorder, Tensor, TracedCall
from cubin_runtime.tensor import TensorView
from tests.attention.tracing_files import definitions, workloads


def call_of(batch: int) -> TracedCall:
    tensor = Tensor("x", TensorView.contiguous(16, "bfloat16", (batch, 4)), ("batch", Constant("columns")))
    return TracedCall("kind", "name", (tensor,), (tensor,), "def run(x): return x\n")


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """Let a write fail behind so many bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_keeps_no_part_of_a_definition(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    with files_end_at(100), pytest.raises(OSError, match="File too large"):
        recorder.add(call_of(1))
    assert definitions(tmp_path) == []
    recorder.add(call_of(1))
    assert len(definitions(tmp_path)) == 1


def test_the_folder_stays_where_it_was_when_the_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    recorder = Recorder("traces")
    monkeypatch.chdir(tmp_path / "elsewhere")
    recorder.add(call_of(1))
    assert len(definitions(tmp_path / "traces")) == 1


def test_a_full_disk_keeps_no_part_of_a_line(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.add(call_of(1))
    (lines,) = tmp_path.glob("workloads/*/*.jsonl")
    before = lines.read_bytes()
    with files_end_at(len(before) + 20), pytest.raises(OSError, match="No space left"):
        recorder.add(call_of(2))
    assert lines.read_bytes() == before
    recorder.add(call_of(2))
    assert len(workloads(tmp_path)) == 2


def test_a_call_of_several_ranks_is_written_once(tmp_path: Path) -> None:
    ranks = Recorder(tmp_path), Recorder(tmp_path)
    for batch in (1, 2, 3):
        for rank in ranks:
            rank.add(call_of(batch))
    assert [call["workload"]["axes"]["batch"] for call in workloads(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("damage", [b'{"workload": {"uu', b"[1]\n", b'{"workload": {"uuid": []}}\n', b"\xff\n"])
def test_behind_a_damaged_line_traces_go_on(tmp_path: Path, damage: bytes) -> None:
    Recorder(tmp_path).add(call_of(1))
    (lines,) = tmp_path.glob("workloads/*/*.jsonl")
    before = lines.read_bytes() + damage
    lines.write_bytes(before)
    for batch in (1, 2):
        Recorder(tmp_path).add(call_of(batch))
    after = lines.read_bytes()
    assert after.startswith(before)
    (line,) = after[len(before) :].splitlines()[-1:]
    assert json.loads(line)["workload"]["axes"] == {"batch": 2}
