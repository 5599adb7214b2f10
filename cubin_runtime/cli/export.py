"""``export``, ``mirror``, ``flashinfer-env``: releases as a zip or a tree, for hosts or libraries that read there."""

from __future__ import annotations

import sys
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..config import local_path
from ..errors import UsageError
from . import options, output

if TYPE_CHECKING:
    from ..artifacts.library import Library
    from ..artifacts.releases.export import Chosen


class Layout(str, Enum):
    """The layouts that ``export`` writes."""

    ZIP = "zip"
    FLASHINFER = "flashinfer"


def export(
    targets: options.Targets,
    out: Annotated[
        Path, typer.Option("--out", metavar="PLACE", help="The .zip to write; of --layout flashinfer, the folder.")
    ],
    layout: Annotated[Layout, typer.Option("--layout", help="A zip, or a folder for FlashInfer.")] = Layout.ZIP,
    compress: Annotated[
        bool, typer.Option("--compress", help="Compress the archive. Its bytes then depend on the version of zlib.")
    ] = False,
    sm: options.SmOption = None,
    family: options.FamilyOption = None,
    dtype: options.DtypeOption = None,
    head_dim: options.HeadDimOption = None,
    match: options.MatchOption = None,
    cpu: options.CpuOption = None,
    store: options.StoreOption = None,
    source: options.SourceOption = None,
    pins: options.PinsOption = None,
    json: options.JsonOption = False,
) -> None:
    """Write a zip of releases, or of some files of them.

    'fetch --source FILE.zip' reads it on another host. Downloads nothing.

    With --layout flashinfer write a folder for FlashInfer instead, whose variables 'flashinfer-env FOLDER' prints.
    """
    from ..artifacts.library import Library
    from ..artifacts.releases.export import export_zip
    from ..artifacts.releases.targets import chosen_at_hand
    from ..artifacts.tables.kernel_filter import KernelFilter

    target = local_path(out, "--out")
    kernel_filter = KernelFilter.from_words(sm, family, dtype, head_dim, match)
    library = Library(options.make_config(store, source, pins, True))
    chosen = chosen_at_hand(library, targets, kernel_filter, cpu and cpu.value)
    if layout is Layout.FLASHINFER:
        if compress:
            raise UsageError("--compress: expected only for a zip, not with --layout flashinfer")
        _write_tree(library, chosen, target, "export", dedicated=True, json=json)
        return
    total = sum(len(paths) + 1 for _, paths in chosen)
    with output.progress("export", total) as advance:
        report = export_zip(library, chosen, target, compress=compress, progress=advance)
    if json:
        output.emit_json("export", asdict(report))
        return
    output.line(
        f"{', '.join(report.releases)}: {output.several(report.files, 'file')} "
        f"({output.size(report.bytes)}) verified and written to "
        f"{report.target} ({output.size(report.archive_bytes)}) in {report.seconds:.1f} s"
    )
    output.line(f"sha256 {report.sha256}")


def mirror(
    targets: options.Targets,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="The folder that a web server will serve.")],
    sm: options.SmOption = None,
    family: options.FamilyOption = None,
    dtype: options.DtypeOption = None,
    head_dim: options.HeadDimOption = None,
    match: options.MatchOption = None,
    cpu: options.CpuOption = None,
    store: options.StoreOption = None,
    source: options.SourceOption = None,
    pins: options.PinsOption = None,
    json: options.JsonOption = False,
) -> None:
    """Write releases as a static tree for a web server. Downloads nothing; a rerun continues."""
    from ..artifacts.library import Library
    from ..artifacts.releases.targets import chosen_at_hand
    from ..artifacts.tables.kernel_filter import KernelFilter

    target = local_path(out, "--out")
    kernel_filter = KernelFilter.from_words(sm, family, dtype, head_dim, match)
    library = Library(options.make_config(store, source, pins, True))
    chosen = chosen_at_hand(library, targets, kernel_filter, cpu and cpu.value)
    _write_tree(library, chosen, target, "mirror", dedicated=False, json=json)


def flashinfer_env(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder that 'export --layout flashinfer' wrote.")
    ],
    json: options.JsonOption = False,
) -> None:
    """Print the variables that make FlashInfer use a folder.

    With them FlashInfer, and vLLM with it, never use the network.
    """
    import shlex

    from ..artifacts.releases.flashinfer_layout import flashinfer_variables

    variables = flashinfer_variables(local_path(folder, "FOLDER"))
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    for line in lines:
        # an escaped, redacted or replaced path would lead elsewhere; JSON has an escape for each character
        if output.escape(line) != line or (not json and line.encode(encoding, "ignore").decode(encoding) != line):
            raise UsageError(f"{folder}: the standard output cannot show this path as it is; use another folder")
    if json:
        output.emit_json("flashinfer-env", {"variables": variables})
        return
    for line in lines:
        output.line(line)


def _write_tree(library: Library, chosen: Chosen, target: Path, verb: str, *, dedicated: bool, json: bool) -> None:
    from ..artifacts.releases.export import mirror as write_tree
    from ..artifacts.releases.flashinfer_layout import refuse_shared_folder

    if dedicated:
        refuse_shared_folder(library, target)
    total = sum(len(paths) + 1 for _, paths in chosen)
    with output.progress(verb, total) as advance:
        report = write_tree(library, chosen, target, progress=advance)
    if json:
        output.emit_json(verb, asdict(report))
        return
    output.line(
        f"{', '.join(report.releases)}: "
        f"{output.several(report.written, 'file')} written to {report.target}, {report.kept} already "
        f"present ({output.size(report.bytes)} verified in {report.seconds:.1f} s)"
    )
