"""``list`` on a small release of our own making, used in place from a directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_release import ENTRY, FOLDER, SmallRelease


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
        (["--sm", "100"], 0),
        (["--dtype", "bfloat16"], 1),
        (["--head-dim", "64"], 0),
        (["--family", "hopper"], 1),
        (["--match", "*.cubin"], 2),
        (["--match", "kernels/*80*"], 1),
        (["--sm", "90", "--match", "*80*"], 0),
    ],
)
def test_list_filters(answer, arguments: list[str], count: int) -> None:
    assert answer("list", "small", *arguments)["count"] == count


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
