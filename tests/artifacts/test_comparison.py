from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cubin_runtime.artifacts.library import Library
from cubin_runtime.artifacts.releases.comparison import Change, ReleaseDiff, compare_releases
from cubin_runtime.artifacts.tables.kernel_filter import KernelFilter
from cubin_runtime.artifacts.tables.metadata import HEADER_PATH
from cubin_runtime.config import Config
from cubin_runtime.errors import SourceError, UsageError
from tests.artifacts.kernel_headers import header_of
from tests.artifacts.releases import Release, make_release

KERNEL = "fmhaSm100fKernel_A"
OTHER = "fmhaSm103aKernel_B"


def made(place: Path, name: str, files: dict[str, bytes]) -> Release:
    return make_release(place / name, files, f"{name}-1.0", f"{name}/fmha")


def library_of(store: Path, *releases: Release, **changed: object) -> Library:
    config = Config(
        store=store,
        sources=tuple(str(release.root) for release in releases),
        pin_files=tuple(release.pin_file for release in releases),
    )
    return Library(replace(config, **changed))  # type: ignore[arg-type]


def compared(store: Path, old: Release, new: Release, wanted: KernelFilter | None = None) -> ReleaseDiff:
    return compare_releases(library_of(store, old, new), old.pin, new.pin, wanted)


def test_names_are_compared_below_each_releases_folder(tmp_path: Path, store: Path) -> None:
    old = made(tmp_path, "old", {"same": b"1", "gone": b"2", "changed": b"3"})
    new = made(tmp_path, "new", {"same": b"1", "come": b"4", "changed": b"5"})
    assert compared(store, old, new) == ReleaseDiff(
        old="old-1.0",
        new="new-1.0",
        added=("come",),
        removed=("gone",),
        changed=(Change("changed", old.digest("changed"), new.digest("changed"), ()),),
        same=1,
        metadata=False,
    )


def test_a_release_is_equal_to_itself(tmp_path: Path, store: Path) -> None:
    old = made(tmp_path, "old", {"a": b"1", "b": b"2"})
    found = compared(store, old, old)
    assert (found.added, found.removed, found.changed, found.same) == ((), (), (), 2)


def test_a_glob_narrows_the_comparison(tmp_path: Path, store: Path) -> None:
    old = made(tmp_path, "old", {"x/a": b"1", "y/a": b"2"})
    new = made(tmp_path, "new", {"x/b": b"1", "y/b": b"2"})
    found = compared(store, old, new, KernelFilter(globs=("x/*",)))
    assert (found.added, found.removed) == (("x/b",), ("x/a",))


@pytest.fixture
def with_metadata(tmp_path: Path) -> tuple[Release, Release]:
    files = {f"{KERNEL}.cubin": b"old", f"{OTHER}.cubin": b"same"}
    old = made(tmp_path, "old", {**files, HEADER_PATH: header_of(KERNEL, OTHER)})
    files[f"{KERNEL}.cubin"] = b"new"
    header = header_of(KERNEL, OTHER, mThreadsPerCTA="512", mReuseSmemKForV="true")
    return old, made(tmp_path, "new", {**files, HEADER_PATH: header})


def test_metadata_says_what_changed_about_a_kernel(with_metadata: tuple[Release, Release], store: Path) -> None:
    found = compared(store, *with_metadata)
    assert found.metadata
    facts = {change.name: change.facts for change in found.changed}
    assert facts[f"{KERNEL}.cubin"] == (("reuses_smem_k_for_v", False, True), ("threads", 64, 512))


def test_a_filter_looks_at_metadata(with_metadata: tuple[Release, Release], store: Path) -> None:
    found = compared(store, *with_metadata, KernelFilter(sm=100))
    assert ([change.name for change in found.changed], found.same) == ([f"{KERNEL}.cubin"], 0)


def test_manifests_alone_are_enough(with_metadata: tuple[Release, Release], store: Path) -> None:
    old, new = with_metadata
    for release in with_metadata:
        release.file(HEADER_PATH).unlink()
    found = compared(store, old, new)
    assert (len(found.changed), found.same, found.metadata) == (2, 1, False)


def test_a_filter_of_metadata_that_is_not_at_hand_is_refused(
    with_metadata: tuple[Release, Release], store: Path
) -> None:
    old, new = with_metadata
    new.file(HEADER_PATH).unlink()
    with pytest.raises(UsageError, match="has no kernel metadata"):
        compared(store, old, new, KernelFilter(dtypes=("bf16",)))


def test_a_manifest_that_cannot_be_had_is_an_error(with_metadata: tuple[Release, Release], store: Path) -> None:
    old, new = with_metadata
    with pytest.raises(SourceError):
        compare_releases(library_of(store, old, new, sources=(str(old.root),)), old.pin, new.pin)
