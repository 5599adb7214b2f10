from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from cubin_runtime.artifacts.tables.metadata import HEADER_PATH
from cubin_runtime.cli import main
from tests.artifacts.kernel_headers import header_of
from tests.artifacts.releases import Release, make_release

KERNELS = ("fmhaSm100fKernel_A", "fmhaSm103aKernel_B")


@pytest.fixture
def filled(release: Release) -> Release:
    assert main(["fetch", "made-1.0", "--source", str(release.root)]) == 0
    return release


@pytest.fixture
def with_metadata(environment: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    files = {**{f"{name}.cubin": name.encode() for name in KERNELS}, HEADER_PATH: header_of(*KERNELS)}
    made = make_release(environment, files)
    monkeypatch.setenv("CUBIN_RUNTIME_PINS", str(made.pin_file))
    assert main(["fetch", "made-1.0", "--source", str(made.root)]) == 0
    return made


def test_an_exported_archive_is_imported_by_fetch(
    filled: Release, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = str(tmp_path / "made.zip")
    assert main(["export", "made-1.0", "--out", archive]) == 0
    assert "made-1.0: 4 files" in capsys.readouterr().out
    elsewhere = ["--store", str(tmp_path / "elsewhere"), "--offline"]
    assert main(["fetch", "made-1.0", "--source", archive, *elsewhere]) == 0
    assert main(["verify", "made-1.0", "--complete", *elsewhere]) == 0
    assert main(["verify", "made-1.0", "--complete", "--tree", archive]) == 0


def test_a_subset_is_exported_and_imported_by_the_same_filters(with_metadata: Release, tmp_path: Path) -> None:
    archive, filters = str(tmp_path / "made.zip"), ["--sm", "100", "--dtype", "bf16"]
    assert main(["export", "made-1.0", "--out", archive, *filters]) == 0
    with zipfile.ZipFile(archive) as opened:
        names = [name.removeprefix("made/fmha/") for name in opened.namelist()]
    assert names == ["checksums.txt", "fmhaSm100fKernel_A.cubin", HEADER_PATH]
    elsewhere = ["--store", str(tmp_path / "elsewhere"), "--offline"]
    assert main(["fetch", "made-1.0", "--source", archive, *filters, *elsewhere]) == 0
    assert main(["verify", "made-1.0", "--complete", *filters, *elsewhere]) == 0


def test_one_file_can_be_exported(filled: Release, tmp_path: Path) -> None:
    archive = tmp_path / "made.zip"
    assert main(["export", filled.path("kernels.bin").text, "--out", str(archive)]) == 0
    with zipfile.ZipFile(archive) as opened:
        assert opened.namelist() == ["made/fmha/checksums.txt", "made/fmha/kernels.bin"]


def test_targets_of_one_release_are_put_together(filled: Release, tmp_path: Path, run_json) -> None:
    targets = (filled.path("kernels.bin"), filled.path("fmha"), filled.path("fmha/decode.cubin"))
    code, shown = run_json("export", *targets, "--out", tmp_path / "x.zip")
    assert (code, shown["files"], shown["releases"]) == (0, 4, ["made-1.0"])


def test_json_reports_an_export(filled: Release, tmp_path: Path, run_json) -> None:
    code, shown = run_json("export", "made-1.0", "--out", tmp_path / "x.zip", "--compress")
    assert (code, shown["schema"], shown["verb"], shown["files"]) == (0, 2, "export", 4)
    assert shown["archive_bytes"] == (tmp_path / "x.zip").stat().st_size


def test_a_mirror_is_served_verified_and_gone_on_with(filled: Release, tmp_path: Path, run_json) -> None:
    tree = tmp_path / "www"
    assert run_json("mirror", "made-1.0", "--out", tree)[1]["written"] == 4
    assert run_json("mirror", "made-1.0", "--out", tree)[1]["kept"] == 4
    assert main(["verify", "made-1.0", "--complete", "--tree", str(tree)]) == 0


def test_a_mirror_says_what_it_did(filled: Release, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mirror", "made-1.0", "--out", str(tmp_path / "www")]) == 0
    assert f"made-1.0: 4 files written to {tmp_path / 'www'}, 0 already present" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["export", "mirror"])
def test_what_was_not_fetched_is_code_4(release: Release, verb: str, tmp_path: Path) -> None:
    assert main([verb, "made-1.0", "--out", str(tmp_path / "x.zip")]) == 4
    assert not (tmp_path / "x.zip").exists()


@pytest.mark.parametrize("verb", ["export", "mirror"])
def test_a_place_that_cannot_be_written_is_code_8(filled: Release, verb: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert main([verb, "made-1.0", "--out", str(tmp_path / "file" / "x.zip")]) == 8


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["export", "made-1.0"], 2),
        (["export", "made-1.0", "--out", "x.tar"], 2),
        (["export", "unknown-1.0", "--out", "x.zip"], 3),
        (["mirror", "unknown-1.0", "--out", "www"], 3),
        (["export", "made/fmha/unknown", "--out", "x.zip"], 3),
    ],
)
def test_what_cannot_be_asked_has_its_code(filled: Release, arguments: list[str], code: int) -> None:
    assert main(arguments) == code


def test_a_local_source_is_exported_without_a_store(release: Release, store: Path, tmp_path: Path) -> None:
    assert main(["export", "made-1.0", "--source", str(release.root), "--out", str(tmp_path / "x.zip")]) == 0
    assert not store.exists()


def test_an_error_is_json_too(release: Release, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "made-1.0", "--out", str(tmp_path / "x.zip"), "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["errors"][0]["kind"] == "MissingError"
