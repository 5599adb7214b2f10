"""``inspect`` on a small release of our own making, used in place from a directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cubin_runtime import cli
from tests.cli.small_release import ENTRY, FIXTURES, FOLDER, SmallRelease


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


def test_a_pinned_file_is_shown_as_verified_with_its_manifest_line(release: SmallRelease, answer) -> None:
    shown = answer("inspect", f"{FOLDER}/kernels/facts_sm_80.cubin")
    assert (shown["verified"], shown["pin"]) == (True, "small")
    assert shown["manifest_line"] == f"{release.digest('kernels/facts_sm_80.cubin')}  kernels/facts_sm_80.cubin"


def test_a_copy_on_disk_is_recognised_by_its_digest(answer) -> None:
    shown = answer("inspect", str(FIXTURES / "facts_sm_80.cubin"))
    assert shown["path"] == f"{FOLDER}/kernels/facts_sm_80.cubin"


def test_bytes_that_no_pin_covers_are_shown_as_unverified(release: SmallRelease, answer) -> None:
    shown = answer("inspect", str(FIXTURES / "pair_sm_100f.cubin"))
    assert (shown["verified"], shown["manifest_line"]) == (False, None)


def test_the_facts_of_each_kernel_are_shown(answer) -> None:
    shown = answer("inspect", str(FIXTURES / "facts_sm_90a.cubin"))
    block = next(k for k in shown["kernels"] if k["symbol"] == "block")
    assert shown["architecture"] == "sm_90a"
    assert block == {
        "symbol": "block",
        "parameters": [{"offset": 112, "bytes": 1280}, {"offset": 1392, "bytes": 8}],
        "max_threads": 96,
        "registers": 12,
        "static_shared_bytes": 1156,
        "stack_bytes": 0,
    }


def test_text_says_verified_or_not(release: SmallRelease, capsys: pytest.CaptureFixture[str]) -> None:
    release.run("inspect", str(FIXTURES / "pair_sm_100f.cubin"))
    assert "no: no pin covers these bytes" in capsys.readouterr().out


def test_metadata_that_disagrees_is_said_and_counts_as_corrupt(release: SmallRelease, answer) -> None:
    shown = answer("inspect", f"{FOLDER}/kernels/facts_sm_90a.cubin")
    assert shown["disagreements"] == ["parameter sizes: the metadata says [0], the cubin []"]
    assert release.run("inspect", f"{FOLDER}/kernels/facts_sm_90a.cubin") == 5


def test_a_file_that_is_no_cubin_is_corrupt(release: SmallRelease, tmp_path: Path) -> None:
    (tmp_path / "x.cubin").write_bytes(b"hello")
    assert release.run("inspect", str(tmp_path / "x.cubin")) == 5


def test_a_file_that_is_not_there_is_missing(release: SmallRelease, tmp_path: Path) -> None:
    assert release.run("inspect", str(tmp_path / "none.cubin")) == 4


def test_a_directory_is_usage(release: SmallRelease, tmp_path: Path) -> None:
    assert release.run("inspect", str(tmp_path)) == 2


def test_a_path_that_climbs_is_usage(release: SmallRelease) -> None:
    assert release.run("inspect", "small-1/../../etc/passwd") == 2


def test_a_path_that_no_pin_covers_says_so(release: SmallRelease) -> None:
    assert release.run("inspect", "other/fmha/x.cubin") == 3


def test_a_damaged_file_of_the_release_is_refused(release: SmallRelease) -> None:
    (release.folder / "kernels/facts_sm_80.cubin").write_bytes(b"\x7fELF damaged")
    assert release.run("inspect", f"{FOLDER}/kernels/facts_sm_80.cubin") == 5


def test_inspecting_a_file_makes_no_store(tmp_path: Path) -> None:
    assert cli.main(["inspect", str(FIXTURES / "pair_sm_100f.cubin"), "--store", str(tmp_path / "store")]) == 0
    assert not (tmp_path / "store").exists()


def shown_json(release: SmallRelease, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict]:
    capsys.readouterr()
    code = release.run("inspect", *arguments, "--json")
    return code, json.loads(capsys.readouterr().out)


def test_all_cubins_of_a_release_are_inspected_in_one_go(
    release: SmallRelease, capsys: pytest.CaptureFixture[str]
) -> None:
    _, shown = shown_json(release, capsys, "small")
    targets = {Path(one["path"]).name: one["architecture"] for one in shown["cubins"]}
    assert targets == {"facts_sm_90a.cubin": "sm_90a", "facts_sm_80.cubin": "sm_80"}


def test_filters_choose_which_cubins_are_inspected(release: SmallRelease, capsys: pytest.CaptureFixture[str]) -> None:
    _, shown = shown_json(release, capsys, "small", "--sm", "90", "--dtype", "bf16")
    assert [Path(one["path"]).name for one in shown["cubins"]] == ["facts_sm_90a.cubin"]


def test_a_folder_of_cubins_is_inspected(release: SmallRelease, capsys: pytest.CaptureFixture[str]) -> None:
    _, shown = shown_json(release, capsys, f"{FOLDER}/kernels/", "--match", "*80*")
    assert [Path(one["path"]).name for one in shown["cubins"]] == ["facts_sm_80.cubin"]


def test_a_disagreement_among_many_is_code_5_and_told(
    release: SmallRelease, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown = shown_json(release, capsys, "small", "--sm", "90")
    assert (code, len(shown["cubins"][0]["disagreements"]) > 0) == (5, True)


def test_a_damaged_cubin_among_many_is_code_5_and_named(
    release: SmallRelease, capsys: pytest.CaptureFixture[str]
) -> None:
    (release.folder / "kernels/facts_sm_80.cubin").write_bytes(b"damaged")
    code, shown = shown_json(release, capsys, "small", "--match", "*80*")
    assert (code, "sha256 of" in shown["cubins"][0]["problem"]) == (5, True)


def test_cubins_that_are_not_at_hand_are_counted(release: SmallRelease, capsys: pytest.CaptureFixture[str]) -> None:
    (release.folder / "kernels/facts_sm_80.cubin").unlink()
    code, shown = shown_json(release, capsys, "small", "--match", "*80*")
    assert (code, shown["cubins"], shown["not_fetched"]) == (0, [], 1)


def test_many_cubins_are_shown_as_lines(release: SmallRelease, capsys: pytest.CaptureFixture[str]) -> None:
    assert release.run("inspect", "small", "--match", "*80*") == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("kernels/facts_sm_80.cubin\tsm_80\t")


@pytest.mark.parametrize(
    "arguments", [["small", "--match", "none*"], [f"{FOLDER}/kernels/facts_sm_80.cubin", "--sm", "80"]]
)
def test_filters_that_choose_nothing_or_have_nothing_to_choose_from_are_refused(
    release: SmallRelease, arguments: list[str]
) -> None:
    assert release.run("inspect", *arguments) == 2
