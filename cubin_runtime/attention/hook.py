"""The one hook through which tools see the launches of operators; ``cubin_runtime.debug`` has the tools."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

# The module that records a process by its configuration; its name is text, as this layer imports none above.
_RECORDER = "cubin_runtime.debug.recorded.recorder"


class Run(NamedTuple):
    """A run of a plan before it is launched.

    ``call`` is the call of a trtllm-gen plan, or the addresses of a native plan's tensors in their order; ``numbers``
    are then the values of the operator's numbers.
    """

    plan: Any
    call: Any
    numbers: tuple[Any, ...]
    stream: int


Hook = Callable[[Run, Callable[[], Any]], Any]


class _Installed:
    """The hook that makes each launch, by the function that it is given; None: nothing sees them."""

    hook: Hook | None = None


installed = _Installed()


def record_process(folder: Path) -> None:
    """Record all calls of this process in ``folder``; errors as ``debug.recorded.CallRecorder``."""
    import_module(_RECORDER).record_process(folder)
