"""The requirements of a program beside this package: it ends with the line that installs it instead of a traceback."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import NoReturn

from ..errors import CubinRuntimeError, MissingError


def require_module(name: str, install: str) -> None:
    """End the program with exit code 4 and one line if the module ``name`` is not installed.

    Args:
        name: for example ``numpy``, or ``cuda.core`` of a package.
        install: the command that installs it, which the line names.
    """
    try:
        installed = find_spec(name) is not None
    except (ImportError, ValueError):  # a package around it is not there, or stands in sys.modules as None
        installed = False
    if not installed:
        stop(MissingError(f"no module {name!r}: {install}"))


def stop(error: CubinRuntimeError) -> NoReturn:
    """End the program as the command line ends for ``error``: its message on the error stream, and its exit code."""
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(error.exit_code)
