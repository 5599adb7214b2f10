"""What a fetch does with the locks of a store, seen from outside."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from cubin_runtime.artifacts.fetch.dispatch import Dispatch
from cubin_runtime.artifacts.fetch.report import FetchReport, report_of
from cubin_runtime.artifacts.fetch.worker_pool import Outcome
from cubin_runtime.artifacts.sources.source import FileRequest
from cubin_runtime.artifacts.store.locks import LOCKS, ShardLock
from cubin_runtime.artifacts.store.store import Store
from cubin_runtime.errors import SourceError, StoreError
from tests.artifacts.fleet import wait_until
from tests.artifacts.releases import QUICK_POLICY, Release, make_release
from tests.artifacts.serving import FaultyServer, hang

NAME = "fmha/prefill.cubin"
SHARDS = "0123456789abcdef"
PATIENT = replace(QUICK_POLICY, lock_give_up=60.0)


@pytest.fixture
def many(tmp_path: Path) -> Release:
    """Enough files that every lock covers some."""
    return make_release(tmp_path / "many", {f"k{n:03}.bin": str(n).encode() for n in range(120)})


def test_a_fetch_that_fails_gives_all_its_locks_back(
    many: Release, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = many.library(store, many.root)
    library.manifest(many.pin)
    library.store.put(many.pin.manifest_sha256, library.manifest_bytes(many.pin))

    def fail(*_: object) -> None:
        raise StoreError("full")

    monkeypatch.setattr(Store, "put", fail)
    with pytest.raises(StoreError):
        library.fetch(many.pin)
    assert all(ShardLock(store, shard).try_take() for shard in SHARDS)


def test_a_fetch_takes_no_more_locks_than_it_has_work_for(
    many: Release, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, most = set(), []
    take, release = ShardLock.try_take, ShardLock.release

    def watched_take(lock: ShardLock) -> bool:
        taken = take(lock)
        if taken:
            held.add(lock)
            most.append(len(held))
        return taken

    def watched_release(lock: ShardLock) -> None:
        held.discard(lock)
        release(lock)

    monkeypatch.setattr(ShardLock, "try_take", watched_take)
    monkeypatch.setattr(ShardLock, "release", watched_release)
    many.library(store, many.root).fetch(many.pin, jobs=1)
    assert 1 <= max(most) <= 4


def test_a_fetch_begins_with_a_random_lock_and_goes_round_from_there(
    many: Release, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    take = ShardLock.try_take

    def watched_take(lock: ShardLock) -> bool:
        tried.append(lock._name.removesuffix(".lock"))
        return take(lock)

    library = many.library(store, many.root)
    library.store.put(many.pin.manifest_sha256, library.manifest_bytes(many.pin))
    monkeypatch.setattr("secrets.randbelow", lambda limit: 5)
    monkeypatch.setattr(ShardLock, "try_take", watched_take)
    library.fetch(many.pin)
    assert "".join(dict.fromkeys(tried)) == "56789abcdef01234"


def test_who_waits_for_a_lock_looks_into_the_store_more_rarely_than_at_the_lock(
    release: Release, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = release.library(store, release.root)
    library.store.put(release.pin.manifest_sha256, b"makes the store")
    digest = release.digest(NAME)
    held, looked, clock = ShardLock(store, digest[0]), [], [100.0]
    assert held.try_take()
    present = Store.present

    def watched_present(of: Store, digests: Iterable[str]) -> set[str]:
        looked.append(clock[-1])
        return present(of, digests)

    monkeypatch.setattr(Store, "present", watched_present)
    monkeypatch.setattr("time.monotonic", lambda: clock[-1])
    waiting = Dispatch(
        library.store,
        [FileRequest(release.path(NAME), release.pin.path, digest, 1 << 20)],
        hire=lambda: pytest.fail("there is nothing to do"),
        policy=PATIENT,
        on_outcome=None,
        on_beat=None,
    )
    for now in (100.0, 100.05, 100.1, 100.15, 100.25):
        clock.append(now)
        assert waiting._take_shards()
    assert looked == [100.0, 100.25]
    held.release()


def test_a_fetch_ends_when_another_process_published_everything_though_that_holds_its_locks(
    release: Release, store: Path
) -> None:
    library = release.library(store, release.root, policy=PATIENT)
    library.store.put(release.pin.manifest_sha256, library.manifest_bytes(release.pin))
    locks = [ShardLock(store, shard) for shard in SHARDS]
    assert all(lock.try_take() for lock in locks)
    reports: list[FetchReport] = []
    told: list[int] = []
    fetching = threading.Thread(target=lambda: reports.append(library.fetch(release.pin, progress=told.append)))
    fetching.start()
    wait_until(lambda: told.count(0) > 1)  # time passes while nothing comes
    for name, data in release.files.items():
        library.store.put(release.digest(name), data)
    fetching.join(60)
    assert not fetching.is_alive()
    assert (reports[0].present, reports[0].fetched) == (len(release.files), 0)
    assert sum(told) == len(release.files)
    for lock in locks:
        lock.release()


def test_a_holder_to_whom_nothing_comes_does_not_seem_alive(
    release: Release, store: Path, server: FaultyServer
) -> None:
    policy = replace(QUICK_POLICY, attempts=1, lock_touch=0.05)
    server.fault("prefill.cubin", hang)
    library = release.library(store, server.url, policy=policy)
    path = release.path("fmha/prefill.cubin")
    turns: list[int] = []

    def fetch() -> None:
        with suppress(SourceError):
            library.fetch(release.pin, [path], progress=turns.append)

    def wait_for_turns(count: int) -> None:
        """Each turn lets ``lock_touch`` seconds pass."""
        last = len(turns) + count
        wait_until(lambda: len(turns) >= last)

    fetching = threading.Thread(target=fetch)
    fetching.start()
    wait_until(lambda: server.count("prefill.cubin") > 0)
    wait_for_turns(6)
    lock = store / LOCKS / f"{release.digest('fmha/prefill.cubin')[0]}.lock"
    touched = os.stat(lock).st_atime_ns
    wait_for_turns(10)
    assert os.stat(lock).st_atime_ns == touched
    server.released.set()
    fetching.join()


def test_one_file_that_no_source_delivered_says_what_to_install(release: Release) -> None:
    pin = replace(release.pin, name="hopper-1.0")
    wanted = FileRequest(release.path("kernels.bin"), pin.path, "0" * 64, 100)
    failed = Outcome(wanted, error=SourceError("no"))
    with pytest.raises(SourceError, match=r"no\n  'pip install cubin-runtime-kernels==1\.0"):
        report_of(pin, [wanted], [wanted], 0, [failed], 1.0, False)
