"""``list`` on a small release of our own making, used in place from a directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.small_release import ENTRY, FOLDER, SmallRelease


@pytest.fixture
def release(tmp_path: Path) -> SmallRelease:
    return SmallRelease(tmp_path, {**ENTRY, "registers": 4}, {**ENTRY, "name": "b", "file": "kernels/x.cubin"})


@pytest.fixture
def answer(release: SmallRelease, capsys: pytest.CaptureFixture[str]):
    """Run a verb with ``--json`` and give its object."""

    def ask(*arguments: str) -> dict:
        release.run(*arguments, "--json")
        return json.loads(capsys.readouterr().out)

    return ask


def test_list_without_a_name_shows_the_pins(answer) -> None:
    assert {"small", "trtllm-gen-0.6.13"} <= {pin["name"] for pin in answer("list")["pins"]}


def test_list_shows_every_file_with_its_metadata(release: SmallRelease, answer) -> None:
    shown = answer("list", "small")
    assert [file["path"] for file in shown["files"]] == [f"{FOLDER}/{name}" for name in release.files]
    assert shown["files"][1]["metadata"]["sm"] == "90a"


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (["--sm", "90"], 1),
        (["--dtype", "bfloat16"], 1),
        (["--family", "hopper"], 1),
        (["--match", "*.cubin"], 2),
        (["--match", "kernels/*80*"], 1),
    ],
)
def test_list_filters(answer, arguments: list[str], count: int) -> None:
    assert answer("list", "small", *arguments)["count"] == count


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--sm", "100"], "no kernel runs on sm 100, expected a device for one of sm_90a"),
        (["--head-dim", "64"], "no kernel has head_dim 64, expected one of 128"),
        (["--dtype", "bf17"], "no kernel has dtype bf17, expected one of bf16"),
        (["--family", "x"], "no kernel has family x, expected one of "),
        (["--match", "nothing*"], "no file matches nothing*"),
        (["--sm", "90", "--match", "*80*"], "no kernel matches all filters together"),
    ],
)
@pytest.mark.parametrize("verb", ["list", "fetch", "verify", "inspect", "export", "mirror", "diff"])
def test_a_filter_that_nothing_passes_is_usage_in_every_verb_and_names_what_there_is(
    release: SmallRelease, capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: str, words: list[str], reason: str
) -> None:
    more = {"export": ["--out", str(tmp_path / "x.zip")], "mirror": ["--out", str(tmp_path / "x")], "diff": ["small"]}
    assert release.run(verb, "small", *more.get(verb, []), *words) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("name", ["kernels/facts_sm_90a.cubin", "facts_sm_90a.cubin", "facts_sm_90a"])
@pytest.mark.parametrize("verb", ["list", "fetch", "verify", "inspect", "where", "export"])
def test_names_that_list_prints_are_accepted_by_every_verb(
    release: SmallRelease, capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: str, name: str
) -> None:
    assert release.run("fetch", "small") == 0
    more = ["--out", str(tmp_path / "x.zip")] if verb == "export" else []
    assert release.run(verb, name, *more) == (5 if verb == "inspect" else 0)  # its metadata is made up
    if verb == "list":
        assert f"{FOLDER}/kernels/facts_sm_90a.cubin".endswith(capsys.readouterr().out.splitlines()[-1].split()[0])


def test_a_name_of_several_files_is_told(release: SmallRelease, capsys: pytest.CaptureFixture[str]) -> None:
    assert release.run("where", "checksums") == 3
    assert "and no local release has a file or kernel of that name" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "count"), [(f"{FOLDER}/kernels", 2), (f"{FOLDER}/kernels.json", 1), (FOLDER, 3)])
def test_list_takes_an_artifact_path(answer, name: str, count: int) -> None:
    assert answer("list", name)["count"] == count


def test_count_prints_the_number_alone(release: SmallRelease, capsys: pytest.CaptureFixture[str]) -> None:
    release.run("list", "small", "--count")
    assert capsys.readouterr().out == "3\n"


def test_the_table_names_file_target_and_types(release: SmallRelease, capsys: pytest.CaptureFixture[str]) -> None:
    release.run("list", "small", "--sm", "90")
    assert capsys.readouterr().out.splitlines()[1] == "kernels/facts_sm_90a.cubin\tsm_90a\tbf16\t128\t96\t4096"


def test_filters_without_a_release_are_usage(release: SmallRelease) -> None:
    assert release.run("list", "--sm", "90") == 2


def test_an_unknown_release_is_not_pinned(release: SmallRelease) -> None:
    assert release.run("list", "nothing") == 3
