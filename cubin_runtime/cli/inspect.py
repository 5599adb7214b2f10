"""``inspect``: facts about a cubin, or about all of a release, and whether they agree with pin and metadata."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import local_path
from ..errors import CorruptError, CubinRuntimeError, MissingError, PinError, SourceError, UsageError
from . import completion, options, output

if TYPE_CHECKING:
    from ..artifacts.cubins.cubin import Cubin
    from ..artifacts.library import Library
    from ..artifacts.pins.pin import Pin
    from ..artifacts.releases.catalog import Entry
    from ..artifacts.tables.kernel_filter import KernelFilter, KernelRow

MAX_FILE_BYTES = 256 << 20
_SUFFIX = ".cubin"


def inspect(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE-or-PATH",
            help="A cubin file, an artifact path, or a release or folder of them.",
            autocompletion=completion.targets,
        ),
    ],
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
    """Show the architecture, kernels and digest of a cubin.

    And whether a pin covers it. Of a release: all its cubins.
    """
    from ..artifacts.cubins.cubin import parse_cubin
    from ..artifacts.library import Library
    from ..artifacts.tables.kernel_filter import KernelFilter

    kernel_filter = KernelFilter.from_words(sm, family, dtype, head_dim, match)
    library = Library(options.make_config(store, source, pins, offline))
    if not _is_file(target):
        target = _resolved(library, target)
    if (surveyed := None if _is_file(target) else _surveyed_pin(library, target)) is not None:
        _survey(library, surveyed, target, kernel_filter, json)
        return
    if not kernel_filter.is_empty:
        raise UsageError("inspect: filters need a release or a folder, for example: inspect trtllm-gen-0.6.13 --sm 100")
    data, pin, path, origin = _read(library, target)
    cubin = parse_cubin(data)
    report = {
        "target": target,
        "origin": origin,
        **_cubin_json(cubin, len(data)),
        **_pin_json(cubin, pin, path),
    }
    row = _row(library, pin, path)
    if row is not None and pin is not None:
        report["declared_architecture"] = str(row.architecture)
        report["metadata"] = row_json(row)
        report["disagreements"] = differences(library, pin, row, data, cubin, path)
    if json:
        output.emit_json("inspect", report)
    else:
        _print_inspection(report)
    if report.get("disagreements"):
        output.note_line(f"{target}: metadata and cubin disagree on {len(report['disagreements'])} facts")
        output.finish([CorruptError.exit_code])


def _resolved(library: Library, target: str) -> str:
    from ..artifacts.path import ArtifactPath
    from ..artifacts.releases.targets import resolved

    ArtifactPath(target.rstrip("/"))  # a path that climbs is told as such
    try:
        return resolved(library, target)
    except PinError as error:
        raise PinError(f"{error}, nor a file on disk") from None


def _read(library: Library, target: str) -> tuple[bytes, Pin | None, Any, str]:
    """Bytes of a file on disk, or of an artifact path; a file that exists wins."""
    from hashlib import sha256

    from ..artifacts.path import ArtifactPath

    if _is_file(target):
        file = Path(target)
        data = _read_file(local_path(file, "inspect"))
        pin, path = _find_pinned(library, sha256(data).hexdigest())
        return data, pin, path, str(file)
    path = ArtifactPath(target)
    pin = library.pins.covering(path)
    artifact = library.load(path, fetch=not library.config.offline)
    return artifact.data, pin, path, artifact.origin


def _is_file(target: str) -> bool:
    """Return whether a target means a file on disk; one that exists wins over an artifact of that name."""
    return os.path.isfile(target) or target.startswith(("/", "./", "../", "~"))


def _read_file(file: Path) -> bytes:
    try:
        if os.path.exists(file) and not os.path.isfile(file):
            raise UsageError(f"{file}: not a regular file")
        with file.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise MissingError(f"{file}: cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"{file}: more than {MAX_FILE_BYTES} bytes, too large for a cubin")
    return data


def _find_pinned(library: Library, digest: str) -> tuple[Pin | None, Any]:
    """The pin and path that list this digest, among releases whose manifest is available locally."""
    from ..artifacts.releases.catalog import manifest_at_hand

    for pin in library.pins:
        try:
            manifest = manifest_at_hand(library, pin)
        except CubinRuntimeError:
            continue
        for path, listed in manifest.digests.items():
            if listed == digest:
                return pin, path
    return None, None


def _row(library: Library, pin: Pin | None, path: Any) -> KernelRow | None:
    from ..artifacts.releases.catalog import open_catalog

    if pin is None:
        return None
    try:
        catalog = open_catalog(library, pin, fetch=False)
    except (MissingError, SourceError):
        return None
    return catalog.row_of(path.text[len(pin.path.text) + 1 :])


def differences(library: Library, pin: Pin, row: KernelRow, data: bytes, cubin: Cubin, path: Any) -> list[str]:
    """Say what metadata and cubin disagree on."""
    from ..artifacts.tables import consistency
    from ..artifacts.tables.metadata import KernelMeta

    listed = library.manifest(pin).digests[path]
    if isinstance(row, KernelMeta):
        disagreements = consistency.trtllm_disagreements(
            row, data, cubin, manifest_sha256=listed, parameter_bytes=consistency.TRTLLM_PARAMETER_BYTES
        )
    else:
        disagreements = consistency.native_disagreements(row, cubin, manifest_sha256=listed)
    return [str(difference) for difference in disagreements]


def _cubin_json(cubin: Cubin, size: int) -> dict[str, Any]:
    return {
        "bytes": size,
        "sha256": cubin.sha256,
        "architecture": str(cubin.architecture),
        "kernels": [
            {
                "symbol": k.symbol,
                "parameters": [{"offset": p.offset, "bytes": p.size} for p in k.parameters],
                "max_threads": k.max_threads,
                "registers": k.registers,
                "static_shared_bytes": k.static_shared_bytes,
                "stack_bytes": k.stack_bytes,
            }
            for k in cubin.kernels.values()
        ],
    }


def _pin_json(cubin: Cubin, pin: Pin | None, path: Any) -> dict[str, Any]:
    if pin is None:
        return {"verified": False, "pin": None, "path": None, "manifest_line": None}
    line = f"{cubin.sha256}  {path.text[len(pin.path.text) + 1 :]}"
    return {"verified": True, "pin": pin.name, "path": path.text, "manifest_line": line}


def row_json(row: KernelRow) -> dict[str, Any]:
    """A row of the metadata, as it stands there."""
    from dataclasses import fields

    values = {f.name: getattr(row, f.name) for f in fields(row)}
    return {k: dict(v) if k == "traits" else v for k, v in values.items()}


def _print_inspection(report: dict[str, Any]) -> None:
    shown = [(key, report[key]) for key in ("target", "origin", "bytes", "sha256", "architecture")]
    if "declared_architecture" in report:
        shown.append(("declared as", report["declared_architecture"]))
    verified = f"yes, by pin {report['pin']}" if report["verified"] else "no: no pin covers these bytes"
    shown.append(("verified", verified))
    if report["verified"]:
        shown += [("path", report["path"]), ("manifest line", report["manifest_line"])]
    if "disagreements" in report:
        shown.append(("metadata", "; ".join(report["disagreements"]) or "agrees"))
    output.facts(shown)
    output.line()
    output.table(
        ("kernel", "parameter bytes", "max threads", "registers", "static shared", "stack"),
        (
            (
                k["symbol"],
                " + ".join(str(p["bytes"]) for p in k["parameters"]) or "none",
                "not declared" if k["max_threads"] is None else k["max_threads"],
                "not recorded" if k["registers"] is None else k["registers"],
                k["static_shared_bytes"],
                "not recorded" if k["stack_bytes"] is None else k["stack_bytes"],
            )
            for k in report["kernels"]
        ),
    )


def _surveyed_pin(library: Library, target: str) -> Pin | None:
    """The pin of a release or a folder in it; None if the target names one artifact or nothing pinned."""
    from ..artifacts.path import ArtifactPath

    try:
        pin = library.pins.get(target)
    except PinError:
        return None
    if target.rstrip("/") in (pin.name, pin.path.text):
        return pin
    path = ArtifactPath(target.rstrip("/"))
    return pin if path not in library.manifest(pin).digests else None


def _survey(library: Library, pin: Pin, target: str, kernel_filter: KernelFilter, json: bool) -> None:
    """Show a line for each local cubin; only manifest and metadata are fetched.

    Ends with code 5 if one is damaged, or its metadata disagrees with it.
    """
    from ..artifacts.releases.catalog import open_catalog

    catalog = open_catalog(library, pin, fetch=not library.config.offline)
    inside = set(library.select(pin, None if target == pin.name else target))
    entries = [
        one for one in catalog.chosen_by(kernel_filter) if one.path in inside and one.path.name.endswith(_SUFFIX)
    ]
    if not entries:
        raise UsageError(f"inspect {target!r}: the filters match no cubin")
    rows: list[dict[str, Any]] = []
    not_fetched = 0
    with output.progress(f"inspect {pin.name}", len(entries)) as advance:
        for entry in entries:
            try:
                rows.append(_facts(library, pin, entry))
            except (MissingError, SourceError):
                not_fetched += 1
            except CorruptError as error:
                rows.append({"path": entry.path.text, "sha256": entry.sha256, "problem": str(error)})
            advance(1)
    if json:
        output.emit_json("inspect", {"pin": pin.name, "cubins": rows, "not_fetched": not_fetched})
    else:
        _print_survey(pin, rows, not_fetched)
    if any(one.get("problem") or one.get("disagreements") for one in rows):
        output.finish([CorruptError.exit_code])


def _facts(library: Library, pin: Pin, entry: Entry) -> dict[str, Any]:
    from ..artifacts.cubins.cubin import parse_cubin

    data = library.load(entry.path, fetch=False).data
    cubin = parse_cubin(data)
    row = entry.row
    return {
        "path": entry.path.text,
        "sha256": entry.sha256,
        "bytes": len(data),
        "architecture": str(cubin.architecture),
        "kernels": list(cubin.kernels),
        "disagreements": [] if row is None else differences(library, pin, row, data, cubin, entry.path),
    }


def _print_survey(pin: Pin, rows: list[dict[str, Any]], not_fetched: int) -> None:
    output.table(
        ("file", "target", "bytes", "kernels", "metadata"),
        (
            (
                one["path"].removeprefix(f"{pin.path}/"),
                one.get("architecture", "unknown"),
                one.get("bytes", "unknown"),
                len(one.get("kernels", ())),
                one.get("problem") or "; ".join(one["disagreements"]) or "no disagreement",
            )
            for one in rows
        ),
    )
    if not_fetched:
        output.note_line(f"{pin.name}: {not_fetched} more are not fetched")
