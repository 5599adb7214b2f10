"""The one configuration value: made at the edge from flags and environment, then passed down."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import UsageError

DEFAULT_SOURCES = ("package",)
PINS_NAME = "pins.toml"
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}


@dataclass(frozen=True, slots=True)
class Config:
    """Where artifacts come from and where they are kept.

    ``sources`` is an ordered tuple of an http(s) URL, a directory tree, a store, a ``.zip`` or ``.whl``,
    or the word ``package``; ``None`` means the default (``package``, then each pin's own sources).
    ``pin_files`` are read besides the built-in pins; with ``pin_keys`` (files of PEM public keys, or keys as 64
    hex digits) only if one of the keys signed them; ``pin_state`` is the file that remembers the newest version of
    each signed file (None: nothing is remembered). ``offline`` forbids opening any socket; ``lazy_fetch``
    allows a missing kernel to be fetched at first use.
    """

    store: Path
    sources: tuple[str, ...] | None = None
    pin_files: tuple[Path, ...] = ()
    offline: bool = False
    lazy_fetch: bool = True
    pin_keys: tuple[str, ...] = ()
    pin_state: Path | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Read ``CUBIN_RUNTIME_CACHE``, ``_SOURCES``, ``_PINS``, ``_PIN_KEYS`` and ``_OFFLINE``.

        Pin files and keys are separated by ``os.pathsep``, sources by white space or commas.

        Raises:
            UsageError: a value is outside its domain, or there is neither a home folder nor a store named.
        """
        env = os.environ if environ is None else environ
        cache = env.get("CUBIN_RUNTIME_CACHE")
        store = local_path(cache, "CUBIN_RUNTIME_CACHE") if cache else _default_store()
        sources = tuple(env.get("CUBIN_RUNTIME_SOURCES", "").replace(",", " ").split())
        pins = [local_path(p, "CUBIN_RUNTIME_PINS") for p in env.get("CUBIN_RUNTIME_PINS", "").split(os.pathsep) if p]
        own = _user_folder("XDG_CONFIG_HOME", ".config")
        # a home that may not even be looked into (a container's user with root's HOME) holds no pins for us
        if own is not None and os.path.exists(own / PINS_NAME):
            pins.insert(0, own / PINS_NAME)
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
        )


def user_pins_path() -> Path:
    """The file that holds the user's own pins, in the user's config directory; it need not exist.

    Raises:
        UsageError: there is no such directory, as there is no home folder.
    """
    folder = _user_folder("XDG_CONFIG_HOME", ".config")
    if folder is None:
        raise UsageError("there is no home folder for pins of your own: set HOME or XDG_CONFIG_HOME")
    return folder / PINS_NAME


def _pin_state() -> Path | None:
    folder = _user_folder("XDG_STATE_HOME", ".local/state")
    return None if folder is None else folder / "pin_versions.json"


def local_path(text: str | Path, what: str) -> Path:
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
    given = os.environ.get(variable, "")
    base = given if os.path.isabs(given) else os.path.join(os.path.expanduser("~"), below_home)
    return Path(base) / "cubin-runtime" if os.path.isabs(base) else None


def _pin_keys(env: Mapping[str, str]) -> tuple[str, ...]:
    """The keys; a variable that is set and names none is an error, lest signatures go unchecked by a slip."""
    value = env.get("CUBIN_RUNTIME_PIN_KEYS")
    keys = tuple(key.strip() for key in (value or "").split(os.pathsep) if key.strip())
    if value is not None and not keys:
        raise UsageError(f"CUBIN_RUNTIME_PIN_KEYS={value!r}: names no key; unset it where pins need no signature")
    return keys


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise UsageError(f"{name}={env[name]!r}: expected 1 or 0")
