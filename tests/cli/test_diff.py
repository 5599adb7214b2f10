from __future__ import annotations

import os
from pathlib import Path

import pytest

from cubin_runtime.artifacts.tables.metadata import HEADER_PATH
from cubin_runtime.cli import main
from tests.artifacts.kernel_headers import header_of
from tests.artifacts.releases import Release, make_release

KERNEL = "fmhaSm100fKernel_A"


@pytest.fixture
def two(environment: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Release, Release]:
    """Two releases of one kernel that changed, and one file each that the other lacks."""
    old_files = {f"{KERNEL}.cubin": b"old", "gone": b"1", HEADER_PATH: header_of(KERNEL)}
    new_header = header_of(KERNEL, mThreadsPerCTA="512")
    new_files = {f"{KERNEL}.cubin": b"new", "come": b"2", HEADER_PATH: new_header}
    old = make_release(environment / "old", old_files, "old-1.0", "old/fmha")
    new = make_release(environment / "new", new_files, "new-1.0", "new/fmha")
    monkeypatch.setenv("CUBIN_RUNTIME_PINS", f"{old.pin_file}{os.pathsep}{new.pin_file}")
    monkeypatch.setenv("CUBIN_RUNTIME_SOURCES", f"{old.root} {new.root}")
    return old, new


def test_added_removed_and_changed_are_told_with_what_metadata_says(
    two: tuple[Release, Release], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", "old-1.0", "new-1.0"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == [
        "+ come",
        "- gone",
        f"~ {KERNEL}.cubin: threads 64 -> 512",
        f"~ {HEADER_PATH}",
        "old-1.0 -> new-1.0: 1 added, 1 removed, 2 changed, 0 the same",
    ]


def test_filters_narrow_it_to_kernels(two: tuple[Release, Release], run_json) -> None:
    code, shown = run_json("diff", "old-1.0", "new-1.0", "--sm", "100")
    assert (code, shown["added"], [one["name"] for one in shown["changed"]]) == (0, [], [f"{KERNEL}.cubin"])


def test_without_metadata_names_and_digests_are_compared(
    two: tuple[Release, Release], capsys: pytest.CaptureFixture[str]
) -> None:
    for release in two:
        release.file(HEADER_PATH).unlink()
    assert main(["diff", "old-1.0", "new-1.0"]) == 0
    assert "compared by names and digests only" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["old-1.0"], 2), (["old-1.0", "unknown-1.0"], 3), (["old-1.0", "trtllm-gen-0.6.13", "--offline"], 7)],
)
def test_what_cannot_be_compared_has_its_code(two: tuple[Release, Release], arguments: list[str], code: int) -> None:
    assert main(["diff", *arguments]) == code


@pytest.mark.parametrize("names", [("old/fmha/gone", "new-1.0"), ("old-1.0", "new/fmha/come")])
def test_a_part_of_a_release_is_not_compared(
    two: tuple[Release, Release], names: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", *names]) == 2
    assert "expected a whole release" in capsys.readouterr().err
