"""Files of users that are changed whole or not at all, one process at a time, and by root without taking them over."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from cubin_runtime.artifacts.atomic_write import changing, replace_file, why_not_changed
from cubin_runtime.artifacts.store.locks import ShardLock
from cubin_runtime.artifacts.store.store import Store
from tests.artifacts.children import ORDINARY_USER, run_child

DATA = b"kernel"
DIGEST = "48a48d9d6e7c6a7ed7f9d9d0b9d6bcd6e4d5e1b2a4dfb1d6b0b5a2a1e6e5b8a9"


@pytest.fixture
def home(open_place: Path) -> Iterator[Path]:
    """The home of an ordinary user, in which root works with a umask that is open to nobody."""
    if os.getuid() != 0:
        pytest.skip("only root can give files away")
    folder = open_place / "home"
    folder.mkdir()
    os.chown(folder, ORDINARY_USER, ORDINARY_USER)
    before = os.umask(0o077)
    yield folder
    os.umask(before)


def test_what_root_changes_in_a_home_its_user_can_change_again(home: Path) -> None:
    file = home / ".config" / "cubin-runtime" / "pins.toml"
    with changing(file):
        replace_file(file, b"root's")
    body = """
    import sys
    from pathlib import Path
    from cubin_runtime.artifacts.atomic_write import changing, replace_file, why_not_changed
    file = Path(sys.argv[1])
    print(why_not_changed(file))
    with changing(file):
        replace_file(file, file.read_bytes() + b" and the user's")
    """
    done = run_child(body, file, as_user=True, before="import filelock\n")
    assert (done.stdout, done.stderr) == ("None\n", "")
    assert file.read_bytes() == b"root's and the user's"


def test_what_root_fills_in_a_home_its_user_can_fill_further(home: Path) -> None:
    store = home / ".cache" / "cubin-runtime" / "store"
    Store(store).put(DIGEST, DATA)
    lock = ShardLock(store, "4")
    assert lock.try_take()
    lock.release()
    body = f"""
    import logging, sys
    from pathlib import Path
    from cubin_runtime.artifacts.store.locks import ShardLock
    from cubin_runtime.artifacts.store.store import Store
    logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
    store = Path(sys.argv[1])
    Store(store).put({DIGEST!r}, {DATA!r})
    print(ShardLock(store, "4").try_take())
    """
    done = run_child(body, store, as_user=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_a_file_of_another_that_a_user_planted_as_a_lock_is_not_given_to_the_user(home: Path) -> None:
    victim = home.parent / "victim"
    victim.write_bytes(b"")
    os.link(victim, home / ".pins.toml.lock")
    with changing(home / "pins.toml"):
        pass
    assert victim.stat().st_uid == 0


def test_a_file_keeps_its_owner_and_mode(home: Path) -> None:
    file = home / "pins.toml"
    file.write_bytes(b"")
    file.chmod(0o640)
    replace_file(file, b"new")
    assert (file.stat().st_uid, stat.S_IMODE(file.stat().st_mode)) == (0, 0o640)


def test_a_lock_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / ".pins.toml.lock").symlink_to("elsewhere")
    with pytest.raises(OSError, match=r"Too many levels.*/\.pins\.toml\.lock"), changing(tmp_path / "pins.toml"):
        pass
    assert why_not_changed(tmp_path / "pins.toml") == f"{tmp_path}/.pins.toml.lock cannot be opened"


def test_a_file_where_a_folder_is_needed_is_named_beforehand(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert why_not_changed(tmp_path / "a" / "pins.toml") is None
    reason = why_not_changed(tmp_path / "file" / "a" / "pins.toml")
    assert reason == f"{tmp_path}/file is not a folder that can be written"
