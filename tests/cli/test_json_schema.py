"""Every verb prints one JSON object that fits its schema, on success and on failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cubin_runtime import cli
from cubin_runtime.cli.json_schema import PAYLOADS, schema_of
from tests.artifacts.releases import Release, make_release
from tests.cli.json_shape import misfits

FIXTURE = Path(__file__).parents[1] / "fixtures" / "facts_sm_90a.cubin"
NAME = "made/fmha/fmha/decode.cubin"


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]):
    """Run a verb with ``--json``; its code and object, which has to fit the schema."""

    def run(*arguments: object) -> tuple[int, dict[str, Any]]:
        words = [*map(str, arguments), "--json"]
        capsys.readouterr()
        code = cli.main(words)
        shown = json.loads(capsys.readouterr().out)  # which fails if there are two objects
        assert misfits(shown, schema_of(words[0])) == []
        assert bool(shown["errors"]) == (code != 0)
        return code, shown

    return run


@pytest.fixture
def fetched(release: Release) -> Release:
    assert cli.main(["fetch", "made-1.0", "--source", str(release.root)]) == 0
    return release


def test_every_verb_that_takes_json_has_a_schema() -> None:
    verbs = {command.name for command in cli.app.registered_commands} - {"schema"}
    assert verbs == set(PAYLOADS)


@pytest.mark.parametrize("verb", sorted(PAYLOADS))
def test_the_schema_is_printed(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema", verb]) == 0
    assert json.loads(capsys.readouterr().out) == schema_of(verb)


def test_a_verb_without_a_schema_is_usage() -> None:
    assert cli.main(["schema", "dance"]) == 2


def test_fetch(release: Release, printed) -> None:
    code, shown = printed("fetch", "made-1.0", "--source", release.root)
    assert (code, shown["releases"][0]["fetched"]) == (0, 3)


def test_fetch_of_a_release_without_sizes(release: Release, printed) -> None:
    release.pin_file.write_text(release.pin_file.read_text().replace(f"bytes = {release.pin.bytes}", "bytes = 0"))
    _, shown = printed("fetch", "made-1.0", "--dry-run", "--source", release.root)
    assert shown["releases"][0]["about_bytes"] is None


def test_fetch_of_several_with_one_that_fails(release: Release, printed) -> None:
    code, shown = printed("fetch", "made-1.0", "unknown", "--source", release.root)
    assert (code, len(shown["releases"]), shown["errors"][0]["kind"]) == (3, 1, "PinError")


@pytest.mark.parametrize("target", ["made-1.0", NAME])
def test_where(fetched: Release, printed, target: str) -> None:
    assert printed("where", target)[0] == 0


def test_where_of_what_is_not_here(release: Release, printed) -> None:
    release.file("fmha/decode.cubin").unlink()
    code, shown = printed("where", NAME, "--source", release.root)
    assert (code, shown["places"], shown["errors"][0]["code"]) == (4, [], 4)


def test_verify(fetched: Release, printed) -> None:
    assert printed("verify", "made-1.0", "--complete")[1]["releases"][0]["ok"] == 3


def test_verify_of_a_damaged_store(fetched: Release, store: Path, printed) -> None:
    digest = fetched.digest("kernels.bin")
    damaged = store / "sha256" / digest[:2] / digest
    damaged.chmod(0o644)
    damaged.write_bytes(b"changed")
    code, shown = printed("verify", "made-1.0")
    assert (code, shown["errors"][0]["kind"]) == (5, "CorruptError")
    assert "kernels.bin" in shown["errors"][0]["message"]


def test_verify_of_a_tree_with_foreign_files(release: Release, printed) -> None:
    (release.root / "junk.txt").write_text("junk")
    code, shown = printed("verify", "made-1.0", "--complete", "--tree", release.root)
    assert (code, shown["releases"][0]["extra"], shown["errors"][0]["code"]) == (6, ["junk.txt"], 6)


@pytest.mark.parametrize("arguments", [[], ["--sha256", "0" * 64, "--offline"]])
def test_pin(environment: Path, printed, arguments: list[str]) -> None:
    release = make_release(environment)
    code, shown = printed("pin", "made/fmha", "--source", release.root, *arguments)
    assert code in (3, 7)
    assert shown["errors"]


def test_pin_writes(environment: Path, printed) -> None:
    release = make_release(environment)
    digest = release.pin.manifest_sha256
    assert printed("pin", "made/fmha", "--sha256", digest, "--source", release.root)[1]["files"] == 3
    assert printed("pin", "made/fmha")[1]["written"].startswith("already pinned in ")
    assert printed("unpin", "made/fmha")[0] == 0


def test_pin_offline_writes_without_the_manifest(environment: Path, printed) -> None:
    code, shown = printed("pin", "in-house/fmha", "--sha256", "1" * 64, "--offline")
    assert (code, shown["files"], shown["manifest_sha256"]) == (0, None, "1" * 64)
    assert {"name": "in-house-fmha", "files": None, "bytes": None}.items() <= printed("list")[1]["pins"][-1].items()


@pytest.mark.parametrize("target", ["made-1.0", "facts", FIXTURE])
def test_inspect(environment: Path, monkeypatch: pytest.MonkeyPatch, printed, target: object) -> None:
    release = make_release(environment, {"facts.cubin": FIXTURE.read_bytes()})
    monkeypatch.setenv("CUBIN_RUNTIME_PINS", str(release.pin_file))
    assert printed("inspect", target, "--source", release.root)[0] == 0


@pytest.mark.parametrize("arguments", [[], ["made-1.0"], ["made-1.0", "--count"]])
def test_list(fetched: Release, printed, arguments: list[str]) -> None:
    assert printed("list", *arguments)[0] == 0


def test_list_says_null_for_sizes_that_no_pin_states(release: Release, printed) -> None:
    pins = {pin["name"]: pin for pin in printed("list")[1]["pins"]}
    assert (pins["trtllm-gen-0.6.18.post1"]["files"], pins["trtllm-gen-0.6.18.post1"]["bytes"]) == (None, None)


def test_diff(fetched: Release, printed) -> None:
    assert printed("diff", "made-1.0", "made-1.0")[1]["same"] == 3


def test_export_and_mirror(fetched: Release, environment: Path, printed) -> None:
    assert printed("export", "made-1.0", "--out", environment / "made.zip")[1]["files"] == 4
    assert printed("mirror", "made-1.0", "--out", environment / "www")[1]["written"] == 4


def test_gc_and_usage(fetched: Release, printed) -> None:
    assert printed("usage")[1]["objects"] == 4
    assert printed("gc", "made-1.0", "--temps", "--unreferenced", "--dry-run")[1]["releases"]["removed"] == 4


def test_keygen_and_sign(release: Release, environment: Path, printed) -> None:
    pytest.importorskip("cryptography")
    key = environment / "pins.key"
    assert printed("keygen", key)[1]["public"] == str(environment / "pins.pub")
    assert printed("sign", release.pin_file, "--key", key)[1]["version"] == 1


@pytest.mark.parametrize("arguments", [[], ["--offline"], ["--require", "launch"]])
def test_doctor(release: Release, printed, arguments: list[str]) -> None:
    printed("doctor", "--source", release.root, *arguments)


@pytest.mark.parametrize("verb", sorted(PAYLOADS))
def test_a_usage_error_has_the_same_envelope(environment: Path, printed, verb: str) -> None:
    code, shown = printed(verb, "--no-such-option")
    assert (code, shown["errors"][0]["kind"]) == (2, "UsageError")


@pytest.mark.parametrize(
    "value",
    [
        {"schema": 2, "verb": "list"},
        {"schema": 1, "verb": "list", "errors": [], "pins": []},
        {"schema": 2, "verb": "list", "errors": []},
        {"schema": 2, "verb": "list", "errors": [], "pins": [], "more": 1},
        {"schema": 2, "verb": "list", "errors": [], "pins": [{"name": "a"}]},
    ],
)
def test_what_does_not_fit_is_found(value: object) -> None:
    assert misfits(value, schema_of("list")) != []
