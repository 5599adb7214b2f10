"""A ``requests`` session that keeps our rules: credentials, cookies, encoding, and a deadline for headers."""

from __future__ import annotations

import http.client
import io
import socket
import time
from http.cookiejar import DefaultCookiePolicy
from typing import Any

import requests
import urllib3
from requests.adapters import HTTPAdapter
from requests.auth import HTTPBasicAuth
from requests.utils import get_netrc_auth

from .._version import __version__


def new_session(header_seconds: float) -> requests.Session:
    """A session for one worker; a server has ``header_seconds`` for all of its headers together."""
    session = requests.Session()
    session.headers.update({"Accept-Encoding": "identity", "User-Agent": f"cubin-runtime/{__version__}"})
    session.auth = _netrc_over_https
    session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
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
