"""Calls recorded on a device and replayed there; rehearsed on the host by ``test_recorded_rehearsal``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cubin_runtime.attention import Runtime
from cubin_runtime.debug.recorded import CallRecorder, replay_call
from tests.gpu.decode_cases import DecodeCase
from tests.gpu.decode_device import on_device
from tests.gpu.mla_cases import MlaCase
from tests.gpu.mla_device import mla_on_device

pytestmark = pytest.mark.gpu

CASES = {
    "plain": DecodeCase((65, 1, 0, 200), 256),
    "one pool, HND": DecodeCase((70, 129), 256, kv_layout="HND", kv_dtype="fp16", spare_columns=2, strided=True),
    "e4m3": DecodeCase((300, 40), 512, kv_dtype="e4m3", q_dtype="e4m3", out_dtype="e4m3", output_scale=0.5),
    "mask": DecodeCase((90, 33), 128, q_len=4, mask="tree", sinks=True, device_scales=True, window_left=40),
    "ragged": DecodeCase((90, 33, 7), 128, q_lens=(2, 3, 1), spare_tokens=2, batch_invariant=True, unsigned=True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_decode_is_recorded_and_replayed(
    runtime: Runtime, rng: np.random.Generator, tmp_path: Path, name: str
) -> None:
    with on_device(runtime, CASES[name], rng) as here, CallRecorder(tmp_path) as recorder:
        here.run()
        here.assert_right()
    (file,) = recorder.files
    report = replay_call(file, runtime=runtime)
    assert (report.ok, report.notes, report.no_reference) == (True, (), "")
    assert {one.name for one in report.recorded} == {one.name for one in report.replayed} == {"out", "lse"}
    assert all(one.ok for one in report.recorded)
    assert report.same_bits or not CASES[name].batch_invariant  # others may merge their partials as they come


LATENT = {
    "plain": MlaCase((65, 1, 0, 100), 128),
    "rope elsewhere": MlaCase((65, 1, 0, 100), 128, separate_rope=True),
    "values elsewhere": MlaCase((65, 1, 0, 100), 128, kv_dtype="e4m3", q_dtype="e4m3", separate_values=True),
}


@pytest.mark.parametrize("name", LATENT)
def test_an_mla_decode_is_recorded_and_replayed(
    runtime: Runtime, rng: np.random.Generator, tmp_path: Path, name: str
) -> None:
    with (
        mla_on_device(runtime, LATENT[name], rng) as here,
        CallRecorder(tmp_path) as recorder,
    ):
        here.run()
    report = replay_call(recorder.files[0], runtime=runtime)
    assert (report.ok, report.no_reference) == (True, "")
    assert all(one.ok for one in report.recorded)


def test_a_wrong_result_is_found_and_not_seen_again(runtime: Runtime, rng: np.random.Generator, tmp_path: Path) -> None:
    """As of a stray write: the output is damaged before it is recorded."""
    with on_device(runtime, CASES["plain"], rng) as here:
        launch = here.plan._launch

        def damaged(*given: object) -> object:
            done = launch(*given)  # type: ignore[arg-type]
            here.driver.fill(here.out_buffer.pointer, 0x40, 64, 0)
            return done

        here.plan._launch = damaged  # type: ignore[method-assign,assignment]
        with CallRecorder(tmp_path) as recorder:
            here.run()
    alone, again = replay_call(recorder.files[0]), replay_call(recorder.files[0], runtime=runtime)
    assert (alone.ok, again.ok, again.same_bits) == (False, True, False)
    (wrong,) = [one for one in alone.recorded if not one.ok]
    assert (wrong.name, wrong.wrong, wrong.first) == ("out", 1, (0, 0))
