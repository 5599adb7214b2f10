"""Targets of verbs: a pin's name, a release's folder, a folder in it or a file, narrowed by the filters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..artifacts.library import Library
    from ..artifacts.path import ArtifactPath
    from ..artifacts.pins.pin import Pin
    from ..artifacts.tables.kernel_filter import KernelFilter

Targets = Annotated[
    list[str], typer.Argument(metavar="PIN-or-PATH...", help="Pinned releases, folders in them, or files.")
]


def chosen(library: Library, pin: Pin, target: str, wanted: KernelFilter) -> tuple[ArtifactPath, ...]:
    """Paths that a target and the filters choose; metadata comes over the network unless that is switched off."""
    from ..artifacts.releases.catalog import chosen_paths

    asked = library.select(pin, None if target == pin.name else target)
    kept = chosen_paths(library, pin, wanted, fetch=not library.config.offline)
    if kept is None:
        return asked
    inside = set(kept)
    return tuple(path for path in asked if path in inside)


def chosen_at_hand(
    library: Library, targets: Sequence[str], wanted: KernelFilter
) -> list[tuple[Pin, tuple[ArtifactPath, ...]]]:
    """What several targets choose, each release once, in the order of the manifests; nothing is fetched.

    Raises:
        MissingError: a release's manifest or metadata is not at hand.
    """
    from ..artifacts.releases.catalog import manifest_at_hand

    found: dict[str, tuple[Pin, set[ArtifactPath]]] = {}
    for target in targets:
        pin = library.pins.get(target)
        manifest_at_hand(library, pin)
        found.setdefault(pin.name, (pin, set()))[1].update(chosen(library, pin, target, wanted))
    return [
        (pin, tuple(path for path in library.manifest(pin).digests if path in paths)) for pin, paths in found.values()
    ]
