from __future__ import annotations

import subprocess
import sys

import pytest
from attention_examples import RELEASE_NAME

from cubin_runtime import Config
from cubin_runtime.attention import Runtime
from cubin_runtime.attention.runtime import PlanCache
from cubin_runtime.errors import MissingError

CHILD = """
import os, sys
from cubin_runtime.attention import Runtime, default_runtime, set_default_runtime
from cubin_runtime.errors import UsageError
{body}
"""


def in_fresh_process(body: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(body=body)], capture_output=True, text=True, check=False, timeout=60
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
    from dataclasses import replace

    runtime = Runtime(replace(config, sources=("/nonexistent",)), release=RELEASE_NAME)
    with pytest.raises(MissingError):
        runtime.own_release()


def test_our_release_is_read_with_its_kernels_and_structs(config: Config) -> None:
    own = Runtime(config, release=RELEASE_NAME).own_release()
    assert {(kernel.traits["dtype"], kernel.traits["head_dim"]) for kernel in own.kernels} == {("bf16", 128)}
    assert {kernel.struct_fingerprint for kernel in own.kernels} == {own.layouts["PagedDecodeTmaParams"].fingerprint}


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
