from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from cubin_runtime import cli
from cubin_runtime._version import KERNELS_VERSION

KEY = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"  # of RFC 8032, 7.1, test 1


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No setting from outside, and a home of its own."""
    for name in ("CACHE", "SOURCES", "PINS", "OFFLINE", "LOG"):
        monkeypatch.delenv(f"CUBIN_RUNTIME_{name}", raising=False)
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    return tmp_path


@pytest.fixture
def report(clean: Path, capsys: pytest.CaptureFixture[str]):
    """Run ``doctor --json`` and give its object."""

    def ask(*arguments: str) -> dict:
        cli.main(["doctor", "--json", *arguments])
        return json.loads(capsys.readouterr().out)

    return ask


def setting(shown: dict, name: str) -> dict:
    return next(s for s in shown["settings"] if s["name"] == name)


def test_it_succeeds_on_a_bare_machine(clean: Path) -> None:
    assert cli.main(["doctor"]) == 0


@pytest.mark.parametrize("name", ["store", "sources", "pins", "offline", "lazy fetch", "profile", "record", "log"])
def test_untouched_settings_are_defaults(report, name: str) -> None:
    assert setting(report(), name)["from"] == "default"


def test_a_setting_from_the_environment_names_its_variable(
    report, monkeypatch: pytest.MonkeyPatch, clean: Path
) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_CACHE", str(clean / "elsewhere"))
    assert setting(report(), "store") == {
        "name": "store",
        "value": str(clean / "elsewhere"),
        "from": "CUBIN_RUNTIME_CACHE",
    }


def test_a_folder_for_recorded_calls_is_shown(report, monkeypatch: pytest.MonkeyPatch, clean: Path) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_RECORD", str(clean / "calls"))
    assert setting(report(), "record") == {
        "name": "record",
        "value": str(clean / "calls"),
        "from": "CUBIN_RUNTIME_RECORD",
    }


def test_a_flag_beats_the_environment(report, monkeypatch: pytest.MonkeyPatch, clean: Path) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_CACHE", str(clean / "elsewhere"))
    shown = setting(report("--store", str(clean / "mine")), "store")
    assert (shown["value"], shown["from"]) == (str(clean / "mine"), "flag")


def test_a_variable_outside_its_domain_is_usage(monkeypatch: pytest.MonkeyPatch, clean: Path) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_OFFLINE", "perhaps")
    assert cli.main(["doctor"]) == 2


def test_passwords_in_sources_are_not_shown(report) -> None:
    shown = report("--source", "https://user:secret@host.example/tree?token=secret")
    assert "secret" not in json.dumps(shown)


def test_offline_is_followed_by_lazy_fetch(report) -> None:
    assert setting(report("--offline"), "lazy fetch") == {
        "name": "lazy fetch",
        "value": False,
        "from": "follows offline",
    }


def test_a_store_that_is_not_there_yet_is_not_made(report, clean: Path) -> None:
    shown = report("--store", str(clean / "new"))["store"]
    assert (shown["exists"], shown["writable"], (clean / "new").exists()) == (False, True, False)


def test_every_pinned_release_is_listed(report) -> None:
    assert "trtllm-gen-0.6.13" in [r["name"] for r in report()["releases"]]


def test_a_release_that_is_not_at_hand_says_why(report) -> None:
    (release,) = (r for r in report()["releases"] if r["name"] == "trtllm-gen-0.6.13")
    assert release["problem"] or release["in_store"] is not None


def test_pins_that_do_not_read_are_reported_with_their_code(clean: Path) -> None:
    (clean / "pins.toml").write_text("[[pin]]\nname = 1\n")
    assert cli.main(["doctor", "--pins", str(clean / "pins.toml")]) == 3


def test_without_a_driver_it_says_that_launching_will_not_work(report, monkeypatch: pytest.MonkeyPatch) -> None:
    from cubin_runtime.cli import doctor

    monkeypatch.setattr(doctor, "_driver", lambda: {"present": False, "cuda": None, "devices": [], "problem": "none"})
    assert "launch: no, none" in report()["will_work"]


def test_a_device_that_no_release_fits_is_named(report, monkeypatch: pytest.MonkeyPatch) -> None:
    from cubin_runtime.cli import doctor

    device = {"ordinal": 0, "name": "Card", "number": 70, "multiprocessors": 1}
    found = {"present": True, "cuda": "13.0", "devices": [device], "problem": None}
    monkeypatch.setattr(doctor, "_driver", lambda: found)
    assert "launch on Card (sm_70): no, no local release has a kernel for it" in report()["will_work"]


def test_fetching_is_said_to_be_off_when_offline(report) -> None:
    assert report("--offline")["will_work"][0].startswith("fetch: no")


@pytest.mark.parametrize(
    ("runs", "untried", "sentence"),
    [
        (3, 0, "yes, 3 kernels of ours"),
        (3, 1, "yes, 2 kernels of ours (1 more were built but never run)"),
        (3, 3, "only when asked for by name, 3 kernels of ours were built but never run"),
    ],
)
def test_kernels_that_were_never_run_are_told_apart(runs: int, untried: int, sentence: str) -> None:
    from cubin_runtime.cli import doctor

    release = {"name": "ours", "runs_on": {"80": runs}, "built_not_run": {"80": untried}}
    assert doctor._launch_verdict(release, "80") == sentence


def test_a_device_is_answered_from_the_release_at_hand(clean: Path, report, monkeypatch: pytest.MonkeyPatch) -> None:
    from cubin_runtime.cli import doctor

    entry = {
        **dict.fromkeys(("name", "symbol", "family", "operation", "struct"), "k"),
        **dict.fromkeys(("struct_fingerprint", "sources_sha256"), "0" * 64),
        **dict.fromkeys(("struct_bytes", "dynamic_shared_bytes", "static_shared_bytes"), 0),
        "registers": 1,
        "spill_bytes": 0,
        "threads": 32,
        "flags": [],
        "traits": {},
        "sm": "80",
        "file": "k.cubin",
        "status": "built, not run",
    }
    files = {"kernels.json": json.dumps({"schema": 1, "kernels": [entry]}).encode(), "k.cubin": b"k"}
    folder = clean / "tree" / "small" / "fmha"
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    manifest = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items())
    (folder / "checksums.txt").write_text(manifest)
    (clean / "pins.toml").write_text(
        f'[[pin]]\nname = "small"\npath = "small/fmha"\nfiles = 2\nbytes = 0\nmax_file_bytes = 65536\n'
        f'manifest_sha256 = "{hashlib.sha256(manifest.encode()).hexdigest()}"\nlicence = "none"\n'
        'abi = "trtllm-gen-0.6.13"\n'
    )
    device = {"ordinal": 0, "name": "Card", "number": 86, "multiprocessors": 1}
    found = {"present": True, "cuda": "13.0", "devices": [device], "problem": None}
    monkeypatch.setattr(doctor, "_driver", lambda: found)
    shown = report("--pins", str(clean / "pins.toml"), "--source", str(clean / "tree"))
    assert (
        "launch on Card (sm_86): only when asked for by name, 1 kernels of small were built but never run"
        in shown["will_work"]
    )


def test_keys_in_force_are_shown_by_name_and_place(report, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setenv("CUBIN_RUNTIME_PIN_KEYS", KEY)
    shown = setting(report(), "pin keys")
    assert shown["value"] == [f"{hashlib.sha256(bytes.fromhex(KEY)).hexdigest()[:16]} (CUBIN_RUNTIME_PIN_KEYS)"]
    assert shown["from"] == "CUBIN_RUNTIME_PIN_KEYS"


def test_where_versions_of_signed_files_are_recorded_is_shown(
    report, monkeypatch: pytest.MonkeyPatch, clean: Path
) -> None:
    assert setting(report(), "pin versions")["value"] == "not recorded: pin files need no signature"
    pytest.importorskip("cryptography")
    monkeypatch.setenv("CUBIN_RUNTIME_PIN_KEYS", KEY)
    state = clean / "cubin-runtime" / "pin_versions.json"
    shown = setting(report(), "pin versions")
    assert (shown["value"], shown["from"], state.parent.exists()) == (str(state), "XDG_STATE_HOME", False)


def test_versions_that_cannot_be_recorded_are_told(report, monkeypatch: pytest.MonkeyPatch, clean: Path) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setenv("CUBIN_RUNTIME_PIN_KEYS", KEY)
    folder = clean / "cubin-runtime"
    folder.mkdir()
    (folder / ".pin_versions.json.lock").symlink_to("elsewhere")
    assert f"CANNOT be recorded, {folder}/.pin_versions.json.lock" in setting(report(), "pin versions")["value"]
    (folder / "pin_versions.json").write_text("damaged")
    assert "cannot be read: it is damaged" in setting(report(), "pin versions")["value"]
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "pin_versions.json"))
    assert "CANNOT be recorded" in setting(report(), "pin versions")["value"]


def test_an_unsigned_pin_file_is_told_with_code_3(
    clean: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cryptography")
    (clean / "pins.toml").write_text("")
    monkeypatch.setenv("CUBIN_RUNTIME_PINS", str(clean / "pins.toml"))
    monkeypatch.setenv("CUBIN_RUNTIME_PIN_KEYS", KEY)
    assert cli.main(["doctor"]) == 3
    assert "is not signed" in capsys.readouterr().out


def test_nothing_is_called_launchable_without_a_driver(report, monkeypatch: pytest.MonkeyPatch) -> None:
    from cubin_runtime.cli import doctor

    monkeypatch.setattr(doctor, "_driver", lambda: {"present": False, "cuda": None, "devices": [], "problem": "none"})
    releases = report()["releases"]
    assert any(one["known_abi"] for one in releases)
    assert not any(one["launchable"] for one in releases)


def test_without_a_store_to_write_it_says_that_fetching_will_not_work(report, clean: Path) -> None:
    (clean / "file").write_text("")
    assert report("--store", str(clean / "file" / "store"))["will_work"][0] == "fetch: no, the store cannot be written"


def test_it_says_of_missing_kernels_what_the_error_of_a_first_launch_says(report) -> None:
    from cubin_runtime import Config, Runtime
    from cubin_runtime.errors import MissingError

    with pytest.raises(MissingError) as raised:
        Runtime(Config.from_environment({**os.environ, "CUBIN_RUNTIME_OFFLINE": "1"})).native_release()
    assert f"'pip install cubin-runtime-kernels=={KERNELS_VERSION}' installs it" in str(raised.value)
    assert f"native kernels: no, {raised.value}" in report()["will_work"]
