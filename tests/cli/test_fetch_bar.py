from __future__ import annotations

import sys

import pytest

from cubin_runtime.cli import fetch_bar as module
from cubin_runtime.cli.fetch_bar import describe, fetch_bar


@pytest.mark.parametrize(
    ("remaining", "came", "size", "seconds", "text"),
    [
        (300, 100, 12_000_000, 2.0, "12.0 MB at 6.0 MB/s, about 6 s left"),
        (0, 400, 48_000_000, 8.0, "48.0 MB at 6.0 MB/s"),
        (400, 0, 0, 3.0, "0.0 MB at 0.0 MB/s"),
        (400, 0, 0, 0.0, "0.0 MB at 0.0 MB/s"),
    ],
)
def test_bytes_rate_and_what_remains(remaining: int, came: int, size: int, seconds: float, text: str) -> None:
    assert describe(remaining, came, size, seconds) == text


def test_files_that_were_there_do_not_count_for_the_pace() -> None:
    with fetch_bar("made-1.0", 100) as bar:
        bar.advance(50)
        bar.moved(1_000_000)
        bar.advance(1)
        assert bar.text(1.0) == "1.0 MB at 1.0 MB/s, about 49 s left"


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "LINE_SECONDS", 0.0)
    with fetch_bar("made-1.0", 3) as bar:
        bar.moved(5)
        bar.advance(1)
    assert capsys.readouterr().err.startswith("fetch made-1.0: 1 of 3 files, 0.0 MB at ")


def test_a_short_fetch_says_nothing_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with fetch_bar("made-1.0", 3) as bar:
        bar.advance(3)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_with_the_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with fetch_bar("made-1.0", 3) as bar:
        bar._said = 0.0
        bar.moved(2_000_000)
        bar.advance(2)
    shown = capsys.readouterr().err
    assert "2/3" in shown
    assert "MB/s" in shown
