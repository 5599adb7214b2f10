from __future__ import annotations

import hashlib
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubin_runtime.artifacts.manifest import MAX_MANIFEST_BYTES, parse_manifest
from cubin_runtime.artifacts.path import ArtifactPath
from cubin_runtime.errors import CorruptError
from tests.artifacts.children import run_child

FOLDER = ArtifactPath("release/fmha")
A = "a" * 64
B = "b" * 64
GOOD = f"{A}  one.cubin\n{B}  sub/two.cubin\n".encode()
NAMES = st.from_regex(r"[a-z0-9_]{1,8}(/[a-z0-9_]{1,8}){0,2}\.cubin", fullmatch=True)
DIGESTS = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)


def test_keys_are_full_paths_in_the_order_of_the_file() -> None:
    manifest = parse_manifest(GOOD, FOLDER, "origin")
    assert list(manifest.digests.items()) == [
        (ArtifactPath("release/fmha/one.cubin"), A),
        (ArtifactPath("release/fmha/sub/two.cubin"), B),
    ]


def test_the_digest_is_the_one_of_the_bytes() -> None:
    assert parse_manifest(GOOD, FOLDER, "origin").sha256 == hashlib.sha256(GOOD).hexdigest()


def test_the_binary_mark_of_sha256sum_is_read() -> None:
    manifest = parse_manifest(f"{A} *one.cubin\n".encode(), FOLDER, "origin")
    assert manifest.digests[FOLDER.child("one.cubin")] == A


@pytest.mark.parametrize(
    ("data", "place", "reason"),
    [
        (b"", "origin:1", "empty"),
        (f"{A}  one\n{A}  one\n".encode(), "origin:2", "twice"),
        (f"{A}  one\n{'g' * 64}  two\n".encode(), "origin:2", "64 lowercase hex"),
        (f"{'A' * 64}  one\n".encode(), "origin:1", "64 lowercase hex"),
        (f"{A[:-1]}  one\n".encode(), "origin:1", "64 lowercase hex"),
        (f"{A} one\n".encode(), "origin:1", "two spaces"),
        (f"{A}  \n".encode(), "origin:1", "a name"),
        (f"{A}  one\n\n{B}  two\n".encode(), "origin:2", "empty"),
        (f"{A}  ../one\n".encode(), "origin:1", r"'\.\.'"),
        (f"{A}  /one\n".encode(), "origin:1", "empty component"),
        (f"{A}  a\\b\n".encode(), "origin:1", "backslash"),
        (f"{A}  one\r\n".encode(), "origin:1", "CRLF"),
        (f"{A}  one\n{B}  tw".encode(), "origin:2", "truncated"),
        (f"{A}  one\n{B}  \xff\n".encode("latin-1"), "origin:2", "UTF-8"),
        (f"{A}  checksums.txt\n".encode(), "origin:1", "lists itself"),
        (f"{A}  sub\n{B}  sub/two\n".encode(), "origin:1", "a file and a folder"),
        (f"{A}  a/b\n{B}  a/b/c/d\n".encode(), "origin:1", "a file and a folder"),
    ],
)
def test_a_wrong_line_is_named_with_its_place(data: bytes, place: str, reason: str) -> None:
    with pytest.raises(CorruptError, match=f"^{place}: .*{reason}"):
        parse_manifest(data, FOLDER, "origin")


def test_a_manifest_over_sixteen_mebibytes_is_not_parsed() -> None:
    with pytest.raises(CorruptError, match="at most"):
        parse_manifest(bytes(MAX_MANIFEST_BYTES + 1), FOLDER, "origin")


@given(st.dictionaries(NAMES, DIGESTS, min_size=1, max_size=20))
def test_what_sha256sum_writes_is_read_back(digests: dict[str, str]) -> None:
    data = "".join(f"{digest}  {name}\n" for name, digest in digests.items()).encode()
    parsed = parse_manifest(data, FOLDER, "origin")
    assert {path.relative_to(FOLDER): digest for path, digest in parsed.digests.items()} == digests


@given(st.binary(max_size=300))
def test_arbitrary_bytes_never_raise_anything_else(data: bytes) -> None:
    with suppress(CorruptError):
        parse_manifest(data, FOLDER, "origin")


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_one_changed_byte_changes_the_digest_or_is_refused(place: int, value: int) -> None:
    damaged = GOOD[:place] + bytes([value]) + GOOD[place + 1 :]
    try:
        manifest = parse_manifest(damaged, FOLDER, "origin")
    except CorruptError:
        return
    assert (manifest.sha256 == hashlib.sha256(GOOD).hexdigest()) == (damaged == GOOD)


def test_the_largest_manifest_of_deep_folders_costs_little_memory() -> None:
    body = """
    import re
    from cubin_runtime.artifacts.manifest import MAX_MANIFEST_BYTES, parse_manifest
    from cubin_runtime.artifacts.path import ArtifactPath
    lines = (f"{n:064x}  {n}/{'a/' * 480}{n}\\n" for n in range(15_500))
    data = "".join(lines).encode()
    assert MAX_MANIFEST_BYTES * 0.9 < len(data) < MAX_MANIFEST_BYTES
    print(len(parse_manifest(data, ArtifactPath("made/fmha"), "x").digests))
    print(int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) >> 10)
    """
    files, mebibytes = map(int, run_child(body).stdout.split())
    assert files == 15_500
    assert mebibytes < 200
