"""``keygen`` and ``sign`` make what ``CUBIN_RUNTIME_PIN_KEYS`` checks."""

from __future__ import annotations

import errno
import os
from datetime import datetime, tzinfo
from pathlib import Path

import pytest

from cubin_runtime.artifacts.atomic_write import changing
from cubin_runtime.artifacts.pins import signed_statement, signing
from cubin_runtime.artifacts.pins.bounded_toml import read_toml
from cubin_runtime.artifacts.pins.pin import parse_pins
from cubin_runtime.cli import main
from tests.artifacts.releases import Release

pytest.importorskip("cryptography")


@pytest.fixture
def key(environment: Path) -> Path:
    assert main(["keygen", str(environment / "pins.key")]) == 0
    return environment / "pins.key"


@pytest.fixture
def checked(release: Release, key: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    """A host that takes only pin files that the key signed."""
    monkeypatch.setenv("CUBIN_RUNTIME_PIN_KEYS", str(key.with_suffix(".pub")))
    return release


def sign(release: Release, key: Path, *arguments: str) -> int:
    return main(["sign", str(release.pin_file), "--key", str(key), *arguments])


def test_the_private_key_is_readable_by_its_owner_alone(key: Path) -> None:
    assert key.stat().st_mode & 0o777 == 0o600


def test_a_key_is_never_overwritten(key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = key.read_bytes()
    assert main(["keygen", str(key)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert key.read_bytes() == before


def fill_disk(monkeypatch: pytest.MonkeyPatch, files: int) -> None:
    """Let the disk be full when there are so many files more and a part of another."""
    write, room = os.write, iter(["all"] * files + ["part"])

    def limited(descriptor: int, data: bytes) -> int:
        left = next(room, "none")
        if left == "none":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data if left == "all" else data[:10])

    monkeypatch.setattr(os, "write", limited)


@pytest.mark.parametrize("files", [0, 1])
def test_a_full_disk_leaves_a_file_as_it_was_signed_before(
    checked: Release, key: Path, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    sign(checked, key)
    with monkeypatch.context() as full:
        fill_disk(full, files)
        assert sign(checked, key) == 8
    assert main(["list", "--pins", str(checked.pin_file)]) == 0


@pytest.mark.parametrize("files", [0, 1], ids=["private", "public"])
def test_a_full_disk_leaves_no_part_of_a_key(
    environment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], files: int
) -> None:
    fill_disk(monkeypatch, files)
    assert main(["keygen", str(environment / "pins.key")]) == 8
    assert "cannot be written: No space left on device" in capsys.readouterr().err
    assert list(environment.iterdir()) == []


def test_a_signed_file_is_taken_and_an_unsigned_one_is_not(checked: Release, key: Path) -> None:
    assert main(["list"]) == 3
    assert sign(checked, key) == 0
    assert main(["list"]) == 0


def test_the_public_key_may_be_given_as_hex(
    checked: Release, key: Path, monkeypatch: pytest.MonkeyPatch, run_json
) -> None:
    other = key.with_name("other.key")
    _, shown = run_json("keygen", other)
    assert sign(checked, other) == 0
    monkeypatch.setenv("CUBIN_RUNTIME_PIN_KEYS", shown["public_hex"])
    assert main(["list"]) == 0


def test_signing_keeps_the_pins(checked: Release, key: Path) -> None:
    before = parse_pins(checked.pin_file.read_bytes(), "before")
    assert sign(checked, key, "--expires", "2099-12-31T00:00:00Z") == 0
    assert sign(checked, key) == 0
    text = checked.pin_file.read_text()
    assert parse_pins(text.encode(), "after") == before
    assert text.startswith(
        f'[signed]\nfile = "{checked.pin_file.name}"\nversion = 2\nexpires = 2099-12-31T00:00:00+00:00'
    )
    assert text.count("[signed]") == 1


def test_signing_again_keeps_what_is_written_above_the_pins(checked: Release, key: Path) -> None:
    written = "# from the platform team\n\n# kernels of 2026\n" + checked.pin_file.read_text()
    checked.pin_file.write_text(written)
    for _ in range(2):
        assert sign(checked, key) == 0
    assert checked.pin_file.read_text().endswith("version = 2\n\n" + written)


def test_a_changed_file_no_longer_fits_its_signature(checked: Release, key: Path) -> None:
    assert sign(checked, key) == 0
    checked.pin_file.write_text(checked.pin_file.read_text() + "# more\n")
    assert main(["list"]) == 3


def test_several_keys_sign_for_a_rotation(checked: Release, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = key.with_name("new.key")
    assert main(["keygen", str(new)]) == 0
    assert sign(checked, key, "--key", str(new)) == 0
    for one in ("pins.pub", "new.pub"):
        monkeypatch.setenv("CUBIN_RUNTIME_PIN_KEYS", str(key.with_name(one)))
        assert main(["list"]) == 0


class InTheNextCentury(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:
        return datetime(2100, 1, 1, tzinfo=tz)


def test_an_expired_file_is_refused(
    checked: Release, key: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sign(checked, key, "--expires", "2099-12-31T00:00:00Z") == 0
    monkeypatch.setattr(signed_statement, "datetime", InTheNextCentury)
    assert main(["list"]) == 3
    assert "expired" in capsys.readouterr().err


def test_signing_again_refuses_an_expiry_that_has_passed(
    checked: Release, key: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sign(checked, key, "--expires", "2099-12-31T00:00:00Z") == 0
    monkeypatch.setattr(signing, "datetime", InTheNextCentury)
    before = checked.pin_file.read_bytes()
    assert sign(checked, key) == 2
    assert "expires 2099-12-31T00:00:00+00:00: is past" in capsys.readouterr().err
    assert checked.pin_file.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--expires", "tomorrow"], 2, "expected a time with its zone"),
        (["--expires", "2099-12-31T00:00:00"], 2, "expected a time with its zone"),
        (
            ["--expires", "2099-12-31T00:00:00+00:00:01"],
            2,
            "expires 2099-12-31T00:00:00+00:00:01: expected a time zone",
        ),
        (["--expires", "2001-01-01T00:00:00Z"], 2, "expires 2001-01-01T00:00:00+00:00: is past"),
        (["--version", "1"], 2, "states 2 already"),
        (["--key", "none.key"], 3, "private key cannot be read"),
    ],
)
def test_what_cannot_be_signed_is_told(
    checked: Release, key: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    assert sign(checked, key, "--version", "2") == 0
    before = checked.pin_file.read_bytes()
    capsys.readouterr()
    assert sign(checked, key, *arguments) == code
    assert said in capsys.readouterr().err
    assert checked.pin_file.read_bytes() == before


def test_a_public_key_does_not_sign(checked: Release, key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sign(checked, key.with_suffix(".pub")) == 3
    assert "is no private key, or needs a password" in capsys.readouterr().err


def test_what_is_no_pin_file_is_not_signed(key: Path, environment: Path) -> None:
    file = environment / "other.toml"
    file.write_text("[other]\n")
    assert main(["sign", str(file), "--key", str(key)]) == 3
    assert not file.with_name("other.toml.sig").exists()


def test_a_key_needs_the_name_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keygen", "/"]) == 2
    assert "expected the name of a new file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ['a"b.toml', "a\\b.toml", "a\nb.toml", "\U0001f600.toml"], ids=ascii)
def test_a_file_of_any_name_is_signed(checked: Release, key: Path, name: str, environment: Path) -> None:
    file = environment / name
    file.write_bytes(checked.pin_file.read_bytes())
    assert main(["sign", str(file), "--key", str(key)]) == 0
    assert read_toml(file.read_bytes(), name)["signed"]["file"] == name


def test_a_name_that_is_no_text_is_refused(
    checked: Release, key: Path, environment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = environment / "\udcff.toml"
    file.write_bytes(checked.pin_file.read_bytes())
    assert main(["sign", str(file), "--key", str(key)]) == 2
    assert "expected a name in UTF-8" in capsys.readouterr().err


def test_a_folder_in_place_of_the_signature_leaves_the_file_as_it_was(
    checked: Release, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = checked.pin_file.read_bytes()
    beside = checked.pin_file.with_name(checked.pin_file.name + ".sig")
    beside.mkdir()
    assert sign(checked, key) == 8
    assert f"{beside}: is a folder" in capsys.readouterr().err
    assert checked.pin_file.read_bytes() == before


def test_signing_waits_for_another_that_signs(checked: Release, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = list[bool]()
    write_all = signing.write_all

    def noted(descriptor: int, data: bytes) -> None:
        with pytest.raises(TimeoutError), changing(checked.pin_file, seconds=0.05):
            pass
        held.append(True)
        write_all(descriptor, data)

    monkeypatch.setattr(signing, "write_all", noted)
    assert sign(checked, key) == 0
    assert held == [True, True]
