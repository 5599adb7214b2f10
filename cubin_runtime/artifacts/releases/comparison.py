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


def compare_releases(library: Library, old: Pin, new: Pin, kernel_filter: KernelFilter | None = None) -> ReleaseDiff:
    """Compare two pinned releases by their manifests; nothing but manifests is fetched.

    A filter keeps what passes it in either release; filters on metadata need it to be available locally.

    Raises:
        PinError, SourceError: a manifest is not available.
        UsageError: the filter needs metadata that is not available locally, or keeps nothing of either release.
    """
    kernel_filter = kernel_filter or KernelFilter()
    catalogs = (_catalog(library, old), _catalog(library, new))
    before, after = (_digests(catalog) for catalog in catalogs)
    passing = (
        None
        if kernel_filter.is_empty
        else {_name(one, entry) for one in catalogs for entry in one.kept_by(kernel_filter)}
    )
    if passing is not None and not passing:
        for catalog in catalogs:
            catalog.chosen_by(kernel_filter)

    def only_in(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(sorted(name for name in one if name not in other and (passing is None or name in passing)))

    both = [name for name in before if name in after and (passing is None or name in passing)]
    different = sorted(name for name in both if before[name] != after[name])
    old_rows, new_rows = (_rows(catalog, before, after) for catalog in catalogs)
    changed = tuple(
        Change(name, before[name], after[name], _facts(old_rows.get(name), new_rows.get(name))) for name in different
    )
    return ReleaseDiff(
        old=old.name,
        new=new.name,
        added=only_in(after, before),
        removed=only_in(before, after),
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


def _digests(catalog: Catalog) -> Mapping[str, str]:
    """Names and digests alone: the entries of two of the largest manifests would take too much memory."""
    return {_name(catalog, entry): entry.sha256 for entry in catalog}


def _rows(catalog: Catalog, before: Mapping[str, str], after: Mapping[str, str]) -> Mapping[str, KernelRow]:
    """The metadata of the files whose bytes differ."""
    named = ((_name(catalog, entry), entry.row) for entry in catalog if entry.row is not None)
    return {name: row for name, row in named if name in before and name in after and before[name] != after[name]}


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
