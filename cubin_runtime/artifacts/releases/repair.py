"""Repair of a store: files that a verification found wrong are fetched and hashed again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import CorruptError, StoreError
from ..bounded_read import TooLargeError
from ..verification import VerifyReport

if TYPE_CHECKING:
    from ..library import Library
    from ..path import ArtifactPath
    from ..pins.pin import Pin


def repair(
    library: Library, pin: Pin, report: VerifyReport, progress: Callable[[int], None] | None = None
) -> tuple[VerifyReport, int]:
    """Fetch the corrupt files of a store's report, and missing ones: those in quarantine, or all.

    All of them if the report calls missing files an error.

    Returns the report as it is then, and how many files were repaired.

    Raises:
        SourceError, CorruptError: no source delivered a file, or one is larger than the pin allows.
        StoreError: the store cannot be written, or damage in it cannot be moved aside.
    """
    corrupt = [problem.path for problem in report.corrupt]
    digests, aside = library.manifest(pin).digests, library.store.quarantined()
    gone = [path for path in report.missing if report.complete or digests[path] in aside]
    wrong = [*corrupt, *gone]
    if not wrong:
        return report, 0
    _refuse_what_stands_in_the_way(library, pin, corrupt)
    library.fetch(pin, wrong, progress=progress)
    again = library.verify(pin, wrong, complete=True)
    healed = replace(
        report,
        ok=report.ok + again.ok,
        bytes=report.bytes + again.bytes,
        missing=(*(path for path in report.missing if path not in set(gone)), *again.missing),
        corrupt=again.corrupt,
    )
    return healed, again.ok


def _refuse_what_stands_in_the_way(library: Library, pin: Pin, corrupt: list[ArtifactPath]) -> None:
    """A fetch trusts a name, so wrong bytes that could not be moved aside would stay forever."""
    digests = library.manifest(pin).digests
    for digest in (digests[path] for path in corrupt):
        if not library.store.has(digest):
            continue
        try:
            library.store.read(digest, pin.max_file_bytes, repair=False)
        except TooLargeError as error:
            raise CorruptError(f"{error} by {pin.name!r}, although its sha256 matches; not repaired") from None
        except CorruptError:
            place = library.store.object_path(digest)
            raise StoreError(f"{place}: is corrupt and cannot be moved to quarantine; not repaired") from None
