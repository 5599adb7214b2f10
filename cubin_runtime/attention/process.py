"""The process's default runtime."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from ..errors import UsageError

if TYPE_CHECKING:
    from .runtime import Runtime


class _Default:
    """Holds it, once it is made or set."""

    runtime: Runtime | None = None


default = _Default()
_lock = threading.RLock()


def default_runtime() -> Runtime:
    """Return the process's default runtime, which is made from the environment on first use.

    Raises:
        UsageError: the runtime was made before this process was forked.
    """
    from .runtime import Runtime

    with _lock:
        runtime = default.runtime = default.runtime or Runtime()
    runtime.check_process()
    return runtime


def runtime_of(runtime: Any) -> Runtime:
    """The runtime that a call names; None: the process's default one.

    Raises:
        UsageError: it is no runtime; or as ``default_runtime``.
    """
    return default_runtime() if runtime is None else _checked(runtime)


def _checked(runtime: Any) -> Runtime:
    from .runtime import Runtime

    if not isinstance(runtime, Runtime):
        raise UsageError(f"got {type(runtime).__name__}, expected a Runtime", argument="runtime")
    return runtime


def set_default_runtime(runtime: Runtime) -> None:
    """Set the process's default runtime, before its first use.

    Raises:
        UsageError: the default runtime is already in use, or ``runtime`` is no runtime.
    """
    _checked(runtime)
    with _lock:
        if default.runtime is not None:
            raise UsageError("the default Runtime is in use already: set it before the first operator runs")
        default.runtime = runtime
