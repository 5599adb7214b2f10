from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable

import pytest
import typer

from cubin_runtime.cli import output


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain_name-1.cubin", "plain_name-1.cubin"),
        ("naïve Größe", "naïve Größe"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x9b2J", "\\x9b2J"),
        ("line\nbreak\r", "line\\x0abreak\\x0d"),
        ("tab\there", "tab\\x09here"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\u2028", "\\u2028"),
        ("\udcff", "\\udcff"),
        ("\U000e0041", "\\U000e0041"),
        ("\x7f", "\\x7f"),
    ],
)
def test_no_character_reaches_the_terminal_as_a_command(text: str, shown: str) -> None:
    assert output.escape(text) == shown


def test_table_cells_are_escaped_and_never_markup(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(("name",), [("[red]x\x1b[0m",)])
    assert capsys.readouterr().out == "name\n[red]x\\x1b[0m\n"


def test_cells_of_a_piped_table_are_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(("name", "size"), [("n" * 500, 1)])
    assert "n" * 500 + "\t1" in capsys.readouterr().out


def on_narrow_terminal(write: Callable[[], None]) -> str:
    """What is written to a terminal of 40 columns."""
    shown = io.StringIO()
    shown.isatty = lambda: True  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, shown)
        patch.setenv("COLUMNS", "40")
        write()
    return shown.getvalue()


@pytest.mark.parametrize("color", ["never", "always"])
def test_an_error_on_a_terminal_is_wrapped_between_words(color: str) -> None:
    def write() -> None:
        output.error_line("about 1.65 GB are needed, 29.08 MB are free on this disk\nand this")

    token = output.LOUDNESS.set(output.Loudness(color=color))
    shown = on_narrow_terminal(write)
    output.LOUDNESS.reset(token)
    plain = shown.replace("\x1b[31m", "").replace("\x1b[0m", "")
    assert plain == "error: about 1.65 GB are needed, 29.08\n  MB are free on this disk\n  and this\n"
    assert ("\x1b[31merror:\x1b[0m" in shown) == (color == "always")


def test_a_line_below_an_error_keeps_its_margin_when_it_is_wrapped() -> None:
    shown = on_narrow_terminal(lambda: output.error_line("no source\n  https://host/folder: Name or service not known"))
    assert shown.endswith("no source\n    https://host/folder: Name or service\n      not known\n")


def test_a_paragraph_on_a_terminal_is_wrapped_and_a_word_stays_whole() -> None:
    shown = on_narrow_terminal(lambda: output.paragraph(f"fetch: no, from https://{'h' * 50}; next: nothing"))
    assert shown == f"fetch: no, from\n    https://{'h' * 50};\n    next: nothing\n"


def test_json_carries_the_schema_number_and_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit_json("verify", {"ok": 1})
    assert json.loads(capsys.readouterr().out) == {"schema": 2, "verb": "verify", "errors": [], "ok": 1}


def test_json_is_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit_json("verify", {"name": "\x1b\x9b\u202e"})
    assert capsys.readouterr().out.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("codes", "code"),
    [([], 0), ([0, 0], 0), ([4, 5], 5), ([6, 4], 4), ([5, 3, 4, 6], 3), ([7, 6], 6), ([8], 8), ([9, 7], 9)],
)
def test_of_several_outcomes_the_gravest_gives_the_code(codes: list[int], code: int) -> None:
    assert output.worst_code(codes) == code


def test_finish_ends_with_the_code() -> None:
    with pytest.raises(typer.Exit) as ended:
        output.finish([4, 6])
    assert ended.value.exit_code == 4


def test_finish_returns_when_all_is_well() -> None:
    output.finish([0])


def test_progress_is_silent_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with output.progress("fetching", 2) as advance:
        advance(2)
    assert capsys.readouterr() == ("", "")


def test_error_lines_keep_breaks_and_escape_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    output.error_line("first\nsecond\x1b")
    assert capsys.readouterr().err == "error: first\n  second\\x1b\n"


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (
            80,
            [
                f"name{' ' * 18}size{' ' * 11}what",
                f"{'n' * 20}  [red]x\\x1b[2J",
                f"m{' ' * 21}2{' ' * 14}why not",
            ],
        ),
        (24, ["n" * 20, "    size [red]x\\x1b[2J", "m", "    size 2, what why not", "    or so"]),
    ],
)
def test_a_table_on_a_terminal_keeps_cells_whole_at_any_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int, shown: list[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    output.table(
        ("name", "size", "what"),
        [("n" * 20, "[red]x\x1b[2J", ""), ("m", 2, "why not" if width > 40 else "why not or so")],
    )
    assert capsys.readouterr().out.splitlines() == shown


def test_a_bar_on_a_terminal_counts_to_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with output.progress("fetch [red]\x1b]0;x\x07", 3) as advance:
        advance(3)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "3/3" in shown.err
    assert "\x1b]0;" not in shown.err
