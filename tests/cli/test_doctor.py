from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest

from cubin_runtime import cli
from cubin_runtime._version import KERNELS_VERSION
from tests.artifacts.releases import Release, make_release
from tests.artifacts.serving import hang, serving

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


def verdict(shown: dict, task: str, **about: str) -> str:
    """State and reason of the first task of that name."""
    found = next(t for t in shown["tasks"] if t["task"] == task and about.items() <= t.items())
    return f"{found['state']}, {found['reason']}"


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
    assert verdict(report(), "launch") == "no, none"


def test_a_device_that_no_release_fits_is_named(report, monkeypatch: pytest.MonkeyPatch) -> None:
    from cubin_runtime.cli import doctor

    device = {"ordinal": 0, "name": "Card", "number": 70, "multiprocessors": 1}
    found = {"present": True, "cuda": "13.0", "devices": [device], "problem": None}
    monkeypatch.setattr(doctor, "_driver", lambda: found)
    assert verdict(report(), "launch", device="Card (sm_70)") == "no, no local release has a kernel for it"


def test_fetching_is_said_to_be_off_when_offline(report) -> None:
    shown = report("--offline")
    assert {task["state"] for task in shown["tasks"] if task["task"] == "fetch"} == {"no"}
    assert "offline is set" in verdict(shown, "fetch", release="trtllm-gen-0.6.13")


@pytest.mark.parametrize(
    ("runs", "untried", "said"),
    [
        (3, 0, "launch on Card (sm_80): yes, 3 kernels of ours"),
        (3, 1, "launch on Card (sm_80): yes, 2 kernels of ours (1 more were built but never run)"),
        (
            3,
            3,
            "launch on Card (sm_80): no, 3 kernels of ours were built for it and never run; "
            "next: ask for them by name with backend='native'",
        ),
    ],
)
def test_kernels_that_were_never_run_are_told_apart(report, runs: int, untried: int, said: str) -> None:
    from cubin_runtime.cli.doctor_tasks import sentence, tasks_of

    release = {**report()["releases"][0], "name": "ours", "known_abi": True}
    device = {"ordinal": 0, "name": "Card", "number": 80, "multiprocessors": 1}
    shown = {
        **report(),
        "releases": [{**release, "runs_on": {"80": runs}, "built_not_run": {"80": untried}}],
        "driver": {"present": True, "cuda": "13.0", "devices": [device], "problem": None},
    }
    assert said in [sentence(task) for task in tasks_of(shown)]


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
    said = verdict(shown, "launch", device="Card (sm_86)")
    assert said == "no, 1 kernels of small were built for it and never run"


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
    shown = report("--store", str(clean / "file" / "store"))
    assert verdict(shown, "fetch", release="trtllm-gen-0.6.13") == "no, the store cannot be written"
    assert verdict(shown, "store").startswith("no,")


def test_it_says_of_missing_kernels_what_the_error_of_a_first_launch_says(report) -> None:
    from cubin_runtime import Config, Runtime
    from cubin_runtime.errors import MissingError

    with pytest.raises(MissingError) as raised:
        Runtime(Config.from_environment({**os.environ, "CUBIN_RUNTIME_OFFLINE": "1"})).native_release()
    assert f"'pip install cubin-runtime-kernels=={KERNELS_VERSION}' installs it" in str(raised.value)
    (kernels,) = (task for task in report()["tasks"] if task["task"] == "kernels")
    assert (kernels["state"], f"{kernels['reason']}; {kernels['next']}") == ("no", str(raised.value))


@pytest.fixture
def mirror(clean: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    """A release that is pinned, with no source that has it."""
    made = make_release(clean)
    monkeypatch.setenv("CUBIN_RUNTIME_PINS", str(made.pin_file))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return made


def test_a_server_is_not_tried_without_check(report, mirror: Release) -> None:
    with serving(mirror.root) as server:
        shown = report("--source", server.url)
        assert not server.counts
    assert verdict(shown, "fetch", release="made-1.0") == f"not tried, from {server.url}"
    assert [s["delivers"] for s in shown["sources"] if s["release"] == "made-1.0"] == [None]


def test_check_asks_the_server(report, mirror: Release) -> None:
    with serving(mirror.root) as server:
        shown = report("--check", "--source", server.url)
    assert verdict(shown, "fetch", release="made-1.0") == f"yes, from {server.url}"
    assert verdict(shown, "fetch", release="hopper-0.1.0").startswith(f"no, {server.url}: ")


def test_a_silent_server_is_waited_for_two_seconds(report, mirror: Release) -> None:
    with serving(mirror.root) as server:
        server.fault("checksums.txt", hang)
        began = time.monotonic()
        shown = report("--check", "--source", server.url)
        seconds = time.monotonic() - began
    # The server, or the check as a whole, was waited for.
    assert re.search("(within|for) 2 s", verdict(shown, "fetch", release="made-1.0"))
    assert seconds < 10


def test_a_name_that_does_not_resolve_is_no(report, mirror: Release) -> None:
    shown = report("--check", "--source", "https://no-such-host.invalid/tree")
    assert verdict(shown, "fetch", release="made-1.0").startswith("no, https://no-such-host.invalid/tree: ")


def test_a_local_source_is_always_tried(report, mirror: Release) -> None:
    shown = report("--source", str(mirror.root))
    assert verdict(shown, "fetch", release="made-1.0") == f"yes, from {mirror.root}"


def test_a_release_that_is_in_the_store_is_fetched(report, mirror: Release, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fetch", "made-1.0", "--source", str(mirror.root)]) == 0
    capsys.readouterr()
    assert verdict(report("--offline"), "fetch", release="made-1.0") == "yes, all 3 files are in the store"


def test_too_little_room_is_told(report, mirror: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    from cubin_runtime.cli import doctor

    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(100, 99, 1))
    said = verdict(report("--source", str(mirror.root)), "fetch", release="made-1.0")
    assert said.startswith("no, about ")
    assert said.endswith("are needed, 1 bytes are free")


def test_a_store_that_refuses_a_file_is_found_by_check(report, clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cubin_runtime.artifacts.store.store import Store
    from cubin_runtime.errors import StoreError

    def refuse(self: Store) -> None:
        raise StoreError("store: cannot be written: Stale file handle")

    (clean / "store").mkdir()
    monkeypatch.setattr(Store, "check_writable", refuse)
    assert verdict(report("--store", str(clean / "store")), "store").startswith("yes")
    assert verdict(report("--check", "--store", str(clean / "store")), "store") == (
        "no, store: cannot be written: Stale file handle"
    )


def test_without_a_home_the_rest_is_still_shown(
    clean: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "relative")
    assert cli.main(["doctor"]) == 2
    shown = capsys.readouterr()
    assert "there is no home folder for the store" in shown.err
    assert "store: no, there is no home folder for the store" in shown.out
    assert "pins: yes, " in shown.out
    assert "accelerator: " in shown.out
    assert "launch: no, " in shown.out


def test_with_an_invalid_setting_the_rest_is_shown_and_nothing_is_claimed(
    clean: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_TIMEOUT", "soon")
    assert cli.main(["doctor"]) == 2
    shown = capsys.readouterr()
    assert "error: CUBIN_RUNTIME_TIMEOUT" in shown.err
    for task, state in {"pins": "not tried", "store": "not tried", "fetch": "no", "verify": "no"}.items():
        assert (
            f"{task}: {state}, a setting is invalid; next: mend the setting that the error below names\n" in shown.out
        )
    assert "accelerator: " in shown.out


def test_pins_that_cannot_be_read_leave_the_built_in_ones(report, clean: Path) -> None:
    (clean / "pins.toml").write_text("[[pin]]\nname = 1\n")
    shown = report("--pins", str(clean / "pins.toml"))
    assert [error["code"] for error in shown["errors"]] == [3]
    assert "trtllm-gen-0.6.13" in [release["name"] for release in shown["releases"]]
    assert verdict(shown, "pins").startswith("no, ")
    assert verdict(shown, "verify") == "no, the pins cannot be read"
    assert verdict(shown, "fetch") == "no, the pins cannot be read"
    assert verdict(shown, "kernels") == "no, the pins cannot be read"


@pytest.mark.parametrize(
    ("task", "code"), [("launch", 9), ("kernels", 4), ("fetch:trtllm-gen-0.6.13", 7), ("store", 0), ("verify", 0)]
)
def test_a_required_task_sets_the_exit_code(clean: Path, monkeypatch: pytest.MonkeyPatch, task: str, code: int) -> None:
    from cubin_runtime.cli import doctor

    monkeypatch.setattr(doctor, "_driver", lambda: {"present": False, "cuda": None, "devices": [], "problem": "none"})
    assert cli.main(["doctor", "--offline", "--require", task]) == code


def test_a_requirement_is_met_by_a_source_that_delivers(mirror: Release) -> None:
    assert cli.main(["doctor", "--require", "fetch:made-1.0", "--source", str(mirror.root)]) == 0
    assert cli.main(["doctor", "--require", "fetch", "--source", str(mirror.root)]) == 0


def test_an_unknown_requirement_is_usage(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--offline", "--require", "launched"]) == 2
    assert "expected one of pins, store, fetch, verify, kernels, accelerator, launch" in capsys.readouterr().err


def test_every_no_comes_with_a_next_step(report, monkeypatch: pytest.MonkeyPatch) -> None:
    from cubin_runtime.cli import doctor

    monkeypatch.setattr(doctor, "_driver", lambda: {"present": False, "cuda": None, "devices": [], "problem": "none"})
    without = [task["task"] for task in report("--offline")["tasks"] if task["state"] != "yes" and not task["next"]]
    assert without == []


@pytest.mark.parametrize("installed", [True, False])
def test_the_accelerator_is_shown(report, monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    from cubin_runtime.launch import accelerator

    monkeypatch.setattr(accelerator, "accelerator", lambda: object() if installed else None)
    assert report()["accelerator"]["installed"] == installed
    assert verdict(report(), "accelerator").startswith("yes" if installed else "no")
