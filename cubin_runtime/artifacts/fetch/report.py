"""The report of a fetch, counted from the outcomes of its objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from ...errors import CorruptError, SourceError
from ...values import dataclass
from ..pins.pin import Pin
from ..sources.source import FileRequest
from ..sources.source_list import with_hint
from .worker_pool import Outcome

_GIVEN_UP = "skipped after"


@dataclass(frozen=True, slots=True)
class FetchReport:
    """The result of a fetch: ``chosen = present + fetched`` (``+ missing`` in a dry run, which fetches nothing).

    ``bytes`` were fetched in ``seconds``; ``about_bytes`` is the estimate for what was missing at the start
    (0: the pin says no sizes), ``saves_about_bytes`` for the files of the release that were not chosen;
    ``by_source`` counts files by the source that delivered them.
    """

    pin: str
    chosen: int
    present: int
    missing: int
    fetched: int
    bytes: int
    about_bytes: int
    seconds: float
    dry_run: bool
    by_source: Mapping[str, int]
    saves_about_bytes: int = 0


def report_of(
    pin: Pin,
    requests: Sequence[FileRequest],
    missing: Sequence[FileRequest],
    about: int,
    outcomes: Sequence[Outcome],
    seconds: float,
    dry_run: bool,
) -> FetchReport:
    """Count files (several may be one object), and raise if one was not delivered."""
    names = Counter(one.sha256 for one in missing)
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed:
        _raise_failures(pin, len(requests), failed)
    by_source: Counter[str] = Counter()
    for outcome in outcomes:
        if outcome.source is not None:
            by_source[outcome.source] += names[outcome.request.sha256]
    fetched = sum(by_source.values())
    return FetchReport(
        pin=pin.name,
        chosen=len(requests),
        present=len(requests) - (len(missing) if dry_run else fetched),
        missing=len(missing) if dry_run else 0,
        fetched=fetched,
        bytes=sum(outcome.size for outcome in outcomes),
        about_bytes=about,
        seconds=seconds,
        dry_run=dry_run,
        by_source=dict(by_source),
        saves_about_bytes=pin.estimate(max(0, pin.files - len(requests))),
    )


def _raise_failures(pin: Pin, chosen: int, failed: Sequence[Outcome]) -> None:
    errors = [outcome.error for outcome in failed]
    kind = CorruptError if any(isinstance(error, CorruptError) for error in errors) else SourceError
    if len(failed) == 1:
        raise kind(with_hint(errors[0], pin) if kind is SourceError else str(errors[0]))
    causes = Counter(_cause(outcome) for outcome in failed)
    given_up = [cause for cause in causes if _GIVEN_UP in cause]
    if len(given_up) < len(causes):  # earlier outcomes state why a source was abandoned
        for cause in given_up:
            del causes[cause]
    whole = f"{len(failed)} of {chosen} files could not be fetched"
    if len(causes) == 1:
        raise kind(with_hint(f"{whole}: {next(iter(causes))}", pin))
    shown = "\n".join(f"  {count} files: {cause}" for cause, count in causes.most_common(5))
    more = f"\n  and {len(causes) - 5} more reasons" if len(causes) > 5 else ""
    raise kind(with_hint(f"{whole}:\n{shown}{more}", pin))


def _cause(outcome: Outcome) -> str:
    """The failure without the file's own name, so that equal causes are listed once."""
    path = outcome.request.path.text
    text = str(outcome.error).removeprefix(f"no source delivered {path}:").strip().replace("\n  ", "; ")
    for name in (quote(path), path):
        text = text.replace(f"/{name}", "").replace(name, "a file")
    return text
