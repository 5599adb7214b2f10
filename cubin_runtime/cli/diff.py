"""``diff``: what changed between two releases."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from . import completion, options, output

if TYPE_CHECKING:
    from ..artifacts.releases.comparison import Change


def diff(
    old: Annotated[str, typer.Argument(metavar="OLD", help="A pinned release.", autocompletion=completion.targets)],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Another one.", autocompletion=completion.targets)],
    sm: options.SmOption = None,
    family: options.FamilyOption = None,
    dtype: options.DtypeOption = None,
    head_dim: options.HeadDimOption = None,
    match: options.MatchOption = None,
    store: options.StoreOption = None,
    source: options.SourceOption = None,
    pins: options.PinsOption = None,
    offline: options.OfflineOption = False,
    json: options.JsonOption = False,
) -> None:
    """Show which kernels differ between two releases."""
    from ..artifacts.library import Library
    from ..artifacts.releases.comparison import compare_releases
    from ..artifacts.releases.targets import whole_release
    from ..artifacts.tables.kernel_filter import KernelFilter

    kernel_filter = KernelFilter.from_words(sm, family, dtype, head_dim, match)
    library = Library(options.make_config(store, source, pins, offline))
    before, after = (whole_release(library, name) for name in (old, new))
    changes = compare_releases(library, before, after, kernel_filter)
    del library  # frees its manifests before the output is built
    if json:
        output.emit_json("diff", asdict(changes))
        return
    for name in changes.added:
        output.line(f"+ {name}")
    for name in changes.removed:
        output.line(f"- {name}")
    for change in changes.changed:
        output.line(f"~ {change.name}{_facts(change)}")
    limitation = (
        "" if changes.metadata else "; compared by names and digests only, because metadata is not available locally"
    )
    output.line(
        f"{changes.old} -> {changes.new}: {len(changes.added)} added, {len(changes.removed)} removed, "
        f"{len(changes.changed)} changed, {changes.same} the same{limitation}"
    )


def _facts(change: Change) -> str:
    facts = ", ".join(f"{name} {old} -> {new}" for name, old, new in change.facts)
    return f": {facts}" if facts else ""
