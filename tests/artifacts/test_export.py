from __future__ import annotations

import hashlib
import os
import stat
import time
import zipfile
from pathlib import Path

import pytest

from cubin_runtime.artifacts.library import Library
from cubin_runtime.artifacts.releases import export as exporting
from cubin_runtime.artifacts.releases.export import Chosen, export_zip, mirror
from cubin_runtime.artifacts.store.store import Store
from cubin_runtime.config import Config
from cubin_runtime.errors import CorruptError, MissingError, StoreError, UsageError
from tests.artifacts.children import needs_mounts, refuse_threads, run_child
from tests.artifacts.releases import FILES, Release, make_release, visible_files
from tests.artifacts.serving import serving

NAME = "fmha/prefill.cubin"


@pytest.fixture
def filled(release: Release, store: Path) -> Library:
    release.library(store, release.root).fetch(release.pin)
    return release.library(store, "/nowhere", offline=True)


def everything(release: Release) -> Chosen:
    return [(release.pin, [release.path(name) for name in release.files])]


def only(release: Release, *names: str) -> Chosen:
    return [(release.pin, [release.path(name) for name in names])]


def in_folder(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if not file.is_dir())


def damage(release: Release, store: Path, name: str) -> None:
    place = Store(store).object_path(release.digest(name))
    place.unlink()
    place.write_bytes(b"damaged")


# -- archives


def test_an_archive_is_a_source_of_the_whole_release(filled: Library, release: Release, tmp_path: Path) -> None:
    report = export_zip(filled, everything(release), tmp_path / "x.zip")
    other = release.library(tmp_path / "other", tmp_path / "x.zip", offline=True)
    assert other.fetch(release.pin).fetched == 3
    assert other.verify(release.pin, complete=True).codes == ()
    assert (report.files, report.bytes) == (4, release.pin.bytes + len(filled.manifest_bytes(release.pin)))


def test_the_report_names_the_archives_digest_and_size(filled: Library, release: Release, tmp_path: Path) -> None:
    report = export_zip(filled, everything(release), tmp_path / "x.zip")
    data = (tmp_path / "x.zip").read_bytes()
    assert (report.sha256, report.archive_bytes) == (hashlib.sha256(data).hexdigest(), len(data))


def test_an_archive_verifies_as_a_tree_with_nothing_extra(filled: Library, release: Release, tmp_path: Path) -> None:
    export_zip(filled, everything(release), tmp_path / "x.zip")
    report = filled.verify(release.pin, tree=str(tmp_path / "x.zip"), complete=True)
    assert (report.ok, report.codes) == (3, ())


@pytest.mark.parametrize("compress", [False, True])
def test_the_same_files_give_the_same_bytes_wherever_they_come_from(
    filled: Library, release: Release, tmp_path: Path, compress: bool
) -> None:
    from_tree = release.library(tmp_path / "none", release.root)
    os.utime(release.file(NAME), (1, 1))
    first = export_zip(filled, everything(release), tmp_path / "a.zip", compress=compress)
    second = export_zip(from_tree, list(reversed(everything(release))), tmp_path / "b.zip", compress=compress)
    assert first.sha256 == second.sha256


def test_the_bytes_of_an_archive_are_these(tmp_path: Path) -> None:
    """A digest of its own: another version of Python or of this package must not change the bytes."""
    made = make_release(tmp_path, FILES)
    report = export_zip(made.library(tmp_path / "none", made.root), everything(made), tmp_path / "x.zip")
    assert report.sha256 == "36b0addadefc1c3ce7c4800f46d54316c81628cfc55e09fefed51e77e3314b1c"


def test_a_compressed_archive_is_smaller_and_read_the_same(filled: Library, release: Release, tmp_path: Path) -> None:
    plain = export_zip(filled, everything(release), tmp_path / "a.zip")
    small = export_zip(filled, everything(release), tmp_path / "b.zip", compress=True)
    assert small.archive_bytes < plain.archive_bytes
    assert filled.verify(release.pin, tree=str(tmp_path / "b.zip"), complete=True).codes == ()


def test_a_subset_carries_the_whole_manifest(filled: Library, release: Release, tmp_path: Path) -> None:
    export_zip(filled, only(release, NAME), tmp_path / "x.zip")
    with zipfile.ZipFile(tmp_path / "x.zip") as archive:
        assert archive.namelist() == ["made/fmha/checksums.txt", "made/fmha/fmha/prefill.cubin"]
    other = release.library(tmp_path / "other", tmp_path / "x.zip", offline=True)
    assert other.fetch(release.pin, [release.path(NAME)]).fetched == 1


def test_several_releases_share_one_archive(tmp_path: Path, store: Path) -> None:
    one = make_release(tmp_path / "one", {"a": b"1"}, "one-1.0", "one/fmha")
    two = make_release(tmp_path / "two", {"b": b"2"}, "two-1.0", "two/fmha")
    sources = (str(one.root), str(two.root))
    library = Library(Config(store=store, sources=sources, pin_files=(one.pin_file, two.pin_file)))
    export_zip(library, [*everything(two), *everything(one)], tmp_path / "x.zip")
    for release in (one, two):
        assert library.verify(release.pin, tree=str(tmp_path / "x.zip"), complete=True).codes == ()


def test_what_is_not_at_hand_is_missing_and_nothing_is_written(release: Release, store: Path, tmp_path: Path) -> None:
    release.library(store, release.root).fetch(release.pin, [release.path("kernels.bin")])
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(MissingError, match="2 of 4 files are not in the store: run 'cubin-runtime fetch' first"):
        export_zip(release.library(store, "/nowhere"), everything(release), out / "x.zip")
    assert in_folder(out) == []


def test_damage_is_never_exported(filled: Library, release: Release, store: Path, tmp_path: Path) -> None:
    damage(release, store, NAME)
    (tmp_path / "x.zip").write_bytes(b"the archive of yesterday")
    with pytest.raises(CorruptError):
        export_zip(filled, everything(release), tmp_path / "x.zip")
    assert (tmp_path / "x.zip").read_bytes() == b"the archive of yesterday"


def test_an_export_asks_no_network(release: Release, store: Path, tmp_path: Path) -> None:
    with serving(release.root) as server, pytest.raises(MissingError):
        export_zip(release.library(store, server.url), everything(release), tmp_path / "x.zip")
    assert not server.counts


def test_a_name_that_is_no_archives_is_refused(filled: Library, release: Release, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ends in \.zip or \.whl"):
        export_zip(filled, everything(release), tmp_path / "x.tar")


def test_a_folder_that_is_not_there_is_a_store_error(filled: Library, release: Release, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be written: No such file"):
        export_zip(filled, everything(release), tmp_path / "none" / "x.zip")


def test_an_interrupt_leaves_nothing(
    filled: Library, release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(exporting, "_file_digest", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_zip(filled, everything(release), out / "x.zip")
    assert in_folder(out) == []


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_full_disk_is_a_store_error_and_leaves_nothing(filled: Library, release: Release) -> None:
    needs_mounts()
    body = """
    import pathlib, sys
    from cubin_runtime.artifacts.releases.export import export_zip
    from cubin_runtime.artifacts.library import Library
    from cubin_runtime.config import Config
    from cubin_runtime.errors import StoreError
    store, pins = map(pathlib.Path, sys.argv[1:])
    library = Library(Config(store, ("/nowhere",), (pins,)))
    pin = library.pins.get("made-1.0")
    try:
        export_zip(library, [(pin, tuple(library.manifest(pin).digests))], pathlib.Path("/mnt/x.zip"))
    except StoreError as error:
        print("refused:", error, list(pathlib.Path("/mnt").iterdir()))
    """
    done = run_child(body, filled.store.root, release.pin_file, mounts="mount -t tmpfs -o size=4k none /mnt")
    assert done.stdout == "refused: /mnt/x.zip: cannot be written: No space left on device []\n"


# -- mirrors


def test_a_mirror_is_a_tree_that_verifies_complete(filled: Library, release: Release, tmp_path: Path) -> None:
    report = mirror(filled, everything(release), tmp_path / "www")
    assert (report.written, report.kept) == (4, 0)
    assert filled.verify(release.pin, tree=str(tmp_path / "www"), complete=True).codes == ()


def test_a_mirror_behind_a_server_is_a_source(filled: Library, release: Release, tmp_path: Path) -> None:
    mirror(filled, everything(release), tmp_path / "www")
    with serving(tmp_path / "www") as server:
        assert release.library(tmp_path / "other", server.url).fetch(release.pin).fetched == 3


def test_a_second_run_writes_nothing(filled: Library, release: Release, tmp_path: Path) -> None:
    mirror(filled, everything(release), tmp_path / "www")
    report = mirror(filled, everything(release), tmp_path / "www")
    assert (report.written, report.kept) == (0, 4)


@pytest.mark.parametrize("content", [b"", b"damaged", bytes(100_000)])
def test_what_is_wrong_in_a_mirror_is_written_again(
    filled: Library, release: Release, tmp_path: Path, content: bytes
) -> None:
    mirror(filled, everything(release), tmp_path / "www")
    (tmp_path / "www" / release.path(NAME).text).write_bytes(content)
    assert mirror(filled, everything(release), tmp_path / "www").written == 1
    assert filled.verify(release.pin, tree=str(tmp_path / "www"), complete=True).codes == ()


def test_a_planted_link_is_replaced_and_its_target_left(filled: Library, release: Release, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    place = tmp_path / "www" / release.path(NAME).text
    place.parent.mkdir(parents=True)
    place.symlink_to(victim)
    mirror(filled, everything(release), tmp_path / "www")
    assert (victim.read_bytes(), place.is_symlink()) == (b"precious", False)


@pytest.mark.parametrize("write", ["export", "mirror"])
def test_a_link_swapped_in_for_the_temporary_is_never_written_through(
    filled: Library, release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    out = tmp_path / "out"
    out.mkdir()
    real = os.open

    def open_and_swap(name: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        descriptor = real(name, flags, mode, dir_fd=dir_fd)
        if flags & os.O_EXCL:
            os.unlink(name, dir_fd=dir_fd)
            os.symlink(victim, name, dir_fd=dir_fd)
        return descriptor

    monkeypatch.setattr("os.open", open_and_swap)
    if write == "export":
        export_zip(filled, everything(release), out / "x.zip")
    else:
        mirror(filled, everything(release), out)
    assert victim.read_bytes() == b"precious"


def test_a_folder_of_a_mirror_that_is_a_link_is_not_followed(filled: Library, release: Release, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "made").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="cannot be written"):
        mirror(filled, everything(release), tmp_path / "www")
    assert in_folder(tmp_path / "elsewhere") == []


@pytest.mark.timeout(20)
def test_a_planted_fifo_is_replaced_and_never_blocks(filled: Library, release: Release, tmp_path: Path) -> None:
    place = tmp_path / "www" / release.path(NAME).text
    place.parent.mkdir(parents=True)
    os.mkfifo(place)
    assert mirror(filled, everything(release), tmp_path / "www").written == 4


def test_the_manifest_comes_last(filled: Library, release: Release, tmp_path: Path, store: Path) -> None:
    damage(release, store, NAME)
    with pytest.raises(CorruptError):
        mirror(filled, everything(release), tmp_path / "www")
    assert not (tmp_path / "www" / "made/fmha/checksums.txt").exists()


def test_a_run_after_an_interrupted_one_goes_on(filled: Library, release: Release, tmp_path: Path, store: Path) -> None:
    damage(release, store, NAME)
    with pytest.raises(CorruptError):
        mirror(filled, everything(release), tmp_path / "www", jobs=1)
    release.library(store, release.root).fetch(release.pin)
    report = mirror(filled, everything(release), tmp_path / "www")
    assert report.kept >= 1
    assert filled.verify(release.pin, tree=str(tmp_path / "www"), complete=True).codes == ()


def test_what_killed_runs_left_goes_with_the_next_run(
    filled: Library, release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "www" / release.pin.path.text
    folder.mkdir(parents=True)
    for place in (folder, tmp_path):
        (place / ".tmp-cubin-runtime-host-1-0123456789abcdef").write_bytes(b"x")
    later = time.time() + 90_000
    monkeypatch.setattr(time, "time", lambda: later)
    mirror(filled, everything(release), tmp_path / "www")
    export_zip(filled, everything(release), tmp_path / "x.zip")
    assert [*folder.glob(".tmp-*"), *tmp_path.glob(".tmp-*")] == []


@pytest.mark.parametrize("name", [".tmp-notes", ".tmp-host-1-0123456789abcdef", ".tmp-cubin-runtime-host-1-012345678"])
def test_old_files_of_others_that_an_export_lies_beside_stay(
    filled: Library, release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path / "www" / release.pin.path.text
    folder.mkdir(parents=True)
    for place in (folder, tmp_path):
        (place / name).write_bytes(b"mine")
    later = time.time() + 90_000
    monkeypatch.setattr(time, "time", lambda: later)
    mirror(filled, everything(release), tmp_path / "www")
    export_zip(filled, everything(release), tmp_path / "x.zip")
    assert [(place / name).read_bytes() for place in (folder, tmp_path)] == [b"mine", b"mine"]


def test_a_mirror_may_be_read_by_everyone(filled: Library, release: Release, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        mirror(filled, everything(release), tmp_path / "www")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "www" / release.path(NAME).text).stat().st_mode) == 0o644


def test_files_named_like_the_manifest_deeper_down_are_files(tmp_path: Path, store: Path) -> None:
    made = make_release(tmp_path, {"a/checksums.txt": b"no manifest", "b": b"2"})
    library = made.library(store, made.root)
    mirror(library, everything(made), tmp_path / "www")
    assert in_folder(tmp_path / "www") == ["made/fmha/a/checksums.txt", "made/fmha/b", "made/fmha/checksums.txt"]


def test_a_mirror_leaves_the_store_as_it_was(filled: Library, release: Release, tmp_path: Path, store: Path) -> None:
    before = visible_files(store)
    mirror(filled, everything(release), tmp_path / "www")
    assert visible_files(store) == before


def test_a_mirror_is_written_where_the_system_refuses_threads(
    monkeypatch: pytest.MonkeyPatch, filled: Library, release: Release, tmp_path: Path
) -> None:
    refuse_threads(monkeypatch)
    assert mirror(filled, everything(release), tmp_path / "www", jobs=3).written == 4
    assert filled.verify(release.pin, tree=str(tmp_path / "www"), complete=True).codes == ()
