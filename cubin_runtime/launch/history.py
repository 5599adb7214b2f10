"""The last launches, kept so that a fault that surfaces later can say what was running."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

KEPT = 16


class Described(Protocol):
    """What can say in one line what it launched, given the parameter bytes and the stream of one launch."""

    def describe_launch(self, parameters: bytes, stream: int) -> str:
        """One line: kernel, digest, grid, block, attributes, stream, parameter bytes."""
        ...


class LaunchHistory:
    """A ring of the last launches; ``record`` is one atomic append of (what, parameter bytes, stream)."""

    def __init__(self, kept: int = KEPT) -> None:
        self._ring: deque[tuple[Described, bytes, int]] = deque(maxlen=kept)
        self.record: Callable[[tuple[Described, bytes, int]], None] = self._ring.append

    def describe(self) -> tuple[str, ...]:
        """One line a launch, newest last."""
        return tuple(what.describe_launch(parameters, stream) for what, parameters, stream in list(self._ring))

    def clear(self) -> None:
        """Forget all launches, for instance after a fault was handled."""
        self._ring.clear()
