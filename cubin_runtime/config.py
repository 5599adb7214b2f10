"""The one configuration value: made at the edge from flags and environment, then passed down."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import UsageError

DEFAULT_SOURCES = ("package",)
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}


@dataclass(frozen=True, slots=True)
class Config:
    """Where artifacts come from and where they are kept.

    ``sources`` is an ordered tuple of an http(s) URL, a directory tree, a store, a ``.zip`` or ``.whl``,
    or the word ``package``; ``None`` means the default (``package``, then each pin's own sources).
    ``pin_files`` are read besides the built-in pins; with ``pin_keys`` (files of PEM public keys, or keys as 64
    hex digits) only if one of the keys signed them. ``offline`` forbids opening any socket; ``lazy_fetch``
    allows a missing kernel to be fetched at first use.
    """

    store: Path
    sources: tuple[str, ...] | None = None
    pin_files: tuple[Path, ...] = ()
    offline: bool = False
    lazy_fetch: bool = True
    pin_keys: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Read ``CUBIN_RUNTIME_CACHE``, ``_SOURCES``, ``_PINS``, ``_PIN_KEYS`` and ``_OFFLINE``.

        Pin files and keys are separated by ``os.pathsep``, sources by white space or commas.

        Raises:
            UsageError: a value is outside its domain.
        """
        import platformdirs

        env = os.environ if environ is None else environ
        cache = env.get("CUBIN_RUNTIME_CACHE")
        store = Path(cache).expanduser() if cache else platformdirs.user_cache_path("cubin-runtime") / "store"
        sources = tuple(env.get("CUBIN_RUNTIME_SOURCES", "").replace(",", " ").split())
        named = [Path(p).expanduser() for p in env.get("CUBIN_RUNTIME_PINS", "").split(os.pathsep) if p]
        own = user_pins_path()
        # a home that may not even be looked into (a container's user with root's HOME) holds no pins for us
        pins = tuple([own, *named] if os.path.exists(own) else named)
        offline = _flag(env, "CUBIN_RUNTIME_OFFLINE")
        return cls(
            store=store.absolute(),
            sources=sources or None,
            pin_files=pins,
            offline=offline,
            lazy_fetch=not offline,
            pin_keys=_pin_keys(env),
        )


def user_pins_path() -> Path:
    """The file that holds the user's own pins, in the user's config directory; it need not exist."""
    import platformdirs

    return platformdirs.user_config_path("cubin-runtime") / "pins.toml"


def _pin_keys(env: Mapping[str, str]) -> tuple[str, ...]:
    """The keys; a variable that is set and names none is an error, lest signatures go unchecked by a slip."""
    value = env.get("CUBIN_RUNTIME_PIN_KEYS", "")
    keys = tuple(key.strip() for key in value.split(os.pathsep) if key.strip())
    if value and not keys:
        raise UsageError(f"CUBIN_RUNTIME_PIN_KEYS={value!r}: names no key")
    return keys


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise UsageError(f"{name}={env[name]!r}: expected 1 or 0")
