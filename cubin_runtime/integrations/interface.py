"""The interface of an engine's version: plug-ins ask for it before they register, and name what is missing."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

_LOGGER = logging.getLogger(__name__)


def register_safely(engine: str, register: Callable[[], None]) -> None:
    """Call ``register``; whatever it raises becomes one warning, as a plug-in must not end the engine."""
    try:
        register()
    except Exception as error:
        _LOGGER.warning(
            "cubin_runtime adds no attention backend to %s %s: %s: %s",
            engine,
            _version(engine),
            type(error).__name__,
            error,
        )


def require(names: Mapping[str, Sequence[str]]) -> None:
    """Import modules and look up their attributes.

    Args:
        names: attributes of each module, by the module's name.

    Raises:
        ImportError: some are missing; the message names all of them.
    """
    missing: list[str] = []
    for module, attributes in names.items():
        try:
            imported = importlib.import_module(module)
        except ImportError as error:
            missing.append(f"{module} ({error})")
            continue
        missing += [f"{module}.{name}" for name in attributes if not hasattr(imported, name)]
    if missing:
        raise ImportError(f"the interface lacks {', '.join(missing)}")


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "of an unknown version"
