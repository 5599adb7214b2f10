"""``pin`` and ``unpin``: trust a release, given its folder and the digest of its manifest, and no longer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ..config import local_path, user_pins_path
from ..errors import PinError, UsageError
from . import completion, options, output

if TYPE_CHECKING:
    from ..artifacts.library import Library
    from ..artifacts.path import ArtifactPath
    from ..artifacts.pins.pin import Pin
    from ..config import Config


def pin(
    path: Annotated[
        str | None, typer.Argument(metavar="PATH", help="The release's folder, as artifact path.", show_default=False)
    ] = None,
    from_flashinfer: Annotated[
        str | None,
        options.option(
            "--from-flashinfer",
            "Pin all releases that a wheel of flashinfer-python names; 'installed' takes the installed package.",
            "WHEEL",
        ),
    ] = None,
    sha256: Annotated[
        str | None, options.option("--sha256", "SHA-256 of its checksums.txt, from a publisher that you trust.", "HEX")
    ] = None,
    name: Annotated[str | None, options.option("--name", "Name of the pin (default: from the path).", "NAME")] = None,
    abi: Annotated[
        str | None,
        typer.Option(
            "--abi", metavar="NAME", help="Parameter layout of its kernels. Without it, no kernel is launched."
        ),
    ] = None,
    licence: Annotated[
        str | None, options.option("--licence", "Licence of its files (default: unknown).", "NAME")
    ] = None,
    max_file_bytes: Annotated[
        int | None, options.option("--max-file-bytes", "Upper bound on the size of one file.", "BYTES", min=1)
    ] = None,
    store: options.StoreOption = None,
    source: options.SourceOption = None,
    pins: options.PinsOption = None,
    offline: options.OfflineOption = False,
    json: options.JsonOption = False,
) -> None:
    """Trust a release: write a pin with its digest.

    Without --sha256 only show what the sources have.
    With --sha256 and --offline, write it without looking at the manifest where no local source has it.
    With --from-flashinfer, trust every release for which FlashInfer has a manifest digest, as one group.
    """
    from ..artifacts.library import Library
    from ..artifacts.path import ArtifactPath
    from ..artifacts.pins.pin_file import add_pin, make_pin

    if from_flashinfer is not None:
        if any(value is not None for value in (path, sha256, name, abi, licence, max_file_bytes)) or source:
            raise UsageError(
                "--from-flashinfer: reads everything from the wheel; expected no other options that describe a pin"
            )
        _pin_flashinfer(from_flashinfer, options.make_config(store, None, pins, offline), json)
        return
    if path is None:
        raise UsageError("pin: expected a PATH or --from-flashinfer")
    _check_values(sha256, abi)
    folder = ArtifactPath(path.removesuffix("/"))
    config = options.make_config(store, source, pins, offline)
    if sha256 is not None:
        _refuse_where_signed(config)
        _refuse_secrets(source or ())
    library = Library(config)
    existing = next((one for one in library.pins if path.rstrip("/") in (one.name, one.path.text)), None)
    if existing is not None and sha256 is None:
        _show(existing, json, written=f"already pinned in {library.pins.origin(existing)}")
        return
    if existing is not None and existing.path != folder:
        raise UsageError(f"pin {path!r}: is the name of a pin, expected the release's folder, {existing.path}")
    data, origin = _manifest_of(library, folder, sha256)
    new = make_pin(
        data,
        folder,
        origin,
        sha256=sha256,
        name=name,
        abi=abi,
        licence=licence or "unknown",
        max_file_bytes=max_file_bytes,
        sources=library.configured_sources if source else (),
    )
    if sha256 is None:
        refused = PinError(
            f"{folder} is not pinned, nothing was written; if you trust this digest, add --sha256 {new.manifest_sha256}"
        )
        _show(new, json, written=None, error=refused)
        raise refused
    file = user_pins_path()
    library.audit.check()
    details = {"name": name, "abi": abi, "licence": licence, "max_file_bytes": max_file_bytes}
    written = add_pin(file, new, library.pins, [field for field, value in details.items() if value is not None])
    if written:
        library.audit.write("pin", release=new.name, path=new.path.text, sha256=new.manifest_sha256, file=str(file))
    _show(new, json, written=str(file) if written else "already pinned")
    if data is None:
        output.note_line("offline, so the manifest was not looked at; the first fetch compares it with this digest")


def _check_values(sha256: str | None, abi: str | None) -> None:
    from ..artifacts.pins.pin import KNOWN_ABIS

    if sha256 is not None and (len(sha256) != 64 or set(sha256) - set("0123456789abcdef")):
        raise UsageError(f"--sha256 {sha256!r}: expected 64 lowercase hex digits")
    if abi is not None and abi not in KNOWN_ABIS:
        raise UsageError(f"--abi {abi!r}: expected one of {', '.join(KNOWN_ABIS)}")


def _manifest_of(library: Library, folder: ArtifactPath, sha256: str | None) -> tuple[bytes | None, str]:
    """The manifest that a source has, and the source; offline and with a digest, None if no local source has it."""
    from ..errors import SourceError

    try:
        return library.discover(folder, sha256)
    except SourceError as error:
        if sha256 is not None and library.config.offline:
            return None, "offline"
        how = "" if sha256 is not None else "--sha256 HEX and "
        raise SourceError(
            f"{error}\n  with {how}--offline the pin is written without looking at the manifest"
        ) from None


def unpin(
    target: Annotated[
        str,
        typer.Argument(
            metavar="PIN-or-PATH",
            help="A pin from your own file, or its release's folder.",
            autocompletion=completion.targets,
        ),
    ],
    store: options.StoreOption = None,
    pins: options.PinsOption = None,
    json: options.JsonOption = False,
) -> None:
    """Stop trusting a release.

    Its pin is removed from your own pin file; the store keeps its files.
    """
    from ..artifacts.library import Library
    from ..artifacts.pins.pin_file import remove_group, remove_pin

    config = options.make_config(store, None, pins, True)
    _refuse_where_signed(config)
    library = Library(config)
    library.audit.check()
    file = user_pins_path()
    if library.pins.group(target):
        removed = remove_group(file, target)
        for one in removed:
            library.audit.write("unpin", release=one.name, path=one.path.text, file=str(file))
        names = [one.name for one in removed]
        if json:
            output.emit_json("unpin", {"name": target, "pins": names, "file": str(file)})
        else:
            output.facts([("name", target), ("pins", ", ".join(names)), ("removed from", str(file))])
        return
    gone = remove_pin(file, target, library.pins)
    library.audit.write("unpin", release=gone.name, path=gone.path.text, file=str(file))
    left = library.store.has(gone.manifest_sha256)
    if json:
        facts = {"name": gone.name, "path": gone.path.text, "file": str(file), "left_in_store": left}
        output.emit_json("unpin", facts)
        return
    output.facts([("name", gone.name), ("path", gone.path.text), ("removed from", str(file))])
    if left:
        output.note_line("its files are still in the store; 'cubin-runtime gc --unreferenced' removes them")


def _pin_flashinfer(place: str, config: Config, json: bool) -> None:
    from ..artifacts.library import Library
    from ..artifacts.pins.flashinfer import INSTALLED, flashinfer_pins
    from ..artifacts.pins.pin_file import add_group

    _refuse_where_signed(config)
    versions = flashinfer_pins(place if place == INSTALLED else str(local_path(place, "--from-flashinfer")))
    file = user_pins_path()
    library = Library(config)
    library.audit.check()
    added = add_group(file, versions.pins, library.pins)
    for new in added:
        library.audit.write("pin", release=new.name, path=new.path.text, sha256=new.manifest_sha256, file=str(file))
    now = {one.path: one for one in Library(options.make_config(None, None, config.pin_files)).pins}
    if json:
        pins = [
            {"name": now[p.path].name, "path": p.path.text, "manifest_sha256": p.manifest_sha256} for p in versions.pins
        ]
        facts = {"group": versions.group, "pins": pins, "unpinnable": list(versions.unpinnable), "file": str(file)}
        output.emit_json("pin", {**facts, "written": len(added)})
        return
    output.table(
        ("pin", "manifest sha256", "path"), ((now[p.path].name, p.manifest_sha256, p.path) for p in versions.pins)
    )
    output.note_line(
        f"{len(added)} of {len(versions.pins)} written to {file}; 'fetch {versions.group}' fetches them all"
    )
    for folder in versions.unpinnable:
        output.note_line(f"{folder}: FlashInfer states no digest of its manifest, so it cannot be pinned")


def _refuse_where_signed(config: Config) -> None:
    if config.pin_keys:
        raise PinError(
            "CUBIN_RUNTIME_PIN_KEYS is set, so a pin file that is changed here would no longer match its "
            "signature; edit and sign it on the host with the private key"
        )


def _refuse_secrets(sources: Sequence[str]) -> None:
    """A pin keeps its sources in a file that others may read."""
    from ..artifacts.library import may_hold_secrets

    if any(map(may_hold_secrets, sources)):
        raise UsageError(
            "--source: a URL with a query, a fragment or user info may hold secrets, and a pin would store it; "
            "expected one without, with credentials in netrc or by --token-file HOST=FILE"
        )


def _show(new: Pin, json: bool, *, written: str | None, error: PinError | None = None) -> None:
    facts = {
        "name": new.name,
        "path": new.path.text,
        "manifest_sha256": new.manifest_sha256,
        "files": new.files or None,
        "max_file_bytes": new.max_file_bytes,
        "abi": new.abi,
        "written": written,
    }
    if json:
        output.emit_json("pin", facts, [] if error is None else [output.error_of(error)])
    else:
        output.facts((key, value) for key, value in facts.items() if value is not None)
