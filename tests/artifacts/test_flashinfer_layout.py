"""Folders that are given to FlashInfer, which deletes what it does not know."""

from __future__ import annotations

from pathlib import Path

import pytest

from cubin_runtime.artifacts.releases.flashinfer_layout import refuse_shared_folder
from cubin_runtime.errors import UsageError
from tests.artifacts.releases import Release


@pytest.mark.parametrize("below", ["", "sha256", ".."])
def test_a_store_even_an_empty_one_and_what_contains_it_are_refused(
    release: Release, tmp_path: Path, below: str
) -> None:
    store = tmp_path / "place" / "store"
    with pytest.raises(UsageError, match="contains or is inside the store"):
        refuse_shared_folder(release.library(store), store / below)


@pytest.mark.parametrize("name", ["thesis.txt", ".tmp-notes"])
def test_a_file_of_anybody_else_is_refused(release: Release, store: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("dear")
    with pytest.raises(UsageError, match="belongs to no pinned release"):
        refuse_shared_folder(release.library(store), tmp_path / "out")


@pytest.mark.parametrize("name", [".tmp-cubin-runtime-host-1-0123456789abcdef", "x.cubin.lock", "x.tmp"])
def test_temporary_files_of_ours_and_of_flashinfer_are_no_reason(
    release: Release, store: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("half")
    refuse_shared_folder(release.library(store), tmp_path / "out")
