"""How a fetch shows where it is: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from . import output

LINE_SECONDS = 10.0


class FetchBar:
    """Counts files and bytes of one fetch, and says rate and remaining time; used by one thread."""

    def __init__(self, name: str, files: int) -> None:
        self._name = name
        self._files = files
        self._done = 0
        self._there: int | None = None
        self._bytes = 0
        self._began = self._said = time.monotonic()

    def advance(self, files: int) -> None:
        """So many more files are there; the first call is for those that were there before."""
        self._done += files
        if self._there is None:
            self._there = self._done
        self._show()

    def moved(self, size: int) -> None:
        """One more file came, of ``size`` bytes."""
        self._bytes += size

    def text(self, seconds: float) -> str:
        """Bytes, rate and what remains after so many seconds."""
        came = self._done - (self._there or 0)
        return describe(self._files - self._done, came, self._bytes, seconds)

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._said >= LINE_SECONDS and self._done < self._files:
            self._said = now
            text = self.text(now - self._began)
            output.note_line(f"fetch {self._name}: {self._done} of {self._files} files, {text}")


def describe(remaining: int, came: int, size: int, seconds: float) -> str:
    """What was moved, how fast, and how long ``remaining`` files take at the pace of those that came, by whomever.

    >>> describe(300, 100, 12_000_000, 2.0)
    '12.0 MB at 6.0 MB/s, about 6 s left'
    """
    rate = size / seconds if seconds > 0 else 0.0
    left = f", about {remaining * seconds / came:.0f} s left" if came and remaining else ""
    return f"{size / 1e6:.1f} MB at {rate / 1e6:.1f} MB/s{left}"


@contextmanager
def fetch_bar(name: str, files: int) -> Iterator[FetchBar]:
    """Show a fetch of ``files`` files on the standard error stream while the block runs."""
    if not sys.stderr.isatty():
        yield FetchBar(name, files)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    rate = TextColumn("{task.fields[rate]}", markup=False)
    with Progress(*columns, rate, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(output.escape(f"fetch {name}"), total=files, rate="")

        class Drawn(FetchBar):
            def _show(self) -> None:
                now = time.monotonic()
                if now - self._said >= 0.1:
                    self._said = now
                    bar.update(task, completed=self._done, rate=self.text(now - self._began))

        yield Drawn(name, files)
