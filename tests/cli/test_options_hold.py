"""Options of fetch, where and verify do what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cubin_runtime.artifacts.library import Library
from cubin_runtime.cli import main, output
from cubin_runtime.errors import StoreError
from tests.artifacts.releases import Release, make_release
from tests.artifacts.serving import serving

NAME = "fmha/prefill.cubin"


def test_offline_asks_no_server_whatever_the_environment_says(
    release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_OFFLINE", "0")
    with serving(release.root) as server:
        assert main(["fetch", "made-1.0", "--source", server.url, "--offline"]) == 7
        assert server.targets == []


def test_where_asks_no_server(release: Release) -> None:
    with serving(release.root) as server:
        assert main(["where", str(release.path(NAME)), "--source", server.url]) in (4, 7)
        assert server.targets == []


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the library's fetch is called with; it finds the store full."""
    seen: list[dict[str, Any]] = []

    def full(library: Library, *_: object, **options: Any) -> None:
        seen.append(options)
        raise StoreError("full")

    monkeypatch.setattr(Library, "fetch", full)
    return seen


def test_jobs_are_passed_on(release: Release, fetches: list[dict[str, Any]]) -> None:
    assert main(["fetch", "made-1.0", "--source", str(release.root), "--jobs", "3"]) == 8
    assert fetches[0]["jobs"] == 3


def test_a_full_store_ends_a_fetch_of_several_releases(release: Release, fetches: list[dict[str, Any]]) -> None:
    assert main(["fetch", "made-1.0", str(release.path(NAME)), "--source", str(release.root)]) == 8
    assert len(fetches) == 1


def test_a_place_has_the_digest_of_its_file(release: Release, run_json) -> None:
    shown = run_json("where", release.path(NAME), "--source", release.root)[1]
    assert [place["sha256"] for place in shown["places"]] == [release.digest(NAME)]


def test_every_tree_that_is_named_is_verified(release: Release, environment: Path, run_json) -> None:
    other = make_release(environment / "other")
    other.file(NAME).write_bytes(b"damaged")
    code, shown = run_json("verify", "made-1.0", "--tree", release.root, "--tree", other.root)
    assert (code, [len(one["corrupt"]) for one in shown["releases"]]) == (5, [0, 1])


@pytest.mark.parametrize(("complete", "word", "paths"), [(True, "missing", 2), (False, "not fetched", 0)])
def test_missing_files_are_an_error_and_named_where_all_are_asked_for(
    release: Release, run_json, capsys: pytest.CaptureFixture[str], complete: bool, word: str, paths: int
) -> None:
    source = ["--source", str(release.root)]
    assert main(["fetch", str(release.path(NAME)), *source]) == 0
    words = ["verify", "made-1.0", *source, *(["--complete"] if complete else [])]
    code, shown = run_json(*words)
    assert (code, len(shown["releases"][0]["missing_paths"])) == (4 if complete else 0, paths)
    main(words)
    assert f"2 {word}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999 bytes"), (1000, "1.00 kB"), (10**6, "1.00 MB"), (10**9, "1.00 GB")],
)
def test_sizes_change_their_unit_at_a_thousand(count: int, text: str) -> None:
    assert output.size(count) == text


@pytest.mark.parametrize(("count", "shown"), [(2, ["0", "1"]), (3, ["0", "1", "and 1 more"])])
def test_some_of_many_are_shown_and_the_rest_counted(
    capsys: pytest.CaptureFixture[str], count: int, shown: list[str]
) -> None:
    output.some("file", [str(number) for number in range(count)], most=2)
    assert capsys.readouterr().out == "".join(f"  file: {one}\n" for one in shown)
