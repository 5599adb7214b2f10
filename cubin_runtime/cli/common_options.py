"""Options that every verb takes, before or after its name: how much is said, and how servers are reached."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from contextvars import ContextVar
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import local_path
from ..errors import UsageError
from . import output

GIVEN: ContextVar[dict[str, str]] = ContextVar("GIVEN", default={})  # noqa: B039  # never changed, only replaced
"""Environment variables that options of this run stand for; they win over the process's environment."""

_SWITCHES = frozenset({"-q", "--quiet", "-v", "-vv", "--verbose"})
_WITH_VALUE = frozenset(
    {"--color", "--timeout", "--retries", "--proxy", "--ca-bundle", "--client-cert", "--token-file"}
)


class Color(str, Enum):
    """The choice of whether text is coloured."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


def option(flag: str, text: str, metavar: str | None = None, **more: Any) -> Any:
    """An option whose help states no default."""
    return typer.Option(flag, help=text, metavar=metavar, show_default=False, **more)


Verbose = Annotated[
    int,
    typer.Option(
        "--verbose",
        "-v",
        count=True,
        show_default=False,
        help="Show the log; repeat for debug messages (CUBIN_RUNTIME_LOG).",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only results and errors.")]
ColorOption = Annotated[Color, typer.Option("--color", help="Colour the text; auto: on a terminal without NO_COLOR.")]
Timeout = Annotated[
    float | None,
    option("--timeout", "Seconds that a server may be silent; default 30 (CUBIN_RUNTIME_TIMEOUT).", "SECONDS"),
]
Retries = Annotated[
    int | None, option("--retries", "Retries after a transient failure; default 3 (CUBIN_RUNTIME_RETRIES).", "N")
]
Proxy = Annotated[str | None, option("--proxy", "URL of a proxy (CUBIN_RUNTIME_PROXY).", "URL")]
CaBundle = Annotated[
    Path | None, option("--ca-bundle", "File of certificates to trust (CUBIN_RUNTIME_CA_BUNDLE).", "FILE")
]
ClientCert = Annotated[
    Path | None, option("--client-cert", "PEM file of a certificate and its key (CUBIN_RUNTIME_CLIENT_CERT).", "FILE")
]
TokenFiles = Annotated[
    list[str] | None, option("--token-file", "Bearer token of a host, in a file (CUBIN_RUNTIME_TOKENS).", "HOST=FILE")
]


def hoisted(arguments: Sequence[str]) -> list[str]:
    """The arguments with common options in front of the verb, where the parser looks for them.

    >>> hoisted(["fetch", "pin", "--retries", "2", "-q", "--", "-v"])
    ['--retries', '2', '-q', 'fetch', 'pin', '--', '-v']
    """
    front: list[str] = []
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif word in _SWITCHES or word.partition("=")[0] in _WITH_VALUE:
            front.append(word)
            if word in _WITH_VALUE:
                front += [value for value in [next(words, None)] if value is not None]
        else:
            rest.append(word)
    return front + rest


def apply(
    verbose: int,
    quiet: bool,
    color: Color,
    timeout: float | None,
    retries: int | None,
    proxy: str | None,
    ca_bundle: Path | None,
    client_cert: Path | None,
    token_files: Sequence[str] | None,
) -> None:
    """Let them hold for the rest of this run.

    Raises:
        UsageError: they contradict each other, or a value is outside its domain.
    """
    if verbose and quiet:
        raise UsageError("--quiet and --verbose: expected at most one of them")
    values: dict[str, str] = {}
    if verbose:
        values["CUBIN_RUNTIME_LOG"] = "info" if verbose == 1 else "debug"
    plain = {"TIMEOUT": timeout, "RETRIES": retries, "PROXY": proxy}
    files = {"CA_BUNDLE": ca_bundle, "CLIENT_CERT": client_cert}
    values |= {f"CUBIN_RUNTIME_{name}": str(value) for name, value in plain.items() if value is not None}
    for name, file in files.items():
        if file is not None:
            values[f"CUBIN_RUNTIME_{name}"] = str(local_path(file, f"--{name.lower().replace('_', '-')}"))
    if token_files:
        values["CUBIN_RUNTIME_TOKENS"] = " ".join(map(_token, token_files))
    GIVEN.set(values)
    output.LOUDNESS.set(output.Loudness(quiet=quiet, color=color.value))


def _token(text: str) -> str:
    """A word of ``CUBIN_RUNTIME_TOKENS``; what came is shown in no message, as it may be the token itself."""
    host, _, file = text.partition("=")
    if host and file:
        with suppress(UsageError):  # of local_path, which shows the path
            word = f"{host}=@{local_path(file, '--token-file')}"
            if len(word.split()) == 1:
                return word
    raise UsageError("--token-file: expected HOST=FILE with the path of a file, without white space")
