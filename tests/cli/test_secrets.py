"""No credential is printed or stored, whatever the verb, the message and the form of the output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cubin_runtime.artifacts.library import Library
from cubin_runtime.cli import main
from cubin_runtime.cli.redaction import redacted
from cubin_runtime.config import Config
from tests.artifacts.releases import Release
from tests.artifacts.serving import serving

SECRET = "s3cr3t"
URLS = (
    f"https://user:{SECRET}@host.invalid/root",
    f"https:/user:{SECRET}@host.invalid/root",
    f"https:user:{SECRET}@host.invalid/root",
    f"//user:{SECRET}@host.invalid/root",
    f"user:{SECRET}@host.invalid/root",
    f"ftp://user:{SECRET}@host.invalid/root",
    f"http://user:{SECRET}@[::1/root",
    f"http://127.0.0.1:9/root?token={SECRET}",
    f"http://127.0.0.1:9/root#{SECRET}=1",
)
VERBS = (
    ["fetch", "made-1.0", "--retries", "0", "--source", "{url}"],
    ["fetch", "made-1.0", "--retries", "0", "--dry-run", "--source", "{url}"],
    ["fetch", "{url}"],
    ["inspect", "{url}"],
    ["list", "{url}"],
    ["where", "{url}", "--source", "{url}"],
    ["verify", "made-1.0", "--tree", "{url}"],
    ["doctor", "--source", "{url}"],
    ["doctor", "--store", "{url}"],
    ["pin", "made/fmha", "--source", "{url}", "--retries", "0"],
    ["pin", "made/fmha", "--source", "{url}", "--sha256", "0" * 64, "--retries", "0"],
    ["pin", "--from-flashinfer", "{url}"],
    ["unpin", "{url}"],
    ["diff", "{url}", "{url}"],
    ["fetch", "made-1.0", "--retries", "0", "--source", "http://127.0.0.1:9", "--proxy", "{url}"],
    ["list", "--sm", "{url}"],
    ["list", "--{url}"],
    ["{url}"],
)


@pytest.mark.parametrize("form", [[], ["--json", "-vv"]], ids=["text", "json and log"])
@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_no_verb_prints_a_secret(
    release: Release, capsys: pytest.CaptureFixture[str], verb: list[str], form: list[str]
) -> None:
    for url in URLS:
        code = main([word.format(url=url) for word in [*verb, *form]])
        shown = "".join(capsys.readouterr())
        assert (code == 1, SECRET in shown) == (False, False), shown


@pytest.mark.parametrize(
    "text", [f"host:{SECRET}", SECRET, f"host={SECRET}", f"={SECRET}", f"host=a {SECRET}", f"host=~{SECRET}/x"]
)
def test_what_is_given_for_a_token_file_is_not_printed(
    release: Release, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    for form in ([], ["--json", "-vv"]):
        words = ["fetch", "made-1.0", "--source", "https://host:9/x", "--retries", "0", "--timeout", "0.2"]
        assert main([*words, "--token-file", text, *form]) in (2, 7)
        assert SECRET not in "".join(capsys.readouterr())


def test_a_traceback_shows_no_secret(
    release: Release, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError(f"https://user:{SECRET}@host/x?token={SECRET}")

    monkeypatch.setattr(Library, "fetch", fail)
    assert main(["fetch", "made-1.0", "--source", str(release.root), "--json"]) == 1
    shown = "".join(capsys.readouterr())
    assert (SECRET in shown, "Traceback" in shown, "ZeroDivisionError: https://host/x" in shown) == (False, True, True)


@pytest.mark.parametrize("query", [f"?token={SECRET}", f"#{SECRET}"])
def test_a_source_that_may_hold_a_secret_is_not_stored(
    release: Release, environment: Path, capsys: pytest.CaptureFixture[str], query: str
) -> None:
    with serving(release.root) as server:
        code = main(["pin", "made/fmha", "--source", server.url + query, "--sha256", release.pin.manifest_sha256])
    said = capsys.readouterr().err
    assert (code, "netrc" in said, "--token-file" in said) == (2, True, True)
    assert not any(SECRET in file.read_text("utf-8", "replace") for file in environment.rglob("*.toml"))


def test_a_url_with_a_query_is_still_fetched_from(release: Release, run_json) -> None:
    with serving(release.root) as server:
        code, shown = run_json("fetch", "made-1.0", "--source", f"{server.url}?token={SECRET}")
    assert (code, SECRET in json.dumps(shown)) == (0, False)


def test_a_configuration_does_not_show_its_sources() -> None:
    assert SECRET not in repr(Config(store=Path("/x"), sources=(URLS[-1],)))


@pytest.mark.parametrize("text", ["a/b", "see https://docs.example/eula", "x@y", "kernel_a@b.cubin", "/data/a:b/c@d"])
def test_text_without_secrets_stays(text: str) -> None:
    assert redacted(text) == text
