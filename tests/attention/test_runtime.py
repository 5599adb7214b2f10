from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from cubin_runtime import Config
from cubin_runtime.attention import Runtime
from cubin_runtime.attention.runtime import PlanCache
from cubin_runtime.errors import MissingError, UsageError
from cubin_runtime.testing import GraphDriver, StandIn
from tests.artifacts.serving import serving
from tests.attention.attention_examples import RELEASE_NAME
from tests.kernels.trtllm_examples import ROW

CHILD = """
import os, sys
from cubin_runtime.attention import Runtime, default_runtime, set_default_runtime
from cubin_runtime.errors import UsageError
{body}
"""


@pytest.fixture(autouse=True)
def without_pins_of_the_user(no_configuration: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(no_configuration))


def in_fresh_process(body: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(body=body)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_default_is_made_once() -> None:
    assert in_fresh_process("print(default_runtime() is default_runtime())") == "True"


def test_the_default_can_be_set_before_its_first_use() -> None:
    body = "mine = Runtime()\nset_default_runtime(mine)\nprint(default_runtime() is mine)"
    assert in_fresh_process(body) == "True"


def test_the_default_cannot_be_set_after_its_first_use() -> None:
    body = "default_runtime()\ntry:\n    set_default_runtime(Runtime())\nexcept UsageError as error:\n    print(error)"
    assert "in use already" in in_fresh_process(body)


def test_the_default_is_refused_in_a_forked_child() -> None:
    body = (
        "default_runtime()\n"
        "if os.fork() == 0:\n"
        "    try:\n        default_runtime()\n"
        "    except UsageError as error:\n        print(error, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()"
    )
    assert "made before a fork" in in_fresh_process(body)


def test_a_release_that_is_not_here_is_missing_when_offline(config: Config) -> None:
    runtime = Runtime(replace(config, sources=("/nonexistent",)), release=RELEASE_NAME)
    with pytest.raises(MissingError):
        runtime.native_release()


def test_our_release_is_read_with_its_kernels_and_structs(config: Config) -> None:
    own = Runtime(config, release=RELEASE_NAME).native_release()
    assert {(kernel.traits["dtype"], kernel.traits["head_dim"]) for kernel in own.kernels} == {("bf16", 128)}
    assert {kernel.struct_fingerprint for kernel in own.kernels} == {own.layouts["PagedDecodeTmaParams"].fingerprint}


@pytest.mark.parametrize(
    ("changes", "frozen", "may"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"lazy_fetch": False}, False, False),
        ({"offline": True}, False, False),
    ],
)
def test_kernels_are_fetched_lazily_unless_that_is_off_or_too_late(
    tmp_path: Path, changes: dict[str, bool], frozen: bool, may: bool
) -> None:
    runtime = Runtime(Config(store=tmp_path / "store", **changes))
    if frozen:
        runtime.freeze()
    assert runtime.may_fetch is may


@pytest.mark.parametrize("lazy", [True, False])
def test_a_kernel_is_fetched_at_first_use_only_if_that_is_on(
    config: Config, release: tuple[Path, Path], standin: StandIn, lazy: bool
) -> None:
    with serving(release[0]) as server:
        online = replace(config, sources=(server.url,), offline=False)
        Runtime(online, driver=GraphDriver(standin.path), release=RELEASE_NAME).native_release()
        runtime = Runtime(replace(online, lazy_fetch=lazy), driver=GraphDriver(standin.path), release=RELEASE_NAME)
        kernel = runtime.native_release().kernels[0]
        standin.add_kernel(kernel.symbol, (kernel.struct_bytes,), kernel.threads)
        with nullcontext() if lazy else pytest.raises(MissingError, match=f"{kernel.file} is not in"):
            runtime.preload([kernel])
        assert server.count(".cubin") == int(lazy)


def test_kernels_are_preloaded_on_the_device_asked_for(runtime: Runtime, standin: StandIn) -> None:
    standin.with_devices(2)
    report = runtime.preload(runtime.native_release().kernels[:1], device=1)
    assert [kernel.context for kernel in report.kernels] == [runtime.driver.primary_context(1)]
    assert standin.call("cuModuleLoadData")["context"] == hex(runtime.driver.primary_context(1))


def test_a_forked_child_loads_no_kernel(runtime: Runtime, standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, context = runtime.native_release().kernels[0], runtime.driver.primary_context()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(UsageError, match="made before a fork"):
        runtime.load(kernel, context)
    with pytest.raises(UsageError, match="made before a fork"):
        runtime.load_trtllm_gen(ROW, context)
    assert "cuModuleLoadData" not in standin.names()


def test_of_two_plans_made_at_once_the_first_is_kept() -> None:
    cache, first, second = PlanCache(), object(), object()

    def slow() -> object:
        assert cache.get("a", lambda: first) is first
        return second

    assert cache.get("a", slow) is first
    assert cache.get("a", slow) is first


def test_a_plan_is_made_once_and_the_oldest_goes_first() -> None:
    cache = PlanCache(entries=2)
    made: list[str] = []
    for key in ("a", "b", "a", "c", "b"):
        cache.get(key, lambda key=key: made.append(key) or key)
    assert made == ["a", "b", "c", "b"]


def test_a_failure_to_plan_is_not_kept() -> None:
    cache = PlanCache()
    with pytest.raises(ZeroDivisionError):
        cache.get("a", lambda: 1 // 0)
    assert cache.get("a", lambda: 5) == 5
