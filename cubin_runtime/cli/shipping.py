"""``export`` and ``mirror``: releases as one zip, or as a static tree, for hosts that fetch from there."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..config import local_path
from . import options, output
from .choosing import Targets, chosen_at_hand


def register(app: typer.Typer) -> None:
    """Add the verbs to the application."""
    app.command("export")(export)
    app.command("mirror")(mirror)


def export(
    targets: Targets,
    out: Annotated[Path, typer.Option("--out", help="The .zip to write.")],
    compress: Annotated[
        bool, typer.Option("--compress", help="Deflate: smaller; equal bytes only with an equal zlib.")
    ] = False,
    sm: options.SmOption = None,
    family: options.FamilyOption = None,
    dtype: options.DtypeOption = None,
    head_dim: options.HeadDimOption = None,
    match: options.MatchOption = None,
    store: options.StoreOption = None,
    source: options.SourceOption = None,
    pins: options.PinsOption = None,
    json: options.JsonOption = False,
) -> None:
    """Write a zip of releases, or of a part, that 'fetch --source FILE.zip' takes; nothing is downloaded."""
    from ..artifacts.library import Library
    from ..artifacts.releases.export import export_zip
    from ..artifacts.tables.kernel_filter import KernelFilter

    target = local_path(out, "--out")
    wanted = KernelFilter.from_words(sm, family, dtype, head_dim, match)
    library = Library(options.make_config(store, source, pins, True))
    chosen = chosen_at_hand(library, targets, wanted)
    total = sum(len(paths) + 1 for _, paths in chosen)
    with output.progress("export", total) as advance:
        report = export_zip(library, chosen, target, compress=compress, progress=advance)
    if json:
        output.emit_json("export", asdict(report))
        return
    output.line(
        f"{', '.join(report.releases)}: {report.files} files ({output.size(report.bytes)}) verified and written to "
        f"{report.target} ({output.size(report.archive_bytes)}) in {report.seconds:.1f} s"
    )
    output.line(f"sha256 {report.sha256}")


def mirror(
    targets: Targets,
    out: Annotated[Path, typer.Option("--out", help="The folder that a web server will serve.")],
    sm: options.SmOption = None,
    family: options.FamilyOption = None,
    dtype: options.DtypeOption = None,
    head_dim: options.HeadDimOption = None,
    match: options.MatchOption = None,
    store: options.StoreOption = None,
    source: options.SourceOption = None,
    pins: options.PinsOption = None,
    json: options.JsonOption = False,
) -> None:
    """Write releases as a static tree, whose URL is then a source; nothing is downloaded, and a rerun goes on."""
    from ..artifacts.library import Library
    from ..artifacts.releases.export import mirror as write_tree
    from ..artifacts.tables.kernel_filter import KernelFilter

    target = local_path(out, "--out")
    wanted = KernelFilter.from_words(sm, family, dtype, head_dim, match)
    library = Library(options.make_config(store, source, pins, True))
    chosen = chosen_at_hand(library, targets, wanted)
    total = sum(len(paths) + 1 for _, paths in chosen)
    with output.progress("mirror", total) as advance:
        report = write_tree(library, chosen, target, progress=advance)
    if json:
        output.emit_json("mirror", asdict(report))
        return
    output.line(
        f"{', '.join(report.releases)}: {report.written} files written to {report.target}, {report.kept} were there "
        f"({output.size(report.bytes)} verified in {report.seconds:.1f} s)"
    )
