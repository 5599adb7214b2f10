"""The recording of the terminal shows what the command line prints."""

from __future__ import annotations

import html
import json
import re

import pytest

from cubin_runtime._version import KERNELS_VERSION
from cubin_runtime.artifacts.pins.pin import BUILTIN_PINS, parse_pins
from tests.artifacts.releases import make_release
from tests.cli.native_release import entry_of
from tests.docs.pages import ROOT
from tests.kernels.decode_kernels import HOPPER
from tools.record_terminal import EXPLAINED, Shown, picture, record

NAME = "recorded-1.0"
COMMITTED = (ROOT / "docs" / "terminal.svg").read_text()
BUILT = ROOT / "build" / "artifacts" / f"hopper-{KERNELS_VERSION}"
STALE = "run: make artifacts, then python tools/record_terminal.py"


def text_of(svg: str) -> str:
    """The lines of a picture of a terminal."""
    lines = re.findall(r"<text [^>]*?y=\"([\d.]+)\"[^>]*>(.*?)</text>", svg)
    by_line: dict[str, str] = {}
    for y, text in lines:
        by_line[y] = by_line.get(y, "") + html.unescape(text).replace("\xa0", " ")
    return "\n".join(by_line.values())


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> list[Shown]:
    """The story on a small release."""
    place = tmp_path_factory.mktemp("recording")
    table = json.dumps({"schema": 1, "release": NAME, "kernels": [entry_of(kernel) for kernel in HOPPER]})
    files = {"kernels.json": table.encode(), "fmha/one_sm90a.cubin": bytes(64), "fmha/two_sm90a.cubin": bytes(65)}
    made = make_release(place / "tree", files, NAME, NAME)
    pins = re.sub("^abi = .*\n", "", made.pin_file.read_text(), flags=re.MULTILINE)
    made.pin_file.write_text(f'{pins}abi = "hopper-{KERNELS_VERSION}"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBIN_RUNTIME_PINS", str(made.pin_file))
        return record(made.root, NAME, f"{EXPLAINED} --release {NAME}")


def test_fetch_verify_and_explain_succeed_and_the_tampered_file_is_refused(shown: list[Shown]) -> None:
    assert [one.code for one in shown] == [0, 0, 0, 5]
    assert "3 fetched" in shown[0].output
    assert "3 files verified" in shown[1].output
    assert "kernel " in shown[2].output
    assert "corrupt: recorded-1.0/fmha/one_sm90a.cubin: sha256 is " in shown[3].output


def test_the_picture_has_each_command_and_what_it_printed(shown: list[Shown]) -> None:
    text = text_of(picture(shown))
    for one in shown:
        assert f"$ {one.command}" in text
        assert one.output.splitlines()[0][:60].expandtabs(4) in text
    assert "exit code 5" in text


def is_built() -> bool:
    """Whether the release that is built here is the pinned one."""
    built, pinned = BUILT / "checksums.txt", ROOT / "benchmarks/results/checksums.txt"
    return built.is_file() and built.read_bytes() == pinned.read_bytes()


def labels(explained: str) -> list[str]:
    """What the lines of ``explain`` are called; their values are those of a release."""
    return re.findall(r"^([a-z][a-z ]{1,9}?)  +\S", explained, re.MULTILINE)


def outline(text: str) -> list[str]:
    """The lines of a recording but those of ``explain``, without numbers, digests, and names of releases."""
    before, explained, behind = re.split(r"^(\$ cubin-runtime explain.*?)(?=^# )", text, flags=re.MULTILINE | re.DOTALL)
    assert explained
    others = (before + behind).splitlines()
    lines = (re.sub(r"(?:hopper-[\d.]+|recorded-[\d.]+)[\w/.]*", "RELEASE", line) for line in others)
    words = (re.sub(r"\b\d[\d.]*(?: [kMG]?B\b| bytes\b)?", "N", line) for line in lines)
    return [line for line in words if "expected" not in line and not re.fullmatch(r"\w{60,}", line)]


def test_the_committed_picture_has_the_words_that_the_command_line_prints_today(shown: list[Shown]) -> None:
    assert outline(text_of(COMMITTED)) == outline(text_of(picture(shown))), STALE
    # A release of kernels for one GPU has none for others.
    today = {*labels(shown[2].output.expandtabs(4)), "elsewhere"}
    assert labels(text_of(COMMITTED))
    assert set(labels(text_of(COMMITTED))) <= today, STALE


def test_the_committed_picture_has_the_figures_of_the_pinned_release() -> None:
    (pin,) = (pin for pin in parse_pins(BUILTIN_PINS.read_bytes(), "pins.toml") if pin.name.startswith("hopper-"))
    text = " ".join(text_of(COMMITTED).split())
    digests = dict(line.split()[::-1] for line in (ROOT / "benchmarks/results/checksums.txt").read_text().splitlines())
    (cubin,) = re.findall(rf"verify {pin.path}/(\S+) --tree", text)
    assert f"{pin.name}: {pin.files} files selected" in text, STALE
    assert f"{pin.files} files verified ({pin.bytes / 1e6:.2f} MB)" in text, STALE
    assert f"expected {digests[cubin]}" in text, STALE


@pytest.mark.skipif(not is_built(), reason="the pinned release is not built here")
def test_the_committed_picture_is_what_the_built_release_gives() -> None:
    def timeless(svg: str) -> str:
        return re.sub(r" in [\d.]+ s\)", ")", text_of(svg))

    assert timeless(COMMITTED) == timeless(picture(record(BUILT.parent, BUILT.name))), STALE


def test_the_picture_tells_the_whole_story_and_loads_no_font() -> None:
    commands = re.findall(r"^\$ cubin-runtime (\w+)", text_of(COMMITTED), re.MULTILINE)
    assert commands == ["fetch", "verify", "explain", "verify"]
    assert "exit code 5" in text_of(COMMITTED)
    assert "@font-face" not in COMMITTED
