"""A pytest plugin for FlashInfer's tests: they call our functions, on any device, and every outcome is written down.

- ``get_compute_capability`` tells the tests an architecture that equals each that they ask for, and every
  ``is_sm..._supported`` is true. FlashInfer's own modules see the real device.
- ``compat.flashinfer.install()`` puts our functions in place. Where a test asks for the backend trtllm-gen, decoding
  gets "auto" and a workspace that is zero, as native kernels expect it; nothing else of a call is changed.
- The wrappers that compute references are those of ``references``; FlashInfer compiles nothing.

Outcomes: ``passed``; ``failed``; ``refused``: ended by our ``UsageError`` or ``BackendError``; ``skipped``;
``untouched``: passed, but called none of our functions.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sampling import sampled

from cubin_runtime.attention.backends import BackendError
from cubin_runtime.compat import flashinfer as ours
from cubin_runtime.errors import UsageError

SETTINGS = json.loads(os.environ.get("FLASHINFER_TESTS", "{}"))  # written by run.py
TRTLLM_GEN = "trtllm-gen"
CONTEXT = ("trtllm_batch_context_with_kv_cache", "trtllm_ragged_attention_deepseek")
FATAL = ("illegal memory access", "misaligned address", "unspecified launch failure", "device-side assert")


class Architecture(int):
    """The major number of a compute capability that equals every one that FlashInfer's tests ask for."""

    asked_for = (9, 10, 12)

    def __eq__(self, other: object) -> bool:
        return other in self.asked_for

    def __ne__(self, other: object) -> bool:
        return other not in self.asked_for

    __hash__ = int.__hash__


class NeedsCompiledKernel(Exception):
    """A test calls FlashInfer's own kernels beside ours."""


class Counts:
    """Calls of the test that runs."""

    calls = 0
    translated = 0


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported."""
    import flashinfer
    import torch

    for marker in ("cuda", "long_running"):
        config.addinivalue_line("markers", marker)
    if not torch.cuda.is_available():  # some modules ask at import; without a device they can be listed
        torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)  # type: ignore[assignment]
    lift_devices(flashinfer.utils)
    if SETTINGS.get("references", True):
        from flashinfer.jit import core
        from references import WRAPPERS

        replace_everywhere(WRAPPERS)
        core.JitSpec.build_and_load = core.JitSpec.build = refuse_to_compile
    handle = ours.install()
    for name, places in handle.replaced.items():
        for place in places:
            module, _, attribute = place.rpartition(".")
            found = sys.modules[module]
            setattr(found, attribute, watched(name, getattr(found, attribute)))


def lift_devices(utils: Any) -> None:
    """Let every device check of the tests hold."""
    utils.get_compute_capability = lambda *_, **__: (Architecture(10), 0)
    for name in dir(utils):
        if name.startswith("is_sm") and name.endswith("_supported"):
            setattr(utils, name, lambda *_, **__: True)


def replace_everywhere(values: Mapping[str, Any]) -> None:
    """Give FlashInfer's modules other values under these names."""
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] == "flashinfer":
            for name in values.keys() & vars(module).keys():
                setattr(module, name, values[name])


def refuse_to_compile(*_: Any, **__: Any) -> None:
    """In the place of FlashInfer's compilation."""
    raise NeedsCompiledKernel


def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, with its calls counted, and the backend of another architecture made that of this device."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        Counts.calls += 1
        if kwargs.get("backend") == TRTLLM_GEN and name not in CONTEXT:
            Counts.translated += 1
            kwargs["backend"] = "auto"
            args, kwargs = with_zeroed_workspace(args, kwargs)
        return function(*args, **kwargs)

    return call


def with_zeroed_workspace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with a zeroed copy in the place of the workspace, the third of every batch function."""
    import torch

    if "workspace_buffer" in kwargs:
        return args, {**kwargs, "workspace_buffer": torch.zeros_like(kwargs["workspace_buffer"])}
    return (*args[:2], torch.zeros_like(args[2]), *args[3:]), kwargs


def function_of(item: pytest.Item) -> str:
    """File and function of a test."""
    return item.nodeid.split("[")[0]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep this process's share of the sample."""
    job, jobs = SETTINGS.get("job", 0), SETTINGS.get("jobs", 1)
    chosen = sampled(items, SETTINGS.get("sample", len(items)), SETTINGS.get("seed", 0), function_of)
    write({"collected": len(items), "sample": len(chosen)})
    # Long tests are neighbours, so that each process gets as many.
    items[:] = chosen[job::jobs]


def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Pass over what remains when the time is up."""
    Counts.calls = Counts.translated = 0
    if time.time() > SETTINGS.get("until", float("inf")):
        write({"test": item.nodeid, "outcome": "not run"})
        return True
    return None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Write down how a test ended."""
    made: Any = yield
    report = made.get_result()
    if call.when != "call" and report.passed:
        return
    outcome, reason = outcome_of(call.excinfo.value if call.excinfo else None)
    seconds = round(call.duration, 3)
    write(
        {"test": item.nodeid, "outcome": outcome, "reason": reason, "seconds": seconds, "translated": Counts.translated}
    )
    if outcome == "failed" and any(word in reason for word in FATAL):
        pytest.exit("the device reports an error that does not go away", returncode=1)


def outcome_of(error: BaseException | None) -> tuple[str, str]:
    """The outcome of a test that ended with ``error``, and why."""
    if error is None:
        return ("passed", "") if Counts.calls else ("untouched", "")
    kinds = {type(one).__name__ for one in chain_of(error)}
    if isinstance(error, pytest.skip.Exception):
        return "skipped", str(error)
    if "WrapperNotOffered" in kinds:
        return "passed", "up to a wrapper around the peer's own kernels"
    if isinstance(error, NeedsCompiledKernel):
        return "skipped", "needs compiled kernels of FlashInfer"
    if "OutOfMemoryError" in kinds:
        return "skipped", "out of memory"
    # An error that a test expects in other words ends as pytest's, with ours as its context.
    refusal = next((one for one in chain_of(error) if isinstance(one, (UsageError, BackendError))), None)
    if refusal is not None:
        return "refused", str(refusal)[:300]
    return "failed", f"{type(error).__name__}: {error}"[:2000]


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those during which it came about."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def write(record: dict[str, Any]) -> None:
    """Append to this process's file, so that a run that is stopped leaves what it has."""
    if "records" in SETTINGS:
        with Path(SETTINGS["records"]).open("a") as opened:
            opened.write(json.dumps(record) + "\n")
