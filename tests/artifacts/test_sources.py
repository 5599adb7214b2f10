from __future__ import annotations

import os
import stat
import sys
import warnings
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from cubin_runtime.artifacts.path import ArtifactPath
from cubin_runtime.artifacts.sources.archive import ArchiveSource
from cubin_runtime.artifacts.sources.directory import DirectorySource
from cubin_runtime.artifacts.sources.package import PackageSource
from cubin_runtime.artifacts.sources.source import FileRequest, NotHereError, parse_source, redact
from cubin_runtime.artifacts.store.store import Store
from cubin_runtime.errors import SourceError, UsageError
from tests.artifacts.releases import Release, make_release, manifest_of, zip_tree

NAME = "fmha/decode.cubin"


def wanted(release: Release, name: str = NAME, limit: int = 1 << 20) -> FileRequest:
    return FileRequest(release.path(name), release.pin.path, None, limit)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("http://host/root", "http"),
        ("https://host:8443/root?sig=abc", "http"),
        ("package", "package"),
        ("/some/tree", "tree"),
        ("tree", "tree"),
        ("x/flashinfer_cubin-0.6.13-py3-none-any.whl", "archive"),
        ("/x/tree.ZIP", "archive"),
    ],
)
def test_the_text_of_a_source_tells_its_kind(text: str, kind: str) -> None:
    assert parse_source(text).kind == kind


@pytest.mark.parametrize("text", ["ftp://host/x", "file:///etc", "https://", "http://:80/x", "http://h:99999/", ""])
def test_a_text_that_is_no_source_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_source(text)


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError, match="netrc") as caught:
        parse_source("https://user:secret@host/root?token=hidden")
    assert "secret" not in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_redaction_takes_user_info_query_and_fragment() -> None:
    assert redact("https://u:p@host:1/a/b?token=x#y") == "https://host:1/a/b"


def test_the_label_of_a_url_is_redacted() -> None:
    assert parse_source("https://host/root?sig=abc").label == "https://host/root"


def test_a_directory_gives_the_bytes_of_its_tree(release: Release) -> None:
    assert DirectorySource(release.root).read(wanted(release)) == release.files[NAME]


def test_a_directory_without_the_file_says_so(release: Release) -> None:
    with pytest.raises(NotHereError, match=r"has no made/fmha/none\.cubin"):
        DirectorySource(release.root).read(wanted(release, "none.cubin"))


def test_a_directory_that_does_not_exist_says_so(release: Release, tmp_path: Path) -> None:
    with pytest.raises(NotHereError, match="is not a directory"):
        DirectorySource(tmp_path / "none").read(wanted(release))


def test_a_directory_does_not_read_over_the_limit(release: Release) -> None:
    with pytest.raises(SourceError, match="at most 10 are allowed"):
        DirectorySource(release.root).read(wanted(release, limit=10))


@pytest.mark.timeout(20)
def test_a_fifo_in_a_tree_is_an_error_and_never_blocks(release: Release) -> None:
    release.file(NAME).unlink()
    os.mkfifo(release.file(NAME))
    with pytest.raises(SourceError, match="is a FIFO"):
        DirectorySource(release.root).read(wanted(release))


def test_a_tree_of_links_is_read(release: Release, tmp_path: Path) -> None:
    release.file(NAME).rename(tmp_path / "blob")
    release.file(NAME).symlink_to(tmp_path / "blob")
    assert DirectorySource(release.root).read(wanted(release)) == release.files[NAME]


def test_a_store_is_a_source_by_digest(release: Release, tmp_path: Path) -> None:
    store = Store(tmp_path / "other")
    store.put(release.digest(NAME), release.files[NAME])
    asked = FileRequest(release.path(NAME), release.pin.path, release.digest(NAME), 1 << 20)
    assert DirectorySource(store.root).read(asked) == release.files[NAME]


@pytest.mark.parametrize("prefix", ["", "pkg/", "pkg/data/deep/"])
def test_an_archive_is_read_wherever_the_tree_lies_in_it(release: Release, tmp_path: Path, prefix: str) -> None:
    archive = zip_tree(release.root, tmp_path / "x.whl", prefix)
    assert ArchiveSource(archive).read(wanted(release)) == release.files[NAME]


def test_an_archive_with_stored_members_is_read(release: Release, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_STORED) as opened:
        opened.writestr("made/fmha/checksums.txt", manifest_of(release.files))
        opened.writestr("made/fmha/fmha/decode.cubin", release.files[NAME])
    assert ArchiveSource(tmp_path / "x.zip").read(wanted(release)) == release.files[NAME]


def test_an_archive_with_bytes_in_front_is_read(release: Release, tmp_path: Path) -> None:
    archive = zip_tree(release.root, tmp_path / "x.zip")
    archive.write_bytes(b"#!/bin/sh\n" * 10 + archive.read_bytes())
    assert ArchiveSource(archive).read(wanted(release)) == release.files[NAME]


def test_an_archive_that_nobody_has_any_more_is_closed(release: Release, tmp_path: Path) -> None:
    source = ArchiveSource(zip_tree(release.root, tmp_path / "x.zip"))
    source.read(wanted(release))
    assert source._descriptor is not None
    place = Path(f"/proc/self/fd/{source._descriptor}")
    assert place.resolve() == tmp_path / "x.zip"
    del source
    assert place.resolve() != tmp_path / "x.zip"


def test_an_archive_without_the_file_says_so(release: Release, tmp_path: Path) -> None:
    with pytest.raises(NotHereError, match="has no made/fmha/none"):
        ArchiveSource(zip_tree(release.root, tmp_path / "x.zip")).read(wanted(release, "none"))


def test_an_archive_that_does_not_exist_says_so(release: Release, tmp_path: Path) -> None:
    with pytest.raises(NotHereError, match="does not exist"):
        ArchiveSource(tmp_path / "none.zip").read(wanted(release))


def test_a_file_that_is_no_archive_is_an_error(release: Release, tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(b"not a zip")
    with pytest.raises(SourceError, match="not a readable zip"):
        ArchiveSource(tmp_path / "x.zip").read(wanted(release))


def test_a_truncated_archive_is_an_error(release: Release, tmp_path: Path) -> None:
    archive = zip_tree(release.root, tmp_path / "x.zip")
    archive.write_bytes(archive.read_bytes()[:-100])
    with pytest.raises(SourceError, match="not a readable zip"):
        ArchiveSource(archive).read(wanted(release))


def test_a_damaged_member_is_an_error(release: Release, tmp_path: Path) -> None:
    archive = zip_tree(release.root, tmp_path / "x.zip")
    data = bytearray(archive.read_bytes())
    place = data.index(b"decode.cubin") + len("decode.cubin")
    data[place : place + 8] = b"\xff" * 8
    archive.write_bytes(data)
    with pytest.raises(SourceError, match="damaged"):
        ArchiveSource(archive).read(wanted(release))


def test_a_member_that_unpacks_to_more_than_it_says_is_refused(release: Release, tmp_path: Path) -> None:
    archive = zip_tree(make_release(tmp_path / "bomb", {NAME: bytes(1_000_000)}).root, tmp_path / "x.zip")
    data = archive.read_bytes().replace((1_000_000).to_bytes(4, "little"), (100).to_bytes(4, "little"))
    archive.write_bytes(data)
    with pytest.raises(SourceError, match="unpacks to over 1000 bytes"):
        ArchiveSource(archive).read(wanted(release, limit=1000))


def test_a_member_over_the_limit_is_refused_unread(release: Release, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="at most 10 are allowed"):
        ArchiveSource(zip_tree(release.root, tmp_path / "x.zip")).read(wanted(release, limit=10))


def install(site: Path, release: Release, monkeypatch: pytest.MonkeyPatch, *, record: bool = True) -> None:
    """Lay the release out as an installed distribution whose package refuses to be imported."""
    package = site / "carrier"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    release.root.rename(package / "data")
    listed = [file.relative_to(site).as_posix() for file in package.rglob("*") if file.is_file()]
    info = site / "carrier-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in listed) if record else "carrier/__init__.py,,\n")
    monkeypatch.syspath_prepend(str(site))


def snapshot(place: Path) -> list[tuple[str, int, int]]:
    return sorted((str(f), f.stat().st_mode, f.stat().st_mtime_ns) for f in place.rglob("*"))


def test_an_installed_package_that_carries_the_tree_is_found_without_importing_it(
    release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", release, monkeypatch)
    assert PackageSource().read(wanted(release)) == release.files[NAME]
    assert "carrier" not in sys.modules


@pytest.mark.timeout(20)
def test_a_record_that_is_a_fifo_lists_nothing_and_is_not_waited_for(
    release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", release, monkeypatch)
    (tmp_path / "other-1.0.dist-info").mkdir()
    os.mkfifo(tmp_path / "other-1.0.dist-info" / "RECORD")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert PackageSource().read(wanted(release)) == release.files[NAME]


def test_a_package_that_does_not_list_the_tree_is_not_searched(
    release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", release, monkeypatch, record=False)
    with pytest.raises(NotHereError, match="no installed package carries made/fmha"):
        PackageSource().read(wanted(release))


@pytest.mark.parametrize(
    "record",
    [b"caf\xe9/__init__.py,,\n", b'"unclosed checksums.txt\n\0checksums.txt,,', b"x" * 200_000 + b"checksums.txt"],
)
def test_damaged_metadata_of_another_package_is_passed_over(
    release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: bytes
) -> None:
    install(tmp_path / "site", release, monkeypatch)
    other = tmp_path / "other" / "damaged-1.0.dist-info"
    other.mkdir(parents=True)
    (other / "RECORD").write_bytes(record)
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    assert PackageSource().read(wanted(release)) == release.files[NAME]


def test_installed_packages_are_looked_up_once_for_many_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[None] = []
    monkeypatch.setattr(metadata, "distributions", lambda: looked.append(None) or iter(()))
    source = PackageSource()
    for number in range(100):
        assert source.roots(ArtifactPath(f"release-{number}/fmha")) == ()
    assert len(looked) == 1


def test_a_package_is_never_written(release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", release, monkeypatch)
    before = snapshot(tmp_path / "site")
    release.library(tmp_path / "store", "package").fetch(release.pin)
    assert snapshot(tmp_path / "site") == before


def test_names_of_a_tree_are_relative_to_the_folder(release: Release, tmp_path: Path) -> None:
    expected = {*release.files, "checksums.txt"}
    assert DirectorySource(release.root).names(release.pin.path) == expected
    assert ArchiveSource(zip_tree(release.root, tmp_path / "x.zip")).names(release.pin.path) == expected


def test_a_folder_that_is_not_there_has_no_names(release: Release, tmp_path: Path) -> None:
    nowhere = ArtifactPath("no/where")
    assert DirectorySource(release.root).names(nowhere) == set()
    assert ArchiveSource(zip_tree(release.root, tmp_path / "x.zip")).names(nowhere) == set()


# -- archives that lead astray whoever unpacks them


def add_to(archive: Path, *members: tuple[zipfile.ZipInfo | str, bytes]) -> Path:
    with zipfile.ZipFile(archive, "a") as opened, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, data in members:
            opened.writestr(name, data)
    return archive


def link_member(name: str) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(name)
    member.create_system = 3
    member.external_attr = (stat.S_IFLNK | 0o777) << 16
    return member


@pytest.mark.parametrize(
    ("member", "extra"),
    [
        ("package/data/made/fmha/kernels.bin", "package/data/made/fmha/kernels.bin (listed more than once)"),
        ("../evil", "../evil"),
        ("package/data/made/fmha/../../evil", "package/data/made/fmha/../../evil"),
        ("/etc/evil", "/etc/evil"),
        ("a\\evil", "a\\evil"),
        (link_member("package/data/link"), "package/data/link"),
    ],
)
@pytest.mark.parametrize("suffix", [".zip", ".whl"])
def test_what_leads_astray_is_listed_with_a_release(
    release: Release, tmp_path: Path, member: zipfile.ZipInfo | str, extra: str, suffix: str
) -> None:
    archive = add_to(zip_tree(release.root, tmp_path / f"x{suffix}"), (member, b"evil"))
    assert extra in ArchiveSource(archive).names(release.pin.path) - {*release.files, "checksums.txt"}


def test_a_local_header_of_another_name_is_damage(release: Release, tmp_path: Path) -> None:
    archive = zip_tree(release.root, tmp_path / "x.zip")
    data = archive.read_bytes()
    name = f"data/{release.path(NAME)}".encode()
    archive.write_bytes(data.replace(name, name[:-1] + b"X", 1))
    with pytest.raises(SourceError, match="its local header has another name"):
        ArchiveSource(archive).read(wanted(release))


def test_names_beyond_ascii_are_read_in_either_encoding(tmp_path: Path) -> None:
    made = make_release(tmp_path, {"ü.cubin": b"kernel", "ㄱ.cubin": b"other"})
    source = ArchiveSource(zip_tree(made.root, tmp_path / "x.zip"))
    assert source.read(wanted(made, "ü.cubin")) == b"kernel"
    assert source.read(wanted(made, "ㄱ.cubin")) == b"other"


def test_only_what_lies_in_no_release_is_outside(release: Release, tmp_path: Path) -> None:
    other = make_release(tmp_path / "other", name="other-1.0", folder="other/fmha")
    archive = zip_tree(release.root, tmp_path / "x.zip")
    zip_tree(other.root, tmp_path / "y.zip")
    with zipfile.ZipFile(tmp_path / "y.zip") as second:
        add_to(archive, ("README", b"hello"), *((name, second.read(name)) for name in second.namelist()))
    source = ArchiveSource(archive)
    assert source.outside([release.pin.path, other.pin.path]) == {"README"}
    inside_other = {f"package/data/{other.path(name)}" for name in (*other.files, "checksums.txt")}
    assert source.outside([release.pin.path]) == {"README", *inside_other}
