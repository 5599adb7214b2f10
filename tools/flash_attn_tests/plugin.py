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

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from recording import Recording

from cubin_runtime.attention.backends import BackendError
from cubin_runtime.compat import flash_attn_interface as ours
from cubin_runtime.errors import UsageError

RECORDING = Recording("FLASH_ATTN_TESTS")
NO_MEMORY = "out of memory"
MEMORY = 0.85  # of the device's that tensors of all processes may take; contexts and libraries take memory too
KEPT_BYTES = 1 << 30
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
        torch.cuda.set_per_process_memory_fraction(MEMORY / RECORDING.settings.get("jobs", 1))
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep this process's share of the sample; the parts of tests that we take come first."""
    import itertools

    for module in {item.module for item in items}:  # type: ignore[attr-defined]
        module.itertools = SimpleNamespace(product=lambda *lists: iter(ordered(list(itertools.product(*lists)))))
    items[:] = RECORDING.share_of([item for item in items if not any(name in item.nodeid for name in OTHERS)])


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
    return RECORDING.passes_over(item)


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
    outcome, reason = outcome_of(call.excinfo.value if call.excinfo else None)
    RECORDING.end(item, call, outcome, reason, calls=Counts.calls, translated=Counts.translated)


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
