"""Publish a built release into a folder, and serve such a folder over HTTP on the loopback interface."""

from __future__ import annotations

import functools
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def publish(tree: Path, folder: Path) -> Path:
    """Copy the release ``tree`` to ``folder/<release>`` and return that; a release never changes once there.

    Raises:
        FileExistsError: another release of that name lies there.
    """
    target = folder / tree.name
    if target.exists():
        if (target / "checksums.txt").read_bytes() != (tree / "checksums.txt").read_bytes():
            raise FileExistsError(f"{target} holds another release of that name; give the new one a new name")
        return target
    partial = folder / f".{tree.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(tree, partial)
    partial.rename(target)
    return target


class _QuietHandler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve ``folder`` on a free loopback port inside the ``with``; yields the URL, no slash at its end."""
    handler = functools.partial(_QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
