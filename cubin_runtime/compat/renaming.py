"""Errors of our operators, rewritten with the argument names of the functions that call them."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import UsageError, WorkspaceError


def renamed(error: UsageError | WorkspaceError, names: Mapping[str, str]) -> UsageError | WorkspaceError:
    """Return ``error`` with its argument called as ``names`` says, if it is there."""
    if error.argument not in names:
        return error
    name, kind = names[error.argument], UsageError if isinstance(error, UsageError) else WorkspaceError
    other = kind(f"{name}{str(error).removeprefix(error.argument)}")
    other.argument = name
    return other
