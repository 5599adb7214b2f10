from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from cubin_runtime.artifacts.atomic_write import changing
from cubin_runtime.artifacts.pins.pin import parse_pins
from cubin_runtime.artifacts.pins.pin_file import add_pin
from cubin_runtime.artifacts.pins.pin_set import PinSet
from cubin_runtime.cli import main
from cubin_runtime.errors import PinError
from tests.artifacts.fleet import COMMAND_LINE, start_python
from tests.artifacts.releases import Release, make_release


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    for name in ("CUBIN_RUNTIME_SOURCES", "CUBIN_RUNTIME_OFFLINE", "CUBIN_RUNTIME_PINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUBIN_RUNTIME_CACHE", str(tmp_path / "store"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return make_release(tmp_path)


@pytest.fixture
def pin_file(tmp_path: Path) -> Path:
    return tmp_path / "config" / "cubin-runtime" / "pins.toml"


def pin(release: Release, *arguments: str) -> int:
    return main(["pin", "made/fmha", "--source", str(release.root), *arguments])


def test_without_a_digest_it_prints_what_it_found_and_writes_nothing(
    release: Release, pin_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pin(release) == 3
    shown = capsys.readouterr()
    assert release.pin.manifest_sha256 in shown.out
    assert "nothing was written" in shown.err
    assert not pin_file.exists()


def test_with_the_digest_the_release_is_trusted_from_then_on(release: Release, pin_file: Path) -> None:
    assert pin(release, "--sha256", release.pin.manifest_sha256, "--name", "mine-1.0") == 0
    assert pin_file.exists()
    assert main(["fetch", "mine-1.0"]) == 0
    assert main(["verify", "mine-1.0", "--complete"]) == 0


def test_with_another_digest_nothing_is_written(release: Release, pin_file: Path) -> None:
    assert pin(release, "--sha256", "0" * 64) == 3
    assert not pin_file.exists()


@pytest.mark.parametrize("digest", ["abc", "g" * 64, "A" * 64, ""])
def test_a_text_that_is_no_digest_is_refused(release: Release, digest: str) -> None:
    assert pin(release, "--sha256", digest) == 2


def test_pinning_twice_is_harmless(release: Release, pin_file: Path) -> None:
    pin(release, "--sha256", release.pin.manifest_sha256)
    before = pin_file.read_text()
    assert pin(release, "--sha256", release.pin.manifest_sha256) == 0
    assert pin_file.read_text() == before


def test_another_digest_for_a_pinned_folder_is_refused(release: Release, pin_file: Path, tmp_path: Path) -> None:
    pin(release, "--sha256", release.pin.manifest_sha256)
    before = pin_file.read_text()
    other = make_release(tmp_path / "other", {"x": b"other"})
    assert pin(other, "--sha256", other.pin.manifest_sha256) == 3
    assert pin_file.read_text() == before


def test_no_source_with_the_folder_is_code_7(release: Release, tmp_path: Path) -> None:
    assert main(["pin", "no/where", "--source", str(release.root)]) == 7


def test_json_shows_what_was_written(release: Release, pin_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pin(release, "--sha256", release.pin.manifest_sha256, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["schema"], shown["verb"], shown["files"]) == (2, "pin", 3)
    assert shown["written"] == str(pin_file)


def unpin(release: Release, name: str = "mine-1.0") -> int:
    return main(["unpin", name])


@pytest.fixture
def pinned(release: Release) -> Release:
    pin(release, "--sha256", release.pin.manifest_sha256, "--name", "mine-1.0")
    return release


def test_what_was_unpinned_is_no_longer_trusted(pinned: Release, pin_file: Path) -> None:
    assert unpin(pinned) == 0
    assert main(["fetch", "mine-1.0", "--source", str(pinned.root)]) == 3


def test_unpin_takes_the_folder_too(pinned: Release) -> None:
    assert unpin(pinned, "made/fmha/") == 0


def test_unpin_leaves_the_rest_of_the_file_as_it_was_written(pinned: Release, pin_file: Path, tmp_path: Path) -> None:
    mine = pin_file.read_text()
    other = make_release(tmp_path / "other", name="other-1.0", folder="other/fmha").pin_file.read_text()
    pin_file.write_text(f"# from the platform team\n{mine}\n# a remark\n{other}")
    assert unpin(pinned) == 0
    assert pin_file.read_text() == f"# from the platform team\n\n# a remark\n{other}"
    pin_file.write_text(f"{other}\n[signed]\nfile = 'pins.toml'\nversion = 1\n\n# a remark\n{mine}")
    assert unpin(pinned, "other-1.0") == 0
    assert unpin(pinned) == 0
    assert pin_file.read_text() == "[signed]\nfile = 'pins.toml'\nversion = 1\n\n# a remark\n"


def test_a_table_that_cannot_be_told_apart_is_left_to_the_user(pinned: Release, pin_file: Path) -> None:
    odd = pin_file.read_text().replace('licence = "unknown"', 'licence = """\\\n[[pin]]"""')
    pin_file.write_text(odd)
    assert unpin(pinned) == 3
    assert pin_file.read_text() == odd


@pytest.mark.parametrize("name", ["trtllm-gen-0.6.13", "unknown-1.0", "made/fmha/kernels.bin"])
def test_only_a_pin_of_ones_own_can_be_taken_out(pinned: Release, pin_file: Path, name: str) -> None:
    before = pin_file.read_text()
    assert unpin(pinned, name) == 3
    assert pin_file.read_text() == before


def test_a_pin_of_another_file_is_named_with_that_file(
    release: Release, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_PINS", str(release.pin_file))
    assert unpin(release, "made-1.0") == 3
    assert f"comes from {release.pin_file}" in capsys.readouterr().err


def test_unpin_says_that_files_are_left(pinned: Release, capsys: pytest.CaptureFixture[str]) -> None:
    main(["fetch", "mine-1.0"])
    capsys.readouterr()
    assert main(["unpin", "mine-1.0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_in_store"] is True


@pytest.mark.parametrize("verb", ["pin", "unpin"])
def test_where_pins_are_signed_they_are_not_changed_here(
    pinned: Release, pin_file: Path, verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = pin_file.read_text()
    monkeypatch.setenv("CUBIN_RUNTIME_PIN_KEYS", "a" * 64)
    arguments = {"pin": ["new/folder", "--sha256", "0" * 64], "unpin": ["mine-1.0"]}[verb]
    assert main([verb, *arguments]) == 3
    assert "sign it on the host with the private key" in capsys.readouterr().err
    assert pin_file.read_text() == before


def test_ten_pins_made_at_once_are_all_kept(release: Release, pin_file: Path, tmp_path: Path) -> None:
    made = [make_release(tmp_path, {"x": b"%d" % n}, f"made-{n}", f"made/{n}") for n in range(10)]
    commands = [
        start_python(
            COMMAND_LINE, "pin", one.pin.path, "--sha256", one.pin.manifest_sha256, "--source", one.root, "--offline"
        )
        for one in made
    ]
    outputs = [command.communicate(timeout=300) for command in commands]
    assert [command.returncode for command in commands] == [0] * 10, outputs
    assert {pin.path for pin in parse_pins(pin_file.read_bytes(), "pins")} == {one.pin.path for one in made}


def test_a_pin_file_that_is_a_link_stays_one_and_keeps_its_mode(
    release: Release, pin_file: Path, tmp_path: Path
) -> None:
    real = tmp_path / "dotfiles.toml"
    real.write_text("# mine\n")
    real.chmod(0o600)
    pin_file.parent.mkdir(parents=True)
    pin_file.symlink_to(real)
    assert pin(release, "--sha256", release.pin.manifest_sha256) == 0
    assert (pin_file.is_symlink(), real.stat().st_mode & 0o777) == (True, 0o600)
    assert real.read_text().startswith("# mine\n\n[[pin]]")


def test_pins_that_another_process_changes_for_ever_are_not_waited_for_for_ever(
    release: Release, pin_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(changing.__wrapped__, "__defaults__", (0.1,))
    with changing(pin_file):
        assert pin(release, "--sha256", release.pin.manifest_sha256) == 3
    assert "the pin cannot be written: another process is changing it" in capsys.readouterr().err


def test_a_pin_file_that_is_no_text_is_told(
    release: Release, pin_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pin_file.parent.mkdir(parents=True)
    pin_file.write_bytes(b"\xff\xfe")
    assert pin(release, "--sha256", release.pin.manifest_sha256) == 3
    assert str(pin_file) in capsys.readouterr().err


@pytest.mark.timeout(20)
def test_a_pin_file_that_is_a_fifo_is_told_and_not_waited_for(
    release: Release, pin_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin_file.parent.mkdir(parents=True)
    os.mkfifo(pin_file)
    with pytest.raises(PinError, match="is a FIFO, expected a regular file"):
        add_pin(pin_file, release.pin, PinSet([]))


def test_a_pin_file_that_cannot_be_looked_at_is_not_replaced(
    release: Release, pin_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin_file.parent.mkdir(parents=True)
    pin_file.write_text("# others\n")
    real = os.lstat

    def fail(path: Any, **named: Any) -> os.stat_result:
        if path == pin_file:
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(path, **named)

    with monkeypatch.context() as patched:
        patched.setattr(os, "lstat", fail)
        with pytest.raises(PinError, match="Stale file handle"):
            add_pin(pin_file, release.pin, PinSet([]))
    assert pin_file.read_text() == "# others\n"


def test_a_lock_that_cannot_be_opened_is_named(
    release: Release, pin_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pin_file.parent.mkdir(parents=True)
    lock = pin_file.parent / ".pins.toml.lock"
    lock.symlink_to("elsewhere")
    assert pin(release, "--sha256", release.pin.manifest_sha256) == 3
    assert str(lock) in capsys.readouterr().err


def test_an_abi_that_nothing_is_known_of_is_refused(
    release: Release, pin_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pin(release, "--sha256", release.pin.manifest_sha256, "--abi", "trtllm-gen-9.9") == 2
    assert "--abi 'trtllm-gen-9.9': expected one of trtllm-gen-0.6.13, hopper-" in capsys.readouterr().err
    assert not pin_file.exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [("--abi", "trtllm-gen-0.6.13"), ("--name", "other"), ("--licence", "MIT"), ("--max-file-bytes", "7")],
)
def test_what_is_asked_for_is_never_ignored_as_the_release_is_pinned(
    pinned: Release, pin_file: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    before = pin_file.read_text()
    assert pin(pinned, "--sha256", pinned.pin.manifest_sha256, option, value) == 3
    assert "made/fmha is pinned already, as 'mine-1.0' with" in capsys.readouterr().err
    assert pin_file.read_text() == before


def test_pinning_again_with_what_is_there_is_harmless(release: Release, pin_file: Path) -> None:
    arguments = ("--sha256", release.pin.manifest_sha256, "--name", "mine-1.0", "--abi", "trtllm-gen-0.6.13")
    assert (pin(release, *arguments), pin(release, *arguments)) == (0, 0)


def test_a_relative_source_is_kept_as_an_absolute_one(
    release: Release, pin_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(release.root.parent)
    assert main(["pin", "made/fmha", "--source", release.root.name, "--sha256", release.pin.manifest_sha256]) == 0
    (kept,) = parse_pins(pin_file.read_bytes(), "pins")
    assert kept.sources == (str(release.root),)
    monkeypatch.chdir(tmp_path / "config")
    assert main(["fetch", kept.name]) == 0


def test_no_pin_is_changed_that_cannot_be_recorded(
    pinned: Release, pin_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = pin_file.read_text()
    monkeypatch.setenv("CUBIN_RUNTIME_AUDIT", str(tmp_path / "missing" / "audit.jsonl"))
    assert main(["unpin", "made/fmha"]) == 8
    assert main(["pin", "other/fmha", "--sha256", "1" * 64, "--offline"]) == 8
    assert pin_file.read_text() == before


def test_only_changes_of_pins_are_recorded(pinned: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    audit = tmp_path / "audit.jsonl"
    monkeypatch.setenv("CUBIN_RUNTIME_AUDIT", str(audit))
    assert pin(pinned, "--sha256", pinned.pin.manifest_sha256) == 0
    assert audit.read_text() == ""
