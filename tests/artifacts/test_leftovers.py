"""What killed processes leave in a store or a mirror goes once it is old, and nothing that is in use goes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cubin_runtime.artifacts.store.folders import open_folder
from cubin_runtime.artifacts.store.leftovers import remove_old_temporaries, remove_quarantined, remove_temporaries

DAYS = 24 * 3600.0
OLD, YOUNG = (f".tmp-cubin-runtime-host-{n}-{n:016x}" for n in (1, 2))


@pytest.fixture
def two_days_later(monkeypatch: pytest.MonkeyPatch) -> float:
    """What the clock says from now on: a file's time of change cannot be set, so the clock moves."""
    later = time.time() + 2 * DAYS
    monkeypatch.setattr(time, "time", lambda: later)
    return later


def make_temporaries(folder: Path, later: float) -> None:
    folder.mkdir(parents=True)
    for name in (OLD, YOUNG):
        (folder / name).write_bytes(b"half")
    os.utime(folder / YOUNG, (later - 60, later - 60))


def names_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def in_a_store(root: Path) -> Path:
    remove_temporaries(root)
    return root / "sha256" / "ab"


def in_a_mirror(root: Path) -> Path:
    folder = root / "sha256" / "ab"
    with open_folder(folder) as opened:
        remove_old_temporaries(opened)
    return folder


@pytest.mark.parametrize("clean", [in_a_store, in_a_mirror])
def test_old_temporaries_go_and_young_ones_stay(
    tmp_path: Path, two_days_later: float, clean: Callable[[Path], Path]
) -> None:
    make_temporaries(tmp_path / "sha256" / "ab", two_days_later)
    assert names_in(clean(tmp_path)) == [YOUNG]


def test_outside_a_store_only_regular_files_of_this_user_go(
    tmp_path: Path, two_days_later: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "www"
    folder.mkdir()
    (folder / "target").write_bytes(b"")
    (folder / OLD).symlink_to("target")
    with open_folder(folder) as opened:
        remove_old_temporaries(opened)
        (folder / OLD).unlink()
        (folder / OLD).write_bytes(b"half")
        with monkeypatch.context() as patched:
            patched.setattr(os, "geteuid", lambda: 4711)
            remove_old_temporaries(opened)
        assert names_in(folder) == [OLD, "target"]
        remove_old_temporaries(opened)
    assert names_in(folder) == ["target"]


@pytest.mark.parametrize("name", ["notes", "0" * 64, "0" * 64 + "-x", ".tmp-notes"])
def test_what_the_package_did_not_name_stays_in_quarantine_and_among_objects(
    tmp_path: Path, two_days_later: float, name: str
) -> None:
    for folder in ("quarantine", "sha256/ab"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / name).write_bytes(b"mine")
    assert (remove_temporaries(tmp_path), remove_quarantined(tmp_path, older_than=0)) == ([], [])


def test_leftovers_that_cannot_be_removed_are_nothing_that_an_export_fails_for(
    tmp_path: Path, two_days_later: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    (tmp_path / OLD).write_bytes(b"half")
    monkeypatch.setattr(os, "unlink", refuse)
    with open_folder(tmp_path) as opened:
        remove_old_temporaries(opened)
    assert names_in(tmp_path) == [OLD]


def test_an_old_object_that_was_just_moved_aside_is_no_old_temporary(tmp_path: Path) -> None:
    folder = tmp_path / "sha256" / "ab"
    folder.mkdir(parents=True)
    (folder / "object").write_bytes(b"kernel")
    os.utime(folder / "object", (0, 0))
    (folder / "object").rename(folder / OLD)
    remove_temporaries(tmp_path)
    assert names_in(folder) == [OLD]


@pytest.mark.parametrize("link", ["sha256", "sha256/ab"])
def test_nothing_behind_a_link_goes(tmp_path: Path, two_days_later: float, link: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    make_temporaries(elsewhere / "ab", two_days_later)
    target = elsewhere if link == "sha256" else elsewhere / "ab"
    store = tmp_path / "store"
    (store / link).parent.mkdir(parents=True)
    (store / link).symlink_to(target)
    if link == "sha256":
        with pytest.raises(NotADirectoryError):
            remove_temporaries(store)
    else:
        assert remove_temporaries(store) == []
    assert names_in(elsewhere / "ab") == [OLD, YOUNG]


def test_the_temporary_of_a_running_process_of_this_host_stays_whatever_its_age(tmp_path: Path) -> None:
    folder = tmp_path / "sha256" / "ab"
    folder.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        name = f".tmp-cubin-runtime-{socket.gethostname()[:64]}-{running.pid}-{255:016x}"
        (folder / name).write_bytes(b"half")
        assert remove_temporaries(tmp_path, older_than=0) == []
        running.communicate()
    assert remove_temporaries(tmp_path, older_than=0) == [4]
