"""A pytest plugin for FlashAttention-3's tests: they call our names, and every outcome is written down.

- ``flash_attn_interface`` is our module of that name. Queries that are e4m3 become bf16, which holds them exactly, and
  their descale goes into that of the keys: our names take 16-bit queries over e4m3 keys and values. Windows that the
  tests give as tensors become numbers, and tensors that require gradients are detached.
- Test processes share the device's memory in equal parts; a test for which its part did not suffice counts as skipped.
- Tests loop over parts: value dimensions and attention chunks. Those with the value dimension of keys and no chunk come
  first, so that what we refuse ends a test after all that we take has been compared.

Outcomes: ``passed``; ``passed in part``: all until our ``UsageError`` or ``BackendError``; ``refused``: by one, before
anything was compared; ``failed``; ``skipped``: by the test, or since it tests gradients.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from sampling import sampled

from cubin_runtime.attention.backends import BackendError
from cubin_runtime.compat import flash_attn_interface as ours
from cubin_runtime.errors import UsageError

SETTINGS = json.loads(os.environ.get("FLASH_ATTN_TESTS", "{}"))  # written by run.py
NO_MEMORY = "out of memory"
MEMORY = 0.85  # of the device's that tensors of all processes may take; contexts and libraries take memory too
KEPT_BYTES = 1 << 30
FATAL = ("illegal memory access", "misaligned address", "unspecified launch failure", "device-side assert")
# Not forward attention, or not a name of ours: gradients, schemas of the peer's own operators, merging of splits.
OTHERS = ("test_flash_attn_race_condition", "test_flash3_bw_compatibility", "test_flash_attn_combine")


class Counts:
    """Of the test that runs: calls that came back, and those whose queries were made bf16."""

    calls = 0
    translated = 0


def pytest_configure() -> None:
    """Before the test module is imported."""
    import torch

    if not torch.cuda.is_available():  # so that the tests can be listed
        torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    else:
        torch.cuda.set_per_process_memory_fraction(MEMORY / SETTINGS.get("jobs", 1))
    module = ModuleType("flash_attn_interface")
    for name in ours.__all__:
        setattr(module, name, translated(getattr(ours, name)))
    module.flash_attn_combine = None  # type: ignore[attr-defined]  # not among our names
    module.get_scheduler_metadata = lambda *_, **__: None  # type: ignore[attr-defined]  # our names need none
    sys.modules["flash_attn_interface"] = module


def translated(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` for what the tests give it."""

    def call(q: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in (q, *args)]
        kwargs = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in kwargs.items()}
        if isinstance(kwargs.get("window_size"), torch.Tensor):
            kwargs["window_size"] = tuple(kwargs["window_size"].tolist())
        if q.dtype == torch.float8_e4m3fn:
            Counts.translated += 1
            plain[0] = plain[0].to(torch.bfloat16)
            scale = kwargs.pop("q_descale", None)
            if scale is not None:
                kwargs["k_descale"] = scale * kwargs["k_descale"]
        result = function(*plain, **kwargs)
        Counts.calls += 1
        return result

    return call


def function_of(item: pytest.Item) -> str:
    """The function of a test."""
    return item.nodeid.split("[")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep this process's share of the sample; the parts of tests that we take come first."""
    import itertools

    for module in {item.module for item in items}:  # type: ignore[attr-defined]
        module.itertools = SimpleNamespace(product=lambda *lists: iter(ordered(list(itertools.product(*lists)))))
    items[:] = [item for item in items if not any(name in item.nodeid for name in OTHERS)]
    job, jobs = SETTINGS.get("job", 0), SETTINGS.get("jobs", 1)
    chosen = sampled(items, SETTINGS.get("sample", len(items)), SETTINGS.get("seed", 0), function_of)
    write({"collected": len(items), "sample": len(chosen)})
    items[:] = chosen[job::jobs]


def ordered(parts: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Parts of a test, (value dimension, attention chunk) or others: without a chunk first, then as they come last.

    The last value dimension of the tests is that of the keys.
    """
    if parts and type(parts[0][0]) is int and parts[0][0] > 3:
        turned = parts[::-1]
        return sorted(turned, key=lambda part: part[1] != 0)
    return parts


def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Pass over what remains when the time is up."""
    Counts.calls = Counts.translated = 0
    free_memory()
    if time.time() > SETTINGS.get("until", float("inf")):
        write({"test": item.nodeid, "outcome": "not run"})
        return True
    return None


def free_memory() -> None:
    """Give back what earlier tests of this process left."""
    import torch

    if torch.cuda.is_available() and torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Write down how a test ended."""
    made: Any = yield
    if call.when != "call" and made.get_result().passed:
        return
    error = call.excinfo.value if call.excinfo else None
    outcome, reason = outcome_of(error)
    record = {"test": item.nodeid, "outcome": outcome, "reason": reason, "seconds": round(call.duration, 3)}
    if outcome == "failed" and error is not None:
        record["traceback"] = "".join(traceback.format_exception(error, limit=-4))[-3000:]
    write({**record, "calls": Counts.calls, "translated": Counts.translated})
    if outcome == "failed" and any(word in reason for word in FATAL):
        pytest.exit("the device reports an error that does not go away", returncode=1)


def outcome_of(error: BaseException | None) -> tuple[str, str]:
    """The outcome of a test that ended with ``error``, and why."""
    if error is None:
        return "passed", ""
    if isinstance(error, pytest.skip.Exception):
        return "skipped", str(error)
    if NO_MEMORY in str(error):
        return "skipped", NO_MEMORY
    if isinstance(error, (UsageError, BackendError)):
        return "passed in part" if Counts.calls else "refused", str(error)[:300]
    return "failed", f"{type(error).__name__}: {error}"[:2000]


def write(record: dict[str, Any]) -> None:
    """Append to this process's file, so that a run that is stopped leaves what it has."""
    if "records" in SETTINGS:
        with open(SETTINGS["records"], "a") as opened:
            opened.write(json.dumps(record) + "\n")
