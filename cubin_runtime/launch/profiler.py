"""Time in the driver and NVTX ranges, for a runtime that was asked for them: they cost every launch a microsecond."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from typing import Any


class Profiler:
    """Counts the seconds of launches and puts an NVTX range around each, where torch or ``nvtx`` can."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._push, self._pop = _ranges()

    def enter(self, kernel: str) -> float:
        """Begin a launch of ``kernel``; return the time."""
        self._push(f"cubin_runtime:{kernel}")
        return time.perf_counter()

    def leave(self, begin: float) -> None:
        """End the launch that ``enter`` gave the time of; of threads that end at once one may go uncounted."""
        self.seconds += time.perf_counter() - begin
        self._pop()


def _ranges() -> tuple[Callable[[str], Any], Callable[[], Any]]:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    try:
        nvtx = importlib.import_module("nvtx")
    except ImportError:
        return (lambda name: None), (lambda: None)
    return nvtx.push_range, nvtx.pop_range
