"""A server of a folder of artifacts that counts what is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@contextmanager
def mirrored(folder: str) -> Iterator[tuple[str, Counter[str]]]:
    """The address of a server of the folder, and how often it sent each file."""
    sent: Counter[str] = Counter()

    class Counting(SimpleHTTPRequestHandler):
        def log_request(self, code: Any = "-", size: Any = "-") -> None:
            if self.command == "GET" and code in (200, 206):
                sent[self.path] += 1

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Counting, directory=folder))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", sent
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
