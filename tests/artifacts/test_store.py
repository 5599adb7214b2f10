from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cubin_runtime.artifacts.bounded_read import NotRegularError, read_bounded
from cubin_runtime.artifacts.store.store import QUARANTINE, Store
from cubin_runtime.errors import CorruptError, MissingError, StoreError
from tests.artifacts.children import ORDINARY_USER, needs_mounts, run_child
from tests.artifacts.releases import sha256, visible_files

DATA = b"bytes of a kernel" * 1000
DIGEST = sha256(DATA)
OTHER = "0" * 64
LIMIT = 1 << 20
READ = "cubin_runtime.artifacts.store.store.read_bounded"


@pytest.fixture
def filled(tmp_path: Path) -> Store:
    return filled_store(tmp_path / "store")


def filled_store(root: Path) -> Store:
    store = Store(root)
    store.put(DIGEST, DATA)
    return store


def damage(store: Store, data: bytes = b"damaged") -> None:
    place = store.object_path(DIGEST)
    place.unlink()
    place.write_bytes(data)


def quarantined(store: Store) -> list[str]:
    folder = store.root / "quarantine"
    return [file.name.split("-")[0] for file in folder.iterdir()] if folder.exists() else []


def test_what_was_put_is_read_back(filled: Store) -> None:
    assert filled.read(DIGEST, LIMIT) == DATA


def test_an_object_is_read_only_for_everyone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        Store(tmp_path).put(DIGEST, DATA)
    finally:
        os.umask(before)
    assert stat.S_IMODE(Store(tmp_path).object_path(DIGEST).stat().st_mode) == 0o444


def test_directories_are_open_but_for_the_umask_and_keep_setgid(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(0o2777)
    before = os.umask(0o002)
    try:
        Store(root).put(DIGEST, DATA)
    finally:
        os.umask(before)
    assert stat.S_IMODE(Store(root).object_path(DIGEST).parent.stat().st_mode) == 0o2775


def test_what_is_made_in_a_folder_shared_by_its_group_is_shared_whatever_the_umask(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(0o2775)
    before = os.umask(0o022)
    try:
        Store(root).put(DIGEST, DATA)
    finally:
        os.umask(before)
    folder = Store(root).object_path(DIGEST).parent
    assert [stat.S_IMODE(place.stat().st_mode) for place in (folder, folder.parent)] == [0o2775] * 2


def test_a_store_that_everyone_may_write_is_used_like_any_other(filled: Store) -> None:
    filled.root.chmod(0o777)
    assert filled.read(DIGEST, LIMIT) == DATA


def test_nothing_but_the_object_is_left_after_a_put(filled: Store) -> None:
    assert visible_files(filled.root) == [DIGEST]


def test_putting_an_object_again_is_harmless(filled: Store) -> None:
    filled.put(DIGEST, DATA)
    assert filled.read(DIGEST, LIMIT) == DATA


def test_an_absent_object_is_missing(filled: Store) -> None:
    with pytest.raises(MissingError, match=OTHER):
        filled.read(OTHER, LIMIT)


def test_a_store_that_does_not_exist_has_nothing_and_is_not_made_by_looking(tmp_path: Path) -> None:
    store = Store(tmp_path / "none")
    with pytest.raises(MissingError):
        store.read(DIGEST, LIMIT)
    assert not store.root.exists()


def test_presence_trusts_the_name_for_few_and_for_many(filled: Store) -> None:
    damage(filled)
    many = {f"{number:064x}" for number in range(100)}
    assert filled.has(DIGEST)
    assert filled.present([DIGEST, OTHER]) == {DIGEST}
    assert filled.present(many | {DIGEST}) == {DIGEST}


def test_damaged_bytes_are_never_handed_over_and_are_moved_aside(filled: Store) -> None:
    damage(filled)
    with pytest.raises(CorruptError, match="read twice and moved to"):
        filled.read(DIGEST, LIMIT)
    assert (filled.has(DIGEST), quarantined(filled)) == (False, [DIGEST])


def test_bytes_over_the_limit_are_refused_and_left_as_another_release_may_need_them(filled: Store) -> None:
    with pytest.raises(CorruptError, match="at most 10 are allowed"):
        filled.read(DIGEST, 10)
    assert (filled.read(DIGEST, LIMIT), quarantined(filled)) == (DATA, [])


def test_wrong_bytes_over_the_limit_are_moved_aside(filled: Store) -> None:
    damage(filled, DATA + b"and more")
    with pytest.raises(CorruptError, match="read twice and moved to"):
        filled.read(DIGEST, len(DATA))
    assert quarantined(filled) == [DIGEST]


def test_a_reader_that_may_not_repair_leaves_damage_in_place(filled: Store) -> None:
    damage(filled)
    with pytest.raises(CorruptError, match="left in place"):
        filled.read(DIGEST, LIMIT, repair=False)
    assert filled.has(DIGEST)


def test_bytes_that_are_right_at_the_second_look_are_taken(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter([b"stale page"])
    monkeypatch.setattr(READ, lambda *a: next(calls, None) or read_bounded(*a))
    assert filled.read(DIGEST, LIMIT) == DATA


def test_a_file_that_another_process_replaced_is_not_moved_aside(
    filled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(filled)

    def read_and_replace(*arguments: object) -> bytes:
        filled.put(DIGEST, DATA)
        return b"what stood there before"

    monkeypatch.setattr(READ, read_and_replace)
    with pytest.raises(CorruptError, match="left in place"):
        filled.read(DIGEST, LIMIT)
    assert (filled.has(DIGEST), quarantined(filled)) == (True, [])


@pytest.mark.timeout(20)
def test_a_fifo_in_the_store_is_an_error_and_never_blocks(filled: Store) -> None:
    filled.object_path(DIGEST).unlink()
    os.mkfifo(filled.object_path(DIGEST))
    with pytest.raises(NotRegularError, match="is a FIFO"):
        filled.read(DIGEST, LIMIT)


def test_a_symlink_in_the_store_is_an_error_even_to_the_right_bytes(filled: Store, tmp_path: Path) -> None:
    place = filled.object_path(DIGEST)
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotRegularError, match="is a symbolic link"):
        filled.read(DIGEST, LIMIT)


def test_a_directory_at_an_objects_name_is_an_error_for_reader_and_writer(filled: Store) -> None:
    filled.object_path(DIGEST).unlink()
    filled.object_path(DIGEST).mkdir()
    with pytest.raises(NotRegularError, match="is a directory"):
        filled.read(DIGEST, LIMIT)
    with pytest.raises(StoreError):
        filled.put(DIGEST, DATA)
    assert visible_files(filled.root) == []


def test_a_symlinked_folder_inside_the_store_is_not_followed(filled: Store, tmp_path: Path) -> None:
    folder = filled.object_path(DIGEST).parent
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotRegularError):
        filled.read(DIGEST, LIMIT)
    with pytest.raises(NotRegularError):
        filled.put(DIGEST, DATA)


@pytest.mark.parametrize("number", [1, 100])
@pytest.mark.parametrize("link", ["sha256", "prefix", "object"])
def test_nothing_behind_a_link_is_present(filled: Store, tmp_path: Path, link: str, number: int) -> None:
    place = filled.object_path(DIGEST)
    linked = {"sha256": place.parent.parent, "prefix": place.parent, "object": place}[link]
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    many = {f"{DIGEST[:2]}{n:062x}" for n in range(number)}
    found, odd = filled.look(many | {DIGEST})
    assert (filled.has(DIGEST), found, DIGEST in odd) == (False, set(), True)


def test_a_store_that_cannot_be_looked_into_is_an_error_and_not_an_absence(
    filled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **named: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(StoreError, match="the store is not accessible"):
        filled.present([DIGEST])


def test_an_object_is_put_although_somebody_cleans_up_meanwhile(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real, lost = os.rename, []

    def rename(source: str, target: str, **folders: int) -> None:
        if not lost:
            lost.append(source)
            os.unlink(source, dir_fd=folders["src_dir_fd"])
        real(source, target, **folders)

    monkeypatch.setattr("os.rename", rename)
    filled.put(DIGEST, DATA)
    assert (len(lost), visible_files(filled.root)) == (1, [DIGEST])


def test_the_root_itself_may_be_a_symlink(filled: Store, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(filled.root)
    assert Store(tmp_path / "link").read(DIGEST, LIMIT) == DATA


def test_putting_over_a_planted_symlink_replaces_the_link_and_not_its_target(filled: Store, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"keep me")
    filled.object_path(DIGEST).unlink()
    filled.object_path(DIGEST).symlink_to(victim)
    filled.put(DIGEST, DATA)
    assert (victim.read_bytes(), filled.read(DIGEST, LIMIT)) == (b"keep me", DATA)


def test_a_name_that_is_no_digest_never_reaches_the_file_system(filled: Store) -> None:
    with pytest.raises(ValueError, match="64 lowercase hex"):
        filled.object_path("../../etc/passwd")


def test_too_little_room_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with pytest.raises(StoreError, match=r"about 1152921504.61 GB are needed, [\d.]+ GB are free"):
        store.check_room(1 << 60, 1)
    assert not store.root.exists()


PUT = f"""
import sys
from pathlib import Path
from cubin_runtime.artifacts.store.store import Store
from cubin_runtime.errors import StoreError
store = Store(Path(sys.argv[1]))
data = {DATA!r}
try:
    store.put({DIGEST!r}, data)
except StoreError as error:
    print(error)
print(sorted(p.name for p in store.root.rglob('*') if p.is_file()))
"""


def test_a_store_of_another_user_is_read_but_a_put_is_a_clear_error(open_place: Path) -> None:
    filled = filled_store(open_place / "store")
    done = run_child(PUT, filled.root, as_user=True)
    assert "the store is not accessible (Permission denied)" in done.stdout, done.stderr
    assert f"['{DIGEST}']" in done.stdout


def test_an_ordinary_user_reads_what_root_put_and_moves_nothing(open_place: Path) -> None:
    filled = filled_store(open_place / "store")
    damage(filled)
    body = f"""
    import sys
    from pathlib import Path
    from cubin_runtime.artifacts.store.store import Store
    from cubin_runtime.errors import CorruptError
    try:
        Store(Path(sys.argv[1])).read({DIGEST!r}, 1 << 20)
    except CorruptError as error:
        print(error)
    """
    done = run_child(body, filled.root, as_user=True)
    assert "left in place" in done.stdout, done.stderr
    assert filled.has(DIGEST)


READ_AS_USER = f"""
import os, sys
from pathlib import Path
from cubin_runtime.artifacts.store.store import Store
from cubin_runtime.errors import CorruptError
os.umask(0o077)
try:
    Store(Path(sys.argv[1])).read({DIGEST!r}, 1 << 20)
except CorruptError as error:
    print(error)
"""


def test_a_user_who_may_not_move_an_object_leaves_no_quarantine_that_is_closed_to_others(open_place: Path) -> None:
    filled = filled_store(open_place / "store")
    damage(filled)
    filled.root.chmod(0o1777)
    done = run_child(READ_AS_USER, filled.root, as_user=True)
    assert "left in place" in done.stdout, done.stderr
    assert not (filled.root / QUARANTINE).exists()


@pytest.mark.parametrize("mode", [0o777, 0o2775])
def test_quarantine_is_as_open_as_the_folder_of_the_objects(open_place: Path, mode: int) -> None:
    filled = filled_store(open_place / "store")
    damage(filled)
    folder = filled.object_path(DIGEST).parent
    for place in (filled.root, folder.parent, folder):
        os.chown(place, 0, ORDINARY_USER)
        place.chmod(mode)
    done = run_child(READ_AS_USER, filled.root, as_user=True)
    assert "moved to" in done.stdout, done.stderr
    made = (filled.root / QUARANTINE).stat()
    assert (stat.S_IMODE(made.st_mode), made.st_gid) == (mode, ORDINARY_USER)


def test_quarantine_that_root_makes_in_a_store_of_another_user_is_as_open(open_place: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give files away")
    filled = filled_store(open_place / "store")
    damage(filled)
    for place in (filled.root, filled.root / "sha256"):
        os.chown(place, ORDINARY_USER, ORDINARY_USER)
        place.chmod(0o777)
    os.umask(0o077)  # open_place restores it
    with pytest.raises(CorruptError, match="moved to"):
        filled.read(DIGEST, LIMIT)
    made = (filled.root / QUARANTINE).stat()
    assert (stat.S_IMODE(made.st_mode), made.st_uid) == (0o777, ORDINARY_USER)


def test_a_full_disk_is_a_clear_error_and_leaves_nothing_behind(tmp_path: Path) -> None:
    needs_mounts()
    done = run_child(
        PUT.replace("data =", "data = b'x' * 500_000 #"),
        tmp_path,
        mounts=f"mount -t tmpfs -o size=64k none {tmp_path}",
    )
    assert "the store is full (No space left on device)" in done.stdout, done.stderr
    assert done.stdout.endswith("[]\n")


def test_a_read_only_store_is_a_clear_error(filled: Store) -> None:
    needs_mounts()
    mounts = f"mount --bind {filled.root} {filled.root}; mount -o remount,bind,ro {filled.root}"
    done = run_child(PUT, filled.root, mounts=mounts)
    assert "the store is not accessible (Read-only file system)" in done.stdout, done.stderr
