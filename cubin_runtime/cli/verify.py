"""``verify``: compare a store or a published tree with the pinned manifest, and repair a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import CubinRuntimeError, StoreError, UsageError
from . import options, output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..artifacts.library import Library
    from ..artifacts.path import ArtifactPath
    from ..artifacts.pins.pin import Pin
    from ..artifacts.verification import VerifyReport


def verify(
    targets: options.Targets,
    complete: Annotated[
        bool, typer.Option("--complete", help="Treat files that were never fetched as an error.")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Fetch corrupt files again, and with --complete missing files too.")
    ] = False,
    sm: options.SmOption = None,
    family: options.FamilyOption = None,
    dtype: options.DtypeOption = None,
    head_dim: options.HeadDimOption = None,
    match: options.MatchOption = None,
    cpu: options.CpuOption = None,
    store: options.StoreOption = None,
    tree: Annotated[
        list[str] | None,
        options.option(
            "--tree", "Check this published tree (directory, .zip, .whl or 'package') instead of the store.", "PLACE"
        ),
    ] = None,
    source: options.SourceOption = None,
    pins: options.PinsOption = None,
    offline: options.OfflineOption = False,
    json: options.JsonOption = False,
) -> None:
    """Hash the files of releases, and compare with the pins.

    They are those in the store, or with --tree those of a published tree.
    """
    from ..artifacts.library import Library
    from ..artifacts.releases.targets import chosen, expanded
    from ..artifacts.tables.kernel_filter import KernelFilter

    if tree and repair:
        raise UsageError("--repair: expected without --tree; only a store can be repaired")
    kernel_filter = KernelFilter.from_words(sm, family, dtype, head_dim, match)
    library = Library(options.make_config(store, source, pins, offline))
    reports: list[tuple[VerifyReport, int]] = []
    errors: list[dict[str, Any]] = []
    for target, target_filter in expanded(library, targets, kernel_filter, cpu and cpu.value):
        pin = library.pins.get(target)
        whole = target_filter.is_empty and target.rstrip("/") in (pin.name, pin.path.text)
        for place in tree or (None,):
            try:
                paths = None if whole else chosen(library, pin, target, target_filter)
                reports.append(_verified(library, pin, paths, complete=complete, repair=repair, tree=place))
            except StoreError:
                raise
            except CubinRuntimeError as error:  # the other releases may be in order
                errors.append(output.error_of(error))
    if json:
        problems = [output.error_of(problem) for report, _ in reports for problem in report.problems]
        done = [_as_json(report, repaired) for report, repaired in reports]
        output.emit_json("verify", {"releases": done}, [*errors, *problems])
    else:
        for report, repaired in reports:
            _print(report, repaired)
    for failed in errors:
        output.error_line(failed["message"])
    output.finish([*(one["code"] for one in errors), *(code for report, _ in reports for code in report.codes)])


def _verified(
    library: Library, pin: Pin, paths: Sequence[ArtifactPath] | None, *, complete: bool, repair: bool, tree: str | None
) -> tuple[VerifyReport, int]:
    """The report on a release, and how many of its files were repaired."""
    from ..artifacts.releases.repair import repair as repair_store

    total = pin.files or None if paths is None else len(paths)
    with output.progress(f"verify {pin.name}", total) as advance:
        report = library.verify(pin, paths, complete=complete, progress=advance, tree=tree)
    if not repair:
        return report, 0
    with output.progress(f"repair {pin.name}", len(report.corrupt)) as advance:
        return repair_store(library, pin, report, advance)


def _print(report: VerifyReport, repaired: int) -> None:
    parts = [f"{output.several(report.ok, 'file')} verified ({output.size(report.bytes)})"]
    if repaired:
        parts.append(f"{repaired} of them repaired")
    if report.missing:
        parts.append(f"{len(report.missing)} {'missing' if report.complete else 'not fetched'}")
    if report.corrupt:
        parts.append(f"{len(report.corrupt)} corrupt")
    if report.extra:
        parts.append(f"{len(report.extra)} extra")
    output.line(f"{report.pin}: {', '.join(parts)}; in {report.where}")
    output.some("corrupt", [f"{problem.path}: {problem.reason}" for problem in report.corrupt])
    if report.complete:
        output.some("missing", [path.text for path in report.missing])
    output.some("extra", report.extra)


def _as_json(report: VerifyReport, repaired: int) -> dict[str, Any]:
    return {
        "pin": report.pin,
        "where": report.where,
        "complete": report.complete,
        "ok": report.ok,
        "bytes": report.bytes,
        "repaired": repaired,
        "missing": len(report.missing),
        "missing_paths": [path.text for path in report.missing] if report.complete else [],
        "corrupt": [{"path": problem.path.text, "reason": problem.reason} for problem in report.corrupt],
        "extra": list(report.extra),
    }
