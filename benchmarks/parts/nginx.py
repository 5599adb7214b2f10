"""nginx on a loopback port over one tree; counts the bytes that it sent, headers included."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CONFIG = """
{user}
worker_processes auto;
daemon off;
pid {place}/nginx.pid;
error_log {place}/error.log warn;
events {{ worker_connections 1024; }}
http {{
    types {{ }}
    default_type application/octet-stream;
    sendfile on;
    tcp_nopush on;
    keepalive_timeout 65;
    keepalive_requests 100000;
    log_format sent '$bytes_sent';
    access_log {place}/sent.log sent;
    client_body_temp_path {place}/body; proxy_temp_path {place}/proxy; fastcgi_temp_path {place}/fastcgi;
    uwsgi_temp_path {place}/uwsgi; scgi_temp_path {place}/scgi;
    server {{
        listen 127.0.0.1:{port};
        root {root};
        autoindex on;
    }}
}}
"""


class Nginx:
    """A running server; ``url`` has no slash at its end."""

    def __init__(self, binary: str, root: Path, place: Path) -> None:
        self._log = place / "sent.log"
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        user = "user root;" if os.getuid() == 0 else ""
        config = place / "nginx.conf"
        config.write_text(_CONFIG.format(user=user, place=place, root=root, port=port))
        self._process = subprocess.Popen([binary, "-p", str(place), "-c", str(config)])
        _wait_for(port)
        self.version = subprocess.run([binary, "-v"], capture_output=True, text=True).stderr.strip()

    def forget(self) -> None:
        """Begin counting anew."""
        os.truncate(self._log, 0)

    def sent(self) -> tuple[int, int]:
        """Responses and bytes since ``forget``."""
        sizes = [int(line) for line in self._log.read_text().split()]
        return len(sizes), sum(sizes)

    def stop(self) -> None:
        """End the server and wait for it."""
        self._process.terminate()
        self._process.wait(20)


def nginx_binary() -> str | None:
    """Where nginx is, if it is installed."""
    return shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")


@contextmanager
def nginx(root: Path, place: Path) -> Iterator[Nginx]:
    """Serve ``root`` while the block runs; ``place`` is a folder for nginx's own files."""
    binary = nginx_binary()
    if binary is None:
        raise FileNotFoundError("nginx is not installed (Debian: apt-get install nginx-light)")
    place.mkdir(parents=True, exist_ok=True)
    server = Nginx(binary, root, place)
    try:
        yield server
    finally:
        server.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
