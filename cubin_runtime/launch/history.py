"""The last launches, kept so that the error of a fault that surfaces later can name them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Protocol

from ..values import dataclass
from .structs import StructLayout

KEPT = 16
Triple = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """One launch as the driver got it; ``attributes`` as text, ``parameters`` the struct's bytes."""

    kernel: str
    symbol: str
    sha256: str
    grid: Triple
    block: Triple
    shared_bytes: int
    attributes: str
    stream: int
    layout: StructLayout
    parameters: bytes

    def __str__(self) -> str:
        rows = self.layout.describe(self.parameters)
        pointers = " ".join(f"{row.name}={row.text}" for row in rows if row.type == "ptr" and row.value)
        return (
            f"{self.kernel} ({self.symbol}, sha256 {self.sha256[:12]}) grid {self.grid} block {self.block} "
            f"shared {self.shared_bytes} {self.attributes} stream {self.stream:#x} "
            f"pointers: {pointers or 'none'}"
        )


class Recorded(Protocol):
    """The maker of one launch's record from its parameter bytes and stream."""

    def record_of(self, parameters: bytes, stream: int) -> LaunchRecord:
        """The full record."""
        ...


class LaunchHistory:
    """A ring of the last launches: ``record`` appends (what, parameter bytes, stream) atomically, ``tick`` counts.

    ``counter`` is what ``tick`` takes the next number of.
    """

    def __init__(self) -> None:
        self._ring: deque[tuple[Recorded, bytes, int]] = deque(maxlen=KEPT)
        self.record: Callable[[tuple[Recorded, bytes, int]], None] = self._ring.append
        self.counter = count()
        self.tick: Callable[[], int] = self.counter.__next__

    @property
    def launches(self) -> int:
        """The number of calls of ``tick``."""
        return int(self.counter.__reduce__()[1][0])  # the next number

    def records(self) -> tuple[LaunchRecord, ...]:
        """The last launches, newest last."""
        return tuple(what.record_of(parameters, stream) for what, parameters, stream in self._ring.copy())

    def clear(self) -> None:
        """Forget all launches, for instance after a fault was handled."""
        self._ring.clear()
