from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from cubin_runtime.artifacts.library import Library
from cubin_runtime.artifacts.releases import gc as collecting
from cubin_runtime.artifacts.releases.gc import collect, collect_leftovers
from cubin_runtime.artifacts.store.locks import ShardLock
from cubin_runtime.artifacts.store.store import Store
from cubin_runtime.config import Config
from cubin_runtime.errors import CorruptError, SourceError, StoreError
from tests.artifacts.children import run_child
from tests.artifacts.releases import PATIENT_LIMITS, QUICK_POLICY, Release, make_release, visible_files

OLD = {"a.cubin": b"only in the old " * 50, "shared.cubin": b"in both " * 80}
NEW = {"b.cubin": b"only in the new " * 50, "shared.cubin": b"in both " * 80}


@pytest.fixture
def old(tmp_path: Path) -> Release:
    return make_release(tmp_path / "old", OLD, "old-1.0", "old/fmha")


@pytest.fixture
def new(tmp_path: Path) -> Release:
    return make_release(tmp_path / "new", NEW, "new-1.0", "new/fmha")


def library_of(store: Path, *releases: Release, sources: bool = False) -> Library:
    roots = tuple(str(release.root) for release in releases) if sources else ("/nowhere",)
    config = Config(store=store, sources=roots, pin_files=tuple(release.pin_file for release in releases))
    return Library(config, policy=QUICK_POLICY, limits=PATIENT_LIMITS)


def fill(store: Path, *releases: Release) -> None:
    library = library_of(store, *releases, sources=True)
    for release in releases:
        library.fetch(release.pin)


def whole(store: Path, release: Release) -> bool:
    return library_of(store, release).verify(release.pin, complete=True).codes == ()


def test_a_release_alone_goes_wholly(store: Path, old: Release) -> None:
    fill(store, old)
    report = collect(library_of(store, old), [old.pin])
    assert (report.removed, report.kept, visible_files(store)) == (3, 0, [])
    assert report.bytes == old.pin.bytes + len(old.file("checksums.txt").read_bytes())


def test_what_another_release_present_shares_stays(store: Path, old: Release, new: Release) -> None:
    fill(store, old, new)
    report = collect(library_of(store, old, new), [old.pin])
    assert (report.removed, report.kept, report.needed_by) == (2, 1, {"new-1.0": 1})
    assert whole(store, new)


def test_a_release_that_is_pinned_and_not_present_keeps_nothing(store: Path, old: Release, new: Release) -> None:
    fill(store, old)
    assert collect(library_of(store, old, new), [old.pin]).removed == 3


def test_a_release_whose_manifest_is_in_a_local_source_counts_as_present(
    store: Path, old: Release, new: Release
) -> None:
    fill(store, old)
    assert collect(library_of(store, old, new, sources=True), [old.pin]).needed_by == {"new-1.0": 1}


def test_releases_removed_together_do_not_keep_each_other(store: Path, old: Release, new: Release) -> None:
    fill(store, old, new)
    report = collect(library_of(store, old, new), [old.pin, new.pin])
    assert (report.removed, visible_files(store)) == (5, [])


def test_a_dry_run_removes_nothing(store: Path, old: Release) -> None:
    fill(store, old)
    report = collect(library_of(store, old), [old.pin], dry_run=True)
    assert (report.removed, report.dry_run, len(visible_files(store))) == (3, True, 3)


def test_a_second_run_finds_nothing(store: Path, old: Release) -> None:
    fill(store, old)
    collect(library_of(store, old), [old.pin])
    report = collect(library_of(store, old), [old.pin])
    assert (report.removed, report.absent) == (0, ("old-1.0",))


def test_an_interrupted_run_can_be_run_again(store: Path, old: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, old)
    real, calls = os.unlink, []

    def unlink(*arguments: object, **named: object) -> None:
        calls.append(arguments)
        if len(calls) > 1:
            raise KeyboardInterrupt
        real(*arguments, **named)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr("os.unlink", unlink)
        with pytest.raises(KeyboardInterrupt):
            collect(library_of(store, old), [old.pin])
    assert Store(store).has(old.pin.manifest_sha256)
    collect(library_of(store, old), [old.pin])
    collect_leftovers(Store(store), older_than=0)
    assert visible_files(store) == []


def test_objects_that_no_pin_knows_are_left_alone(store: Path, old: Release, new: Release) -> None:
    fill(store, old, new)
    collect(library_of(store, old), [old.pin])
    assert new.digest("b.cubin") in visible_files(store)


def test_nothing_goes_while_the_needs_of_another_release_are_unknown(store: Path, old: Release, new: Release) -> None:
    fill(store, old, new)
    place = Store(store).object_path(new.pin.manifest_sha256)
    place.unlink()
    place.write_bytes(b"damaged")
    with pytest.raises(
        CorruptError, match=r"what 'new-1\.0' needs is not known, so nothing that it may need is removed"
    ):
        collect(library_of(store, old, new), [old.pin])
    assert whole(store, old)


def test_a_manifest_in_quarantine_does_not_make_its_release_absent(store: Path, old: Release, new: Release) -> None:
    fill(store, old, new)
    place = Store(store).object_path(new.pin.manifest_sha256)
    place.unlink()
    place.write_bytes(b"damaged")
    for _ in range(2):
        with pytest.raises(CorruptError, match=r"what 'new-1\.0' needs is not known"):
            collect(library_of(store, old, new), [old.pin])
    assert whole(store, old)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("name", ["old", "new"])
def test_a_manifest_folder_that_cannot_be_opened_is_not_an_absent_release(
    store: Path, old: Release, new: Release, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    fill(store, old, new)
    before, closed = visible_files(store), {"old": old, "new": new}[name].pin.manifest_sha256[:2]
    real = os.open

    def refuse(path: object, *arguments: object, **named: object) -> int:
        if path == closed:
            raise OSError(number, os.strerror(number))
        return real(path, *arguments, **named)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr("os.open", refuse)
        with pytest.raises(StoreError, match=rf"what '{name}-1\.0' needs is not known.*{os.strerror(number)}"):
            collect(library_of(store, old, new), [old.pin])
    assert visible_files(store) == before


def test_a_manifest_folder_that_is_closed_while_objects_go_stops_the_collection(
    store: Path, old: Release, new: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other release arrives, and its folder is another user's."""
    fill(store, old)
    real, real_remove = os.open, collecting._remove_all

    def refuse(path: object, *arguments: object, **named: object) -> int:
        if path == new.pin.manifest_sha256[:2]:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *arguments, **named)  # type: ignore[arg-type]

    def close_then_remove(*arguments: object) -> list[str]:
        monkeypatch.setattr("os.open", refuse)
        return real_remove(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(collecting, "_remove_all", close_then_remove)
    with pytest.raises(StoreError, match="Permission denied"):
        collect(library_of(store, old, new), [old.pin])
    monkeypatch.undo()
    assert whole(store, old)


def test_a_local_source_that_cannot_be_read_may_have_the_manifest_of_another_release(
    store: Path, old: Release, new: Release, tmp_path: Path
) -> None:
    fill(store, old, new)
    Store(store).object_path(new.pin.manifest_sha256).unlink()
    broken = tmp_path / "broken.zip"
    broken.write_bytes(b"no zip")
    config = Config(store=store, sources=(str(broken),), pin_files=(old.pin_file, new.pin_file))
    with pytest.raises(SourceError, match=r"needs is not known.*not a readable zip"):
        collect(Library(config), [old.pin])
    assert whole(store, old)


def test_a_release_that_arrives_while_objects_go_keeps_what_it_needs(
    store: Path, old: Release, new: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fetch publishes its manifest and sees the shared object just before that is moved aside."""
    fill(store, old)
    real = collecting._remove_all

    def arrive_then_remove(*arguments: object) -> list[str]:
        Store(store).put(new.pin.manifest_sha256, new.file("checksums.txt").read_bytes())
        assert Store(store).has(new.digest("shared.cubin"))
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(collecting, "_remove_all", arrive_then_remove)
    report = collect(library_of(store, old, new), [old.pin])
    assert (report.kept, report.needed_by) == (1, {"new-1.0": 1})
    assert Store(store).has(new.digest("shared.cubin"))


def test_a_fetch_publishes_its_manifest_before_it_looks_at_what_is_there(
    store: Path, old: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = library_of(store, old, sources=True)
    seen: list[bool] = []
    real = library.store.present

    def present(digests: object) -> set[str]:
        seen.append(library.store.has(old.pin.manifest_sha256))
        return real(digests)  # type: ignore[arg-type]

    monkeypatch.setattr(library.store, "present", present)
    library.fetch(old.pin)
    assert all(seen)


@pytest.mark.timeout(60)
def test_fetches_and_collections_at_once_leave_the_fetched_release_whole(
    store: Path, old: Release, new: Release
) -> None:
    errors: list[BaseException] = []

    def turn_over() -> None:
        try:
            for _ in range(10):
                fill(store, old)
                collect(library_of(store, old, new), [old.pin])
        except BaseException as error:
            errors.append(error)

    worker = threading.Thread(target=turn_over)
    worker.start()
    fill(store, new)
    worker.join()
    assert (errors, whole(store, new)) == ([], True)


def test_a_collection_waits_for_the_fetch_that_holds_the_lock(store: Path, old: Release) -> None:
    fill(store, old)
    held = [ShardLock(store, f"{number:x}") for number in range(16)]
    assert all(lock.try_take() for lock in held)
    worker = threading.Thread(target=collect, args=(library_of(store, old), [old.pin]))
    worker.start()
    worker.join(0.3)
    waited = worker.is_alive() and len(visible_files(store)) == 3
    for lock in held:
        lock.release()
    worker.join(100)
    assert (waited, visible_files(store)) == (True, [])


def test_a_store_that_is_not_there_has_nothing(store: Path, old: Release) -> None:
    assert collect(library_of(store, old), [old.pin]).absent == ("old-1.0",)
    assert collect_leftovers(Store(store)).temporaries == 0
    assert not store.exists()


def test_a_store_of_another_user_is_refused(open_place: Path, old: Release) -> None:
    store = open_place / "store"
    fill(store, old)
    body = """
    import pathlib, sys
    from cubin_runtime.artifacts.releases.gc import collect
    from cubin_runtime.artifacts.library import Library
    from cubin_runtime.config import Config
    from cubin_runtime.errors import StoreError
    library = Library(Config(pathlib.Path(sys.argv[1]), ("/nowhere",), (pathlib.Path(sys.argv[2]),)))
    try:
        collect(library, [library.pins.get("old-1.0")])
    except StoreError as error:
        print("refused:", error)
    """
    pins = open_place / "pins.toml"
    pins.write_bytes(old.pin_file.read_bytes())
    assert "refused:" in run_child(body, store, pins, as_user=True).stdout
    assert whole(store, old)


def test_a_planted_link_is_not_followed(store: Path, old: Release, tmp_path: Path) -> None:
    fill(store, old)
    elsewhere = tmp_path / "elsewhere"
    prefix = Store(store).object_path(old.digest("a.cubin")).parent
    prefix.rename(elsewhere)
    prefix.symlink_to(elsewhere)
    with pytest.raises(StoreError, match="cannot be removed: Not a directory"):
        collect(library_of(store, old), [old.pin])
    assert (elsewhere / old.digest("a.cubin")).exists()


# -- leftovers


TEMPORARY = ".tmp-cubin-runtime-host-1-0123456789abcdef"


def leave(store: Path, *names: str) -> None:
    for name in names:
        file = store / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"12345")


def test_leftovers_of_killed_processes_go(store: Path) -> None:
    leave(
        store,
        f"sha256/ab/{TEMPORARY}",
        "sha256/cd/.tmp-cubin-runtime-host-2-00000000000000bb",
        "quarantine/" + "0" * 64 + "-host-1-00000000000000cc",
    )
    report = collect_leftovers(Store(store), older_than=0)
    assert (report.temporaries, report.quarantined, report.bytes) == (2, 1, 15)
    assert visible_files(store) == []


def test_a_young_temporary_belongs_to_a_process_that_may_live(store: Path) -> None:
    leave(store, f"sha256/ab/{TEMPORARY}")
    assert collect_leftovers(Store(store)).temporaries == 0
    assert visible_files(store) == [TEMPORARY]


def test_objects_and_locks_are_no_leftovers(store: Path, old: Release) -> None:
    fill(store, old)
    leave(store, "locks/0.lock")
    assert collect_leftovers(Store(store), older_than=0).temporaries == 0
    assert whole(store, old)
    assert (store / "locks" / "0.lock").exists()


def test_a_dry_run_leaves_leftovers(store: Path) -> None:
    leave(store, f"sha256/ab/{TEMPORARY}")
    report = collect_leftovers(Store(store), older_than=0, dry_run=True)
    assert (report.temporaries, visible_files(store)) == (1, [TEMPORARY])


def test_leftovers_behind_a_planted_link_stay(store: Path, tmp_path: Path) -> None:
    leave(tmp_path / "elsewhere", TEMPORARY)
    (store / "sha256").mkdir(parents=True)
    (store / "sha256" / "ab").symlink_to(tmp_path / "elsewhere")
    assert collect_leftovers(Store(store), older_than=0).temporaries == 0
    assert (tmp_path / "elsewhere" / TEMPORARY).exists()


def test_a_folder_in_the_place_of_an_object_stays_there_and_is_an_error(store: Path, old: Release) -> None:
    fill(store, old)
    place = Store(store).object_path(old.digest("a.cubin"))
    place.unlink()
    place.mkdir()
    (place / "mine").write_bytes(b"mine")
    library = library_of(store, old)
    with pytest.raises(StoreError, match=f"{place.name}: cannot be removed: Is a directory"):
        collect(library, [old.pin])
    assert [file.name for file in place.parent.iterdir()] == [place.name]
    assert (place / "mine").read_bytes() == b"mine"
    place.rename(store / "elsewhere")
    collect(library, [old.pin])
    assert visible_files(store) == []
