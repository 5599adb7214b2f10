"""Every fault against every way of fetching: a named error in time, nothing wrong visible, the next run completes."""

from __future__ import annotations

import errno
import os
import random
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cubin_runtime.artifacts.fetch import process_pool
from cubin_runtime.artifacts.store import store as store_module
from cubin_runtime.artifacts.store.locks import ShardLock
from cubin_runtime.errors import CorruptError, CubinRuntimeError, SourceError, StoreError
from tests.artifacts.children import needs_mounts, run_child
from tests.artifacts.fleet import FETCH, SMALL_CREWS, start_fetcher, temporaries, wrong_objects
from tests.artifacts.releases import PATIENT_LIMITS, QUICK_POLICY, Release, make_release, visible_files
from tests.artifacts.serving import (
    Action,
    FaultyServer,
    Handler,
    announced_oversize,
    drip,
    drip_headers,
    endless,
    gzip_encoded,
    hang,
    hang_in_the_body,
    ok,
    redirect,
    reset,
    serving,
    short_length,
    status,
    truncated,
    wrong_bytes,
)

FAULTY = "k005.bin"
FILES = {f"k{n:03}.bin": random.Random(n).randbytes(2000 + 40 * n) for n in range(40)}
EXPECTED = len(FILES) + 1

FAULTS: dict[str, tuple[Action, type[CubinRuntimeError], str]] = {
    "truncation": (truncated, SourceError, "ended after|truncated"),
    "wrong bytes": (wrong_bytes, CorruptError, "expected .* \\(2 times\\)"),
    "drip": (drip, SourceError, "bytes a second"),
    "drip in the headers": (drip_headers, SourceError, "no complete headers after"),
    "stall before the headers": (hang, SourceError, "no data for"),
    "stall in the body": (hang_in_the_body, SourceError, "no data for"),
    "reset": (reset, SourceError, "reset|closed|without response|RemoteDisconnected"),
    "403": (status(403), SourceError, "status 403"),
    "404": (status(404), SourceError, "status 404"),
    "429": (status(429, Retry_After="0"), SourceError, "status 429"),
    "429 for an hour": (status(429, Retry_After="3600"), SourceError, "status 429"),
    "500": (status(500), SourceError, "status 500"),
    "503": (status(503), SourceError, "status 503"),
    "length too short": (short_length, CorruptError, "expected .* \\(2 times\\)"),
    "length too long": (announced_oversize, SourceError, "at most"),
    "no end": (endless, SourceError, "sends more than"),
    "redirect loop": (redirect("?again"), SourceError, "more than 5 redirects"),
    "redirect to a file": (redirect("file:///etc/passwd"), SourceError, "redirects to scheme"),
    "encoded": (gzip_encoded, SourceError, "Content-Encoding"),
}

# The one limit that ends a fault; the files without a fault would have to meet it twice.
LIMITS = {
    "drip": replace(PATIENT_LIMITS, window=2.0, least_rate=1000.0),
    "drip in the headers": replace(PATIENT_LIMITS, headers=2.0),
    "stall before the headers": replace(PATIENT_LIMITS, silence=2.0),
    "stall in the body": replace(PATIENT_LIMITS, silence=2.0),
}
TWICE = replace(QUICK_POLICY, attempts=2)


@pytest.fixture
def many(tmp_path: Path) -> Release:
    return make_release(tmp_path / "many", FILES)


@pytest.fixture
def server(many: Release, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    with serving(many.root) as running:
        yield running


@pytest.fixture(params=["threads", "workers"])
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Fetch with threads, or with two worker processes although there are few files."""
    if request.param == "workers":
        monkeypatch.setattr(process_pool, "OBJECTS_A_PROCESS", 8)
        monkeypatch.setattr(process_pool, "available_cores", lambda: 2)
    return str(request.param)


def objects(store: Path) -> set[str]:
    return set(visible_files(store)) - set(temporaries(store))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_server(many: Release, server: FaultyServer, store: Path, pool: str, fault: str) -> None:
    action, kind, words = FAULTS[fault]
    server.fault(FAULTY, action)
    limits, policy = LIMITS.get(fault, PATIENT_LIMITS), TWICE if fault in LIMITS else QUICK_POLICY
    with pytest.raises(kind, match=words) as caught:
        many.library(store, server.url, limits=limits, policy=policy).fetch(many.pin, jobs=4)
    assert FAULTY in str(caught.value)
    assert (len(objects(store)), wrong_objects(store), temporaries(store)) == (EXPECTED - 1, [], [])
    server.fault(FAULTY, ok)
    assert many.library(store, server.url).fetch(many.pin, jobs=4).fetched == 1
    assert (len(objects(store)), wrong_objects(store)) == (EXPECTED, [])


def test_a_certificate_that_nobody_signed(many: Release, server: FaultyServer, store: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -keyout {key} -out {certificate}"
    try:
        subprocess.run(command.split(), check=True, capture_output=True, timeout=100)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"openssl cannot make a certificate here: {error}")
    many.library(store, many.root).fetch(many.pin, [many.path("k000.bin")])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with pytest.raises(SourceError, match="TLS failed"):
        many.library(store, server.url.replace("http:", "https:")).fetch(many.pin, jobs=4)
    assert len(objects(store)) == 2
    assert many.library(store, many.root).fetch(many.pin).fetched == len(FILES) - 1


def test_nobody_listens(many: Release, server: FaultyServer, store: Path, pool: str) -> None:
    many.library(store, many.root).fetch(many.pin, [many.path("k000.bin")])
    url = server.url
    server.shutdown()
    server.server_close()
    with pytest.raises(SourceError, match="39 of 40 files could not be fetched"):
        many.library(store, url).fetch(many.pin, jobs=4)
    assert many.library(store, many.root).fetch(many.pin).fetched == len(FILES) - 1


def test_a_server_that_fails_in_the_middle_of_a_run_is_replaced_by_the_next_source(
    many: Release, server: FaultyServer, store: Path, pool: str
) -> None:
    def until_ten_are_out(handler: Handler, body: bytes) -> None:
        action = ok if sum(server.counts.values()) <= 10 else status(503)
        action(handler, body)

    server.fault(".bin", until_ten_are_out)
    with serving(many.root) as second:
        report = many.library(store, server.url, second.url).fetch(many.pin, jobs=4)
    assert set(report.by_source) == {server.url, second.url}
    assert sum(report.by_source.values()) == len(FILES)
    assert (len(objects(store)), wrong_objects(store)) == (EXPECTED, [])


def test_a_source_that_turned_dead_is_hardly_asked_again(many: Release, server: FaultyServer, store: Path) -> None:
    server.fault(".bin", status(500))
    many.library(store, server.url, many.root).fetch(many.pin, jobs=4)
    assert server.count(".bin") <= 4 * QUICK_POLICY.attempts + 3 * QUICK_POLICY.attempts


# -- the disk


@pytest.mark.parametrize("workers", [False, True])
def test_a_disk_that_fills_up_in_the_middle(many: Release, store: Path, tmp_path: Path, workers: bool) -> None:
    needs_mounts()
    pins = many.pin_file.read_text()
    many.pin_file.write_text(pins.replace(f"bytes = {many.pin.bytes}\n", "bytes = 0\n", 1))
    disk = tmp_path / "disk"
    disk.mkdir()
    body = (SMALL_CREWS if workers else "") + FETCH.replace("sys.exit(error.exit_code)", "pass")
    body += "from tests.artifacts.fleet import temporaries, wrong_objects\n"
    body += "print('left', temporaries(Path(store)), wrong_objects(Path(store)))\n"
    mounts = f"mount -t tmpfs -o size=64k none {disk}"
    done = run_child(body, disk / "store", many.pin_file, many.root, 4, mounts=mounts)
    assert "StoreError 8" in done.stdout, done.stdout + done.stderr
    assert "the store is full (No space left on device)" in done.stdout
    assert done.stdout.endswith("left [] []\n")


@pytest.mark.parametrize("workers", [False, True])
def test_a_disk_that_is_read_only(many: Release, tmp_path: Path, workers: bool) -> None:
    needs_mounts()
    disk = tmp_path / "disk"
    disk.mkdir()
    mounts = f"mount --bind {disk} {disk}; mount -o remount,bind,ro {disk}"
    body = (SMALL_CREWS if workers else "") + FETCH
    done = run_child(body, disk / "store", many.pin_file, many.root, 4, mounts=mounts)
    assert (done.returncode, done.stdout[:12]) == (8, "StoreError 8"), done.stdout + done.stderr
    assert "Read-only file system" in done.stdout


def fail_with_eio(*arguments: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_an_input_output_error_while_an_object_is_written(
    many: Release, server: FaultyServer, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = many.library(store, server.url)
    library.manifest(many.pin)
    with monkeypatch.context() as broken:
        broken.setattr(store_module, "write_all", fail_with_eio)
        with pytest.raises(StoreError, match="Input/output error"):
            library.fetch(many.pin, jobs=4)
    assert (len(objects(store)), temporaries(store)) == (1, [])
    assert library.fetch(many.pin, jobs=4).fetched == len(FILES)


def test_an_input_output_error_while_an_object_is_written_by_a_worker(
    many: Release, server: FaultyServer, store: Path
) -> None:
    # the worker is a new interpreter: what it imports first is broken through its start-up code
    broken = """
from cubin_runtime.artifacts.fetch import process_pool
process_pool.WORKER_START = '''
import errno, os
from cubin_runtime.artifacts.store import store
def fail(*arguments):
    raise OSError(errno.EIO, os.strerror(errno.EIO))
store.write_all = fail
'''
"""
    fetcher = start_fetcher(many, store, server.url, workers=True, before=broken)
    printed, errors = fetcher.communicate(timeout=100)
    assert (fetcher.returncode, printed[:12]) == (8, "StoreError 8"), printed + errors
    assert "Input/output error" in printed
    assert temporaries(store) == []
    assert many.library(store, server.url).fetch(many.pin, jobs=4).fetched == len(FILES)


def test_an_input_output_error_while_an_object_is_read(
    many: Release, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = many.library(store, many.root)
    library.fetch(many.pin)
    with monkeypatch.context() as broken:
        broken.setattr(store_module, "read_bounded", fail_with_eio)
        with pytest.raises(StoreError, match="Input/output error"):
            library.load(many.path(FAULTY), fetch=False)
    assert library.load(many.path(FAULTY), fetch=False).data == FILES[FAULTY]


def test_an_input_output_error_in_a_source_sends_the_fetch_to_the_next_one(
    many: Release, server: FaultyServer, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = many.library(store, many.root, server.url)
    library.manifest(many.pin)
    monkeypatch.setattr("cubin_runtime.artifacts.bounded_read.read_bounded", fail_with_eio)
    assert library.fetch(many.pin, jobs=4).by_source == {server.url: len(FILES)}


# -- locks


NO_LOCKS = """
from cubin_runtime.artifacts.store.locks import ShardLock
ShardLock.try_take = lambda self: True
ShardLock.touch = ShardLock.release = ShardLock.saw_progress = lambda self: None
"""


@pytest.mark.parametrize("workers", [False, True])
def test_without_any_locks_four_processes_at_once_are_still_right(
    many: Release, server: FaultyServer, store: Path, workers: bool
) -> None:
    fetchers = [start_fetcher(many, store, server.url, workers=workers, before=NO_LOCKS) for _ in range(4)]
    outputs = [fetcher.communicate(timeout=100) for fetcher in fetchers]
    assert [fetcher.returncode for fetcher in fetchers] == [0] * 4, outputs
    assert (len(objects(store)), wrong_objects(store), temporaries(store)) == (EXPECTED, [], [])


def test_the_stub_stands_for_all_that_a_fetch_asks_of_a_lock() -> None:
    own = {name for name in vars(ShardLock) if not name.startswith("_")}
    assert own == {"try_take", "touch", "release", "saw_progress"}
