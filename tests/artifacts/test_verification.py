from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from cubin_runtime.artifacts import verification
from cubin_runtime.artifacts.library import Library
from cubin_runtime.artifacts.store.store import Store
from cubin_runtime.artifacts.verification import default_jobs
from cubin_runtime.errors import MissingError, PinError, UsageError
from tests.artifacts.children import refuse_threads
from tests.artifacts.releases import Release, zip_tree
from tests.artifacts.serving import FaultyServer

NAME = "fmha/prefill.cubin"


@pytest.fixture
def filled(release: Release, store: Path) -> Library:
    library = release.library(store, release.root)
    library.fetch(release.pin)
    return library


def replace_object(release: Release, store: Path, name: str, data: bytes) -> None:
    place = Store(store).object_path(release.digest(name))
    place.unlink()
    place.write_bytes(data)


def test_a_whole_store_is_ok(release: Release, filled: Library) -> None:
    report = filled.verify(release.pin, complete=True)
    assert (report.ok, report.bytes, report.codes) == (3, release.pin.bytes, ())


def test_what_was_never_fetched_is_missing_and_no_error(release: Release, store: Path) -> None:
    library = release.library(store, release.root)
    library.fetch(release.pin, [release.path(NAME)])
    report = library.verify(release.pin)
    assert (report.ok, report.codes) == (1, ())
    assert report.missing == (release.path("kernels.bin"), release.path("fmha/decode.cubin"))


def test_complete_makes_missing_an_error(release: Release, store: Path) -> None:
    library = release.library(store, release.root)
    library.fetch(release.pin, [release.path(NAME)])
    assert library.verify(release.pin, complete=True).codes == (4,)


def test_a_damaged_object_is_corrupt_and_moved_aside_so_that_a_fetch_repairs_it(
    release: Release, store: Path, filled: Library
) -> None:
    replace_object(release, store, NAME, b"damaged")
    report = filled.verify(release.pin)
    assert [problem.path for problem in report.corrupt] == [release.path(NAME)]
    assert (report.ok, report.codes) == (2, (5,))
    assert filled.fetch(release.pin).fetched == 1
    assert filled.verify(release.pin, complete=True).codes == ()


def test_one_flipped_bit_is_found(release: Release, store: Path, filled: Library) -> None:
    flipped = bytearray(release.files[NAME])
    flipped[1000] ^= 1
    replace_object(release, store, NAME, bytes(flipped))
    assert filled.verify(release.pin).codes == (5,)


def test_an_object_that_grew_over_the_limit_is_corrupt(release: Release, store: Path, filled: Library) -> None:
    replace_object(release, store, NAME, bytes(release.pin.max_file_bytes + 1))
    assert "at most 3900 are allowed" in filled.verify(release.pin).corrupt[0].reason


@pytest.mark.timeout(20)
def test_a_fifo_is_reported_and_never_blocks(release: Release, store: Path, filled: Library) -> None:
    place = Store(store).object_path(release.digest(NAME))
    place.unlink()
    os.mkfifo(place)
    assert "is a FIFO" in filled.verify(release.pin).corrupt[0].reason


def test_a_link_is_reported_even_if_its_target_is_right(release: Release, store: Path, filled: Library) -> None:
    place = Store(store).object_path(release.digest(NAME))
    place.unlink()
    place.symlink_to(release.file(NAME))
    assert "is a symbolic link" in filled.verify(release.pin).corrupt[0].reason


def test_a_linked_folder_is_reported_even_if_its_files_are_right(
    release: Release, store: Path, filled: Library
) -> None:
    folder = Store(store).object_path(release.digest(NAME)).parent
    folder.rename(store / "elsewhere")
    folder.symlink_to(store / "elsewhere")
    assert "is a link or a file, expected a directory" in filled.verify(release.pin).corrupt[0].reason


def test_only_chosen_paths_are_looked_at(release: Release, store: Path, filled: Library) -> None:
    replace_object(release, store, NAME, b"damaged")
    report = filled.verify(release.pin, [release.path("kernels.bin")], complete=True)
    assert (report.ok, report.codes) == (1, ())


def test_a_path_outside_the_manifest_is_refused(release: Release, filled: Library) -> None:
    with pytest.raises(PinError, match="not in the manifest"):
        filled.verify(release.pin, [release.path("none")])


def test_progress_counts_what_was_hashed(release: Release, filled: Library) -> None:
    steps: list[int] = []
    filled.verify(release.pin, progress=steps.append)
    assert sum(steps) == 3


def test_a_published_tree_is_ok(release: Release, filled: Library, tmp_path: Path) -> None:
    archive = zip_tree(release.root, tmp_path / "x.whl")
    reports = [filled.verify(release.pin, tree=str(tree), complete=True) for tree in (release.root, archive)]
    assert [(report.ok, report.codes) for report in reports] == [(3, ()), (3, ())]


def test_a_tree_may_have_missing_corrupt_and_extra_files(release: Release, filled: Library) -> None:
    release.file("kernels.bin").unlink()
    release.file(NAME).write_bytes(b"damaged")
    release.file("fmha/extra.cubin").write_bytes(b"extra")
    (release.root / release.pin.path.text / "link").symlink_to("/etc/passwd")
    report = filled.verify(release.pin, tree=str(release.root), complete=True)
    assert report.missing == (release.path("kernels.bin"),)
    assert [problem.path for problem in report.corrupt] == [release.path(NAME)]
    assert report.extra == ("fmha/extra.cubin", "link")
    assert report.codes == (5, 4, 6)


def test_extra_files_in_an_archive_are_found(release: Release, filled: Library, tmp_path: Path) -> None:
    release.file("fmha/extra.cubin").write_bytes(b"extra")
    archive = zip_tree(release.root, tmp_path / "x.zip")
    assert filled.verify(release.pin, tree=str(archive)).extra == ("fmha/extra.cubin",)


def test_extra_is_not_looked_for_when_paths_are_chosen(release: Release, filled: Library) -> None:
    release.file("fmha/extra.cubin").write_bytes(b"extra")
    assert filled.verify(release.pin, [release.path(NAME)], tree=str(release.root)).extra == ()


def test_a_tree_with_another_manifest_is_a_pin_error(release: Release, filled: Library) -> None:
    (release.root / release.pin.path.text / "checksums.txt").write_bytes(b"0" * 64 + b"  x\n")
    with pytest.raises(PinError, match="sha256 is"):
        filled.verify(release.pin, tree=str(release.root))


def test_a_tree_without_a_manifest_is_missing(release: Release, filled: Library, tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"no manifest of 'made-1\.0'"):
        filled.verify(release.pin, tree=str(tmp_path))


def test_a_server_is_no_tree(release: Release, filled: Library) -> None:
    with pytest.raises(UsageError, match="expected a directory"):
        filled.verify(release.pin, tree="http://host/")


def test_the_store_is_verified_without_any_source(release: Release, store: Path, filled: Library) -> None:
    assert release.library(store).verify(release.pin, complete=True).codes == ()


def test_verify_opens_no_connection_for_files(
    release: Release, server: FaultyServer, store: Path, filled: Library
) -> None:
    release.library(store, server.url).verify(release.pin)
    assert not server.counts


@pytest.mark.parametrize(("held", "jobs"), [(0, 16), (8 << 20, 16), (64 << 20, 2), (128 << 20, 1), (1 << 30, 1)])
def test_few_large_files_are_held_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch, held: int, jobs: int) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    assert default_jobs(held) == jobs


@pytest.mark.parametrize(("suffix", "extra"), [(".zip", ("package/README",)), (".whl", ())])
def test_a_zip_holds_releases_and_nothing_else_while_a_wheel_is_a_package(
    release: Release, filled: Library, tmp_path: Path, suffix: str, extra: tuple[str, ...]
) -> None:
    archive = zip_tree(release.root, tmp_path / f"x{suffix}")
    with zipfile.ZipFile(archive, "a") as opened:
        opened.writestr("package/README", "hello")
    assert filled.verify(release.pin, tree=str(archive)).extra == extra
    assert filled.verify(release.pin, [release.path(NAME)], tree=str(archive)).extra == ()


@pytest.mark.parametrize("threads", [0, 1])
def test_files_are_hashed_by_as_many_threads_as_the_system_gives(
    monkeypatch: pytest.MonkeyPatch, filled: Library, release: Release, threads: int
) -> None:
    monkeypatch.setattr(verification, "_BATCH", 1)
    refuse_threads(monkeypatch, threads)
    for tree in (None, str(release.root)):
        assert filled.verify(release.pin, tree=tree, complete=True, jobs=3).ok == 3
