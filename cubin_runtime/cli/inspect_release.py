"""``inspect`` of a whole release: facts about all of its cubins that are available locally."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import (
    CorruptError,
    MissingError,
    PinError,
    SourceError,
    UsageError,
)
from . import output

if TYPE_CHECKING:
    from ..artifacts.library import Library
    from ..artifacts.pins.pin import Pin
    from ..artifacts.releases.catalog import Entry
    from ..artifacts.tables.kernel_filter import KernelFilter

_SUFFIX = ".cubin"


def surveyed_pin(library: Library, target: str) -> Pin | None:
    """The pin of a release or a folder in it; None if the target names one artifact or nothing pinned."""
    from ..artifacts.path import ArtifactPath

    try:
        pin = library.pins.get(target)
    except PinError:
        return None
    if target.rstrip("/") in (pin.name, pin.path.text):
        return pin
    path = ArtifactPath(target.rstrip("/"))
    return pin if path not in library.manifest(pin).digests else None


def survey(library: Library, pin: Pin, target: str, wanted: KernelFilter, json: bool) -> None:
    """Show a line for each local cubin; only manifest and metadata are fetched.

    Ends with code 5 if one is damaged, or its metadata disagrees with it.
    """
    from ..artifacts.releases.catalog import open_catalog

    catalog = open_catalog(library, pin, fetch=not library.config.offline)
    inside = set(library.select(pin, None if target == pin.name else target))
    entries = [one for one in catalog.chosen_by(wanted) if one.path in inside and one.path.name.endswith(_SUFFIX)]
    if not entries:
        raise UsageError(f"inspect {target!r}: the filters match no cubin")
    found: list[dict[str, Any]] = []
    not_fetched = 0
    with output.progress(f"inspect {pin.name}", len(entries)) as advance:
        for entry in entries:
            try:
                found.append(_facts(library, pin, entry))
            except (MissingError, SourceError):
                not_fetched += 1
            except CorruptError as error:
                found.append({"path": entry.path.text, "sha256": entry.sha256, "problem": str(error)})
            advance(1)
    if json:
        output.emit_json("inspect", {"pin": pin.name, "cubins": found, "not_fetched": not_fetched})
    else:
        _print(pin, found, not_fetched)
    if any(one.get("problem") or one.get("disagreements") for one in found):
        output.finish([CorruptError.exit_code])


def _facts(library: Library, pin: Pin, entry: Entry) -> dict[str, Any]:
    from ..artifacts.cubins.cubin import parse_cubin
    from .inspect import differences

    data = library.load(entry.path, fetch=False).data
    cubin = parse_cubin(data)
    row = entry.row
    return {
        "path": entry.path.text,
        "sha256": entry.sha256,
        "bytes": len(data),
        "architecture": str(cubin.architecture),
        "kernels": list(cubin.kernels),
        "disagreements": [] if row is None else differences(library, pin, row, data, cubin, entry.path),
    }


def _print(pin: Pin, found: list[dict[str, Any]], not_fetched: int) -> None:
    output.table(
        ("file", "target", "bytes", "kernels", "metadata"),
        (
            (
                one["path"].removeprefix(f"{pin.path}/"),
                one.get("architecture", "unknown"),
                one.get("bytes", "unknown"),
                len(one.get("kernels", ())),
                one.get("problem") or "; ".join(one["disagreements"]) or "no disagreement",
            )
            for one in found
        ),
    )
    if not_fetched:
        output.note_line(f"{pin.name}: {not_fetched} more are not fetched")
