"""The observer that sees every launch of the process while it is entered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from ..attention import hook
from ..attention.fast_path.operator_function import suspend
from ..attention.hook import Run

_lock = threading.RLock()
ObserverT = TypeVar("ObserverT", bound="Observer")


class Observer:
    """Base of the recorders: entered, it observes the launches of all threads, and no call takes a fast path."""

    def observe(self, run: Run, launch: Callable[[], Any]) -> Any:
        """Call ``launch``, which launches ``run``, and return its result."""
        raise NotImplementedError

    def __enter__(self: ObserverT) -> ObserverT:
        with _lock:
            suspend(1)
            _install((*observers(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            suspend(-1)
            _install(tuple(one for one in observers() if one is not self))


class _Entered:
    observers: tuple[Observer, ...] = ()


def observers() -> tuple[Observer, ...]:
    """The entered ones, in the order in which they were entered."""
    return _Entered.observers


def _install(entered: tuple[Observer, ...]) -> None:
    _Entered.observers = entered
    hook.installed.hook = _observe if entered else None


def _observe(run: Run, launch: Callable[[], Any]) -> Any:
    for observer in _Entered.observers:
        launch = partial(observer.observe, run, launch)
    return launch()
