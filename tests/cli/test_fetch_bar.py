from __future__ import annotations

import re
import sys

import pytest

from cubin_runtime.cli import fetch_bar as module
from cubin_runtime.cli import output
from cubin_runtime.cli.fetch_bar import describe, fetch_bar
from tests.artifacts.children import refuse_threads


@pytest.mark.parametrize(
    ("remaining", "came", "size", "recent", "seconds", "text"),
    [
        (300, 100, 12_000_000, 12_000_000, 2.0, "12.00 MB, 6.00 MB/s, 6 s left"),
        (9000, 100, 12_000_000, 1_000_000, 2.0, "12.00 MB, 500.00 kB/s, 3:00 left"),
        (9000, 1, 12_000_000, 1_000_000, 1.0, "12.00 MB, 1.00 MB/s, 2:30:00 left"),
        (0, 400, 48_000_000, 48_000_000, 8.0, "48.00 MB, 6.00 MB/s"),
        (400, 0, 0, 0, 3.0, "0 bytes"),
        (400, 0, 0, 0, 0.0, "0 bytes"),
    ],
)
def test_bytes_rate_and_what_remains(
    remaining: int, came: int, size: int, recent: int, seconds: float, text: str
) -> None:
    assert describe(remaining, came, size, recent, seconds) == text


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the bar sees, in a list of one."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_files_that_were_there_do_not_count_for_the_pace(clock: list[float]) -> None:
    with fetch_bar("made-1.0", 100) as bar:
        bar.advance(50)
        clock[0] += 1.0
        bar.moved(1_000_000)
        bar.advance(1)
        assert bar.text(clock[0]) == "1.00 MB, 1.00 MB/s, 49 s left"


def test_waiting_for_another_process_does_not_count_for_ever(clock: list[float]) -> None:
    with fetch_bar("made-1.0", 1000) as bar:
        for _ in range(600):  # a lock was busy for ten minutes
            bar.advance(0)
            clock[0] += 1.0
        for _ in range(20):
            clock[0] += 1.0
            bar.moved(1_000_000)
            bar.advance(10)
        assert bar.text(clock[0]) == "20.00 MB, 1.00 MB/s, 1:20 left"


def test_a_whole_bar_fits_eighty_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with fetch_bar("trtllm-gen-0.6.13", 13453) as bar:
        bar.advance(0)
        clock[0] += 10.0
        bar.moved(1_234_000_000)
        bar.advance(9651)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert "9651/13453 1.23 GB, 123.40 MB/s, 4 s left" in shown


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "LINE_SECONDS", 0.0)
    with fetch_bar("made-1.0", 3) as bar:
        bar.moved(5)
        bar.advance(1)
    assert capsys.readouterr().err.startswith("fetch made-1.0: 1 of 3 files, 5 bytes")


def test_a_short_fetch_says_nothing_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with fetch_bar("made-1.0", 3) as bar:
        bar.advance(3)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_with_the_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with fetch_bar("made-1.0", 3) as bar:
        bar.advance(0)
        clock[0] += 1.0
        bar.moved(2_000_000)
        bar.advance(2)
    shown = capsys.readouterr().err
    assert "2/3" in shown
    assert "MB/s" in shown


def test_there_is_no_bar_where_the_system_refuses_a_thread_to_draw_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    refuse_threads(monkeypatch)
    with fetch_bar("made-1.0", 3) as bar, output.progress("verify", 3) as advance:
        bar.advance(3)
        advance(3)
    assert "made-1.0" in capsys.readouterr().err
