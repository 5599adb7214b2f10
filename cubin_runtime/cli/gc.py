"""``gc`` and ``usage``: remove objects that no release needs from a store, and what takes how much of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError
from . import completion, options, output

if TYPE_CHECKING:
    from ..artifacts.releases.gc import CollectReport, LeftoverReport, UnreferencedReport

Reports = tuple["CollectReport | None", "LeftoverReport | None", "UnreferencedReport | None"]


def gc(
    releases: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PIN-or-PATH",
            help="Pinned releases to remove from the store.",
            autocompletion=completion.targets,
        ),
    ] = None,
    temps: Annotated[
        bool,
        typer.Option("--temps", help="Remove temporary files of killed processes, and corrupt files in quarantine."),
    ] = False,
    unreferenced: Annotated[
        bool, typer.Option("--unreferenced", help="Remove what no release needs that is pinned here.")
    ] = False,
    older_than: Annotated[
        float,
        typer.Option(
            "--older-than",
            metavar="HOURS",
            min=0.0,
            help="With --temps and --unreferenced: only files older than this many hours.",
        ),
    ] = 1.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and stop.")] = False,
    store: options.StoreOption = None,
    source: options.SourceOption = None,
    pins: options.PinsOption = None,
    json: options.JsonOption = False,
) -> None:
    """Remove a release from the store.

    Objects that another release in the store needs stay. Only pins known here are considered.
    """
    from ..artifacts.library import Library
    from ..artifacts.releases.gc import collect, collect_leftovers, collect_unreferenced
    from ..artifacts.releases.targets import whole_release

    if not releases and not temps and not unreferenced:
        raise UsageError("gc: expected releases, --temps or --unreferenced")
    library = Library(options.make_config(store, source, pins, True))
    targets = [whole_release(library, name) for name in releases or ()]
    if not dry_run:
        library.audit.check()
    seconds = older_than * 3600
    collected = collect(library, targets, dry_run=dry_run) if targets else None
    leftovers = collect_leftovers(library.store, older_than=seconds, dry_run=dry_run) if temps else None
    orphans = collect_unreferenced(library, older_than=seconds, dry_run=dry_run) if unreferenced else None
    if not dry_run:
        removed = sum(one.removed for one in (collected, orphans) if one is not None)
        library.audit.write(
            "gc", releases=[pin.name for pin in targets], removed=removed, store=str(library.store.root)
        )
    if json:
        parts = {
            "releases": collected and asdict(collected),
            "leftovers": leftovers and asdict(leftovers),
            "unreferenced": orphans and asdict(orphans),
        }
        output.emit_json("gc", {"store": str(library.store.root), **parts})
        return
    _print((collected, leftovers, orphans), older_than, dry_run=dry_run)


def _print(reports: Reports, older_than: float, *, dry_run: bool) -> None:
    collected, leftovers, orphans = reports
    verb = "would be removed" if dry_run else "removed"
    if collected is not None:
        shared = "".join(f"; {name} needs {count} of them" for name, count in collected.needed_by.items())
        output.line(
            f"{', '.join(collected.releases)}: {collected.removed} objects {verb} ({output.size(collected.bytes)}), "
            f"{collected.kept} kept{shared}"
        )
        for name in collected.absent:
            output.note_line(
                f"{name}: its manifest is not available locally, so its objects in the store are not known"
            )
    age = f"of over {output.several(older_than, 'hour')} " if older_than else ""
    if leftovers is not None:
        output.line(
            f"{output.several(leftovers.temporaries, 'temporary file')} and "
            f"{output.several(leftovers.quarantined, 'damaged object')} {age}{verb} ({output.size(leftovers.bytes)})"
        )
    if orphans is not None:
        output.line(
            f"{output.several(orphans.removed, 'object')} {age}that no pinned release needs {verb} "
            f"({output.size(orphans.bytes)})"
        )


def usage(
    store: options.StoreOption = None,
    source: options.SourceOption = None,
    pins: options.PinsOption = None,
    json: options.JsonOption = False,
) -> None:
    """Show how much of the store each pinned release takes.

    And what none of them needs.
    """
    from ..artifacts.library import Library
    from ..artifacts.releases.gc import store_usage

    library = Library(options.make_config(store, source, pins, True))
    totals = store_usage(library)
    if json:
        output.emit_json("usage", {"store": str(library.store.root), **asdict(totals)})
        return
    rows: list[tuple[object, ...]] = [
        tuple(
            "unknown" if cell is None else cell
            for cell in (one.release, one.objects, _size(one.bytes), _size(one.alone_bytes))
        )
        for one in totals.releases
    ]
    rows.append(("needed by no pinned release", totals.unreferenced, output.size(totals.unreferenced_bytes), ""))
    rows.append(("in all", totals.objects, output.size(totals.bytes), ""))
    output.table(("release", "objects", "size", "only in this release"), rows)
    if totals.unreferenced:
        output.note_line("'cubin-runtime gc --unreferenced' removes what no pinned release needs")
    if totals.quarantined:
        output.note_line(
            f"{output.several(totals.quarantined, 'damaged object')} in quarantine; 'cubin-runtime gc --temps' removes "
            "what has been there for an hour"
        )


def _size(count: int | None) -> str | None:
    return None if count is None else output.size(count)
