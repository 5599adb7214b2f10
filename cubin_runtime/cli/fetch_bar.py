"""Progress of a fetch: a bar on a terminal, an occasional line in a log."""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from . import output

LINE_SECONDS = 10.0
PACE_SECONDS = 15.0


class FetchBar:
    """Counts files and bytes of one fetch, and says rate and remaining time; used by one thread.

    Pace is that of the last ``PACE_SECONDS``, so that waiting for another process counts no longer than that.
    """

    def __init__(self, name: str, files: int) -> None:
        self._name = name
        self._files = files
        self._done = 0
        self._bytes = 0
        self._said = time.monotonic()
        self._seen: deque[tuple[float, int, int]] = deque()

    def advance(self, files: int) -> None:
        """Count more files (0: a sign of life); the first call is for those that were there before."""
        self._done += files
        now = time.monotonic()
        if not self._seen or now - self._seen[-1][0] >= 0.1:
            self._seen.append((now, self._done, self._bytes))
        while now - self._seen[0][0] > PACE_SECONDS and len(self._seen) > 1:
            self._seen.popleft()
        self._show(now)

    def moved(self, size: int) -> None:
        """One more file came, of ``size`` bytes."""
        self._bytes += size

    def text(self, now: float) -> str:
        """Bytes, rate and what remains."""
        if not self._seen:
            return describe(self._files - self._done, 0, self._bytes, 0, 0.0)
        then, done, size = self._seen[0]
        return describe(self._files - self._done, self._done - done, self._bytes, self._bytes - size, now - then)

    def _show(self, now: float) -> None:
        if now - self._said >= LINE_SECONDS and self._done < self._files:
            self._said = now
            output.note_line(f"fetch {self._name}: {self._done} of {self._files} files, {self.text(now)}")


def describe(remaining: int, came: int, size: int, recent: int, seconds: float) -> str:
    """Say how much came in all, how fast ``recent`` bytes came in ``seconds``, and how long ``remaining`` files take.

    >>> describe(300, 100, 12_000_000, 6_000_000, 2.0)
    '12.00 MB, 3.00 MB/s, 6 s left'
    """
    rate = f", {output.size(int(recent / seconds))}/s" if seconds > 0 and recent else ""
    left = f", {_duration(remaining * seconds / came)} left" if came > 0 and remaining and seconds > 0 else ""
    return f"{output.size(size)}{rate}{left}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}" if minutes else f"{rest} s"


@contextmanager
def fetch_bar(name: str, files: int) -> Iterator[FetchBar]:
    """Show a fetch of ``files`` files on the standard error stream while the block runs."""
    if not sys.stderr.isatty() or output.LOUDNESS.get().quiet:
        yield FetchBar(name, files)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    # eighty columns hold it all, narrow terminals the count
    has_room = shutil.get_terminal_size().columns >= 70
    columns = (TextColumn("{task.description}", markup=False), BarColumn(8), MofNCompleteColumn())
    rate = TextColumn("{task.fields[rate]}", markup=False)
    bar = Progress(*columns, rate, console=output.console(sys.stderr), transient=True)
    with output.drawn(bar):
        task = bar.add_task(output.escape(f"fetch {name}"), total=files, rate="")

        class Drawn(FetchBar):
            def _show(self, now: float) -> None:
                if now - self._said >= 0.1:
                    self._said = now
                    bar.update(task, completed=self._done, rate=self.text(now) if has_room else "")

        yield Drawn(name, files)
