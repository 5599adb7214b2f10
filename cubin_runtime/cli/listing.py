"""``list``: the pinned releases, and what one of them holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from . import completion, options, output
from .inspect import row_json

if TYPE_CHECKING:
    from ..artifacts.library import Library
    from ..artifacts.pins.pin import Pin
    from ..artifacts.releases.catalog import Entry


def list_(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="PIN-or-PATH", help="A pinned release; without it, all pins.", autocompletion=completion.targets
        ),
    ] = None,
    sm: options.SmOption = None,
    family: options.FamilyOption = None,
    dtype: options.DtypeOption = None,
    head_dim: options.HeadDimOption = None,
    match: options.MatchOption = None,
    count: Annotated[bool, typer.Option("--count", help="Print only how many files are listed.")] = False,
    store: options.StoreOption = None,
    source: options.SourceOption = None,
    pins: options.PinsOption = None,
    offline: options.OfflineOption = False,
    json: options.JsonOption = False,
) -> None:
    """List the pinned releases, or the kernels of one."""
    from ..artifacts.library import Library
    from ..artifacts.releases.catalog import open_catalog
    from ..artifacts.releases.targets import resolved
    from ..artifacts.tables.kernel_filter import KernelFilter

    kernel_filter = KernelFilter.from_words(sm, family, dtype, head_dim, match)
    library = Library(options.make_config(store, source, pins, offline))
    if name is None:
        if not kernel_filter.is_empty:
            raise UsageError("list: filters need a release, for example: list trtllm-gen-0.6.13 --sm 100")
        _list_pins(library, json)
        return
    name = resolved(library, name)
    pin = library.pins.get(name)
    passing = open_catalog(library, pin, fetch=not library.config.offline).chosen_by(kernel_filter)
    entries = [entry for entry in passing if _is_asked_for(entry, pin, name)]
    if json:
        files = [] if count else [_entry_json(entry) for entry in entries]
        output.emit_json("list", {"pin": pin.name, "count": len(entries), "files": files})
    elif count:
        output.line(len(entries))
    else:
        output.table(
            ("file", "target", "types q/k/v/o", "head", "threads", "shared"),
            (_entry_cells(entry, pin) for entry in entries),
        )


def _is_asked_for(entry: Entry, pin: Pin, name: str) -> bool:
    """Return whether an entry lies under the name or path that the user gave."""
    prefix = name.rstrip("/")
    return prefix in (pin.name, pin.path.text, entry.path.text) or entry.path.text.startswith(f"{prefix}/")


def _entry_json(entry: Entry) -> dict[str, Any]:
    row = None if entry.row is None else row_json(entry.row)
    return {"path": entry.path.text, "sha256": entry.sha256, "metadata": row}


def _entry_cells(entry: Entry, pin: Pin) -> tuple[object, ...]:
    from ..artifacts.tables.kernel_filter import head_dims_of
    from ..artifacts.tables.metadata import KernelMeta

    file, row = entry.path.text[len(pin.path.text) + 1 :], entry.row
    if row is None:
        return (file, "", "", "", "", "")
    if isinstance(row, KernelMeta):
        types = f"{row.dtype_q}/{row.dtype_k}/{row.dtype_v}/{row.dtype_o}"
        heads, shared = f"{row.head_dim_qk}/{row.head_dim_v}", row.shared_bytes
    else:
        types = "/".join(str(v) for k, v in row.traits.items() if "dtype" in k)
        heads, shared = "/".join(str(d) for d in sorted(head_dims_of(row))), row.dynamic_shared_bytes
    return (file, row.architecture, types, heads, row.threads, shared)


def _list_pins(library: Library, json: bool) -> None:
    listed = list(library.pins)
    if json:
        output.emit_json(
            "list",
            {
                "pins": [
                    {
                        "name": p.name,
                        "path": p.path.text,
                        "files": p.files or None,
                        "bytes": p.bytes or None,
                        "licence": p.licence,
                    }
                    for p in listed
                ]
            },
        )
        return
    rows = (
        (p.name, p.files or "unknown", output.size(p.bytes) if p.bytes else "unknown", p.licence, p.path.text)
        for p in listed
    )
    output.table(("pin", "files", "size", "licence", "path"), rows)
