"""Time limits on servers, and the watch over one response that enforces them at every read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ...config import Network
from ...errors import SourceError
from ...values import dataclass
from .source import RetryableError

LONGEST_SECONDS = 86400.0  # a socket counts milliseconds in 32 bits, and beyond them waits for no time at all


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The limits of waiting for a server; seconds and bytes a second.

    ``connect`` is for the connection, ``headers`` for all headers together, ``silence`` the longest time
    without a byte, and over each ``window`` the body must come at ``least_rate`` or faster. ``redirects`` is
    how many are followed.
    """

    connect: float = 10.0
    headers: float = 60.0
    silence: float = 30.0
    window: float = 20.0
    least_rate: float = 2048.0
    redirects: int = 5

    @classmethod
    def of(cls, network: Network) -> HttpLimits:
        """The defaults, or what was configured."""
        if network.timeout is None:
            return cls()
        silence = min(network.timeout, LONGEST_SECONDS)
        return cls(connect=silence, headers=2 * silence, silence=silence)


class Pace:
    """The watch over one request, asked before each receive, so that no part of a response escapes it.

    Until ``begin_body`` the deadline for headers holds (a proxy's answer included), then the least rate. What
    counts towards the rate is payload alone: chunk sizes, extensions and trailers are none.
    """

    def __init__(
        self, limits: HttpLimits, where: str, stop: threading.Event, tick: Callable[[], None] | None = None
    ) -> None:
        """``where`` is how errors name the server; ``stop`` ends the transfer; ``tick`` is told of progress."""
        self._limits, self._where, self._stop, self._tick = limits, where, stop, tick
        self._headers_until: float | None = time.monotonic() + limits.headers
        self._window_end = 0.0
        self._in_window = 0

    def begin_body(self) -> None:
        """The headers are over, and what came with them may be the whole body."""
        self._headers_until = None
        self._window_end = time.monotonic() + self._limits.window
        self.count(0)

    def count(self, size: int) -> None:
        """Count bytes of payload."""
        self._in_window += size
        if self._tick is not None:
            self._tick()

    def check(self) -> None:
        """Return whether to go on waiting.

        Raises:
            TimeoutError: the headers took too long.
            RetryableError: the payload comes too slowly.
            SourceError: the transfer is to stop.
        """
        if self._stop.is_set():
            raise SourceError(f"{self._where}: stopped")
        now = time.monotonic()
        if self._headers_until is not None:
            if now > self._headers_until:
                raise TimeoutError("timed out: the headers took too long")
        elif now >= self._window_end:
            rate = self._in_window / (now - self._window_end + self._limits.window)
            if rate < self._limits.least_rate:
                raise RetryableError(
                    f"{self._where}: {rate:.0f} bytes a second, expected {self._limits.least_rate:.0f} or more"
                )
            self._in_window, self._window_end = 0, now + self._limits.window
