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
    """The process's runtime, made on first use from the environment.

    Raises:
        UsageError: it was made before this process was forked.
    """
    from .runtime import Runtime

    with _lock:
        made = default.runtime = default.runtime or Runtime()
    made.check_process()
    return made


def set_default_runtime(runtime: Runtime) -> None:
    """Set what ``default_runtime`` gives; only before its first use.

    Raises:
        UsageError: it is in use already.
    """
    with _lock:
        if default.runtime is not None:
            raise UsageError("the default Runtime is in use already: set it before the first operator runs")
        default.runtime = runtime
