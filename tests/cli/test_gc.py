from __future__ import annotations

import os
from pathlib import Path

import pytest

from cubin_runtime.cli import main
from tests.artifacts.releases import Release, make_release, visible_files


@pytest.fixture
def two(environment: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Release, Release]:
    """Two fetched releases with one object in common."""
    old = make_release(environment / "old", {"a": b"1" * 100, "both": b"2" * 100}, "old-1.0", "old/fmha")
    new = make_release(environment / "new", {"b": b"3" * 100, "both": b"2" * 100}, "new-1.0", "new/fmha")
    monkeypatch.setenv("CUBIN_RUNTIME_PINS", f"{old.pin_file}{os.pathsep}{new.pin_file}")
    for release in (old, new):
        assert main(["fetch", release.pin.name, "--source", str(release.root)]) == 0
    return old, new


def test_gc_removes_a_release_and_keeps_the_other_whole(
    two: tuple[Release, Release], store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["gc", "old-1.0"]) == 0
    assert "old-1.0: 2 objects removed (" in (shown := capsys.readouterr().out)
    assert "1 kept; new-1.0 needs 1 of them" in shown
    assert main(["verify", "new-1.0", "--complete"]) == 0
    assert len(visible_files(store)) == 3


def test_gc_takes_the_folder_of_a_release(two: tuple[Release, Release], store: Path) -> None:
    assert main(["gc", "old/fmha/", "new-1.0"]) == 0
    assert visible_files(store) == []


def test_a_dry_run_only_says_what_would_go(two: tuple[Release, Release], store: Path, run_json) -> None:
    code, shown = run_json("gc", "old-1.0", "--dry-run")
    assert (code, shown["releases"]["removed"], shown["leftovers"]) == (0, 2, None)
    assert len(visible_files(store)) == 5


def test_gc_of_what_is_not_there_says_so(
    two: tuple[Release, Release], capsys: pytest.CaptureFixture[str], store: Path
) -> None:
    main(["gc", "old-1.0"])
    assert main(["gc", "old-1.0"]) == 0
    assert "old-1.0: its manifest is not available locally" in capsys.readouterr().err


def test_gc_of_leftovers_alone_needs_no_release(two: tuple[Release, Release], store: Path, run_json) -> None:
    (store / "sha256" / "ab").mkdir(exist_ok=True)
    (store / "sha256" / "ab" / ".tmp-cubin-runtime-host-1-00000000000000aa").write_bytes(b"12345")
    assert run_json("gc", "--temps")[1]["leftovers"]["temporaries"] == 0
    code, shown = run_json("gc", "--temps", "--older-than", "0")
    assert (code, shown["leftovers"]["temporaries"], shown["leftovers"]["bytes"]) == (0, 1, 5)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["gc"], 2),
        (["gc", "old/fmha/a"], 2),
        (["gc", "unknown-1.0"], 3),
        (["gc", "--temps", "--older-than", "-1"], 2),
    ],
)
def test_what_cannot_be_asked_has_its_code(two: tuple[Release, Release], arguments: list[str], code: int) -> None:
    assert main(arguments) == code


def test_a_damaged_manifest_of_another_release_is_code_5(two: tuple[Release, Release], store: Path) -> None:
    digest = two[1].pin.manifest_sha256
    place = store / "sha256" / digest[:2] / digest
    place.chmod(0o644)
    place.write_bytes(b"damaged")
    assert main(["gc", "old-1.0"]) == 5


def test_what_an_unpinned_release_left_is_removed(
    two: tuple[Release, Release], store: Path, monkeypatch: pytest.MonkeyPatch, run_json
) -> None:
    _, new = two
    monkeypatch.setenv("CUBIN_RUNTIME_PINS", str(new.pin_file))
    code, shown = run_json("gc", "--unreferenced", "--older-than", "0", "--dry-run")
    assert (code, shown["unreferenced"]["removed"], len(visible_files(store))) == (0, 2, 5)
    assert run_json("gc", "--unreferenced", "--older-than", "0")[1]["unreferenced"]["removed"] == 2
    assert len(visible_files(store)) == 3
    assert main(["verify", "new-1.0", "--complete"]) == 0


def test_nothing_of_a_pinned_release_is_unreferenced(two: tuple[Release, Release], store: Path, run_json) -> None:
    assert run_json("gc", "--unreferenced", "--older-than", "0")[1]["unreferenced"]["removed"] == 0
    assert len(visible_files(store)) == 5


def test_young_objects_stay(
    two: tuple[Release, Release], store: Path, monkeypatch: pytest.MonkeyPatch, run_json
) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_PINS", str(two[1].pin_file))
    assert run_json("gc", "--unreferenced")[1]["unreferenced"]["removed"] == 0
    assert len(visible_files(store)) == 5


def test_unpin_names_what_removes_the_files(environment: Path, capsys: pytest.CaptureFixture[str], store: Path) -> None:
    release = make_release(environment)
    digest = release.pin.manifest_sha256
    assert main(["pin", "made/fmha", "--sha256", digest, "--source", str(release.root)]) == 0
    assert main(["fetch", "made-fmha", "--source", str(release.root)]) == 0
    assert main(["unpin", "made-fmha"]) == 0
    assert "'cubin-runtime gc --unreferenced' removes them" in capsys.readouterr().err
    assert main(["gc", "--unreferenced", "--older-than", "0"]) == 0
    assert visible_files(store) == []


def test_usage_tells_each_release_its_share(two: tuple[Release, Release], run_json) -> None:
    code, shown = run_json("usage")
    shares = {one["release"]: one for one in shown["releases"]}
    manifests = [release.root / release.pin.path.text / "checksums.txt" for release in two]
    sizes = [file.stat().st_size for file in manifests]
    assert code == 0
    assert (shares["old-1.0"]["objects"], shares["old-1.0"]["bytes"]) == (3, 200 + sizes[0])
    assert shares["old-1.0"]["alone_bytes"] == 100 + sizes[0]
    assert (shown["objects"], shown["bytes"], shown["unreferenced"]) == (5, 300 + sum(sizes), 0)
    assert shares["trtllm-gen-0.6.13"]["bytes"] is None


def test_usage_counts_what_no_pin_needs(
    two: tuple[Release, Release], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_PINS", str(two[1].pin_file))
    capsys.readouterr()
    assert main(["usage"]) == 0
    assert "needed by no pinned release\t2\t" in capsys.readouterr().out


def test_a_fresh_damaged_object_is_said_to_stay_an_hour(
    two: tuple[Release, Release], store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (store / "quarantine").mkdir(exist_ok=True)
    (store / "quarantine" / f"{'a' * 64}-host-1-00000000000000aa").write_bytes(b"damaged")
    capsys.readouterr()
    assert main(["usage"]) == 0
    assert "1 damaged object in quarantine; 'cubin-runtime gc --temps' removes what has been there for an hour" in (
        capsys.readouterr().err
    )
    assert main(["gc", "--temps"]) == 0
    assert "0 temporary files and 0 damaged objects of over 1 hour removed" in capsys.readouterr().out
    assert main(["gc", "--temps", "--older-than", "0"]) == 0
    assert "0 temporary files and 1 damaged object removed" in capsys.readouterr().out


def test_nothing_is_removed_that_cannot_be_recorded(
    two: tuple[Release, Release], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = visible_files(store)
    monkeypatch.setenv("CUBIN_RUNTIME_AUDIT", str(store / "missing" / "audit.jsonl"))
    assert main(["gc", "old-1.0"]) == 8
    assert visible_files(store) == before
