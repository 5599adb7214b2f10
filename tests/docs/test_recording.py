"""The recording of the terminal shows what the command line prints."""

from __future__ import annotations

import html
import json
import re

import pytest
from decode_kernels import HOPPER
from native_release import entry_of
from pages import ROOT
from releases import make_release

from cubin_runtime import __version__
from tools.record_terminal import EXPLAINED, Shown, picture, record

NAME = "recorded-1.0"


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
    pins = made.pin_file.read_text()
    made.pin_file.write_text(re.sub("^abi = .*\n", "", pins, flags=re.MULTILINE) + f'abi = "hopper-{__version__}"\n')
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


def test_the_committed_picture_tells_the_same_story() -> None:
    text = text_of((ROOT / "docs" / "terminal.svg").read_text())
    commands = re.findall(r"^\$ cubin-runtime (\w+)", text, re.MULTILINE)
    assert commands == ["fetch", "verify", "explain", "verify"]
    assert "exit code 5" in text
    assert "@font-face" not in (ROOT / "docs" / "terminal.svg").read_text()
