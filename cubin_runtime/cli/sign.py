"""``keygen`` and ``sign``: keys and signatures of pin files, on the machine that has the private key."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from ..config import local_path
from ..errors import UsageError
from . import options, output


def keygen(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.key", help="The private key to write; FILE.pub is the public one.")
    ],
    json: options.JsonOption = False,
) -> None:
    """Make an Ed25519 key to sign pin files with."""
    from ..artifacts.pins.signing import make_key

    pair = make_key(local_path(file, "FILE.key"))
    facts = {
        "private": str(pair.private),
        "public": str(pair.public),
        "name": pair.name,
        "public_hex": pair.public_hex,
    }
    if json:
        output.emit_json("keygen", facts)
        return
    output.facts([("private key", pair.private), ("public key", pair.public), ("name", pair.name)])
    output.note_line(f"on hosts, set CUBIN_RUNTIME_PIN_KEYS to {pair.public.name} or to {pair.public_hex}")


def sign(
    file: Annotated[
        Path, typer.Argument(metavar="PINS.toml", help="The pin file; PINS.toml.sig is written beside it.")
    ],
    key: Annotated[
        list[Path], typer.Option("--key", metavar="FILE.key", help="A private key; repeat to sign with several.")
    ],
    version: Annotated[
        int | None,
        typer.Option(
            "--version", metavar="N", help="The version to state (default: one more than the file states).", min=1
        ),
    ] = None,
    expires: Annotated[
        str | None, options.option("--expires", "When hosts refuse the file: 2027-01-31T00:00:00Z.", "TIME")
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """State the version of a pin file at its top, and sign it."""
    from ..artifacts.pins.signing import sign_pin_file

    until = None if expires is None else _time(expires)
    keys = [local_path(one, "--key") for one in key]
    done = sign_pin_file(local_path(file, "PINS.toml"), keys, version=version, expires=until)
    facts = {
        "file": str(done.file),
        "signature": str(done.signature),
        "version": done.version,
        "expires": done.expires,
        "keys": list(done.keys),
    }
    if json:
        output.emit_json("sign", facts)
    else:
        shown = {**facts, "keys": ", ".join(done.keys)}
        output.facts((name, value) for name, value in shown.items() if value is not None)


def _time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise UsageError(f"--expires {text!r}: expected a time with its zone, for example 2027-01-31T00:00:00Z")
    return time
