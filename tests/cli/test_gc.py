from __future__ import annotations

import os
from pathlib import Path

import pytest
from releases import Release, make_release, visible_files

from cubin_runtime.cli import main


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
