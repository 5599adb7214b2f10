from __future__ import annotations

from pathlib import Path

import pytest

from cubin_runtime.artifacts.pins.pin import BUILTIN_PINS, parse_pins
from kernels_src.pinning import main, pin_of, with_pin
from kernels_src.release import Release, write_release

OTHERS = """# Kept.
[[pin]]
name = "other-1"
path = "other-1"
manifest_sha256 = "1111111111111111111111111111111111111111111111111111111111111111"
files = 1
bytes = 1
max_file_bytes = 8
licence = "MIT"  # kept too
"""


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return write_release(tmp_path, "hopper-0.0.1", {"fmha/a.cubin": b"a"}, [])


@pytest.fixture
def pins(tmp_path: Path) -> Path:
    file = tmp_path / "pins.toml"
    file.write_text(OTHERS)
    return file


def names(text: str) -> list[str]:
    return [pin.name for pin in parse_pins(text.encode(), "pins")]


def test_a_first_pin_is_appended_and_the_rest_kept(release: Release) -> None:
    text = with_pin(OTHERS, pin_of(release))
    assert text.startswith(OTHERS + "\n[[pin]]\n")
    assert names(text) == ["other-1", "hopper-0.0.1"]


def test_a_second_pin_of_the_name_replaces_the_first_in_its_place(tmp_path: Path, release: Release) -> None:
    text = with_pin(OTHERS.replace("other-1", "hopper-0.0.1") + "\n" + OTHERS, pin_of(release))
    assert names(text) == ["hopper-0.0.1", "other-1"]
    assert parse_pins(text.encode(), "pins")[0] == pin_of(release)
    assert text.endswith("\n\n" + OTHERS)


def test_the_pin_states_digest_files_and_bytes_of_the_tree(release: Release) -> None:
    pin = pin_of(release)
    index = (release.folder / "kernels.json").stat().st_size
    assert (pin.manifest_sha256, pin.files, pin.bytes) == (release.manifest_sha256, 2, index + 1)


def test_writing_then_checking_agrees(release: Release, pins: Path) -> None:
    assert main([str(release.folder), "--pins", str(pins)]) == 0
    assert main([str(release.folder), "--pins", str(pins), "--check"]) == 0


def test_writing_twice_changes_nothing_more(release: Release, pins: Path) -> None:
    main([str(release.folder), "--pins", str(pins)])
    once = pins.read_bytes()
    main([str(release.folder), "--pins", str(pins)])
    assert pins.read_bytes() == once


def test_a_difference_fails_the_check_with_both_digests_and_writes_nothing(
    tmp_path: Path, release: Release, pins: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(release.folder), "--pins", str(pins)])
    before = pins.read_bytes()
    changed = write_release(tmp_path, "hopper-0.0.1", {"fmha/a.cubin": b"b"}, [])
    assert main([str(changed.folder), "--pins", str(pins), "--check"]) == 1
    said = capsys.readouterr().err
    assert release.manifest_sha256 in said
    assert changed.manifest_sha256 in said
    assert pins.read_bytes() == before


def test_a_release_without_a_pin_fails_the_check(
    release: Release, pins: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(release.folder), "--pins", str(pins), "--check"]) == 1
    assert "pinned  nothing" in capsys.readouterr().err


def test_the_built_in_pins_keep_their_comments(release: Release) -> None:
    text = BUILTIN_PINS.read_text()
    assert with_pin(text, pin_of(release)).startswith(text.rstrip("\n"))
