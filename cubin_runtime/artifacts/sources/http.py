"""Bytes over http(s): one session per worker, every limit a parameter, no secrets in messages."""

from __future__ import annotations

import http.client
import io
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote, urljoin, urlsplit, urlunsplit

from ...config import Network
from ...errors import CubinRuntimeError, SourceError
from ...values import dataclass
from ..path import ArtifactPath
from .http_pace import HttpLimits, Pace
from .source import FileRequest, NotHereError, RetryableError, SourceSpec, TooMuchError, redact

if TYPE_CHECKING:
    from .http_session import HttpSession, Response

_RETRYABLE_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PIECE = 1 << 20
_LENGTH = re.compile(r"[0-9]{1,18}")
_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")


class HttpSource:
    """A tree served over http(s), ``<base URL>/<artifact path>``; a query is kept and never shown."""

    local = False

    def __init__(
        self,
        spec: SourceSpec,
        limits: HttpLimits | None = None,
        network: Network | None = None,
        *,
        stop: threading.Event | None = None,
        tick: Callable[[], None] | None = None,
    ) -> None:
        """``stop`` ends a transfer between two reads; ``tick`` is called whenever bytes came."""
        self.label = spec.label
        self._base = urlsplit(spec.text)
        self._limits = limits or HttpLimits()
        self._network = network or Network()
        self._stop = stop or threading.Event()
        self._tick = tick
        self._session: HttpSession | None = None
        self._begun: _Begun | None = None

    def read(self, request: FileRequest) -> bytes:
        """See ``Source.read``. Never retries and never waits longer than its limits.

        What came of a large file before a failure is kept for the next call, if that asks for the same file.
        """
        base = self._base
        path = f"{base.path.rstrip('/')}/{quote(request.path.text)}"
        url = urlunsplit((base.scheme, base.netloc, path, base.query, ""))
        begun, self._begun = self._begun, None
        if begun is not None and begun.path != request.path:
            begun = None
        try:
            response, where = self._follow(url, {} if begun is None else begun.asking_for_the_rest())
            try:
                data = self._body(response, where, request, begun)
            except BaseException:
                response.abandon()
                raise
            if not response.isclosed():
                response.abandon()
            return data
        except CubinRuntimeError:
            raise
        except Exception as error:  # any exception that a server can cause is a failure of this source
            from .http_errors import translate

            raise translate(error, redact(url), self._limits) from None

    def forget(self) -> None:
        """See ``Source.forget``."""
        self._begun = None

    def close(self) -> None:
        """Close the connections."""
        self.forget()
        if self._session is not None:
            self._session.close()
            self._session = None

    def _body(self, response: Response, where: str, request: FileRequest, begun: _Begun | None) -> bytes:
        """The body of an answer that has one, after what was begun where the server goes on with that."""
        limit = request.limit
        goes_on = begun if response.status == 206 else None
        if goes_on is None:
            _check_status(response, where, asked_for_rest=begun is not None)
        _check_encoding(response, where)
        size = _announced(response, where) if goes_on is None else _check_range(response, where, goes_on)
        if size is not None and size > limit:
            raise TooMuchError(f"{where}: announces {size} bytes, at most {limit} are allowed")
        whole = io.BytesIO() if goes_on is None else goes_on.whole
        try:
            if size is None:
                return _receive_to_the_end(response, where, whole, limit)
            return _receive(response, where, whole, size)
        except (RetryableError, http.client.HTTPException, OSError):
            tag = response.headers.get("ETag", "").strip()
            validator = response.headers.get("Last-Modified", "") if not tag or tag.startswith("W/") else tag
            if whole.tell() >= _PIECE and validator:
                self._begun = _Begun(request.path, validator, whole)
            raise

    def _follow(self, url: str, headers: Mapping[str, str]) -> tuple[Response, str]:
        """The first response that is not a redirect, and its URL; each redirect is checked before it is followed."""
        from .http_session import HttpSession

        if self._session is None:
            self._session = HttpSession(self._limits, self._network)
        for _ in range(self._limits.redirects + 1):
            parts, where = urlsplit(url), redact(url)
            pace = Pace(self._limits, where, self._stop, self._tick)
            # a redirect to another host gets no credentials, even if netrc has some
            own_host = (parts.scheme, parts.netloc.lower()) == (self._base.scheme, self._base.netloc.lower())
            response = self._session.get(url, pace, headers, credentials=own_host)
            if response.status not in _REDIRECTS:
                return response, where
            response.abandon()
            url = _next_hop(url, response.headers.get("Location"), response.status)
        raise SourceError(f"{self.label}: more than {self._limits.redirects} redirects")


@dataclass(frozen=True, slots=True)
class _Begun:
    """The bytes received of a file; ``validator`` identifies this version of it to the server.

    A ``BytesIO``, as it hands its memory over in the end instead of copying it.
    """

    path: ArtifactPath
    validator: str
    whole: io.BytesIO

    def asking_for_the_rest(self) -> dict[str, str]:
        return {"Range": f"bytes={self.whole.tell()}-", "If-Range": self.validator}


def _check_encoding(response: Response, where: str) -> None:
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise SourceError(f"{where}: sent Content-Encoding {encoding!r}, only identity was requested")


def _check_range(response: Response, where: str, begun: _Begun) -> int:
    """The total size that a partial response states."""
    match = _RANGE.fullmatch(response.headers.get("Content-Range", "").strip())
    if match is None or int(match[1]) != begun.whole.tell() or int(match[2]) + 1 != int(match[3]):
        raise SourceError(f"{where}: sent another range than requested")
    return int(match[3])


def _announced(response: Response, where: str) -> int | None:
    """The size of the body; None if only its end will tell."""
    framing = response.headers.get("Transfer-Encoding", "").strip().lower()
    if response.chunked:
        return None
    if framing not in ("", "identity"):
        raise SourceError(f"{where}: sent Transfer-Encoding {framing!r}, which was not requested")
    lengths = {value.strip() for value in response.headers.get_all("Content-Length", [])}
    if not lengths:
        return None
    if len(lengths) > 1:
        raise SourceError(f"{where}: sent headers that contradict each other")
    (length,) = lengths
    if _LENGTH.fullmatch(length) is None:
        raise SourceError(f"{where}: sent no valid Content-Length")
    return int(length)


def _receive(response: Response, where: str, whole: io.BytesIO, size: int) -> bytes:
    """The body of an answer of known size, after what ``whole`` has of it already."""
    if size <= _PIECE and not whole.tell():
        data = response.read(size) if size else response.read()
        if len(data) == size:
            return data  # nearly always
        whole.write(data)
    while whole.tell() < size and (data := _next_piece(response, min(_PIECE, size - whole.tell()))):
        whole.write(data)
    if whole.tell() != size:
        raise RetryableError(f"{where}: the body is truncated: it ended after {whole.tell()} of {size} bytes")
    return whole.getvalue()


def _receive_to_the_end(response: Response, where: str, whole: io.BytesIO, limit: int) -> bytes:
    while data := _next_piece(response, _PIECE):
        whole.write(data)
        if whole.tell() > limit:
            raise TooMuchError(f"{where}: sends more than {limit} bytes")
    return whole.getvalue()


def _next_piece(response: Response, most: int) -> bytes:
    """The next bytes of a body; only here it is known what of a chunked one is payload."""
    if response.length is not None:
        return response.read(most)
    data = response.read1(most)
    if response.chunked:
        response.pace.count(len(data))
    return data


def _check_status(response: Response, where: str, *, asked_for_rest: bool) -> None:
    status = response.status
    if status == 200:
        return
    if status == 416 and asked_for_rest:
        raise RetryableError(f"{where}: status 416, restarting the download")
    if status in (404, 410):
        raise NotHereError(f"{where}: status {status}")
    if status in _RETRYABLE_STATUS:
        raise RetryableError(f"{where}: status {status}", _retry_after(response.headers.get("Retry-After")))
    hint = " (credentials come from netrc or CUBIN_RUNTIME_TOKENS, over https only)" if status in (401, 403) else ""
    raise SourceError(f"{where}: status {status}{hint}")


def _next_hop(old: str, location: str | None, status: int) -> str:
    """Return where a redirect leads, if it may be followed."""
    where = redact(old)
    if not location:
        raise SourceError(f"{where}: status {status} without a Location")
    try:
        new = urljoin(old, location)
        parts = urlsplit(new)
        host, port_fault = parts.hostname, parts.port == 0
    except ValueError:
        raise SourceError(f"{where}: redirects to an invalid URL") from None
    if parts.scheme not in ("http", "https") or not host or port_fault:
        raise SourceError(f"{where}: redirects to scheme {parts.scheme!r}, expected http or https")
    if urlsplit(old).scheme == "https" and parts.scheme != "https":
        raise SourceError(f"{where}: redirects from https to http, which is refused")
    if "@" in parts.netloc:
        raise SourceError(f"{where}: redirects to a URL with credentials, which is refused")
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
