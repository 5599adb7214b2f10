"""Bytes over http(s): one session a worker, every limit a parameter, nothing secret in any message."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urljoin, urlsplit, urlunsplit

from ...errors import SourceError
from .source import NotHereError, RetryableError, SourceSpec, Wanted, redact

if TYPE_CHECKING:
    import urllib3

    from .http_session import Transport

_RETRYABLE_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CHUNK = 1 << 18


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """How long a server is waited for; seconds and bytes a second.

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


class HttpSource:
    """A tree served over http(s), ``<base URL>/<artifact path>``; a query is kept and never shown."""

    local = False

    def __init__(
        self,
        spec: SourceSpec,
        limits: HttpLimits | None = None,
        *,
        stop: threading.Event | None = None,
        tick: Callable[[], None] | None = None,
    ) -> None:
        """``stop`` ends a transfer between two reads; ``tick`` is called whenever bytes came."""
        self.label = spec.label
        self._base = urlsplit(spec.text)
        self._limits = limits or HttpLimits()
        self._stop = stop or threading.Event()
        self._tick = tick
        self._transport: Transport | None = None

    def read(self, wanted: Wanted) -> bytes:
        """See ``Source.read``. Never retries and never waits longer than its limits."""
        import http.client

        import requests
        import urllib3

        url = urlunsplit(
            (
                self._base.scheme,
                self._base.netloc,
                f"{self._base.path.rstrip('/')}/{quote(wanted.path.text)}",
                self._base.query,
                "",
            )
        )
        try:
            response, where = self._follow(url)
            try:
                data = self._body(response, where, wanted)
            except BaseException:
                response.close()  # a connection with bytes left on it serves nobody
                raise
            response.release_conn()
            return data
        except (
            requests.exceptions.RequestException,
            urllib3.exceptions.HTTPError,
            http.client.HTTPException,
            OSError,
        ) as error:
            raise _translate(error, redact(url), self._limits) from None

    def close(self) -> None:
        """Close the connections."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _follow(self, url: str) -> tuple[urllib3.BaseHTTPResponse, str]:
        """The first response that is no redirect, and its URL; followed by hand so that each hop is judged."""
        from .http_session import Transport

        if self._transport is None:
            self._transport = Transport(self._limits.connect, self._limits.silence, self._limits.headers)
        for _ in range(self._limits.redirects + 1):
            response = self._transport.get(url)
            if response.status not in _REDIRECTS:
                return response, redact(url)
            location = response.headers.get("Location")
            response.close()
            if not location:
                raise SourceError(f"{redact(url)}: status {response.status} without a Location")
            url = _checked_hop(url, urljoin(url, location))
        raise SourceError(f"{self.label}: more than {self._limits.redirects} redirects")

    def _body(self, response: urllib3.BaseHTTPResponse, where: str, wanted: Wanted) -> bytes:
        _check_status(response, where)
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise SourceError(f"{where}: sent Content-Encoding {encoding!r}, only identity was asked for")
        announced = response.headers.get("Content-Length")
        size = int(announced) if announced is not None and announced.isdecimal() else None
        if size is not None and size > wanted.limit:
            raise SourceError(f"{where}: announces {size} bytes, at most {wanted.limit} are allowed")
        data = self._receive(response, wanted.limit, where)
        if size is not None and len(data) != size:
            raise RetryableError(f"{where}: the body ended after {len(data)} of {size} bytes")
        return data

    def _receive(self, raw: Any, limit: int, where: str) -> bytes:
        chunks: list[bytes] = []
        total = in_window = 0
        window_end = time.monotonic() + self._limits.window
        # read1 returns what one receive brought, so a server that drips cannot hide inside a long read
        while chunk := raw.read1(_CHUNK, decode_content=False):
            chunks.append(chunk)
            total += len(chunk)
            in_window += len(chunk)
            if total > limit:
                raise SourceError(f"{where}: sends more than {limit} bytes")
            if self._stop.is_set():
                raise SourceError(f"{where}: stopped")
            if self._tick is not None:
                self._tick()
            if (now := time.monotonic()) >= window_end:
                rate = in_window / (now - window_end + self._limits.window)
                if rate < self._limits.least_rate:
                    raise RetryableError(
                        f"{where}: {rate:.0f} bytes a second, expected {self._limits.least_rate:.0f} or more"
                    )
                in_window, window_end = 0, now + self._limits.window
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _check_status(response: urllib3.BaseHTTPResponse, where: str) -> None:
    status = response.status
    if status == 200:
        return
    if status in (404, 410):
        raise NotHereError(f"{where}: status {status}")
    if status in _RETRYABLE_STATUS:
        raise RetryableError(f"{where}: status {status}", _retry_after(response.headers.get("Retry-After")))
    hint = " (credentials come from netrc, over https only)" if status in (401, 403) else ""
    raise SourceError(f"{where}: status {status}{hint}")


def _checked_hop(old: str, new: str) -> str:
    parts = urlsplit(new)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SourceError(f"{redact(old)}: redirects to scheme {parts.scheme!r}, expected http or https")
    if urlsplit(old).scheme == "https" and parts.scheme != "https":
        raise SourceError(f"{redact(old)}: redirects from https to http, which is refused")
    if "@" in parts.netloc:
        raise SourceError(f"{redact(old)}: redirects to a URL with credentials, which is refused")
    return new


def _retry_after(value: str | None) -> float | None:
    """Seconds that a ``Retry-After`` header asks for (a number or a date); None if it is neither."""
    from email.utils import parsedate_to_datetime

    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def _translate(error: Exception, where: str, limits: HttpLimits) -> SourceError:
    """One of our errors from a library's; its text is not used, it may hold the query of the URL."""
    import requests
    import urllib3

    if isinstance(error, urllib3.exceptions.ProxyError):
        error = error.original_error if isinstance(error.original_error, Exception) else error
    refused = isinstance(error, urllib3.exceptions.NewConnectionError)  # a sort of time-out in urllib3
    if isinstance(error, urllib3.exceptions.ConnectTimeoutError) and not refused:
        return RetryableError(f"{where}: no connection within {limits.connect:g} s")
    if isinstance(error, (urllib3.exceptions.SSLError, requests.exceptions.SSLError)):
        return SourceError(f"{where}: TLS failed: {_innermost(error)}")
    if isinstance(error, (urllib3.exceptions.InvalidHeader, requests.exceptions.InvalidHeader)):
        return SourceError(f"{where}: sent headers that contradict each other")
    if isinstance(
        error,
        (requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema, urllib3.exceptions.LocationValueError),
    ):
        return SourceError(f"{where}: no valid URL")
    reason = _innermost(error)
    if "timed out" in reason.lower() or "Timeout" in type(error).__name__:
        return RetryableError(f"{where}: no byte for {limits.silence:g} s, or headers for {limits.headers:g} s")
    return RetryableError(f"{where}: {reason}")


def _innermost(error: BaseException) -> str:
    """The deepest cause in words: the system's text for an OS error, else the type's name."""
    seen: list[BaseException] = []
    pending: list[BaseException] = [error]
    while pending:
        current = pending.pop()
        if any(current is known for known in seen):
            continue
        seen.append(current)
        linked = (current.__cause__, current.__context__, getattr(current, "reason", None), *current.args)
        pending += [item for item in linked if isinstance(item, BaseException)]
    for item in reversed(seen):
        if isinstance(item, OSError) and item.strerror:
            return str(getattr(item, "verify_message", "") or item.strerror)
        if isinstance(item, TimeoutError):
            return "timed out"
    name = type(seen[-1]).__name__
    return "the body is truncated" if name == "IncompleteRead" else name
