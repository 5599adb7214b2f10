"""The process's default runtime."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    from .runtime import Runtime


class _Default:
    """Holds it, once it is made or set."""

    runtime: Runtime | None = None


default = _Default()
_lock = threading.Lock()


def default_runtime() -> Runtime:
    """Return the process's default runtime, which is made from the environment on first use.

    Raises:
        UsageError: the runtime was made before this process was forked.
    """
    from .runtime import Runtime

    with _lock:
        made = default.runtime = default.runtime or Runtime()
    made.check_process()
    return made


def set_default_runtime(runtime: Runtime) -> None:
    """Set the process's default runtime, before its first use.

    Raises:
        UsageError: the default runtime is already in use.
    """
    with _lock:
        if default.runtime is not None:
            raise UsageError("the default Runtime is in use already: set it before the first operator runs")
        default.runtime = runtime
