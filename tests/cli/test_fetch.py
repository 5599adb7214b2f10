from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cubin_runtime.artifacts.store.store import Store
from cubin_runtime.cli import main
from tests.artifacts.fleet import COMMAND_LINE, start_python, wait_until
from tests.artifacts.releases import Release, make_release, visible_files
from tests.artifacts.serving import FaultyServer, hang, serving, status, wrong_bytes

NAME = "fmha/prefill.cubin"


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    made = make_release(tmp_path)
    for name in ("CUBIN_RUNTIME_SOURCES", "CUBIN_RUNTIME_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUBIN_RUNTIME_CACHE", str(tmp_path / "store"))
    monkeypatch.setenv("CUBIN_RUNTIME_PINS", str(made.pin_file))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return made


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def damage(release: Release, store: Path) -> None:
    place = Store(store).object_path(release.digest(NAME))
    place.unlink()
    place.write_bytes(b"damaged")


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main([*arguments, "--json"])
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, shown


def test_fetch_puts_a_release_into_the_store(release: Release, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "made-1.0", "--source", str(release.root)]) == 0
    assert "3 files selected, 0 were in the store, 3 fetched (8.00 kB" in capsys.readouterr().out
    assert len(visible_files(store)) == 4


def test_fetch_takes_one_path(release: Release, store: Path) -> None:
    assert main(["fetch", release.path(NAME).text, "--source", str(release.root)]) == 0
    assert release.digest(NAME) in visible_files(store)
    assert len(visible_files(store)) == 2


def test_fetch_takes_a_glob(release: Release, store: Path) -> None:
    assert main(["fetch", "made-1.0", "--match", "fmha/*", "--source", str(release.root)]) == 0
    assert len(visible_files(store)) == 3


def test_a_choice_says_what_it_saves(release: Release, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", release.path(NAME).text, "--source", str(release.root)]) == 0
    assert "1 fetched (3.90 kB" in (shown := capsys.readouterr().out)
    assert shown.endswith("; the filters save about 5.33 kB\n")


def test_a_dry_run_says_about_how_much(release: Release, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "made-1.0", "--dry-run", "--source", str(release.root)]) == 0
    assert "3 would be fetched, about 8.00 kB" in capsys.readouterr().out
    assert not store.exists()


def test_json_reports_a_fetch(release: Release, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = run_json(capsys, "fetch", "made-1.0", "--source", str(release.root))
    assert (code, shown["schema"], shown["verb"], shown["errors"]) == (0, 2, "fetch", [])
    assert shown["releases"][0]["fetched"] == 3


def test_the_source_may_come_from_the_environment(
    release: Release, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_SOURCES", f"/nothing-here {release.root}")
    assert main(["fetch", "made-1.0"]) == 0


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["fetch", "unknown-1.0"], 3),
        (["fetch", "made/fmha/../x"], 3),
        (["fetch", "made/fmha/unknown"], 3),
        (["fetch", "made-1.0", "--jobs", "0"], 2),
        (["fetch", "made-1.0", "--source", "gopher://x/"], 2),
        (["fetch", "made-1.0", "--match", "none*"], 2),
        (["fetch"], 2),
        (["verify"], 2),
        (["where", "unknown-1.0"], 3),
    ],
)
def test_what_cannot_be_asked_has_its_code(release: Release, arguments: list[str], code: int) -> None:
    source = [] if "--source" in arguments else ["--source", str(release.root)]
    assert main([*arguments, *source]) == code


def test_a_source_without_the_files_is_code_7(
    release: Release, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(release.root) as server:
        server.fault(NAME, status(404))
        assert main(["fetch", "made-1.0", "--source", server.url]) == 7
    assert "status 404" in capsys.readouterr().err


def test_a_lying_source_is_code_5(release: Release, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(release.root) as server:
        server.fault(NAME, wrong_bytes)
        assert main(["fetch", "made-1.0", "--source", server.url]) == 5
    assert f"expected {release.digest(NAME)}" in capsys.readouterr().err


def test_a_lying_manifest_is_code_3(release: Release) -> None:
    with serving(release.root) as server:
        server.fault("checksums.txt", wrong_bytes)
        assert main(["fetch", "made-1.0", "--source", server.url]) == 3


def test_a_store_that_cannot_be_written_is_code_8(release: Release, store: Path) -> None:
    store.write_text("a file, not a folder")
    assert main(["fetch", "made-1.0", "--source", str(release.root)]) == 8


def test_offline_is_code_7_and_asks_nobody(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_OFFLINE", "1")
    server: FaultyServer
    with serving(release.root) as server:
        assert main(["fetch", "made-1.0", "--source", server.url]) == 7
        assert not server.counts


def test_an_error_of_one_release_does_not_keep_the_other(release: Release, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = run_json(capsys, "fetch", "unknown-1.0", "made-1.0", "--source", str(release.root))
    assert code == 3
    assert (len(shown["releases"]), shown["errors"][0]["code"]) == (1, 3)


def test_verify_is_0_for_a_whole_store(release: Release, capsys: pytest.CaptureFixture[str]) -> None:
    main(["fetch", "made-1.0", "--source", str(release.root)])
    assert main(["verify", "made-1.0"]) == 0
    assert "3 files verified (8.00 kB); in" in capsys.readouterr().out


def test_verify_reports_what_was_not_fetched_without_an_error(
    release: Release, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["fetch", release.path(NAME).text, "--source", str(release.root)])
    assert main(["verify", "made-1.0"]) == 0
    assert "1 file verified (3.90 kB), 2 not fetched" in capsys.readouterr().out


def test_verify_complete_is_4_when_files_are_missing(release: Release) -> None:
    main(["fetch", release.path(NAME).text, "--source", str(release.root)])
    assert main(["verify", "made-1.0", "--complete"]) == 4


def test_verify_is_5_for_damage_and_names_the_file(
    release: Release, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["fetch", "made-1.0", "--source", str(release.root)])
    damage(release, store)
    assert main(["verify", "made-1.0"]) == 5
    assert f"corrupt: {release.path(NAME)}" in capsys.readouterr().out


def test_verify_of_a_tree_is_6_for_an_extra_file(release: Release, capsys: pytest.CaptureFixture[str]) -> None:
    release.file("fmha/e\x1b[2Jxtra").write_bytes(b"extra")
    assert main(["verify", "made-1.0", "--tree", str(release.root)]) == 6
    assert "extra: fmha/e\\x1b[2Jxtra" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("broken", "code"),
    [(("corrupt", "missing", "extra"), 5), (("missing", "extra"), 4), (("manifest", "corrupt"), 3)],
)
def test_of_several_faults_the_worst_is_the_code(release: Release, broken: tuple[str, ...], code: int) -> None:
    if "corrupt" in broken:
        release.file(NAME).write_bytes(b"damaged")
    if "missing" in broken:
        release.file("kernels.bin").unlink()
    if "extra" in broken:
        release.file("extra").write_bytes(b"extra")
    if "manifest" in broken:
        release.file("checksums.txt").write_bytes(b"damaged")
    assert main(["verify", "made-1.0", "--complete", "--tree", str(release.root)]) == code


def test_json_reports_a_verification(release: Release, capsys: pytest.CaptureFixture[str]) -> None:
    main(["fetch", "made-1.0", "--source", str(release.root)])
    code, shown = run_json(capsys, "verify", "made-1.0", "--complete")
    found = shown["releases"][0]
    assert (code, found["ok"], found["missing"], found["corrupt"], found["extra"]) == (0, 3, 0, [], [])


def test_where_names_the_file_in_the_store(release: Release, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["fetch", "made-1.0", "--source", str(release.root)])
    capsys.readouterr()
    assert main(["where", release.path(NAME).text]) == 0
    assert capsys.readouterr().out == f"store   {Store(store).object_path(release.digest(NAME))}\n"


def test_where_is_4_for_what_is_nowhere(release: Release) -> None:
    main(["fetch", release.path("kernels.bin").text, "--source", str(release.root)])
    assert main(["where", release.path(NAME).text]) == 4


def test_where_counts_for_a_release(release: Release, capsys: pytest.CaptureFixture[str]) -> None:
    main(["fetch", release.path(NAME).text, "--source", str(release.root)])
    code, shown = run_json(capsys, "where", "made-1.0")
    assert (code, shown["files"], shown["in_store"]) == (0, 3, 1)


def test_an_interrupt_is_code_130(release: Release) -> None:
    with serving(release.root) as server:
        server.fault(NAME, hang)
        child = start_python(COMMAND_LINE, "fetch", "made-1.0", "--source", server.url)
        wait_until(lambda: server.count(NAME) > 0)
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=90)  # less than the server hangs
    assert child.returncode == 130, said


# -- said up front, and once


@pytest.mark.parametrize("word", ["nowhere", "nowhere.zip"])
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_source_that_is_not_there_is_told_before_anything_is_asked(
    release: Release, tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, more: list[str]
) -> None:
    assert main(["fetch", "made-1.0", "--source", str(tmp_path / word), *more]) == 7
    assert capsys.readouterr().err == f"error: --source '{tmp_path / word}': there is no such folder or archive\n"


def test_a_dry_run_fails_where_the_fetch_would(release: Release, store: Path) -> None:
    assert main(["fetch", "made-1.0", "--source", str(release.root), "--match", "*/prefill.cubin"]) == 0
    assert main(["fetch", "made-1.0", "--source", "http://127.0.0.1:9", "--retries", "0", "--dry-run"]) == 7


def test_equal_causes_are_told_once(release: Release, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "made-1.0", "--source", str(release.root), "--match", "*/prefill.cubin"]) == 0
    capsys.readouterr()
    with serving(release.root) as server:
        server.fault("", status(403))
        assert main(["fetch", "made-1.0", "--source", server.url]) == 7
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: 2 of 3 files could not be fetched: {server.url}: status 403 (")


def test_different_causes_are_counted(release: Release, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(release.root) as server:
        server.fault("kernels.bin", status(403))
        server.fault("prefill.cubin", status(404))
        assert main(["fetch", "made-1.0", "--source", server.url]) == 7
    first, *causes = capsys.readouterr().err.splitlines()
    assert first == "error: 2 of 3 files could not be fetched:"
    assert sorted(cause.split(" (")[0] for cause in causes) == [
        f"    1 files: {server.url}: status 403",
        f"    1 files: {server.url}: status 404",
    ]


def test_verbose_logs_every_file_with_its_source(release: Release, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "made-1.0", "--source", str(release.root), "-v"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "fetched" in line]
    assert sorted(lines) == sorted(
        f"INFO cubin_runtime: fetched {release.path(name)}: {len(data)} bytes from {release.root}"
        for name, data in release.files.items()
    )


def test_an_audit_log_that_is_a_fifo_without_a_reader_is_an_error_and_never_blocks(
    release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "audit.fifo")
    monkeypatch.setenv("CUBIN_RUNTIME_AUDIT", str(tmp_path / "audit.fifo"))
    assert main(["fetch", "made-1.0", "--source", str(release.root)]) == 8


def test_an_audit_log_is_kept_on_request(release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_AUDIT", str(tmp_path / "audit.jsonl"))
    assert main(["fetch", "made-1.0", "--source", str(release.root)]) == 0
    assert main(["verify", "made-1.0"]) == 0
    events = [json.loads(line)["event"] for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert events == ["fetch", "fetch", "fetch", "verify"]
