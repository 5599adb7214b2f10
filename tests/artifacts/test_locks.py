"""The store's locks: they save double work, and nobody waits for one that does not work or brings nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cubin_runtime.artifacts.releases.gc import collect
from cubin_runtime.artifacts.store.locks import ShardLock, shard_of
from cubin_runtime.artifacts.store.store import Store
from cubin_runtime.errors import StoreError
from tests.artifacts.releases import QUICK_POLICY, Release, make_release, visible_files
from tests.artifacts.serving import FaultyServer

NAME = "fmha/prefill.cubin"


def all_digests(release: Release) -> list[str]:
    return sorted({*map(release.digest, release.files), release.pin.manifest_sha256})


@contextmanager
def held_elsewhere(store: Path, release: Release) -> Iterator[Path]:
    """The lock of one object, held by somebody else's open file."""
    file = store / "locks" / f"{shard_of(release.digest(NAME))}.lock"
    with file.open("a+") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield file


def test_a_holder_that_shows_no_progress_is_not_waited_for_for_ever(
    release: Release, server: FaultyServer, store: Path
) -> None:
    library = release.library(store, server.url, policy=replace(QUICK_POLICY, lock_give_up=0.3))
    library.fetch(release.pin, [release.path("kernels.bin")])
    with held_elsewhere(store, release):
        assert library.fetch(release.pin).present == 1
    assert visible_files(store) == all_digests(release)


def test_a_waiter_goes_on_when_another_process_has_published(
    release: Release, server: FaultyServer, store: Path
) -> None:
    library = release.library(store, server.url, policy=replace(QUICK_POLICY, lock_give_up=60.0))
    library.fetch(release.pin, [release.path("kernels.bin"), release.path("fmha/decode.cubin")])
    with held_elsewhere(store, release):
        Store(store).put(release.digest(NAME), release.files[NAME])
        assert library.fetch(release.pin).fetched == 0


def test_a_holder_that_touches_its_lock_is_waited_for(tmp_path: Path) -> None:
    holder, waiter = ShardLock(tmp_path, "a"), ShardLock(tmp_path, "a", give_up=0.2)
    assert holder.try_take()
    deadline = time.monotonic() + 0.6
    taken = False
    while time.monotonic() < deadline:
        holder.touch()
        taken = taken or waiter.try_take()
        time.sleep(0.02)
    assert not taken


def test_a_holder_that_touches_its_lock_in_vain_is_not_waited_for_for_ever(
    release: Release, server: FaultyServer, store: Path
) -> None:
    policy = replace(QUICK_POLICY, lock_give_up=60.0, lock_longest_wait=0.5)
    library = release.library(store, server.url, policy=policy)
    library.fetch(release.pin, [release.path("kernels.bin")])
    done = threading.Event()
    with held_elsewhere(store, release) as file:

        def touch() -> None:
            while not done.wait(0.02):
                os.utime(file)

        toucher = threading.Thread(target=touch)
        toucher.start()
        assert library.fetch(release.pin).fetched == 2
        done.set()
        toucher.join()


def test_a_lock_is_free_after_its_release(tmp_path: Path) -> None:
    holder, waiter = ShardLock(tmp_path, "a"), ShardLock(tmp_path, "a", give_up=60.0)
    assert holder.try_take()
    assert not waiter.try_take()
    holder.release()
    assert waiter.try_take()
    waiter.release()


def test_a_lock_is_free_after_its_release_though_a_forked_child_has_its_file(tmp_path: Path) -> None:
    holder, waiter = ShardLock(tmp_path, "a"), ShardLock(tmp_path, "a")
    assert holder.try_take()
    assert holder._descriptor is not None
    of_a_child = os.dup(holder._descriptor)
    holder.release()
    assert waiter.try_take()
    waiter.release()
    os.close(of_a_child)


def test_lock_files_are_at_most_sixteen_and_stay(tmp_path: Path, store: Path) -> None:
    many = make_release(tmp_path / "many", {f"k{n:03}": f"kernel {n}".encode() for n in range(200)})
    many.library(store, many.root).fetch(many.pin)
    assert len(list((store / "locks").iterdir())) == 16


def test_locks_that_cannot_be_made_do_not_matter(release: Release, store: Path) -> None:
    store.mkdir()
    (store / "locks").write_text("in the way")
    assert release.library(store, release.root).fetch(release.pin).fetched == 3


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told_at_once(
    release: Release, store: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    library = release.library(store, release.root)
    began = time.monotonic()
    library.fetch(release.pin)
    collect(library, [release.pin])
    assert time.monotonic() - began < QUICK_POLICY.lock_give_up / 2
    assert visible_files(store) == []


def test_a_store_made_read_only_by_its_modes_is_still_roots(release: Release, store: Path) -> None:
    library = release.library(store, release.root)
    library.fetch(release.pin, [release.path(NAME)])
    subprocess.run(["chmod", "-R", "a-w", store], check=True)
    if os.access(store, os.W_OK):
        assert library.fetch(release.pin).fetched == 2
        assert collect(library, [release.pin]).removed == 4
    else:
        with pytest.raises(StoreError, match="the store is not accessible"):
            library.fetch(release.pin)


def test_a_lock_that_may_only_be_read_is_held_all_the_same(release: Release, store: Path) -> None:
    release.library(store, release.root).fetch(release.pin)
    file = store / "locks" / f"{shard_of(release.digest(NAME))}.lock"
    file.chmod(0o444)
    holder, waiter = (ShardLock(store, shard_of(release.digest(NAME)), give_up=60.0) for _ in range(2))
    assert (holder.try_take(), waiter.try_take()) == (True, False)
    holder.release()


def test_a_folder_of_locks_that_is_a_link_is_not_followed(release: Release, store: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    store.mkdir()
    (store / "locks").symlink_to(tmp_path / "elsewhere")
    release.library(store, release.root).fetch(release.pin)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_symlink_planted_as_a_lock_is_not_followed(release: Release, store: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("keep me")
    (store / "locks").mkdir(parents=True)
    for digit in "0123456789abcdef":
        (store / "locks" / f"{digit}.lock").symlink_to(victim)
    release.library(store, release.root).fetch(release.pin)
    assert (victim.read_text(), visible_files(store)) == ("keep me", all_digests(release))
