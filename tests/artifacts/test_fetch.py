from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cubin_runtime.artifacts.sources.failover import FetchPolicy
from cubin_runtime.artifacts.store.store import Store
from cubin_runtime.errors import CorruptError, PinError, SourceError, StoreError, UsageError
from tests.artifacts.children import ORDINARY_USER, needs_mounts, refuse_threads, run_child
from tests.artifacts.fleet import children_of, is_running, start_python, wait_until
from tests.artifacts.releases import PATIENT_LIMITS, QUICK_POLICY, Release, make_release, visible_files, zip_tree
from tests.artifacts.serving import (
    Action,
    FaultyServer,
    Handler,
    announced_oversize,
    drip_chunk_extension,
    endless_trailers,
    gzip_encoded,
    hang,
    ok,
    redirect,
    reset,
    serving,
    short_length,
    slow,
    status,
    steady,
    truncated,
    wrong_bytes,
)

NAME = "fmha/prefill.cubin"


def all_digests(release: Release) -> list[str]:
    return sorted({*map(release.digest, release.files), release.pin.manifest_sha256})


def test_a_release_is_fetched_whole_with_its_manifest(release: Release, server: FaultyServer, store: Path) -> None:
    report = release.library(store, server.url).fetch(release.pin)
    assert visible_files(store) == all_digests(release)
    assert (report.chosen, report.present, report.fetched, report.bytes) == (3, 0, 3, release.pin.bytes)
    assert report.by_source == {server.url: 3}


def test_what_is_there_is_not_fetched_again(release: Release, server: FaultyServer, store: Path) -> None:
    library = release.library(store, server.url)
    library.fetch(release.pin)
    before = sum(server.counts.values())
    report = library.fetch(release.pin)
    assert (report.present, report.fetched, sum(server.counts.values())) == (3, 0, before)


def test_presence_is_trusted_by_name(release: Release, server: FaultyServer, store: Path) -> None:
    Store(store).put(release.digest(NAME), b"damaged")
    release.library(store, server.url).fetch(release.pin)
    assert server.count(NAME) == 0


def test_only_chosen_files_are_fetched(release: Release, server: FaultyServer, store: Path) -> None:
    report = release.library(store, server.url).fetch(release.pin, [release.path(NAME)])
    assert (report.chosen, report.fetched) == (1, 1)
    assert server.count("decode.cubin") == 0


def test_the_manifest_is_looked_up_beside_the_files_and_nothing_else_is_asked_for(
    release: Release, server: FaultyServer, store: Path
) -> None:
    release.library(store, server.url).fetch(release.pin)
    names = {*release.files, "checksums.txt"}
    assert set(server.counts) == {f"/{release.pin.path}/{name}" for name in names}


def test_a_dry_run_fetches_at_most_the_manifest(release: Release, server: FaultyServer, store: Path) -> None:
    report = release.library(store, server.url).fetch(release.pin, dry_run=True)
    assert (report.missing, report.fetched, report.about_bytes) == (3, 0, release.pin.bytes)
    assert visible_files(store) == [release.pin.manifest_sha256]


def test_a_path_outside_the_manifest_is_refused(release: Release, server: FaultyServer, store: Path) -> None:
    with pytest.raises(PinError, match="not in the manifest"):
        release.library(store, server.url).fetch(release.pin, [release.path("other.cubin")])


def test_jobs_below_one_are_refused(release: Release, server: FaultyServer, store: Path) -> None:
    with pytest.raises(UsageError, match="jobs: got 0"):
        release.library(store, server.url).fetch(release.pin, jobs=0)


def test_progress_counts_every_file_once(release: Release, server: FaultyServer, store: Path) -> None:
    library = release.library(store, server.url)
    library.fetch(release.pin, [release.path(NAME)])
    steps: list[int] = []
    library.fetch(release.pin, progress=steps.append)
    assert sum(steps) == 3


@pytest.mark.parametrize("jobs", [1, 2, 16])
def test_many_files_are_fetched_once_each_whatever_the_jobs(tmp_path: Path, jobs: int, store: Path) -> None:
    many = make_release(tmp_path / "many", {f"k{n:03}": f"kernel {n}".encode() for n in range(150)})
    with serving(many.root) as server:
        many.library(store, server.url).fetch(many.pin, jobs=jobs)
        assert set(server.counts.values()) == {1}
    assert visible_files(store) == all_digests(many)


def test_files_of_different_locks_are_fetched_at_the_same_time(tmp_path: Path, store: Path) -> None:
    few = make_release(tmp_path / "few", {f"k{n}": f"kernel {n}".encode() for n in range(6)})
    all_are_here = threading.Barrier(len(few.files))

    def action(handler: Handler, body: bytes) -> None:
        all_are_here.wait(60)
        ok(handler, body)

    with serving(few.root) as server:
        for name in few.files:
            server.fault(f"/{name}", action)
        few.library(store, server.url).fetch(few.pin, jobs=6)
    assert visible_files(store) == all_digests(few)


def test_two_names_of_equal_bytes_are_fetched_once(tmp_path: Path, store: Path) -> None:
    twins = make_release(tmp_path / "twins", {"a": b"same", "b": b"same", "c": b"other"})
    with serving(twins.root) as server:
        report = twins.library(store, server.url).fetch(twins.pin)
        assert server.count("/a") + server.count("/b") == 1
    assert (report.fetched, report.bytes) == (3, len(b"sameother"))
    assert visible_files(store) == all_digests(twins)


# -- what may pass is tried again, what cannot is not


@pytest.mark.parametrize("action", [status(500), status(503, Retry_After="0"), truncated, reset, hang])
def test_a_fault_that_passes_is_retried(release: Release, server: FaultyServer, store: Path, action: Action) -> None:
    server.fault(NAME, action, ok)
    limits = replace(PATIENT_LIMITS, silence=4.0)
    release.library(store, server.url, limits=limits).fetch(release.pin)
    assert (server.count(NAME), visible_files(store)) == (2, all_digests(release))


@pytest.mark.parametrize("action", [wrong_bytes, short_length])
def test_wrong_bytes_that_turn_right_are_taken(
    release: Release, server: FaultyServer, store: Path, action: Action
) -> None:
    server.fault(NAME, action, ok)
    release.library(store, server.url).fetch(release.pin)
    assert (server.count(NAME), visible_files(store)) == (2, all_digests(release))


@pytest.mark.parametrize(
    ("action", "requests", "kind"),
    [
        (status(404), 1, SourceError),
        (status(403), 1, SourceError),
        (gzip_encoded, 1, SourceError),
        (announced_oversize, 1, SourceError),
        (redirect("ftp://host/x"), 1, SourceError),
        (redirect("?again"), 6, SourceError),
        (status(503, Retry_After="3600"), 1, SourceError),
        (status(500), 4, SourceError),
        (truncated, 4, SourceError),
        (wrong_bytes, 2, CorruptError),
        (short_length, 2, CorruptError),
    ],
)
def test_a_fault_that_stays_costs_so_many_requests_and_the_other_files_arrive(
    release: Release, server: FaultyServer, store: Path, action: Action, requests: int, kind: type[Exception]
) -> None:
    server.fault(NAME, action)
    with pytest.raises(kind, match=NAME):
        release.library(store, server.url).fetch(release.pin)
    assert server.count(NAME) == requests
    assert set(all_digests(release)) - set(visible_files(store)) == {release.digest(NAME)}


def test_retry_after_is_waited_for(release: Release, server: FaultyServer, store: Path) -> None:
    server.fault(NAME, status(503, Retry_After="1"), ok)
    began = time.monotonic()
    release.library(store, server.url).fetch(release.pin)
    assert time.monotonic() - began >= 1.0


@pytest.mark.parametrize(
    ("action", "kind"),
    [(status(503), SourceError), (status(403), SourceError), (wrong_bytes, CorruptError), (gzip_encoded, SourceError)],
)
def test_a_server_that_gives_only_wrong_answers_is_not_asked_for_every_file(
    tmp_path: Path, store: Path, action: Action, kind: type[Exception]
) -> None:
    many = make_release(tmp_path / "many", {f"k{n:03}": f"kernel {n}".encode() for n in range(60)})
    with serving(many.root) as server:
        server.fault("", action)
        server.fault("checksums.txt", ok)
        server.faults = dict(reversed(server.faults.items()))
        with pytest.raises(kind, match="60 of 60 files could not be fetched"):
            many.library(store, server.url).fetch(many.pin, jobs=2)
        assert sum(server.counts.values()) < 30


def test_a_server_that_lacks_many_files_is_asked_for_the_others(tmp_path: Path, store: Path) -> None:
    many = make_release(tmp_path / "many", {f"k{n:03}": f"kernel {n}".encode() for n in range(30)})
    with serving(many.root) as server:
        for n in range(29):
            server.fault(f"k{n:03}", status(404))
        with pytest.raises(SourceError, match="29 of 30 files could not be fetched"):
            many.library(store, server.url).fetch(many.pin, jobs=1)
        assert server.count("k029") == 1


def test_a_damaged_tree_is_asked_for_every_file(tmp_path: Path, store: Path) -> None:
    many = make_release(tmp_path / "many", {f"k{n:03}": f"kernel {n}".encode() for n in range(30)})
    for n in range(29):
        many.file(f"k{n:03}").write_bytes(b"damaged")
    with pytest.raises(CorruptError, match="29 of 30 files could not be fetched"):
        many.library(store, many.root).fetch(many.pin, jobs=1)
    assert Store(store).has(many.digest("k029"))


@pytest.mark.parametrize(
    "action",
    [
        status(404),
        status(500),
        wrong_bytes,
        gzip_encoded,
        redirect("http://["),
        redirect("http://[zz]/x"),
        status(200, Content_Length="9" * 5000),
        drip_chunk_extension,
        endless_trailers,
    ],
)
def test_the_next_source_is_asked_when_one_fails(
    release: Release, server: FaultyServer, store: Path, action: Action
) -> None:
    server.fault(NAME, action)
    limits, policy = replace(PATIENT_LIMITS, window=2.0, least_rate=1000.0), replace(QUICK_POLICY, attempts=2)
    report = release.library(store, server.url, release.root, limits=limits, policy=policy).fetch(release.pin)
    assert report.by_source == {server.url: 2, str(release.root): 1}


def test_the_first_source_that_has_the_bytes_wins(release: Release, server: FaultyServer, store: Path) -> None:
    report = release.library(store, release.root, server.url).fetch(release.pin)
    assert (report.by_source, server.counts) == ({str(release.root): 3}, {})


def test_the_error_names_every_source_with_its_reason(release: Release, server: FaultyServer, store: Path) -> None:
    server.fault(NAME, status(404))
    with pytest.raises(SourceError, match=r"status 404\n.*nothing-here is not a directory"):
        release.library(store, server.url, "/nothing-here").fetch(release.pin)


def test_the_error_without_any_source_says_what_to_install(store: Path, tmp_path: Path) -> None:
    named = make_release(tmp_path / "named", name="trtllm-gen-9.9")
    with pytest.raises(SourceError, match=r"install flashinfer-cubin==9\.9"):
        named.library(store, "package").fetch(named.pin)


def test_a_manifest_that_is_not_the_pinned_one_is_a_pin_error(
    release: Release, server: FaultyServer, store: Path
) -> None:
    server.fault("checksums.txt", wrong_bytes)
    with pytest.raises(PinError, match="not the pinned one"):
        release.library(store, server.url).fetch(release.pin)
    assert visible_files(store) == []


def test_an_archive_is_a_source_for_everything(release: Release, store: Path, tmp_path: Path) -> None:
    archive = zip_tree(release.root, tmp_path / "x.whl")
    assert release.library(store, archive).fetch(release.pin).fetched == 3


def test_a_store_is_a_source_for_everything(release: Release, store: Path, tmp_path: Path) -> None:
    release.library(tmp_path / "first", release.root).fetch(release.pin)
    assert release.library(store, tmp_path / "first").fetch(release.pin).fetched == 3


def test_offline_asks_no_server(release: Release, server: FaultyServer, store: Path) -> None:
    library = release.library(store, server.url, offline=True)
    with pytest.raises(SourceError, match="skipped, the network is disabled"):
        library.fetch(release.pin)
    assert not server.counts


def test_offline_opens_no_socket(release: Release, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    library = release.library(store, "http://host.invalid/", release.root, offline=True)
    assert library.fetch(release.pin).fetched == 3


# -- the store


def test_too_little_room_is_found_before_a_byte_moves(release: Release, server: FaultyServer, store: Path) -> None:
    library = release.library(store, server.url)
    huge = replace(release.pin, bytes=1 << 60)
    with pytest.raises(StoreError, match=r"about 1152921504\.61 GB are needed"):
        library.fetch(huge)
    assert server.count(NAME) == 0


FETCH = """
import sys, time, requests
from pathlib import Path
from tests.artifacts.releases import PATIENT_LIMITS, QUICK_POLICY
from cubin_runtime.artifacts.library import Library
from cubin_runtime.config import Config
from cubin_runtime.errors import CubinRuntimeError
store, pins, source, *start = map(str, sys.argv[1:])
print("ready", flush=True)
while start and not Path(start[0]).exists():
    time.sleep(0.005)
library = Library(Config(Path(store), (source,), (Path(pins),)), limits=PATIENT_LIMITS, policy=QUICK_POLICY)
pin = library.pins.get("made-1.0")
try:
    print(library.fetch(pin, jobs=2))
except CubinRuntimeError as error:
    print(type(error).__name__, error.exit_code, error)
"""


def test_a_disk_that_fills_up_is_one_clear_error(tmp_path: Path) -> None:
    needs_mounts()
    big = make_release(tmp_path / "big", {"one": os.urandom(60_000), "two": os.urandom(60_001)})
    unknown = big.pin_file.read_text().replace("bytes = 120001\n", "bytes = 0\n", 1)
    big.pin_file.write_text(unknown)
    disk = tmp_path / "disk"
    disk.mkdir()
    mounts = f"mount -t tmpfs -o size=100k none {disk}"
    body = FETCH + "print([p.name[:4] for p in Path(store).rglob('*.tmp*')])"
    done = run_child(body, disk / "store", big.pin_file, big.root, mounts=mounts)
    assert "StoreError 8" in done.stdout, done.stderr
    assert "the store is full" in done.stdout
    assert done.stdout.endswith("[]\n")


def test_a_read_only_disk_is_one_clear_error(release: Release, tmp_path: Path) -> None:
    needs_mounts()
    disk = tmp_path / "disk"
    disk.mkdir()
    mounts = f"mount --bind {disk} {disk}; mount -o remount,bind,ro {disk}"
    done = run_child(FETCH, disk / "store", release.pin_file, release.root, mounts=mounts)
    assert "StoreError 8" in done.stdout, done.stderr
    assert "Read-only file system" in done.stdout


def test_a_store_of_another_user_is_one_clear_error(open_place: Path) -> None:
    release = make_release(open_place)
    done = run_child(FETCH, open_place / "store", release.pin_file, release.root, as_user=True)
    assert "StoreError 8" in done.stdout, done.stderr
    assert "Permission denied" in done.stdout


def test_a_store_filled_by_root_in_an_open_folder_takes_an_ordinary_users_files(open_place: Path) -> None:
    release = make_release(open_place)
    before = os.umask(0)
    try:
        release.library(open_place / "store", release.root).fetch(release.pin, [release.path(NAME)])
    finally:
        os.umask(before)
    done = run_child(FETCH, open_place / "store", release.pin_file, release.root, as_user=True)
    assert "fetched=2" in done.stdout, done.stdout + done.stderr


def test_a_store_shared_by_a_group_is_filled_by_its_members_whatever_their_umask(open_place: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder to a group")
    release = make_release(open_place)
    store = open_place / "store"
    store.mkdir()
    os.chown(store, 0, ORDINARY_USER)
    store.chmod(0o2775)
    release.library(store, release.root).fetch(release.pin, [release.path(NAME)])
    done = run_child(FETCH, store, release.pin_file, release.root, as_user=True)
    assert "fetched=2" in done.stdout, done.stdout + done.stderr
    assert release.library(store, release.root).fetch(release.pin).present == 3


def start(release: Release, store: Path, source: str, *signal_file: Path) -> subprocess.Popen[str]:
    return start_python(FETCH, store, release.pin_file, source, *signal_file)


def test_eight_processes_that_start_together_download_once(
    release: Release, server: FaultyServer, store: Path, tmp_path: Path
) -> None:
    for name in release.files:
        server.fault(name, slow(0.3))
    children = [start(release, store, server.url, tmp_path / "go") for _ in range(8)]
    assert [child.stdout.readline() for child in children if child.stdout] == ["ready\n"] * 8
    (tmp_path / "go").touch()
    outputs = [child.communicate(timeout=100) for child in children]
    assert [child.returncode for child in children] == [0] * 8, outputs
    assert set(server.counts.values()) == {1}
    assert len(server.counts) == 4
    assert visible_files(store) == all_digests(release)


def test_a_slow_holder_that_shows_progress_is_waited_for(release: Release, server: FaultyServer, store: Path) -> None:
    server.fault(NAME, steady(6.0))
    policy = replace(QUICK_POLICY, lock_give_up=4.0, lock_touch=0.1)
    paths = [release.path(NAME)]
    libraries = [release.library(store, server.url, policy=policy) for _ in range(2)]
    libraries[0].manifest(release.pin)
    threads = [threading.Thread(target=library.fetch, args=(release.pin, paths)) for library in libraries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (server.count(NAME), release.digest(NAME) in visible_files(store)) == (1, True)


def test_a_process_killed_in_the_middle_leaves_nothing_visible_and_the_next_completes(
    release: Release, server: FaultyServer, store: Path
) -> None:
    server.fault(NAME, hang)
    child = start(release, store, server.url)
    wait_until(lambda: server.count(NAME) > 0)
    workers = children_of(child.pid)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    wait_until(lambda: not any(map(is_running, workers)))  # while one runs, its temporary is no leftover
    assert release.digest(NAME) not in visible_files(store)
    server.fault(NAME, ok)
    release.library(store, server.url).fetch(release.pin)
    assert visible_files(store) == all_digests(release)


def test_an_interrupt_ends_soon_and_leaves_no_temporary(release: Release, server: FaultyServer, store: Path) -> None:
    server.fault(NAME, hang)
    child = start(release, store, server.url)
    wait_until(lambda: server.count(NAME) > 0)
    os.kill(child.pid, signal.SIGINT)
    _, errors = child.communicate(timeout=90)  # less than the server hangs
    assert "KeyboardInterrupt" in errors
    assert set(visible_files(store)) < set(all_digests(release))


@pytest.mark.parametrize(
    ("attempt", "retry_after", "low", "high"),
    [(0, None, 0.375, 0.625), (1, None, 0.75, 1.25), (2, 3.0, 3.0, 3.5)],
)
def test_waits_double_or_are_what_the_server_says_and_a_random_part_more(
    attempt: int, retry_after: float | None, low: float, high: float
) -> None:
    delay = FetchPolicy().delay(attempt, retry_after)
    assert delay is not None
    assert low <= delay <= high


@pytest.mark.parametrize(("attempt", "retry_after"), [(3, None), (3, 1.0), (0, 61.0)])
def test_no_wait_means_no_further_attempt(attempt: int, retry_after: float | None) -> None:
    assert FetchPolicy().delay(attempt, retry_after) is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("threads", [0, 1])
def test_a_fetch_takes_as_many_threads_as_the_system_gives(
    release: Release, store: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    refuse_threads(monkeypatch, threads)
    assert release.library(store, release.root).fetch(release.pin, jobs=3).fetched == 3
    assert visible_files(store) == all_digests(release)
