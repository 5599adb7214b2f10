"""Making a store right again: what a verification called an error is fetched once more and hashed once more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import StoreError
from ..verification import VerifyReport

if TYPE_CHECKING:
    from ..library import Library
    from ..path import ArtifactPath
    from ..pins.pin import Pin


def repair(
    library: Library, pin: Pin, report: VerifyReport, progress: Callable[[int], None] | None = None
) -> tuple[VerifyReport, int]:
    """Fetch the corrupt files of a store's report, and the missing ones if it calls them an error.

    Returns the report as it is then, and how many files were repaired.

    Raises:
        SourceError, CorruptError: no source delivered a file.
        StoreError: the store cannot be written, or damage in it cannot be moved aside.
    """
    corrupt = [problem.path for problem in report.corrupt]
    wrong = [*corrupt, *(report.missing if report.complete else ())]
    if not wrong:
        return report, 0
    _refuse_what_stands_in_the_way(library, pin, corrupt)
    library.fetch(pin, wrong, progress=progress)
    again = library.verify(pin, wrong, complete=True)
    healed = replace(
        report,
        ok=report.ok + again.ok,
        bytes=report.bytes + again.bytes,
        missing=again.missing if report.complete else report.missing,
        corrupt=again.corrupt,
    )
    return healed, again.ok


def _refuse_what_stands_in_the_way(library: Library, pin: Pin, corrupt: list[ArtifactPath]) -> None:
    """A fetch trusts a name, so wrong bytes that could not be moved aside would stay for ever."""
    digests = library.manifest(pin).digests
    buffer = bytearray(1 << 20)
    for path in corrupt:
        digest = digests[path]
        (size,) = library.store.matches([digest], pin.max_file_bytes, buffer)
        if size is None and library.store.has(digest):
            raise StoreError(f"{library.store.object_path(digest)}: is damaged and cannot be moved aside; not repaired")
