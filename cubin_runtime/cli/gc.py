"""``gc``: remove objects that no release needs from a store."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from ..errors import UsageError
from . import options, output


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    app.command("gc")(gc)


def gc(
    releases: Annotated[
        list[str] | None, typer.Argument(metavar="[PIN-or-PATH...]", help="Pinned releases to remove from the store.")
    ] = None,
    temps: Annotated[
        bool,
        typer.Option("--temps", help="Remove temporary files of killed processes, and corrupt files in quarantine."),
    ] = False,
    older_than: Annotated[
        float, typer.Option("--older-than", min=0.0, help="With --temps: only files older than this many hours.")
    ] = 1.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and stop.")] = False,
    store: options.StoreOption = None,
    source: options.SourceOption = None,
    pins: options.PinsOption = None,
    json: options.JsonOption = False,
) -> None:
    """Remove the objects of a release that no other release in the store needs. Only pins known here are considered."""
    from ..artifacts.library import Library
    from ..artifacts.releases.gc import collect, collect_leftovers

    if not releases and not temps:
        raise UsageError("gc: expected releases, or --temps, or both")
    library = Library(options.make_config(store, source, pins, True))
    targets = [library.pins.get(name) for name in releases or ()]
    for name, pin in zip(releases or (), targets, strict=True):
        if name.rstrip("/") not in (pin.name, pin.path.text):
            raise UsageError(f"gc {name!r}: lies in {pin.name!r}; expected a whole release")
    collected = collect(library, targets, dry_run=dry_run) if targets else None
    left = collect_leftovers(library.store, older_than=older_than * 3600, dry_run=dry_run) if temps else None
    if json:
        parts = {"releases": collected and asdict(collected), "leftovers": left and asdict(left)}
        output.emit_json("gc", {"store": str(library.store.root), **parts})
        return
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
    if left is not None:
        output.line(
            f"{left.temporaries} temporaries and {left.quarantined} damaged objects {verb} ({output.size(left.bytes)})"
        )
