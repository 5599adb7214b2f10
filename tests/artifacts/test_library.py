from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from cubin_runtime.artifacts.path import ArtifactPath
from cubin_runtime.artifacts.store.store import Store
from cubin_runtime.errors import CorruptError, MissingError, PinError, SourceError, StoreError, UsageError
from tests.artifacts.releases import Release, make_release, visible_files, zip_tree
from tests.artifacts.serving import FaultyServer, ok, status, wrong_bytes

NAME = "fmha/prefill.cubin"


def plant(store: Path, digest: str, data: bytes) -> None:
    Store(store).put(digest, data)


def test_an_artifact_is_loaded_from_the_store(release: Release, store: Path) -> None:
    library = release.library(store, release.root)
    library.fetch(release.pin)
    artifact = release.library(store).load(release.path(NAME), fetch=False)
    assert (artifact.data, artifact.sha256) == (release.files[NAME], release.digest(NAME))
    assert artifact.origin == str(store)


def test_a_local_source_is_read_in_place_and_nothing_is_copied(release: Release, store: Path) -> None:
    artifact = release.library(store, release.root).load(release.path(NAME).text, fetch=False)
    assert (artifact.data, artifact.origin) == (release.files[NAME], str(release.root))
    assert not store.exists()


def test_an_archive_is_read_in_place(release: Release, store: Path, tmp_path: Path) -> None:
    archive = zip_tree(release.root, tmp_path / "x.whl")
    assert release.library(store, archive).load(release.path(NAME), fetch=False).origin == str(archive)


def test_without_fetch_the_network_is_not_used(release: Release, server: FaultyServer, store: Path) -> None:
    library = release.library(store, server.url)
    library.manifest(release.pin)
    with pytest.raises(MissingError, match=r"'cubin-runtime fetch made/fmha/fmha/prefill\.cubin' gets it"):
        library.load(release.path(NAME), fetch=False)
    assert server.count(NAME) == 0


def test_without_fetch_not_even_the_manifest_is_downloaded(release: Release, server: FaultyServer, store: Path) -> None:
    with pytest.raises(MissingError, match=r"the manifest of 'made-1\.0' is not available locally"):
        release.library(store, server.url).load(release.path(NAME), fetch=False)
    assert not server.counts


def test_with_fetch_it_comes_over_the_network_into_the_store_and_logs_one_line(
    release: Release, server: FaultyServer, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = release.library(store, server.url)
    with caplog.at_level(logging.INFO, "cubin_runtime"):
        artifact = library.load(release.path(NAME), fetch=True)
    assert (artifact.data, artifact.origin) == (release.files[NAME], server.url)
    assert visible_files(store) == sorted([release.digest(NAME), release.pin.manifest_sha256])
    lines = [record.message.partition(" in ") for record in caplog.records]
    assert [line[0] for line in lines] == ["fetched made/fmha/fmha/prefill.cubin: 3900 bytes"]
    assert float(lines[0][2].removesuffix(f" s from {server.url}")) >= 0


def test_the_second_load_asks_nobody(release: Release, server: FaultyServer, store: Path) -> None:
    library = release.library(store, server.url)
    library.load(release.path(NAME), fetch=True)
    library.load(release.path(NAME), fetch=True)
    assert server.count(NAME) == 1


def test_a_damaged_object_is_replaced_from_the_network(release: Release, server: FaultyServer, store: Path) -> None:
    plant(store, release.digest(NAME), b"damaged")
    artifact = release.library(store, server.url).load(release.path(NAME), fetch=True)
    assert artifact.data == release.files[NAME]
    assert Store(store).read(release.digest(NAME), 1 << 20) == release.files[NAME]


def test_a_damaged_object_is_passed_over_for_a_good_local_source(release: Release, store: Path) -> None:
    plant(store, release.digest(NAME), b"damaged")
    assert release.library(store, release.root).load(release.path(NAME), fetch=False).origin == str(release.root)


def test_a_damaged_object_alone_is_an_error(release: Release, store: Path) -> None:
    release.library(store, release.root).fetch(release.pin, [release.path("kernels.bin")])
    plant(store, release.digest(NAME), b"damaged")
    with pytest.raises(CorruptError, match="which is not its name"):
        release.library(store).load(release.path(NAME), fetch=False)


def test_a_damaged_local_source_is_refused(release: Release, store: Path) -> None:
    release.file(NAME).write_bytes(b"damaged")
    with pytest.raises(CorruptError, match="expected"):
        release.library(store, release.root).load(release.path(NAME), fetch=False)


def test_a_damaged_local_source_is_passed_over(release: Release, store: Path, tmp_path: Path) -> None:
    good = zip_tree(release.root, tmp_path / "x.zip")
    release.file(NAME).write_bytes(b"damaged")
    assert release.library(store, release.root, good).load(release.path(NAME), fetch=False).origin == str(good)


def test_a_lying_server_is_refused(release: Release, server: FaultyServer, store: Path) -> None:
    server.fault(NAME, wrong_bytes)
    with pytest.raises(CorruptError, match="2 times"):
        release.library(store, server.url).load(release.path(NAME), fetch=True)
    assert release.digest(NAME) not in visible_files(store)


def test_a_link_in_the_store_is_an_error_not_a_detour(release: Release, store: Path) -> None:
    plant(store, release.digest(NAME), b"x")
    place = Store(store).object_path(release.digest(NAME))
    place.unlink()
    place.symlink_to(release.file(NAME))
    with pytest.raises(StoreError, match="symbolic link"):
        release.library(store, release.root).load(release.path(NAME), fetch=False)


def test_a_path_outside_every_pin_is_refused(release: Release, store: Path) -> None:
    with pytest.raises(PinError, match="is not pinned"):
        release.library(store, release.root).load("elsewhere/x.cubin", fetch=True)


def test_a_name_outside_the_manifest_is_never_looked_up(release: Release, server: FaultyServer, store: Path) -> None:
    (release.root / release.pin.path.text / "extra.cubin").write_bytes(b"extra")
    with pytest.raises(PinError, match="not in the manifest"):
        release.library(store, server.url).load(release.path("extra.cubin"), fetch=True)
    assert server.count("extra.cubin") == 0


def test_no_manifest_in_any_source_is_a_source_error(release: Release, server: FaultyServer, store: Path) -> None:
    server.fault("checksums.txt", status(404))
    with pytest.raises(SourceError, match="status 404"):
        release.library(store, server.url).manifest(release.pin)


def test_a_damaged_manifest_in_the_store_is_fetched_again(release: Release, server: FaultyServer, store: Path) -> None:
    plant(store, release.pin.manifest_sha256, b"damaged")
    assert len(release.library(store, server.url).manifest(release.pin).digests) == 3


def test_the_manifest_passes_over_a_source_that_has_another_one(
    release: Release, server: FaultyServer, store: Path, tmp_path: Path
) -> None:
    other = make_release(tmp_path / "other", {"x": b"another release"})
    assert len(release.library(store, other.root, server.url).manifest(release.pin).digests) == 3


def test_the_manifest_is_parsed_once(release: Release, store: Path) -> None:
    library = release.library(store, release.root)
    assert library.manifest(release.pin) is library.manifest(release.pin)


def test_where_names_store_and_source_in_the_order_of_loading(release: Release, store: Path) -> None:
    library = release.library(store, release.root)
    library.fetch(release.pin, [release.path(NAME)])
    assert [(place.kind, place.location) for place in library.where(release.path(NAME))] == [
        ("store", str(Store(store).object_path(release.digest(NAME)))),
        ("source", str(release.file(NAME))),
    ]


def test_where_finds_nothing_for_what_is_nowhere(release: Release, store: Path) -> None:
    release.library(store, release.root).fetch(release.pin, [release.path("kernels.bin")])
    assert release.library(store).where(release.path(NAME)) == ()


@pytest.mark.parametrize(
    ("below", "names"),
    [
        (None, ["kernels.bin", "fmha/decode.cubin", "fmha/prefill.cubin"]),
        ("made/fmha", ["kernels.bin", "fmha/decode.cubin", "fmha/prefill.cubin"]),
        ("made/fmha/fmha/", ["fmha/decode.cubin", "fmha/prefill.cubin"]),
        ("made/fmha/kernels.bin", ["kernels.bin"]),
    ],
)
def test_a_target_selects_files_folders_or_all(
    release: Release, store: Path, below: str | None, names: list[str]
) -> None:
    assert release.library(store, release.root).select(release.pin, below) == tuple(map(release.path, names))


def test_a_target_outside_the_manifest_is_refused(release: Release, store: Path) -> None:
    with pytest.raises(PinError, match="not in the manifest"):
        release.library(store, release.root).select(release.pin, "made/fmha/none")


def test_a_source_that_is_none_is_refused_at_once(release: Release, store: Path) -> None:
    with pytest.raises(UsageError, match="expected http or https"):
        release.library(store, "gopher://host/x")


def test_discover_gives_the_manifest_of_a_folder_without_a_pin(release: Release, store: Path) -> None:
    data, origin = release.library(store, release.root).discover(ArtifactPath("made/fmha"), None)
    assert (data, origin) == (
        (release.root / "made/fmha/checksums.txt").read_bytes(),
        str(release.root),
    )


def test_discover_with_a_digest_takes_no_other_bytes(release: Release, store: Path) -> None:
    with pytest.raises(PinError, match="expected 0000"):
        release.library(store, release.root).discover(ArtifactPath("made/fmha"), "0" * 64)


def test_loading_leaves_no_descriptor_open(release: Release, store: Path, tmp_path: Path) -> None:
    library = release.library(store, release.root)
    library.fetch(release.pin)
    library.load(release.path(NAME), fetch=False)
    before = sorted(os.listdir("/proc/self/fd"))
    for name in release.files:
        library.load(release.path(name), fetch=False)
        with pytest.raises(CorruptError):
            library.store.read(release.digest(name), 1)
        plant(store, release.digest(name), release.files[name])
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_failure_that_passes_is_hidden_from_the_loader(release: Release, server: FaultyServer, store: Path) -> None:
    server.fault(NAME, status(503), ok)
    artifact = release.library(store, server.url).load(release.path(NAME), fetch=True)
    assert artifact.data == release.files[NAME]


def test_looking_for_a_manifest_offline_makes_no_store(release: Release, store: Path) -> None:
    with pytest.raises(SourceError, match="skipped"):
        release.library(store, "http://host.invalid/", offline=True).manifest(release.pin)
    assert not store.exists()
