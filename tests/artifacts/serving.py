"""A real HTTP server on loopback that serves a tree and misbehaves where it is told to."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

Action = Callable[["Handler", bytes], None]


class FaultyServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.released = threading.Event()
        self.counts: Counter[str] = Counter()
        self.seen_headers: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
        self.targets: list[str] = []
        self.faults: dict[str, list[Action]] = {}
        self.guard = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def fault(self, name: str, *actions: Action) -> None:
        """Answer requests for a path that ends with ``name`` by these actions in turn; the last one stays."""
        self.faults[name] = list(actions)

    def action_for(self, path: str) -> Action:
        with self.guard:
            for name, actions in self.faults.items():
                if path.endswith(name):
                    return actions.pop(0) if len(actions) > 1 else actions[0]
        return ok

    def count(self, name: str) -> int:
        return sum(count for path, count in self.counts.items() if path.endswith(name))

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that went away are part of the game."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FaultyServer

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        with self.server.guard:
            self.server.counts[path] += 1
            self.server.targets.append(self.path)
            self.server.seen_headers[path].append(dict(self.headers.items()))
        file = self.server.root / path.lstrip("/")
        body = file.read_bytes() if file.is_file() else None
        action = self.server.action_for(path)
        if body is None and action is ok:
            action = status(404)
        action(self, body or b"")

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def answer(self, code: int, body: bytes, **headers: str) -> None:
        self.send_response(code)
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        for key, value in {"Content-Length": str(len(body)), **named}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)


def ok(handler: Handler, body: bytes) -> None:
    handler.answer(200, body)


def wrong_bytes(handler: Handler, body: bytes) -> None:
    handler.answer(200, bytes(len(body)))


def truncated(handler: Handler, body: bytes) -> None:
    handler.answer(200, body[: len(body) // 2], Content_Length=str(len(body)))
    handler.close_connection = True


def short_length(handler: Handler, body: bytes) -> None:
    handler.answer(200, body, Content_Length=str(len(body) - 5))
    handler.close_connection = True


def announced_oversize(handler: Handler, body: bytes) -> None:
    handler.answer(200, body, Content_Length=str(1 << 40))
    handler.close_connection = True


def endless(handler: Handler, body: bytes) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.close_connection = True
    while not handler.server.released.is_set():
        handler.wfile.write(bytes(4096))


def hang(handler: Handler, body: bytes) -> None:
    handler.close_connection = True
    handler.server.released.wait(100)


def ok_for(requests: int) -> Action:
    """Answer as many requests of any path; later ones hang, so that a fetch is still going on when a test looks."""

    def act(handler: Handler, body: bytes) -> None:
        action = ok if sum(handler.server.counts.values()) <= requests else hang
        action(handler, body)

    return act


def hang_in_the_body(handler: Handler, body: bytes) -> None:
    handler.answer(200, body[:10], Content_Length=str(len(body)))
    handler.wfile.flush()
    hang(handler, body)


def drip(handler: Handler, body: bytes) -> None:
    handler.answer(200, b"", Content_Length=str(len(body)))
    handler.close_connection = True
    for start in range(len(body)):
        if handler.server.released.wait(0.05):
            return
        handler.wfile.write(body[start : start + 1])
        handler.wfile.flush()


def reset(handler: Handler, body: bytes) -> None:
    handler.close_connection = True
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def gzip_encoded(handler: Handler, body: bytes) -> None:
    handler.answer(200, body, Content_Encoding="gzip")


def slow(seconds: float) -> Action:
    def act(handler: Handler, body: bytes) -> None:
        time.sleep(seconds)
        handler.answer(200, body)

    return act


def steady(seconds: float) -> Action:
    """The whole body, spread evenly over some seconds."""

    def act(handler: Handler, body: bytes) -> None:
        handler.answer(200, b"", Content_Length=str(len(body)))
        for start in range(0, len(body), len(body) // 20):
            time.sleep(seconds / 20)
            handler.wfile.write(body[start : start + len(body) // 20])
            handler.wfile.flush()

    return act


def drip_headers(handler: Handler, body: bytes) -> None:
    handler.close_connection = True
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Padding: ")
    while not handler.server.released.wait(0.05):
        handler.wfile.write(b"x")
        handler.wfile.flush()


def drip_framing(before: bytes, drop: bytes, *, pause: float = 0.05) -> Action:
    """A chunked answer that begins with ``before`` and then goes on with ``drop`` for ever, nothing of it payload."""

    def act(handler: Handler, body: bytes) -> None:
        handler.close_connection = True
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + before)
        while not handler.server.released.wait(pause):
            handler.wfile.write(drop)
            handler.wfile.flush()

    return act


drip_chunk_size = drip_framing(b"", b"0")
drip_chunk_extension = drip_framing(b"a;", b"x")
drip_trailer = drip_framing(b"1\r\nx\r\n0\r\nX-Trailer: ", b"x")
endless_trailers = drip_framing(b"1\r\nx\r\n0\r\n", b"X-Trailer: x\r\n" * 100, pause=0.001)


def in_chunks(handler: Handler, body: bytes) -> None:
    """The whole body in chunks of 100 bytes, with an extension and a trailer."""
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    pieces = [body[start : start + 100] for start in range(0, len(body), 100)]
    handler.wfile.write(b"".join(b"%x;name=value\r\n%s\r\n" % (len(piece), piece) for piece in pieces))
    handler.wfile.write(b"0\r\nX-Trailer: x\r\n\r\n")


def resumable(breaks_after: int = 0, tag: str = '"1"', sends: Callable[[int, int], str] | None = None) -> Action:
    """A body of a known version, as a whole or from where it is asked for; breaks off after so many bytes.

    ``sends`` says from the first byte and the size what range is claimed, if not the true one.
    """

    def act(handler: Handler, body: bytes) -> None:
        asked = handler.headers.get("Range", "")
        goes_on = bool(asked) and handler.headers.get("If-Range") == tag
        first = int(asked.removeprefix("bytes=").removesuffix("-")) if goes_on else 0
        claimed = sends(first, len(body)) if sends else f"bytes {first}-{len(body) - 1}/{len(body)}"
        headers = {"ETag": tag, "Content-Length": str(len(body) - first)}
        if goes_on:
            headers["Content-Range"] = claimed
        end = breaks_after or len(body)
        handler.answer(206 if goes_on else 200, body[first:end], **headers)
        handler.close_connection = end < len(body)

    return act


def rest_in_chunks(pause: float) -> Action:
    """The rest that is asked for, in 20 chunks with a pause behind each."""

    def act(handler: Handler, body: bytes) -> None:
        first = int(handler.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {first}-{len(body) - 1}/{len(body)}")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        size = -(-(len(body) - first) // 20)
        for start in range(first, len(body), size):
            piece = body[start : start + size]
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            handler.wfile.flush()
            time.sleep(pause)
        handler.wfile.write(b"0\r\n\r\n")

    return act


def status(code: int, **headers: str) -> Action:
    def act(handler: Handler, body: bytes) -> None:
        handler.answer(code, b"no", **headers)

    return act


def redirect(location: str) -> Action:
    return status(302, Location=location)


@contextmanager
def serving(root: Path) -> Iterator[FaultyServer]:
    server = FaultyServer(root)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
