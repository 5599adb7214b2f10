"""``fetch`` and ``where``: bytes into the store, and where they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import CubinRuntimeError, MissingError, SourceError, StoreError
from . import completion, options, output
from .fetch_bar import fetch_bar
from .output import size as _size

if TYPE_CHECKING:
    from ..artifacts.library import FetchReport, Library
    from ..artifacts.pins.pin import Pin
    from ..artifacts.tables.kernel_filter import KernelFilter


def fetch(
    targets: options.Targets,
    sm: options.SmOption = None,
    family: options.FamilyOption = None,
    dtype: options.DtypeOption = None,
    head_dim: options.HeadDimOption = None,
    match: options.MatchOption = None,
    cpu: options.CpuOption = None,
    jobs: Annotated[
        int, typer.Option("--jobs", metavar="N", min=1, max=256, help="Number of files to fetch at a time.")
    ] = 8,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be fetched, and stop.")] = False,
    store: options.StoreOption = None,
    source: options.SourceOption = None,
    pins: options.PinsOption = None,
    offline: options.OfflineOption = False,
    json: options.JsonOption = False,
) -> None:
    """Fetch files, verify them, and put them into the store."""
    from ..artifacts.library import Library
    from ..artifacts.releases.targets import chosen, expanded
    from ..artifacts.tables.kernel_filter import KernelFilter

    kernel_filter = KernelFilter.from_words(sm, family, dtype, head_dim, match)
    library = Library(options.make_config(store, source, pins, offline))
    absent = options.absent_source(library.configured_sources) if source else None
    reports: list[FetchReport] = []
    errors: list[CubinRuntimeError] = []
    selections: list[tuple[str, KernelFilter]] = []
    for target in targets:
        try:
            selections += expanded(library, [target], kernel_filter, cpu and cpu.value)
        except CubinRuntimeError as error:
            errors.append(error)
    for target, selection in selections:
        try:
            pin = library.pins.get(target)
            if absent is not None and not _is_complete(library, pin):
                raise SourceError(f"--source {absent!r}: there is no such folder or archive")
            paths = chosen(library, pin, target, selection)
            with fetch_bar(pin.name, len(paths)) as bar:
                reports.append(
                    library.fetch(pin, paths, jobs=jobs, dry_run=dry_run, progress=bar.advance, on_bytes=bar.moved)
                )
        except StoreError:
            raise
        except CubinRuntimeError as error:
            errors.append(error)
    if json:
        done = [_fetch_json(report, library.pins.get(report.pin)) for report in reports]
        output.emit_json("fetch", {"releases": done}, [output.error_of(one) for one in errors])
    else:
        for report in reports:
            output.line(_fetch_text(report))
    for failed in errors:
        output.error_line(failed)
    output.finish(failed.exit_code for failed in errors)


def _is_complete(library: Library, pin: Pin) -> bool:
    """Return whether the store has all of a release, so that no source will be asked."""
    try:
        digests = set(library.manifest(pin, network=False).digests.values())
    except CubinRuntimeError:
        return False
    return library.store.present(digests) == digests


def where(
    target: Annotated[
        str,
        typer.Argument(
            metavar="PIN-or-PATH", help="A release, a folder in it, or a file.", autocompletion=completion.targets
        ),
    ],
    store: options.StoreOption = None,
    source: options.SourceOption = None,
    pins: options.PinsOption = None,
    offline: options.OfflineOption = False,
    json: options.JsonOption = False,
) -> None:
    """Show where files are. Reads and downloads nothing."""
    from ..artifacts.library import Library
    from ..artifacts.path import ArtifactPath
    from ..artifacts.releases.targets import resolved

    library = Library(options.make_config(store, source, pins, True))
    target = resolved(library, target)
    pin = library.pins.get(target)
    paths = library.select(pin, None if target == pin.name else target)
    if len(paths) == 1 and paths[0] == ArtifactPath(target.rstrip("/")):
        places = library.where(paths[0])
        missing = MissingError(f"{target} is neither in the store {library.store.root} nor in a local source")
        if json:
            errors = [] if places else [output.error_of(missing)]
            output.emit_json("where", {"path": target, "places": [_place_json(p) for p in places]}, errors)
        else:
            for place in places:
                output.line(f"{place.kind:<6}  {place.location}")
        if not places:
            raise missing
        return
    manifest = library.manifest(pin)
    present = len(library.store.present(manifest.digests[path] for path in paths))
    facts = {"pin": pin.name, "store": str(library.store.root), "files": len(paths), "in_store": present}
    if json:
        output.emit_json("where", facts)
    else:
        output.facts(facts.items())


def _fetch_text(report: FetchReport) -> str:
    about = f", about {_size(report.about_bytes)}" if report.about_bytes else ""
    saves = f"; the filters save about {_size(report.saves_about_bytes)}" if report.saves_about_bytes else ""
    if report.dry_run:
        return (
            f"{report.pin}: {output.several(report.chosen, 'file')} selected, {report.present} in the store, "
            f"{report.missing} would be fetched{about}{saves}"
        )
    origin = ", ".join(f"{count} from {label}" for label, count in report.by_source.items())
    return (
        f"{report.pin}: {output.several(report.chosen, 'file')} selected, {report.present} were in the store, "
        f"{report.fetched} fetched ({_size(report.bytes)} in {report.seconds:.1f} s)"
        + (f": {origin}" if origin else "")
        + saves
    )


def _fetch_json(report: FetchReport, pin: Pin) -> dict[str, Any]:
    from dataclasses import asdict

    estimates = ("about_bytes", "saves_about_bytes")  # which a pin without sizes does not have
    return {**asdict(report), **(dict.fromkeys(estimates) if not pin.bytes else {})}


def _place_json(place: Any) -> dict[str, Any]:
    return {"kind": place.kind, "location": place.location, "sha256": place.sha256}
