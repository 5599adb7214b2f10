"""The configuration value: made once from flags and environment, then passed down."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import TypeVar

from .errors import UsageError
from .values import dataclass

PINS_NAME = "pins.toml"
_Number = TypeVar("_Number", int, float)
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}


@dataclass(frozen=True, slots=True)
class Network:
    """Network settings; None means the default.

    ``timeout`` is the number of seconds that a server may be silent, ``retries`` the number of retries after a
    transient failure, ``proxy`` the URL of a proxy for all hosts, ``ca_bundle`` a PEM file of trusted certificates,
    ``client_cert`` a PEM file with a certificate and its key. ``tokens`` are pairs of a host and its bearer token, or
    ``@`` and the file that contains it; a token is only sent to its host, over https.

    Raises:
        UsageError: there is no folder that a relative path, or one below ``~``, starts at.
    """

    timeout: float | None = None
    retries: int | None = None
    proxy: str | None = field(default=None, repr=False)
    ca_bundle: Path | None = None
    client_cert: Path | None = None
    tokens: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name in ("ca_bundle", "client_cert"):
            if (file := getattr(self, name)) is not None:
                object.__setattr__(self, name, local_path(file, name))

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Network:
        """Read ``CUBIN_RUNTIME_TIMEOUT``, ``_RETRIES``, ``_PROXY``, ``_CA_BUNDLE``, ``_CLIENT_CERT``, ``_TOKENS``.

        Raises:
            UsageError: a value is invalid.
        """

        def file(name: str) -> Path | None:
            return local_path(env[name], name) if env.get(name) else None

        return cls(
            timeout=_number(env, "CUBIN_RUNTIME_TIMEOUT", float, above=0.0),
            retries=_number(env, "CUBIN_RUNTIME_RETRIES", int, above=-1),
            proxy=env.get("CUBIN_RUNTIME_PROXY") or None,
            ca_bundle=file("CUBIN_RUNTIME_CA_BUNDLE"),
            client_cert=file("CUBIN_RUNTIME_CLIENT_CERT"),
            tokens=tuple(_token(word) for word in env.get("CUBIN_RUNTIME_TOKENS", "").split()),
        )


@dataclass(frozen=True, slots=True)
class Config:
    """The sources of artifacts and the place where they are kept.

    ``sources`` are tried in order; each is an http(s) URL, a directory tree, a store, a ``.zip`` or ``.whl``, or the
    word ``package``. None means the default: ``package``, then the pin's own sources. ``pin_files`` are read in
    addition to the built-in pins. With ``pin_keys`` (PEM files of public keys, or keys as 64 hex digits), each pin file
    must be signed by one of the keys; ``pin_state`` is the file that records the newest version of each signed file
    (None: versions are not recorded). ``offline`` forbids all network access. ``lazy_fetch`` allows a missing kernel to
    be fetched on first use. ``network`` has the network settings. ``profile`` measures launches and marks them for NVTX
    (``Runtime.stats``). ``record`` is a folder in which every call is recorded (``debug.recorded``). ``audit`` is a
    file to which one JSON object per line is appended for every file that is fetched or loaded, with its source, and
    for every verification (None: no such file). Paths may be text, and sources paths; a relative path starts at the
    current folder of this moment, and ``~`` is a home folder.

    Raises:
        UsageError: no path is given for a path, or one in place of several; or there is no folder that it starts at.
    """

    store: Path
    sources: tuple[str, ...] | None = field(default=None, repr=False)
    pin_files: tuple[Path, ...] = ()
    offline: bool = False
    lazy_fetch: bool = True
    pin_keys: tuple[str, ...] = ()
    pin_state: Path | None = None
    network: Network = Network()
    profile: bool = False
    record: Path | None = None
    audit: Path | None = None

    def __post_init__(self) -> None:
        for name in ("store", "pin_state", "record", "audit"):
            path = getattr(self, name)
            if isinstance(path, (str, os.PathLike)):
                object.__setattr__(self, name, local_path(path, name))
            elif path is not None or name == "store":
                raise UsageError("expected a path", argument=name, value=path)
        for name in ("sources", "pin_files", "pin_keys"):
            several = getattr(self, name)
            if isinstance(several, (str, os.PathLike)):
                raise UsageError("expected a tuple of them", argument=name, value=repr(several))
        object.__setattr__(self, "pin_files", tuple(local_path(file, "pin_files") for file in self.pin_files))
        object.__setattr__(self, "sources", self.sources and tuple(map(os.fspath, self.sources)))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Read ``CUBIN_RUNTIME_CACHE``, ``_SOURCES``, ``_PINS``, ``_PIN_KEYS``, ``_OFFLINE``, ``_PROFILE``,
        ``_RECORD``, ``_AUDIT`` and the variables of ``Network``.

        Pin files and keys are separated by ``os.pathsep``, sources by white space or commas.

        Raises:
            UsageError: a value is invalid, or neither a home folder nor a store is set; or keys are set, and there is
                no home folder to record versions in.
        """
        env = os.environ if environ is None else environ
        cache = env.get("CUBIN_RUNTIME_CACHE")
        store = local_path(cache, "CUBIN_RUNTIME_CACHE") if cache else _default_store()
        sources = tuple(env.get("CUBIN_RUNTIME_SOURCES", "").replace(",", " ").split())
        pins = [local_path(p, "CUBIN_RUNTIME_PINS") for p in env.get("CUBIN_RUNTIME_PINS", "").split(os.pathsep) if p]
        folder = _user_folder("XDG_CONFIG_HOME", ".config")
        if folder is not None and _may_be_there(folder / PINS_NAME):
            pins.insert(0, folder / PINS_NAME)
        offline = _flag(env, "CUBIN_RUNTIME_OFFLINE")
        keys = _pin_keys(env)
        return cls(
            store=store,
            sources=sources or None,
            pin_files=tuple(pins),
            offline=offline,
            lazy_fetch=not offline,
            pin_keys=keys,
            pin_state=_pin_state() if keys else None,
            network=Network.from_environment(env),
            profile=_flag(env, "CUBIN_RUNTIME_PROFILE"),
            record=local_path(env["CUBIN_RUNTIME_RECORD"], "CUBIN_RUNTIME_RECORD")
            if env.get("CUBIN_RUNTIME_RECORD")
            else None,
            audit=local_path(env["CUBIN_RUNTIME_AUDIT"], "CUBIN_RUNTIME_AUDIT")
            if env.get("CUBIN_RUNTIME_AUDIT")
            else None,
        )


def user_pins_path() -> Path:
    """The file that holds the user's own pins, in the user's config directory; it need not exist.

    Raises:
        UsageError: there is no such directory, as there is no home folder.
    """
    folder = _user_folder("XDG_CONFIG_HOME", ".config")
    if folder is None:
        raise UsageError("there is no home folder for user pins: set HOME or XDG_CONFIG_HOME")
    return folder / PINS_NAME


def _may_be_there(pins: Path) -> bool:
    """Return whether to read the user's pins; where that fails (a home on a server that is down), readers say why.

    A home that may not even be looked into (a container's user with root's HOME) holds no pins for us.
    """
    try:
        os.stat(pins)
    except OSError as error:
        return not isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError)
    return True


def _pin_state() -> Path:
    folder = _user_folder("XDG_STATE_HOME", ".local/state")
    if folder is None:
        raise UsageError(
            "CUBIN_RUNTIME_PIN_KEYS is set, and there is no home folder to record the versions of signed pin files in: "
            "set HOME or XDG_STATE_HOME"
        )
    return folder / "pin_versions.json"


def local_path(text: str | os.PathLike[str], what: str) -> Path:
    """An absolute path, ``~`` expanded; ``what`` names the setting in errors.

    Raises:
        UsageError: the user after ``~`` is unknown, or a relative path has no current folder to start from.
    """
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:
        raise UsageError(f"{what} {str(text)!r}: no home folder is known for it") from None
    except FileNotFoundError:
        raise UsageError(f"{what} {str(text)!r}: the current folder does not exist any more") from None


def _default_store() -> Path:
    folder = _user_folder("XDG_CACHE_HOME", ".cache")
    if folder is None:
        raise UsageError("there is no home folder for the store: set CUBIN_RUNTIME_CACHE, HOME or XDG_CACHE_HOME")
    return folder / "store"


def _user_folder(variable: str, below_home: str) -> Path | None:
    """Our folder of the user's, by the XDG rules; never relative, as anybody may fill the current folder."""
    folder = os.environ.get(variable, "")
    base = folder if os.path.isabs(folder) else os.path.join(os.path.expanduser("~"), below_home)
    return Path(base) / "cubin-runtime" if os.path.isabs(base) else None


def _pin_keys(env: Mapping[str, str]) -> tuple[str, ...]:
    """The keys; a variable that is set and names none is an error, lest signatures go unchecked by a slip."""
    value = env.get("CUBIN_RUNTIME_PIN_KEYS")
    keys = tuple(key.strip() for key in (value or "").split(os.pathsep) if key.strip())
    if value is not None and not keys:
        raise UsageError(f"CUBIN_RUNTIME_PIN_KEYS={value!r}: names no key; unset it if pins need no signature")
    return keys


def _token(word: str) -> tuple[str, str]:
    """A pair of host and token; the word is shown in no message, as it may hold a secret."""
    host, equals, token = word.partition("=")
    if not (host and equals and token.strip("@")):
        raise UsageError("CUBIN_RUNTIME_TOKENS: expected HOST=TOKEN or HOST=@FILE, separated by white space")
    if token.startswith("@"):
        with suppress(UsageError):  # which shows the path
            token = f"@{local_path(token[1:], 'CUBIN_RUNTIME_TOKENS')}"
    return host.lower(), token


def _number(env: Mapping[str, str], name: str, kind: Callable[[str], _Number], *, above: float) -> _Number | None:
    value = env.get(name, "").strip()
    if not value:
        return None
    with suppress(ValueError):
        if above < (number := kind(value)) < math.inf:
            return number
    raise UsageError(f"{name}={value!r}: expected {'a number' if kind is float else 'an integer'} above {above:g}")


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise UsageError(f"{name}={env[name]!r}: expected 1 or 0")
