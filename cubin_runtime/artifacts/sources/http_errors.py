"""Errors of the package from those of HTTP libraries, whose texts may contain secrets and are not used."""

from __future__ import annotations

import http.client
import re
import ssl

import requests
import urllib3

from ...errors import SourceError
from .http_pace import HttpLimits
from .source import RetryableError, redact

_NO_URL = (
    requests.exceptions.InvalidURL,
    requests.exceptions.InvalidSchema,
    urllib3.exceptions.LocationValueError,
    UnicodeError,
)
_TUNNEL = re.compile(r"Tunnel connection failed: ([0-9]{3})\b")


class ConnectError(Exception):
    """No connection came about, for its cause; ``proxy`` is the proxy that was asked, if any.

    ``reason`` says what is wrong on this side (a CA bundle, a proxy's URL) where that is known.
    """

    def __init__(self, proxy: str | None = None, reason: str | None = None) -> None:
        super().__init__(reason)
        self.proxy, self.reason = proxy, reason


def translate(error: Exception, where: str, limits: HttpLimits) -> SourceError:
    """The error of a source for what went wrong with a request; ``where`` names the server.

    Anything at all may have gone wrong: what a server sends must not be able to raise more than this.
    """
    if isinstance(error, ConnectError):
        return _no_connection(error, where, limits)
    if isinstance(error, _NO_URL):
        return SourceError(f"{where}: invalid URL")
    if (reason := _tls_reason(error)) is not None:
        return RetryableError(f"{where}: TLS failed: {reason}")
    if _is_timeout(error):
        return RetryableError(
            f"{where}: no data for {limits.silence:g} s, or no complete headers after {limits.headers:g} s"
        )
    if isinstance(error, OSError | http.client.HTTPException):
        return RetryableError(f"{where}: {_innermost(error)}")
    return SourceError(f"{where}: the response cannot be read: {_innermost(error)}")


def _no_connection(error: ConnectError, where: str, limits: HttpLimits) -> SourceError:
    if error.proxy is not None:
        where = f"{where}: through the proxy {redact(error.proxy)}"
    if error.reason is not None:
        return SourceError(f"{where}: {error.reason}")
    cause = error.__cause__ or error
    if isinstance(cause, _NO_URL):
        return SourceError(f"{where}: invalid URL")
    if (reason := _tls_reason(cause)) is not None:
        return SourceError(f"{where}: TLS failed: {reason}")
    if _is_timeout(cause):
        return RetryableError(f"{where}: no connection within {limits.connect:g} s")
    return RetryableError(f"{where}: {_innermost(cause)}")


def _is_timeout(error: BaseException) -> bool:
    refused = isinstance(error, urllib3.exceptions.NewConnectionError)  # a sort of time-out in some versions
    return not refused and isinstance(error, TimeoutError | urllib3.exceptions.TimeoutError)


def _tls_reason(error: BaseException) -> str | None:
    """Return the reason why TLS failed, in words; None if it was not TLS."""
    for item in _chain(error):
        if isinstance(item, ssl.SSLError):
            reason = getattr(item, "verify_message", "") or item.reason or type(item).__name__
            return str(reason).replace("_", " ")
    return None


def _chain(error: BaseException) -> list[BaseException]:
    """The error and all that led to it, the outermost first."""
    seen: list[BaseException] = []
    pending: list[BaseException] = [error]
    while pending:
        current = pending.pop()
        if any(current is earlier for earlier in seen):
            continue
        seen.append(current)
        linked = (current.__cause__, current.__context__, getattr(current, "reason", None), *current.args)
        pending += [item for item in linked if isinstance(item, BaseException)]
    return seen


def _innermost(error: BaseException) -> str:
    """The deepest cause in words: the system's text for an OS error, else the type's name."""
    chain = _chain(error)
    for item in reversed(chain):
        if isinstance(item, OSError) and item.strerror:
            return str(item.strerror)
        if isinstance(item, TimeoutError):
            return "timed out"
        # the words of a proxy's answer are not shown, its status is
        if isinstance(item, OSError) and (refusal := _TUNNEL.match(str(item))) is not None:
            return f"refused with status {refusal[1]}"
    name = type(chain[-1]).__name__
    return "the body is truncated" if name == "IncompleteRead" else name
