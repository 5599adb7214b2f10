"""A pytest plugin for FlashInfer's tests: they call our functions, on any device, and every outcome is written down.

- ``get_compute_capability`` tells the tests an architecture that equals each that they ask for, and every
  ``is_sm..._supported`` is true. FlashInfer's own modules see the real device.
- ``compat.flashinfer.install()`` puts our functions in place. Where a test asks for a backend of another architecture,
  trtllm-gen for decoding, cute-dsl or trtllm-native, our function gets "auto". What decodes on several backends gets a
  workspace of zeros, as FlashInfer documents it; the tests leave memory as it comes. Nothing else of a call is changed.
- The wrappers that compute references are those of ``references``; FlashInfer compiles nothing.
- No test looks for writes to a part of the workspace that trtllm-gen kernels leave alone: native ones lay it out anew.
- Test processes share the device: what a test leaves allocated is freed, and a test for which memory did not suffice
  runs again at the end, when no other process runs any.

Outcomes: ``passed``; ``failed``; ``refused``: ended by our ``UsageError`` or ``BackendError``; ``skipped``;
``untouched``: passed, but called none of our functions.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from recording import Recording

from cubin_runtime.attention.backends import BackendError
from cubin_runtime.compat import flashinfer as ours
from cubin_runtime.errors import UsageError

RECORDING = Recording("FLASHINFER_TESTS")
SETTINGS = RECORDING.settings
TRTLLM_GEN = "trtllm-gen"
OTHER_BACKENDS = ("cute-dsl", "trtllm-native")
CONTEXT = ("trtllm_batch_context_with_kv_cache", "trtllm_ragged_attention_deepseek")
DECODE = ("trtllm_batch_decode_with_kv_cache", "trtllm_batch_decode_with_kv_cache_mla")
NO_MEMORY = "out of memory"
NO_MEMORY_OF_LIBRARIES = "CUBLAS_STATUS_ALLOC_FAILED"
# It decodes twice, and then expects errors about counters of trtllm-gen kernels, which native kernels do without.
EXPECTS_COUNTERS = "::test_trtllm_batch_decode_mla_preallocated_out[1-1]"
# How many bytes behind the statistics of trtllm-gen kernels the tests expect to be left alone.
CHECKED_BYTES = "TRTLLM_GEN_WORKSPACE_CHECK_BYTES"
KEPT_BYTES = 4 << 30  # what a process keeps allocated for its next test


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


class Run:
    """What a process keeps between tests: zeroed workspaces by form, and tests for which memory did not suffice."""

    workspaces: ClassVar[dict[Any, Any]] = {}
    short_of_memory: ClassVar[set[str]] = set()
    is_alone = False


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported."""
    import flashinfer
    import torch

    for marker in ("cuda", "long_running"):
        config.addinivalue_line("markers", marker)
    if not torch.cuda.is_available():  # some modules ask at import; without a device they can be listed
        torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)  # type: ignore[assignment]
    lift_devices(flashinfer.utils)
    # It imports a compiler; tests ask it alone whether it has the architecture.
    utils = SimpleNamespace(is_cute_dsl_arch_supported=lambda *_, **__: True)
    sys.modules.setdefault("flashinfer.cute_dsl", SimpleNamespace(utils=utils))  # type: ignore[arg-type]
    sys.modules["flashinfer.cute_dsl.utils"] = utils  # type: ignore[assignment]
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
        backend = kwargs.get("backend")
        if backend in OTHER_BACKENDS or (backend == TRTLLM_GEN and name not in CONTEXT):
            Counts.translated += 1
            kwargs["backend"] = "auto"
        if name in DECODE:
            args, kwargs = with_zeroed_workspace(args, kwargs)
        return call.called(*args, **kwargs)  # type: ignore[attr-defined]

    call.called = function  # type: ignore[attr-defined]
    return call


def with_zeroed_workspace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with this process's own workspace in the place of the third of every batch function.

    It is zero before its first call; kernels leave its semaphores zero.
    """
    import torch

    def own(given: Any) -> Any:
        form = (given.shape, given.dtype, given.device)
        if form not in Run.workspaces:
            Run.workspaces[form] = torch.zeros_like(given)
        return Run.workspaces[form]

    if "workspace_buffer" in kwargs:
        return args, {**kwargs, "workspace_buffer": own(kwargs["workspace_buffer"])}
    return (*args[:2], own(args[2]), *args[3:]), kwargs


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep this process's share of the sample, and let workspaces be laid out otherwise than for trtllm-gen kernels."""
    items[:] = RECORDING.share_of(items)
    for module in {item.getparent(pytest.Module).obj for item in items}:  # type: ignore[union-attr]
        if hasattr(module, CHECKED_BYTES):
            setattr(module, CHECKED_BYTES, 0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests beside other processes, then alone those for which memory did not suffice."""
    if session.config.option.collectonly or "turn" not in SETTINGS:
        return None
    gc.collect()
    gc.freeze()  # a quarter of a million tests that are collected; what each test leaves is then found quickly
    with Path(SETTINGS["turn"]).open() as turn:  # the lock is given back where a process is ended, too
        fcntl.flock(turn, fcntl.LOCK_SH)
        run_tests(session.items)
        fcntl.flock(turn, fcntl.LOCK_UN)
        again = [item for item in session.items if item.nodeid in Run.short_of_memory]
        if again:
            free_memory(0)
            fcntl.flock(turn, fcntl.LOCK_EX)
            Run.is_alone = True
            for item in again:
                item._initrequest()  # type: ignore[attr-defined]  # its fixtures, as for a first run
            run_tests(again)
    return True


def run_tests(items: Sequence[pytest.Item]) -> None:
    """Run tests one after another, and free what each leaves."""
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        free_memory(KEPT_BYTES)


def free_memory(kept: int) -> None:
    """Give memory of torch's that no tensor holds back to the device, where it has more than ``kept`` bytes."""
    import torch

    if torch.cuda.is_available() and torch.cuda.memory_reserved() > kept:
        gc.collect()
        torch.cuda.empty_cache()


def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Pass over what remains when the time is up."""
    Counts.calls = Counts.translated = 0
    return RECORDING.passes_over(item)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Write down how a test ended."""
    made: Any = yield
    report = made.get_result()
    if call.when != "call" and report.passed:
        return
    outcome, reason = outcome_of(call.excinfo.value if call.excinfo else None)
    if reason == NO_MEMORY and not Run.is_alone and "turn" in SETTINGS:
        Run.short_of_memory.add(item.nodeid)
        return
    if outcome == "failed" and reason.startswith("Failed: DID NOT RAISE") and item.nodeid.endswith(EXPECTS_COUNTERS):
        outcome, reason = "skipped", "expects errors about counters that native kernels do without"
    RECORDING.end(item, call, outcome, reason, translated=Counts.translated)


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
    if any(words in str(one) for one in chain_of(error) for words in (NO_MEMORY, NO_MEMORY_OF_LIBRARIES)):
        return "skipped", NO_MEMORY
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
