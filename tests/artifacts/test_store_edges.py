"""Edges of the store: what the file system says, sizes at their limits, and what is asked of the disk."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cubin_runtime.artifacts import manifest
from cubin_runtime.artifacts.pins.pin import format_pin, parse_pins
from cubin_runtime.artifacts.pins.pin_set import PinSet, refuse_trust_in_store
from cubin_runtime.artifacts.store.store import Store
from cubin_runtime.artifacts.store.store_errors import store_error
from cubin_runtime.config import Config
from cubin_runtime.errors import CorruptError, PinError, StoreError

DATA = b"kernel" * 100
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def filled(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    store.put(DIGEST, DATA)
    return store


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_or_a_quota_that_is_used_up_is_called_full(number: int) -> None:
    assert "the store is full" in str(store_error(OSError(number, "x"), "here"))


def test_the_file_system_is_asked_to_write_everything_down(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def syncfs(descriptor: int) -> int:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(syncfs=syncfs))
    filled.sync()
    assert synced == [str(filled.root)]


def test_a_store_is_writable_only_if_a_file_can_be_made(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def read_only(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *arguments, **options)

    filled.check_writable()
    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(StoreError, match="is not accessible"):
        filled.check_writable()


@pytest.mark.parametrize(("files", "fits"), [(2, True), (3, False)])
def test_files_that_cannot_be_made_are_noticed_before_anything_is_written(
    filled: Store, monkeypatch: pytest.MonkeyPatch, files: int, fits: bool
) -> None:
    status = SimpleNamespace(f_bavail=1 << 30, f_frsize=4096, f_files=10, f_favail=2)
    monkeypatch.setattr(os, "statvfs", lambda _: status)
    if fits:
        filled.check_room(1, files)
        return
    with pytest.raises(StoreError, match="3 files are needed, 2 can be created"):
        filled.check_room(1, files)


@pytest.mark.parametrize(("limit", "size"), [(len(DATA), len(DATA)), (len(DATA) - 1, None)])
def test_the_quick_look_of_a_verification_keeps_to_the_limit(filled: Store, limit: int, size: int | None) -> None:
    assert list(filled.matches([DIGEST], limit, bytearray(64))) == [size]


def test_a_manifest_may_have_the_largest_size_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    data = f"{DIGEST}  a.cubin\n".encode()
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", len(data))
    folder = PinSet.from_files(None).get("trtllm-gen-0.6.13").path
    assert len(manifest.parse_manifest(data, folder, "x").digests) == 1
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", len(data) - 1)
    with pytest.raises(CorruptError):
        manifest.parse_manifest(data, folder, "x")


@pytest.mark.parametrize("odd", ["\x7f", "\x00", "\n", '"', "\\", "é"])
def test_any_character_of_a_source_survives_in_a_pin(odd: str) -> None:
    from dataclasses import replace

    pin = replace(PinSet.from_files(None).get("trtllm-gen-0.6.13"), sources=(f"/a{odd}b",))
    assert parse_pins(format_pin(pin).encode(), "x") == (pin,)


def test_keys_below_the_home_folder_are_looked_for_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(PinError, match="is inside the store"):
        refuse_trust_in_store(Config(store=tmp_path / "store", pin_keys=("~/store/key.pub",)))


def test_a_link_into_the_store_is_no_way_around(tmp_path: Path, filled: Store) -> None:
    (tmp_path / "pins.toml").symlink_to(filled.root / "pins.toml")
    with pytest.raises(PinError, match="is inside the store"):
        refuse_trust_in_store(Config(store=filled.root, pin_files=(tmp_path / "pins.toml",)))
