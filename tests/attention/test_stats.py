"""What a runtime tells of itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cubin_runtime import Config
from cubin_runtime.attention import Runtime
from cubin_runtime.testing import GraphDriver, StandIn
from tests.attention.attention_examples import RELEASE_NAME
from tests.attention.test_paged_decode import call


def test_launches_plans_and_loads_are_counted(runtime: Runtime) -> None:
    before = runtime.stats()
    assert (before.launches, before.plans_made, before.plans_found, before.loads) == (0, 0, 0, 0)
    for _ in range(3):
        call(runtime)
    call(runtime, window_left=5)
    after = runtime.stats()
    assert (after.launches, after.plans_made, after.plans_found, after.fast_paths) == (4, 2, 0, 2)
    assert after.loads == 1
    assert after.loaded_bytes > 0
    assert (after.failed_loads, after.driver_seconds) == (0, None)


def test_a_profile_measures_launches(config: Config, standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr("cubin_runtime.launch.profiler._ranges", lambda: (seen.append, lambda: seen.append("end")))
    made = Runtime(replace(config, profile=True), driver=GraphDriver(standin.path), release=RELEASE_NAME)
    for kernel in made.native_release().kernels:
        standin.add_kernel(kernel.symbol, (kernel.struct_bytes,), kernel.threads)
    made.driver.set_current(made.driver.primary_context(0))
    for _ in range(2):
        call(made)
    made.driver.set_current(None)
    seconds = made.stats().driver_seconds
    assert seconds is not None
    assert seconds > 0
    assert [word.split("_")[0] for word in seen] == ["cubin", "end"] * 2
