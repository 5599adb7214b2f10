"""Output of all verbs: escaped text, JSON with a schema number, tables and progress."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import islice
from typing import TYPE_CHECKING, Any, TextIO

from ..byte_sizes import size as size
from ..errors import CubinRuntimeError
from ..values import dataclass
from .redaction import redacted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from ..kernels.explanation import Facts, Table

JSON_SCHEMA = 2
_CODE_ORDER = (3, 5, 4, 6)
# Cc control, Cf format (bidi overrides), Cs lone surrogates, Co private use, Zl/Zp line and paragraph breaks
_UNSAFE_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_RED, _PLAIN = "\x1b[31m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Loudness:
    """The settings of what is said besides results and errors, and of colour (``auto``, ``always`` or ``never``)."""

    quiet: bool = False
    color: str = "auto"

    def colors(self, stream: TextIO) -> bool:
        """Return whether text to a stream is coloured."""
        if self.color != "auto":
            return self.color == "always"
        return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


LOUDNESS: ContextVar[Loudness] = ContextVar("LOUDNESS", default=Loudness())  # noqa: B039  # immutable


EMITTED: ContextVar[bool] = ContextVar("EMITTED", default=False)
"""True once this run has printed its JSON object."""


class OutputError(CubinRuntimeError):
    """The output of a verb cannot be written: the disk behind it is full, for example."""

    exit_code = 8


def prepare_streams() -> None:
    """Let the standard streams take whatever is printed.

    A closed one becomes ``/dev/null``, so that no file of ours gets its number; characters that its encoding
    lacks are escaped.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # for as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def escape(text: object) -> str:
    r"""Text that a terminal shows and never obeys: control and format characters as ``\xNN`` or ``\uNNNN``.

    Credentials in URLs are removed.

    >>> escape("a\x1b[2Jb\n")
    'a\\x1b[2Jb\\x0a'
    """
    plain = redacted(str(text))
    if plain.isascii() and plain.isprintable():
        return plain
    return "".join(_escape_one(c) if unicodedata.category(c) in _UNSAFE_CATEGORIES else c for c in plain)


def _escape_one(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def worst_code(codes: Iterable[int]) -> int:
    """One exit code for several outcomes: 3, then 5, 4, 6, then the largest other; 0 for none."""
    failures = {code for code in codes if code}
    for code in _CODE_ORDER:
        if code in failures:
            return code
    return max(failures, default=0)


def finish(codes: Iterable[int]) -> None:
    """End a verb with the worst of ``codes``; returns if all are 0."""
    code = worst_code(codes)
    if code:
        import typer

        raise typer.Exit(code)


def emit_json(verb: str, payload: Mapping[str, object], errors: Sequence[Mapping[str, object]] = ()) -> None:
    """Print one JSON object: ``schema``, ``verb``, ``errors`` and the payload (ASCII only, so nothing needs escaping).

    It is printed once a run: an error after it is only an error line.
    """
    EMITTED.set(True)
    whole = {"schema": JSON_SCHEMA, "verb": verb, "errors": list(errors), **payload}
    pieces = json.JSONEncoder(indent=2, default=str).iterencode(whole)
    with writing():
        while chunk := "".join(map(redacted, islice(pieces, 1 << 14))):  # never all of it in memory
            sys.stdout.write(chunk)
        sys.stdout.write("\n")


def line(text: object = "") -> None:
    """Print one escaped line to the standard output."""
    _write(escape(text))


def paragraph(text: object) -> None:
    """Print one escaped line; on a terminal it is wrapped between words, with what follows indented."""
    for part in _on_terminal(escape(text), sys.stdout, indent=4):
        _write(part)


def error_line(text: object) -> None:
    """Print one escaped line, marked as an error, to the standard error stream; line breaks stay.

    On a terminal long lines are wrapped between words.
    """
    mark = f"{_RED}error:{_PLAIN}" if LOUDNESS.get().colors(sys.stderr) else "error:"
    for number, part in enumerate(str(text).splitlines() or [""]):
        for line in _on_terminal(f"{'error:' if number == 0 else ' '} {escape(part)}", sys.stderr, indent=2):
            _tell(line.replace("error:", mark, 1) if number == 0 and line.startswith("error:") else line)


def traceback_lines() -> None:
    """Print the traceback of the error that is being handled to the standard error stream."""
    import traceback

    for part in traceback.format_exc().splitlines():
        _tell(escape(part))


def note_line(text: object) -> None:
    """Print one escaped line to the standard error stream, if that can be written and nobody asked for quiet."""
    if not LOUDNESS.get().quiet:
        _tell(escape(text))


def _tell(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr)


def error_object(code: int, kind: str, message: str) -> dict[str, Any]:
    """An error as every verb shows it in JSON, in the list ``errors``."""
    return {"code": code, "kind": kind, "message": message}


def error_of(error: CubinRuntimeError) -> dict[str, Any]:
    """The object of an error of the package."""
    return error_object(error.exit_code, type(error).__name__, str(error))


def console(stream: TextIO) -> Console:
    """Return the console on which ``rich`` draws, with or without colour."""
    from rich.console import Console

    return Console(file=stream, no_color=not LOUDNESS.get().colors(stream))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; cells are escaped and never cut.

    On a terminal the columns are aligned if they fit; else each row's first cell has a line of its own, whole, so
    that it can be copied, and the others follow with their columns' names. In a pipe it is tab-separated lines.
    """
    cells = ([escape(cell) for cell in row] for row in rows)
    if not sys.stdout.isatty():
        _write("\t".join(escape(column) for column in columns))
        for row in cells:
            _write("\t".join(row))
        return
    listed = [[escape(column) for column in columns], *cells]
    widths = [max(map(len, column)) for column in zip(*listed, strict=True)]
    room = shutil.get_terminal_size().columns
    if sum(widths) + 2 * (len(widths) - 1) <= room:
        for row in listed:
            _write("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    for first, *others in listed[1:]:
        _write(first)
        about = ", ".join(f"{name} {cell}" for name, cell in zip(listed[0][1:], others, strict=True) if cell)
        for part in textwrap.wrap(about, max(20, room - 4), break_long_words=False, break_on_hyphens=False):
            _write(f"    {part}")


def facts(rows: Iterable[tuple[str, object]]) -> None:
    """Print ``name  value`` lines, aligned, values escaped; on a terminal long values are wrapped between words.

    Names may be those of JSON fields: their underscores are shown as spaces.
    """
    listed = [(name.replace("_", " "), value) for name, value in rows]
    width = max((len(name) for name, _ in listed), default=0)
    room = shutil.get_terminal_size().columns - width - 2 if sys.stdout.isatty() else 0
    for name, value in listed:
        text = escape(value)
        lines = [text] if room < 20 or len(text) <= room else _wrapped(text, room)
        for number, part in enumerate(lines or [""]):
            _write(f"{name if number == 0 else '':<{width}}  {part}".rstrip())


def _wrapped(text: str, room: int) -> list[str]:
    """Lines of at most ``room`` columns; a name that is longer than a line is divided where a word of it begins."""
    if text.isidentifier():
        text = re.sub(r"(?<=[a-z0-9_])(?=[A-Z])", " ", text)
        return [line.replace(" ", "") for line in textwrap.wrap(text, room, break_long_words=False)]
    return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)


def _on_terminal(text: str, stream: TextIO, *, indent: int) -> list[str]:
    """The lines of a text: one, unless the stream is a terminal that is narrower."""
    room = shutil.get_terminal_size().columns if stream.isatty() else 0
    if room < 20 or len(text) <= room:
        return [text]
    margin = " " * (len(text) - len(text.lstrip()))
    wrap = textwrap.TextWrapper(room, margin, margin + " " * indent, break_long_words=False, break_on_hyphens=False)
    return wrap.wrap(text.lstrip())


def some(word: str, items: Sequence[str], most: int = 20) -> None:
    """Print the first of many items, a line each, and how many more there are."""
    for item in items[:most]:
        line(f"  {word}: {item}")
    if len(items) > most:
        line(f"  {word}: and {len(items) - most} more")


def several(count: float, word: str) -> str:
    """A number with its noun, in the plural unless it is one."""
    return f"{count:.12g} {word}{'' if count == 1 else 's'}"


@contextmanager
def progress(description: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on the standard error stream, shown only where that is a terminal.

    Args:
        description: what is being done, in two or three words.
        total: how many files there are, None if that is not known.

    Yields:
        a function that advances the bar by the number it is given; any thread may call it.
    """
    if not sys.stderr.isatty() or LOUDNESS.get().quiet:
        yield lambda step: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console(sys.stderr),
        transient=True,
    )
    with drawn(bar):
        task = bar.add_task(escape(description), total=total)
        yield lambda step: bar.advance(task, step)


@contextmanager
def drawn(bar: Progress) -> Iterator[None]:
    """Show a bar while the block runs; where the system refuses the thread that draws it, the block runs without."""
    with suppress(RuntimeError):
        bar.start()
    try:
        yield
    finally:
        bar.stop()


def flush() -> None:
    """Write out what is buffered; a reader that has gone away is not an error.

    Raises:
        OutputError: it cannot be written.
    """
    with writing():
        sys.stdout.flush()


def _write(text: str) -> None:
    with writing():
        print(text)


@contextmanager
def writing() -> Iterator[None]:
    """A block that writes to the standard output.

    Raises:
        OutputError: it cannot be written, other than because its reader has gone away.
    """
    try:
        yield
    except BrokenPipeError:
        stop_writing()
    except OSError as error:
        stop_writing()
        raise OutputError(f"the standard output cannot be written: {error.strerror}") from None


def stop_writing() -> None:
    """Throw away what is printed from now on.

    ``list | head`` closes the pipe: the verb goes on in silence and ends with the code that it earned.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def explanation(choice: Facts, details: Sequence[Facts | Table]) -> None:
    """Print the choice, and after it the details that were asked for."""
    from ..kernels.explanation import Table

    facts(choice)
    for section in details:
        line()
        if isinstance(section, Table):
            table(section.columns, section.rows)
        else:
            facts(section)
    if not details:
        note_line("--candidates lists what was compared, and details")
