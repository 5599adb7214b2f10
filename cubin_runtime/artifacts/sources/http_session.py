"""A ``requests`` session that keeps our rules (credentials, encoding, a deadline for headers), asked quickly.

``requests`` settles what holds for a whole host: proxy, certificates, credentials, headers. That is done once
a host; each request then goes straight to the connection pool that came of it, which costs a third.
"""

from __future__ import annotations

import http.client
import io
import socket
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter
from requests.auth import HTTPBasicAuth
from requests.utils import get_netrc_auth, urldefragauth

from ..._version import __version__


class Transport:
    """The connections of one worker; not for several threads at once."""

    def __init__(self, connect_seconds: float, silence_seconds: float, header_seconds: float) -> None:
        """A server has ``header_seconds`` for all of its headers together; the others are for one step."""
        self._session = _new_session(header_seconds)
        self._timeout = urllib3.Timeout(connect=connect_seconds, read=silence_seconds)
        self._hosts: dict[tuple[str, str], _Host] = {}

    def get(self, url: str) -> urllib3.BaseHTTPResponse:
        """The response to one GET, its body not yet read; redirects are not followed and nothing is retried.

        Raises:
            requests.RequestException: the URL, the proxy or the certificates cannot be used.
            urllib3.exceptions.HTTPError: the request failed.
        """
        parts = urlsplit(url)
        host = self._hosts.get((parts.scheme, parts.netloc))
        if host is None:
            host = self._hosts[parts.scheme, parts.netloc] = self._settle(url)
        path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        return host.pool.urlopen(
            "GET",
            host.prefix + path,
            headers=host.headers,
            redirect=False,
            retries=False,
            preload_content=False,
            decode_content=False,
            assert_same_host=False,
            timeout=self._timeout,
        )

    def close(self) -> None:
        """Close all connections."""
        self._hosts.clear()
        self._session.close()

    def _settle(self, url: str) -> _Host:
        """What ``requests`` would do for every request to this host."""
        session = self._session
        request = session.prepare_request(requests.Request("GET", url))
        assert request.url is not None
        settings = session.merge_environment_settings(request.url, {}, True, None, None)
        adapter = session.get_adapter(request.url)
        assert isinstance(adapter, HTTPAdapter)
        pool = adapter.get_connection_with_tls_context(
            request, settings["verify"], proxies=settings["proxies"], cert=settings["cert"]
        )
        assert isinstance(pool, urllib3.HTTPConnectionPool)
        adapter.cert_verify(pool, request.url, settings["verify"], settings["cert"])  # type: ignore[no-untyped-call]
        # a plain proxy wants the whole URL, everyone else the path
        whole = adapter.request_url(request, settings["proxies"]) == urldefragauth(request.url)
        parts = urlsplit(request.url)
        prefix = f"{parts.scheme}://{parts.netloc}" if whole else ""
        return _Host(pool, prefix, dict(request.headers.items()))


@dataclass(frozen=True, slots=True)
class _Host:
    pool: urllib3.HTTPConnectionPool
    prefix: str
    headers: dict[str, str]


def _new_session(header_seconds: float) -> requests.Session:
    session = requests.Session()
    session.headers.update({"Accept-Encoding": "identity", "User-Agent": f"cubin-runtime/{__version__}"})
    session.auth = _netrc_over_https
    for scheme in ("http://", "https://"):
        session.mount(scheme, _DeadlineAdapter(header_seconds))
    return session


def _netrc_over_https(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Credentials of the very host that is asked, from netrc, over https alone; set anew for each hop."""
    request.headers.pop("Authorization", None)
    if request.url is not None and request.url.startswith("https:"):
        found = get_netrc_auth(request.url)
        if found is not None:
            HTTPBasicAuth(*found)(request)
    return request


class _DeadlineAdapter(HTTPAdapter):
    """Makes connections whose responses carry the deadline; a socket's timeout is for one receive."""

    def __init__(self, header_seconds: float) -> None:
        self._header_seconds = header_seconds
        super().__init__()

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        super().init_poolmanager(*arguments, **options)
        self.poolmanager.pool_classes_by_scheme = _pool_classes(self._header_seconds)


def _pool_classes(header_seconds: float) -> dict[str, type[urllib3.HTTPConnectionPool]]:
    class Response(http.client.HTTPResponse):
        """Reads its headers through a file that knows when they must be over."""

        def __init__(self, sock: socket.socket, *arguments: Any, **options: Any) -> None:
            super().__init__(sock, *arguments, **options)
            self._watched = _WatchedFile(self.fp.detach(), time.monotonic() + header_seconds)
            self.fp = io.BufferedReader(self._watched)

        def begin(self) -> None:
            super().begin()
            self._watched.deadline = None

    class Connection(urllib3.connection.HTTPConnection):
        response_class = Response

    class SecureConnection(urllib3.connection.HTTPSConnection):
        response_class = Response

    class Pool(urllib3.HTTPConnectionPool):
        ConnectionCls = Connection

    class SecurePool(urllib3.HTTPSConnectionPool):
        ConnectionCls = SecureConnection

    return {"http": Pool, "https": SecurePool}


class _WatchedFile(io.RawIOBase):
    """A socket's raw file that fails once its deadline has passed, however often single bytes come."""

    def __init__(self, raw: io.RawIOBase, deadline: float) -> None:
        self._raw = raw
        self.deadline: float | None = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise TimeoutError("timed out: the headers took too long")
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
