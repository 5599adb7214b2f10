"""Hostile sources, files and names from the command line: refused with a sentence, obeyed by no terminal."""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cubin_runtime.artifacts.pins.pin import format_pin
from cubin_runtime.artifacts.sources.failover import FetchPolicy
from cubin_runtime.artifacts.store.store import Store
from cubin_runtime.artifacts.tables.metadata import HEADER_PATH
from cubin_runtime.cli import main
from tests.artifacts.kernel_headers import header_of
from tests.artifacts.releases import Release, make_release, sha256, zip_tree
from tests.artifacts.serving import Action, announced_oversize, gzip_encoded, redirect, serving

NAME = "fmha/prefill.cubin"
ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202e"
RawAsked = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FetchPolicy, "delay", lambda self, attempt, retry_after: None)


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str]) -> RawAsked:
    """The code of a command line, and all that it printed; which never holds what a terminal would obey."""

    def ask(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        shown = "".join(capsys.readouterr())
        assert "\x1b" not in shown
        assert "\u202e" not in shown
        assert "Traceback" not in shown
        return code, shown

    return ask


# -- servers


@pytest.mark.parametrize(
    ("action", "sentence"),
    [
        (announced_oversize, "at most"),
        (gzip_encoded, "Content-Encoding"),
        (redirect("ftp://host/x"), "scheme"),
        (redirect("file:///etc/passwd"), "scheme"),
        (redirect("http://user:secret@127.0.0.1:9/x"), ""),
        (redirect(f"/{ESCAPES.encode().hex()}%1b[2J"), "404"),
    ],
)
def test_a_server_that_plays_tricks_is_refused(
    release: Release, asked: RawAsked, action: Action, sentence: str
) -> None:
    with serving(release.root) as server:
        server.fault(NAME, action)
        code, shown = asked("fetch", "made-1.0", "--source", server.url)
    assert (code, sentence.lower() in shown.lower(), "secret" in shown) == (7, True, False)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("http://user:secret@host.invalid/", "credentials belong in netrc"),
        ("ftp://host.invalid/", "expected http or https"),
        ("file:///tree", "expected http or https"),
        (f"gopher://host/{ESCAPES}", "expected http or https"),
    ],
)
def test_a_source_that_is_none_is_refused(release: Release, asked: RawAsked, source: str, sentence: str) -> None:
    code, shown = asked("fetch", "made-1.0", "--source", source)
    assert (code, sentence in shown, "secret" in shown) == (2, True, False)


# -- names


@pytest.mark.parametrize(
    "target", ["made/fmha/../../etc/passwd", "/etc/passwd", "made//fmha", "made/fmha\\x", f"made/fmha/{ESCAPES}", "."]
)
@pytest.mark.parametrize("verb", ["fetch", "verify", "where", "list"])
def test_a_path_that_climbs_or_hides_is_refused(release: Release, asked: RawAsked, verb: str, target: str) -> None:
    assert asked(verb, target, "--source", release.root)[0] == 3


def pinned(release: Release, manifest: bytes) -> None:
    """The release with another manifest, and a pin that trusts it: what remains is the form."""
    release.file("checksums.txt").write_bytes(manifest)
    old, new = release.pin.manifest_sha256, sha256(manifest)
    release.pin_file.write_text(format_pin(release.pin).replace(old, new))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("../../../etc/passwd", "has the component '..'"),
        ("/etc/passwd", "empty component"),
        (ESCAPES, "control character"),
        ("a\r", "CRLF"),
        ("checksums.txt", "lists itself"),
    ],
)
def test_a_manifest_that_plays_tricks_is_refused_even_if_pinned(
    release: Release, asked: RawAsked, line: str, sentence: str
) -> None:
    pinned(release, f"{'0' * 64}  {line}\n".encode())
    code, shown = asked("fetch", "made-1.0", "--source", release.root)
    assert (code, sentence in shown, "checksums.txt:1:" in shown) == (5, True, True)


def test_names_of_a_published_tree_are_escaped(release: Release, asked: RawAsked) -> None:
    release.file(f"fmha/{ESCAPES}").write_bytes(b"extra")
    code, shown = asked("verify", "made-1.0", "--tree", release.root)
    assert (code, "\\x1b]0;owned\\x07\\x1b[2J\\u202e" in shown) == (6, True)


def test_names_in_an_archive_are_escaped(release: Release, asked: RawAsked, tmp_path: Path) -> None:
    archive = zip_tree(release.root, tmp_path / "x.zip")
    with zipfile.ZipFile(archive, "a") as opened:
        opened.writestr(f"package/data/made/fmha/{ESCAPES}", b"extra")
        opened.writestr("package/data/made/fmha/../../../etc/passwd", b"extra")
    code, shown = asked("verify", "made-1.0", "--tree", archive)
    assert (code, "extra: ../../../etc/passwd" in shown) == (6, True)


# -- what was planted in a store or a tree


@pytest.fixture
def place(release: Release, store: Path) -> Path:
    """Where an object was, in a store that is complete but for it."""
    assert main(["fetch", "made-1.0", "--source", str(release.root)]) == 0
    found = Store(store).object_path(release.digest(NAME))
    found.unlink()
    return found


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("plant", "sentence"),
    [
        (lambda place: os.mkfifo(place), "is a FIFO, expected a regular file"),
        (lambda place: place.symlink_to("/etc/passwd"), "is a symbolic link, expected a regular file"),
        (lambda place: place.mkdir(), "is a directory, expected a regular file"),
        (lambda place: place.write_bytes(b"x" * 100_000), "at most 3900 are allowed"),
    ],
)
def test_what_was_planted_in_a_store_is_named_and_never_read(
    release: Release, place: Path, asked: RawAsked, plant: Callable[[Path], object], sentence: str
) -> None:
    plant(place)
    code, shown = asked("verify", "made-1.0")
    assert (code, sentence in shown) == (5, True)


@pytest.mark.timeout(30)
def test_a_fifo_in_a_tree_is_refused(release: Release, asked: RawAsked) -> None:
    release.file(NAME).unlink()
    os.mkfifo(release.file(NAME))
    code, shown = asked("fetch", "made-1.0", "--source", release.root)
    assert (code, "is a FIFO" in shown) == (7, True)


# -- hostile formats


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06" + bytes(8), b"PK\x03\x04" * 100, bytes(1 << 16)])
def test_a_file_that_is_no_zip_is_refused(release: Release, asked: RawAsked, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.zip").write_bytes(content)
    code, shown = asked("fetch", "made-1.0", "--source", tmp_path / "x.zip")
    assert (code, "not a readable zip" in shown) == (7, True)


def test_a_zip_that_says_its_directory_is_huge_is_refused_unread(
    release: Release, asked: RawAsked, tmp_path: Path
) -> None:
    size = 65 << 20
    archive = tmp_path / "x.zip"
    with archive.open("wb") as opened:
        opened.truncate(size)
        opened.seek(size)
        opened.write(struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 1, 1, size, 0, 0))
    code, shown = asked("fetch", "made-1.0", "--source", archive)
    assert (code, f"a central directory of {size} bytes" in shown) == (7, True)


def test_a_zip_bomb_is_refused(release: Release, asked: RawAsked, tmp_path: Path) -> None:
    release.file(NAME).write_bytes(bytes(10 << 20))
    archive = zip_tree(release.root, tmp_path / "x.zip")
    code, shown = asked("fetch", "made-1.0", "--source", archive)
    assert (code, "is 10485760 bytes, at most 3900 are allowed" in shown) == (7, True)


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"MZ" + bytes(100), b"\x7fELF\x02\x01\x01" + b"\xff" * 200])
def test_a_file_that_is_no_cubin_is_refused(release: Release, asked: RawAsked, tmp_path: Path, content: bytes) -> None:
    (tmp_path / f"x{ESCAPES}").write_bytes(content)
    assert asked("inspect", tmp_path / f"x{ESCAPES}")[0] == 5


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        (b"", "no struct declaration"),
        (header_of("fmhaSm100fKernel_A", mThreadsPerCTA=ESCAPES), "is not ASCII"),
        (header_of("fmhaSm100fKernel_A", mThreadsPerCTA="\x1b[2J"), "expected a uint"),
        (header_of("fmhaSm100fKernel_A", "fmhaSm100fKernel_A"), "occurs twice"),
    ],
)
def test_hostile_metadata_is_refused_even_if_pinned(
    environment: Path, asked: RawAsked, monkeypatch: pytest.MonkeyPatch, header: bytes, sentence: str
) -> None:
    made = make_release(environment, {HEADER_PATH: header, "x.cubin": b"x"})
    monkeypatch.setenv("CUBIN_RUNTIME_PINS", str(made.pin_file))
    code, shown = asked("list", "made-1.0", "--source", made.root)
    assert (code, sentence in shown) == (5, True)


def test_a_pin_file_that_holds_escapes_is_refused_and_shown_escaped(
    release: Release, asked: RawAsked, tmp_path: Path
) -> None:
    pins = tmp_path / "odd.toml"
    pins.write_text(format_pin(release.pin).replace("Apache-2.0", "\\u001b[2J\\u202e"))
    code, shown = asked("list", "--pins", pins)
    assert (code, "expected printable text" in shown) == (3, True)
