"""HTTP connections with our rules: credentials for one host only, no encoding, a time limit on every read.

``requests`` settles what holds for a whole host: proxy, certificates, credentials, headers. ``urllib3`` makes the
connection. Requests then go straight to the standard library's half of that connection, which costs a fifth.
"""

from __future__ import annotations

import http.client
import io
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter
from requests.auth import HTTPBasicAuth
from requests.utils import NETRC_FILES, get_netrc_auth, requote_uri, urldefragauth
from urllib3.connection import HTTPConnection
from urllib3.util.proxy import connection_requires_http_tunnel

from ..._version import __version__
from ...config import Network
from ..bounded_read import NotRegularError, TooLargeError, read_regular
from .http_errors import ConnectError
from .http_pace import HttpLimits, Pace

MAX_SECRETS_BYTES = 1 << 20  # of a file with a token, and of netrc


class HttpSession:
    """The connections of one worker, one per host; not for several threads at once."""

    def __init__(self, limits: HttpLimits, network: Network) -> None:
        self._limits, self._network = limits, network
        self._session = requests.Session()
        self._session.headers.update({"Accept-Encoding": "identity", "User-Agent": f"cubin-runtime/{__version__}"})
        self._hosts: dict[tuple[str, str, bool], _Host] = {}

    def get(self, url: str, pace: Pace, headers: Mapping[str, str], *, credentials: bool) -> Response:
        """The response to one GET, its body not yet read; redirects are not followed and nothing is retried.

        ``credentials`` says whether this host may get its token or what netrc has; never over plain http. Whoever
        leaves bytes of the body unread calls ``Response.abandon``.

        Raises:
            ConnectError: no connection came about.
            requests.RequestException: the URL, the proxy or the certificates cannot be used.
            http.client.HTTPException, OSError: the request failed.
        """
        parts = urlsplit(url)
        key = (parts.scheme, parts.netloc, credentials)
        host = self._hosts.get(key)
        if host is None:
            host = self._hosts[key] = self._settle(url, credentials)
        connection = host.connection
        if connection is None or not connection.is_connected:
            host.close()
            connection = host.connection = self._connect(host, pace)
        _watch(connection, pace)
        path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        try:
            http.client.HTTPConnection.request(
                connection, "GET", requote_uri(host.prefix + path), headers={**host.headers, **headers}
            )
            response = http.client.HTTPConnection.getresponse(connection)
        except BaseException:
            host.close()
            raise
        assert isinstance(response, Response)
        return response

    def close(self) -> None:
        """Close all connections."""
        for host in self._hosts.values():
            host.close()
        self._hosts.clear()
        self._session.close()

    def _settle(self, url: str, credentials: bool) -> _Host:
        """Merge the settings that ``requests`` would use for every request to this host."""
        session = self._session
        session.auth = partial(_own_over_https, tokens=dict(self._network.tokens)) if credentials else _no_credentials
        request = session.prepare_request(requests.Request("GET", url))
        assert request.url is not None
        network = self._network
        proxies = {} if network.proxy is None else {"http": network.proxy, "https": network.proxy}
        bundle, certificate = (None if file is None else str(file) for file in (network.ca_bundle, network.client_cert))
        settings = session.merge_environment_settings(request.url, proxies, True, bundle, certificate)
        for file in (settings["verify"], settings["cert"]):
            if isinstance(file, str) and os.path.exists(file) and not (os.path.isfile(file) or os.path.isdir(file)):
                raise ConnectError(reason=f"{file} is no regular file, expected certificates")
        adapter = session.get_adapter(request.url)
        assert isinstance(adapter, HTTPAdapter)
        try:
            pool = adapter.get_connection_with_tls_context(
                request, settings["verify"], proxies=settings["proxies"], cert=settings["cert"]
            )
        except requests.exceptions.InvalidProxyURL:
            raise ConnectError(reason="the URL of the proxy is not valid") from None
        except requests.exceptions.InvalidSchema as error:
            raise ConnectError(reason=f"the proxy cannot be used: {error}") from None
        assert isinstance(pool, urllib3.HTTPConnectionPool)
        try:
            adapter.cert_verify(pool, request.url, settings["verify"], settings["cert"])  # type: ignore[no-untyped-call]
        except OSError as error:
            raise ConnectError(reason=str(error)) from None
        headers = dict(request.headers.items())
        # a plain proxy wants the whole URL and its own credentials with each request, everyone else the path
        whole = adapter.request_url(request, settings["proxies"]) == urldefragauth(request.url)
        parts = urlsplit(request.url)
        if whole:
            headers.update(pool.proxy_headers)
        return _Host(pool, f"{parts.scheme}://{parts.netloc}" if whole else "", headers)

    def _connect(self, host: _Host, pace: Pace) -> HTTPConnection:
        """A connection through whatever proxy there is; its socket then waits ``silence`` for each receive."""
        pool = host.pool
        connection = pool._new_conn()
        assert isinstance(connection, HTTPConnection)
        connection.timeout = self._limits.connect
        _watch(connection, pace)  # a proxy answers first
        try:
            if connection_requires_http_tunnel(pool.proxy, pool.proxy_config, pool.scheme):
                pool._prepare_proxy(connection)
            else:
                connection.connect()
            assert connection.sock is not None
            connection.sock.settimeout(self._limits.silence)
        except BaseException as error:
            connection.close()
            if isinstance(error, Exception):
                raise ConnectError(None if pool.proxy is None else str(pool.proxy)) from error
            raise
        return connection


@dataclass(slots=True)
class _Host:
    pool: urllib3.HTTPConnectionPool
    prefix: str
    headers: dict[str, str]
    connection: HTTPConnection | None = None

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


class Response(http.client.HTTPResponse):
    """A response of the standard library whose every receive asks its ``Pace`` first."""

    def __init__(
        self, sock: socket.socket, *arguments: Any, pace: Pace, connection: HTTPConnection, **options: Any
    ) -> None:
        super().__init__(sock, *arguments, **options)
        self.pace, self._connection = pace, connection
        self._watched = _WatchedFile(self.fp.detach(), pace)
        self.fp = io.BufferedReader(self._watched)

    def begin(self) -> None:
        """Read the headers."""
        super().begin()
        self.pace.begin_body()
        # between chunks lies framing, so that there only the reader knows what is payload
        self._watched.is_payload = not self.chunked

    def abandon(self) -> None:
        """Close the connection too, as bytes that nobody will read may be left on it."""
        self.close()
        self._connection.close()


def _watch(connection: HTTPConnection, pace: Pace) -> None:
    """Make the next responses of a connection ask ``pace``."""
    make: Any = partial(Response, pace=pace, connection=connection)
    connection.response_class = make


class _WatchedFile(io.RawIOBase):
    """A socket's raw file that asks before each receive, however often single bytes come."""

    def __init__(self, raw: io.RawIOBase, pace: Pace) -> None:
        self._raw, self._pace = raw, pace
        self.is_payload = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._pace.check()
        size = self._raw.readinto(buffer)
        if self.is_payload and size:
            self._pace.count(size)
        return size

    def close(self) -> None:
        self._raw.close()
        super().close()


def _own_over_https(request: requests.PreparedRequest, tokens: Mapping[str, str]) -> requests.PreparedRequest:
    """Credentials of the very host that is asked, its token or else what netrc has, over https alone."""
    _no_credentials(request)
    if request.url is None or not request.url.startswith("https:"):
        return request
    token = tokens.get(urlsplit(request.url).hostname or "")
    if token is not None:
        request.headers["Authorization"] = f"Bearer {_token_text(token)}"
    elif _netrc_is_readable() and (login := get_netrc_auth(request.url)) is not None:
        HTTPBasicAuth(*login)(request)
    return request


def _netrc_is_readable() -> bool:
    """Return whether there is a netrc that is a regular file; requests would wait for a FIFO for ever."""
    named = os.environ.get("NETRC")
    places = [named] if named is not None else [f"~/{name}" for name in NETRC_FILES]
    files = [file for file in map(os.path.expanduser, places) if os.path.exists(file)]
    try:
        return bool(files) and len(read_regular(Path(files[0]), MAX_SECRETS_BYTES)) > 0
    except (OSError, NotRegularError, TooLargeError):
        return False


def _token_text(token: str) -> str:
    """The token itself; one that begins with ``@`` names its file."""
    if token.startswith("@"):
        try:
            token = read_regular(Path(token[1:]), MAX_SECRETS_BYTES).decode("ascii").strip()
        except (OSError, ValueError, NotRegularError, TooLargeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no ASCII text"
            if isinstance(error, NotRegularError | TooLargeError):
                reason = f"no regular file of at most {MAX_SECRETS_BYTES} bytes"
            # the name is not shown: whoever gave the token itself in its place finds no such file
            raise ConnectError(reason=f"the file of this host's token cannot be read: {reason}") from None
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConnectError(reason="the token of this host is not printable ASCII")
    return token


def _no_credentials(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """None at all, whatever netrc or the URL holds."""
    request.headers.pop("Authorization", None)
    return request
