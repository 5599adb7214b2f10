"""The last launches, kept so that the error of a fault that surfaces later can name them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Protocol

from ..values import dataclass
from .accelerator import accelerator
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


Entry = tuple[Recorded, bytes, int]  # what, parameter bytes, stream


class Ring:
    """The last launches in plain Python; the accelerator has the same in C."""

    def __init__(self) -> None:
        self._kept: deque[Entry] = deque(maxlen=KEPT)
        self._counter = count()

    def record(self, entry: Entry) -> None:
        """Keep a launch as the last; threads may do so side by side."""
        self._kept.append(entry)
        next(self._counter)

    @property
    def launches(self) -> int:
        """The number of those that were recorded."""
        return int(repr(self._counter).rpartition("(")[2][:-1])  # the next number, which Python 3.14 shows nowhere else

    def entries(self) -> list[Entry]:
        """The launches that are kept, the last at the end."""
        return list(self._kept.copy())

    def clear(self) -> None:
        """Forget the launches that are kept."""
        self._kept.clear()


class LaunchHistory:
    """The last launches in a context: ``record`` keeps one, and ``ring`` is what they are kept in."""

    def __init__(self) -> None:
        module = accelerator()
        self.ring: Ring = Ring() if module is None else module.Ring()
        self.record: Callable[[Entry], None] = self.ring.record

    @property
    def launches(self) -> int:
        """The number of launches so far."""
        return self.ring.launches

    def records(self) -> tuple[LaunchRecord, ...]:
        """The last launches, newest last."""
        return tuple(what.record_of(parameters, stream) for what, parameters, stream in self.ring.entries())

    def clear(self) -> None:
        """Forget all launches, for instance after a fault was handled."""
        self.ring.clear()
