from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubin_runtime.artifacts.path import ArtifactPath, PathError
from cubin_runtime.errors import UsageError

PARTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="/\\"), min_size=1)
GOOD_PARTS = PARTS.filter(lambda part: part not in (".", "..") and len(part.encode()) <= 255)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("/etc/passwd", "absolute"),
        ("a//b", "empty component"),
        ("a/", "empty component"),
        ("../a", r"'\.\.'"),
        ("a/../b", r"'\.\.'"),
        ("a/./b", r"'\.'"),
        ("..", r"'\.\.'"),
        ("a\\b", "backslash"),
        ("a\0b", "NUL"),
        ("a\nb", "control"),
        ("a\x7fb", "control"),
        ("a/\udcff", "Unicode"),
        ("a" * 256, "255 bytes"),
        ("ä" * 128, "255 bytes"),
        ("/".join(["abcdefg"] * 129), "1024"),
    ],
)
def test_a_text_that_breaks_a_rule_is_refused_with_the_rule(text: str, reason: str) -> None:
    with pytest.raises(PathError, match=reason):
        ArtifactPath(text)


def test_a_path_error_is_a_usage_error() -> None:
    assert issubclass(PathError, UsageError)


def test_something_that_is_no_text_is_refused() -> None:
    with pytest.raises(PathError, match="expected text, got int"):
        ArtifactPath(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["a", "a/b.cubin", "a/..b/c..", "a/...", "a b/c", "ä/ß", "a" * 255])
def test_a_path_inside_the_rules_is_taken_as_it_is(text: str) -> None:
    assert ArtifactPath(text).text == text


def test_parts_release_and_name_are_read_off_the_text() -> None:
    path = ArtifactPath("release/fmha/kernel.cubin")
    assert (path.release, path.parts, path.name) == (
        "release",
        ("release", "fmha", "kernel.cubin"),
        "kernel.cubin",
    )


@pytest.mark.parametrize("relative", ["../other", "/abs", "", "a/../../b"])
def test_a_child_cannot_climb(relative: str) -> None:
    with pytest.raises(PathError):
        ArtifactPath("release").child(relative)


def test_below_means_inside_and_not_merely_the_same_beginning() -> None:
    folder = ArtifactPath("a/b")
    assert ArtifactPath("a/b/c").is_below(folder)
    assert not ArtifactPath("a/bc").is_below(folder)
    assert not folder.is_below(folder)


def test_relative_to_undoes_child() -> None:
    folder = ArtifactPath("a/b")
    assert folder.child("c/d").relative_to(folder) == "c/d"


def test_relative_to_another_folder_is_refused() -> None:
    with pytest.raises(PathError, match="not below"):
        ArtifactPath("a/b").relative_to(ArtifactPath("c"))


@given(st.lists(GOOD_PARTS, min_size=1, max_size=4))
def test_good_parts_make_a_path_that_gives_them_back(parts: list[str]) -> None:
    text = "/".join(parts)
    if len(text.encode()) <= 1024:
        assert ArtifactPath(text).parts == tuple(parts)


@given(st.text(st.sampled_from(string.ascii_letters + "./\\\0\n"), max_size=40))
def test_whatever_is_accepted_stays_below_its_root(text: str) -> None:
    try:
        path = ArtifactPath(text)
    except PathError:
        return
    depth = 0
    for part in path.parts:
        depth += {"..": -1, ".": 0, "": 0}.get(part, 1)
        assert depth >= 1
