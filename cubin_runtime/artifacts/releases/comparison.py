"""Differences between two releases: by name and digest, and by metadata where that is available locally."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from ...errors import MissingError, SourceError
from ...values import dataclass
from ..tables.kernel_filter import KernelFilter, KernelRow
from .catalog import Catalog, Entry, open_catalog

if TYPE_CHECKING:
    from ..library import Library
    from ..pins.pin import Pin

_IDENTITY = frozenset({"symbol", "sha256", "row", "file", "name"})


@dataclass(frozen=True, slots=True)
class Change:
    """A file whose bytes differ; ``facts`` are the metadata fields that do: name, old value, new value."""

    name: str
    old_sha256: str
    new_sha256: str
    facts: tuple[tuple[str, object, object], ...]


@dataclass(frozen=True, slots=True)
class ReleaseDiff:
    """Names are relative to each release's folder, sorted; ``metadata``: whether both releases' was available."""

    old: str
    new: str
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[Change, ...]
    same: int
    metadata: bool


def compare_releases(library: Library, old: Pin, new: Pin, wanted: KernelFilter | None = None) -> ReleaseDiff:
    """Compare two pinned releases by their manifests; nothing but manifests is fetched.

    A filter keeps what passes it in either release; filters on metadata need it to be available locally.

    Raises:
        PinError, SourceError: a manifest is not available.
        UsageError: the filter needs metadata that is not available locally, or keeps nothing of either release.
    """
    wanted = wanted or KernelFilter()
    catalogs = (_catalog(library, old), _catalog(library, new))
    before, after = (_by_name(catalog) for catalog in catalogs)
    kept = {_name(catalog, entry) for catalog in catalogs for entry in catalog.kept_by(wanted)}
    if not kept:
        for catalog in catalogs:
            catalog.chosen_by(wanted)
    both = sorted(kept & set(before) & set(after))
    changed = tuple(
        Change(name, before[name].sha256, after[name].sha256, _facts(before[name].row, after[name].row))
        for name in both
        if before[name].sha256 != after[name].sha256
    )
    return ReleaseDiff(
        old=old.name,
        new=new.name,
        added=tuple(sorted(kept & set(after) - set(before))),
        removed=tuple(sorted(kept & set(before) - set(after))),
        changed=changed,
        same=len(both) - len(changed),
        metadata=all(catalog.has_metadata for catalog in catalogs),
    )


def _catalog(library: Library, pin: Pin) -> Catalog:
    manifest = library.manifest(pin)
    try:
        return open_catalog(library, pin, fetch=False)
    except (MissingError, SourceError):
        return Catalog(manifest, lambda _: None, has_metadata=False)


def _by_name(catalog: Catalog) -> Mapping[str, Entry]:
    return {_name(catalog, entry): entry for entry in catalog}


def _name(catalog: Catalog, entry: Entry) -> str:
    return entry.path.relative_to(catalog.manifest.folder)


def _facts(old: KernelRow | None, new: KernelRow | None) -> tuple[tuple[str, object, object], ...]:
    if old is None or new is None:
        return ()
    before, after = _values(old), _values(new)
    return tuple(
        (name, before.get(name), after.get(name))
        for name in sorted(set(before) | set(after))
        if before.get(name) != after.get(name)
    )


def _values(row: KernelRow) -> dict[str, object]:
    values = {field.name: getattr(row, field.name) for field in fields(row) if field.name not in _IDENTITY}
    traits = values.pop("traits", {})
    return values | {f"traits.{key}": value for key, value in traits.items()}
