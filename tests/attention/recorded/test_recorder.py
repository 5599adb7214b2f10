"""What a recorder of calls writes, by the stand-in driver: launches compute nothing, memory is real."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention import Runtime, TensorView, paged_decode, plan_paged_decode
from cubin_runtime.compat import flashinfer
from cubin_runtime.debug.observer import observers
from cubin_runtime.debug.recorded import CallRecorder, read_call, replay_call
from cubin_runtime.debug.recorded.call_file import write_call
from cubin_runtime.debug.recorded.recorder import record_process
from cubin_runtime.dtypes import ITEM_BYTES
from cubin_runtime.errors import CorruptError, StoreError, UsageError
from cubin_runtime.launch.driver_errors import DriverCallError
from cubin_runtime.testing import StandIn
from tests.attention.attention_examples import Tensors
from tests.attention.trtllm_calls import MadeUpMemory
from tests.attention.xqa_calls import xqa_batch_arguments

CACHES = ("k_cache", "v_cache")
LENGTHS = np.array([100, 64, 0, 1], dtype=np.int32)
TABLE = np.arange(64, dtype=np.int32).reshape(4, 16)
Decode = Callable[..., Any]


@pytest.fixture
def tensors(runtime: Runtime) -> Iterator[Tensors]:
    """The tensors of the examples in memory of the stand-in, filled with bytes that differ."""
    driver, held = runtime.driver, []

    def placed(view: TensorView) -> TensorView:
        size = ITEM_BYTES[view.dtype] * int(np.prod(view.shape))
        held.append(driver.allocate(size))
        driver.copy_to_device(held[-1], (np.arange(size) % 251).astype(np.uint8))
        return replace(view, pointer=held[-1])

    made = Tensors()
    there = {f.name: getattr(made, f.name) for f in fields(made) if getattr(made, f.name) is not None}
    found = replace(made, **{name: placed(view) for name, view in there.items()})
    driver.copy_to_device(found.seq_lens.pointer, LENGTHS)
    driver.copy_to_device(found.page_table.pointer, TABLE)
    yield found
    for address in held:
        driver.free(address)


@pytest.fixture
def decode(runtime: Runtime, tensors: Tensors) -> Decode:
    def call(given: Tensors = tensors, **options: Any) -> None:
        *positional, out, lse = given.positional
        paged_decode(*positional, out=out, lse=lse, runtime=runtime, **{"max_seq_len": 1000, **options})

    return call


def test_a_call_is_written_with_all_that_it_had(
    runtime: Runtime, tensors: Tensors, decode: Decode, tmp_path: Path
) -> None:
    with CallRecorder(tmp_path) as recorder:
        decode(softmax_scale=0.5, window_left=100)
    (file,) = recorder.files
    call = read_call(file)
    assert file.name.endswith("-000001-paged_decode.safetensors")
    assert {name: tensor.view for name, tensor in call.tensors.items()} == {
        name: view for name, view in tensors.by_name.items() if view is not None
    }
    assert call.tensors["q"].data == runtime.driver.read(tensors.q.pointer, 4 * 64 * 128 * 2)
    assert call.tensors["out"].data == runtime.driver.read(tensors.out.pointer, 4 * 64 * 128 * 2)
    asked = {"max_seq_len": 1000, "planned_max_seq_len": 1024, "softmax_scale": 0.5, "window_left": 100}
    assert asked.items() <= call.options.items()
    assert (call.origin["pin"], call.origin["compute_capability"]) == ("hopper-test", "9.0")
    assert call.kernels[0]["kernel"].startswith("fmha_paged_decode")
    assert len(call.kernels[0]["sha256"]) == 64


def test_of_caches_the_pages_that_are_read_are_written(
    runtime: Runtime, tensors: Tensors, decode: Decode, tmp_path: Path
) -> None:
    with CallRecorder(tmp_path) as recorder:
        decode()
    call = read_call(recorder.files[0])
    assert call.page_ids == (0, 1, 16, 48)
    page = 64 * 8 * 128 * 2
    at = tensors.k_cache.pointer + 48 * page
    assert call.tensors["k_cache"].data[3 * page :] == runtime.driver.read(at, page)
    assert call.tensors["k_cache"].view.shape == (100, 64, 8, 128)


def test_plans_bound_steps_and_other_names_are_written(
    runtime: Runtime, tensors: Tensors, decode: Decode, tmp_path: Path
) -> None:
    names = ("q", *CACHES, "page_table", "seq_lens", "out")
    given = {name: getattr(tensors, name) for name in names}
    plan = plan_paged_decode(**given, max_seq_len=1024, runtime=runtime)
    layer, every = plan.bind(**{name: given[name] for name in CACHES}), plan.bind(**given)
    free = [view for name, view in given.items() if name not in CACHES]

    def all_ways() -> None:
        plan.run(**given)
        layer.step(*free)
        every.step()
        decode()

    for _ in range(3):
        all_ways()
    with CallRecorder(tmp_path) as recorder:
        all_ways()
        with plan.bind(**given) as inside:
            inside.step()
    all_ways()
    assert len(recorder.files) == 5


def test_steps_are_fast_again_afterwards(runtime: Runtime, tensors: Tensors, tmp_path: Path, standin: StandIn) -> None:
    given = {name: getattr(tensors, name) for name in ("q", *CACHES, "page_table", "seq_lens", "out")}
    every = plan_paged_decode(**given, max_seq_len=1024, runtime=runtime).bind(**given)
    every.step()
    with CallRecorder(tmp_path):
        every.step()
    standin.clear_log()
    every.step()
    assert standin.names() == ["cuLaunchKernelEx"]


def test_a_closed_step_stays_closed(runtime: Runtime, tensors: Tensors, tmp_path: Path) -> None:
    given = {name: getattr(tensors, name) for name in ("q", *CACHES, "page_table", "seq_lens", "out")}
    every = plan_paged_decode(**given, max_seq_len=1024, runtime=runtime).bind(**given)
    step = every.step
    with CallRecorder(tmp_path):
        every.close()
    with pytest.raises(UsageError, match="the bound step is closed"):
        step()


def test_flashinfers_names_are_written_as_what_they_stand_on(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", runtime)
    memory = MadeUpMemory()
    monkeypatch.setattr(runtime.driver, "read", lambda address, size: bytes(size))
    with CallRecorder(tmp_path) as recorder:
        flashinfer.xqa_batch_decode_with_kv_cache(
            **xqa_batch_arguments(memory), out=memory.tensor("bfloat16", 4, 64, 128), bmm1_scale=0.1, bmm2_scale=1.0
        )
    assert [read_call(file).operator for file in recorder.files] == ["paged_decode"]


def test_a_fault_is_written_with_the_inputs(tensors: Tensors, decode: Decode, standin: StandIn, tmp_path: Path) -> None:
    decode()
    with CallRecorder(tmp_path) as recorder:
        standin.fail("cuStreamSynchronize", 700, skip=1)  # behind the launch
        with pytest.raises(DriverCallError, match="cuStreamSynchronize returned 700"):
            decode()
    call = read_call(recorder.files[0])
    assert "last launches, newest last:\n  fmha_paged_decode" in call.error
    assert (call.tensors["out"].data, len(call.tensors["q"].data)) == (b"", 4 * 64 * 128 * 2)


def test_a_fault_is_raised_where_its_file_cannot_be_written(
    decode: Decode, standin: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    decode()
    with CallRecorder(tmp_path / "calls") as recorder:
        recorder.folder.rmdir()
        standin.fail("cuStreamSynchronize", 700, skip=1)  # behind the launch
        with pytest.raises(DriverCallError, match="cuStreamSynchronize returned 700"):
            decode()
    assert "cannot be written" in caplog.text


def test_a_captured_call_runs_and_is_not_written(
    runtime: Runtime, decode: Decode, standin: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = runtime.driver.create_stream()
    decode(stream=stream)
    standin.clear_log()
    runtime.driver.begin_capture(stream)
    with CallRecorder(tmp_path) as recorder, caplog.at_level(logging.WARNING):
        decode(stream=stream)
    runtime.driver.end_capture(stream)
    assert (recorder.files, recorder.skipped) == ((), 1)
    assert "a call of paged_decode is not recorded: the stream captures" in caplog.text
    assert len(standin.calls("cuLaunchKernelEx")) == 1


@pytest.mark.parametrize("limit", [1000, 400_000])
def test_a_call_over_the_bound_runs_and_is_not_written(
    decode: Decode, standin: StandIn, tmp_path: Path, limit: int
) -> None:
    with CallRecorder(tmp_path, max_bytes=limit) as recorder:
        decode()
    assert (list(tmp_path.iterdir()), recorder.skipped) == ([], 1)
    assert len(standin.calls("cuLaunchKernelEx")) == 1


def test_the_newest_files_are_kept(decode: Decode, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("stays")
    with CallRecorder(tmp_path, calls=2) as recorder:
        for _ in range(4):
            decode()
    kept = [file.name.split("-")[1] for file in recorder.files]
    assert kept == ["000003", "000004"]
    assert {file.name for file in tmp_path.iterdir()} == {"other", *(file.name for file in recorder.files)}


def test_a_later_recorder_leaves_the_files_of_an_earlier_one(decode: Decode, tmp_path: Path) -> None:
    with CallRecorder(tmp_path) as first:
        decode()
    with CallRecorder(tmp_path) as second:
        decode()
    assert set(tmp_path.iterdir()) == {*first.files, *second.files}
    assert len(list(tmp_path.iterdir())) == 2


def test_the_folder_stays_where_it_was_when_the_process_goes_elsewhere(
    decode: Decode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with CallRecorder("calls"):
        monkeypatch.chdir(tmp_path / "elsewhere")
        decode()
    assert len(list((tmp_path / "calls").iterdir())) == 1


def test_files_are_kept_as_far_as_their_bytes_go(decode: Decode, tmp_path: Path) -> None:
    with CallRecorder(tmp_path, max_bytes=2 << 20) as recorder:
        decode()
        decode()
    assert len(recorder.files) == 1


def test_the_recorder_entered_last_records(decode: Decode, tmp_path: Path) -> None:
    with CallRecorder(tmp_path / "outer") as outer, CallRecorder(tmp_path / "inner") as inner:
        decode()
    assert (len(outer.files), len(inner.files)) == (0, 1)


def test_nothing_is_written_outside(decode: Decode, tmp_path: Path) -> None:
    with CallRecorder(tmp_path):
        pass
    decode()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bounds", [{"calls": 0}, {"max_bytes": 0}])
def test_bounds_below_one_are_refused(bounds: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected 1 or more of both"):
        CallRecorder(tmp_path, **bounds)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be made"):
        CallRecorder(tmp_path / "file" / "calls").__enter__()


def test_a_runtime_whose_configuration_asks_for_it_records(runtime: Runtime, decode: Decode, tmp_path: Path) -> None:
    for _ in range(2):
        Runtime(replace(runtime.config, record=tmp_path / "calls"), driver=runtime.driver)
    (recorder,) = observers()
    try:
        decode()
    finally:
        recorder.__exit__(None, None, None)
    assert len(recorder.files) == 1


def test_a_process_records_into_a_folder_once(tmp_path: Path) -> None:
    record_process(tmp_path)
    record_process(tmp_path)
    (recorder,) = observers()
    recorder.__exit__(None, None, None)


def test_its_header_can_be_read_alone(decode: Decode, tmp_path: Path) -> None:
    with CallRecorder(tmp_path) as recorder:
        decode()
    data = recorder.files[0].read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["q"]["shape"] == [4, 64, 128]


def _recorded_without(option: str, decode: Decode, folder: Path) -> Path:
    """A call that was recorded before there was an option."""
    with CallRecorder(folder) as recorder:
        decode()
    (file,) = recorder.files
    call = read_call(file)
    write_call(replace(call, options={name: value for name, value in call.options.items() if name != option}), file)
    return file


def test_a_call_without_a_newer_option_is_run_again(runtime: Runtime, decode: Decode, tmp_path: Path) -> None:
    file = _recorded_without("draft_position", decode, tmp_path)
    assert replay_call(file, runtime=runtime).replayed


def test_a_call_without_its_bound_is_refused(runtime: Runtime, decode: Decode, tmp_path: Path) -> None:
    file = _recorded_without("planned_max_seq_len", decode, tmp_path)
    with pytest.raises(CorruptError, match="inconsistent arguments: KeyError\\('planned_max_seq_len'\\)"):
        replay_call(file, runtime=runtime)


def test_a_factor_of_a_scale_on_the_device_is_run_again(
    runtime: Runtime, tensors: Tensors, decode: Decode, tmp_path: Path
) -> None:
    scale = TensorView.contiguous(tensors.q.pointer, "float32", (1,))
    with CallRecorder(tmp_path / "calls") as recorder:
        decode(softmax_scale=scale, k_scale=0.5, output_scale=scale, v_scale=2.0)
    with CallRecorder(tmp_path / "again") as again:
        replay_call(recorder.files[0], runtime=runtime)
    before, after = (read_call(one.files[0]).options for one in (recorder, again))
    assert (before["softmax_scale"], before["output_scale"]) == (0.5, 2.0)
    assert after == before
