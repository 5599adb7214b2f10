"""Targets: a pin's name, a release's folder, a folder in it or a file, narrowed by a filter."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ...errors import CubinRuntimeError, PinError, UsageError
from .catalog import chosen_paths, manifest_at_hand
from .groups import narrowed

if TYPE_CHECKING:
    from ..library import Library
    from ..path import ArtifactPath
    from ..pins.pin import Pin
    from ..tables.kernel_filter import KernelFilter


def resolved(library: Library, target: str) -> str:
    """The target itself, or the one path that is meant by a file's or kernel's name, as ``list`` and ``explain`` print.

    Looked for in the releases whose manifest is available locally.

    Raises:
        PinError: it is neither a pin, nor a path that a pin covers, nor the name of a file or kernel.
        UsageError: several files have the name.
    """
    try:
        library.pins.get(target)
        return target
    except PinError as error:
        unknown = error
    names: list[str] = []
    name = target.strip("/")
    for pin in library.pins:
        with suppress(CubinRuntimeError):
            for path in manifest_at_hand(library, pin).digests:
                file = path.text[len(pin.path.text) + 1 :]
                if name in (file, path.name, path.name.removesuffix(".cubin")):
                    names.append(path.text)
    if not names:
        raise PinError(f"{unknown}; and no local release has a file or kernel of that name") from None
    if len(names) > 1:
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        raise UsageError(f"{target!r} is the name of several files: {shown}")
    return names[0]


def whole_release(library: Library, target: str) -> Pin:
    """The pin that a target names, for what is done with whole releases alone.

    Raises:
        PinError: it is neither a pin, nor a path that a pin covers.
        UsageError: it is only a part of a release.
    """
    pin = library.pins.get(target)
    if target.rstrip("/") not in (pin.name, pin.path.text):
        raise UsageError(f"{target!r}: lies in {pin.name!r}, expected a whole release")
    return pin


def expanded(
    library: Library, targets: Sequence[str], kernel_filter: KernelFilter, cpu: str | None = None
) -> list[tuple[str, KernelFilter]]:
    """The targets, the releases of a group one by one, each with the filter that is left for it.

    Raises:
        PinError: see ``resolved``.
        UsageError: the filters leave nothing of a group, or a name is that of several files.
    """
    choices: list[tuple[str, KernelFilter]] = []
    for target in targets:
        if pins := library.pins.group(target):
            choices += [(pin.name, target_filter) for pin, target_filter in narrowed(target, pins, kernel_filter, cpu)]
        else:
            choices.append((resolved(library, target), kernel_filter))
    return choices


def chosen(library: Library, pin: Pin, target: str, kernel_filter: KernelFilter) -> tuple[ArtifactPath, ...]:
    """Paths that a target and the filters choose; metadata comes over the network unless that is switched off."""
    under_target = library.select(pin, None if target == pin.name else target)
    passing = chosen_paths(library, pin, kernel_filter, fetch=not library.config.offline)
    if passing is None:
        return under_target
    inside = set(passing)
    return tuple(path for path in under_target if path in inside)


def chosen_at_hand(
    library: Library, targets: Sequence[str], kernel_filter: KernelFilter, cpu: str | None = None
) -> list[tuple[Pin, tuple[ArtifactPath, ...]]]:
    """Return what several targets choose, each release once, in the order of the manifests; nothing is fetched.

    Raises:
        MissingError: a release's manifest or metadata is not available locally.
    """
    choices: dict[str, tuple[Pin, set[ArtifactPath]]] = {}
    for target, target_filter in expanded(library, targets, kernel_filter, cpu):
        pin = library.pins.get(target)
        manifest_at_hand(library, pin)
        choices.setdefault(pin.name, (pin, set()))[1].update(chosen(library, pin, target, target_filter))
    return [
        (pin, tuple(path for path in library.manifest(pin).digests if path in paths)) for pin, paths in choices.values()
    ]
