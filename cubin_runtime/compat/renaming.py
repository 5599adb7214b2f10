"""Errors of our operators, rewritten with the argument names of the functions that call them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..errors import UsageError, WorkspaceError

_NAMED = re.compile(r"(\w*)(.*)", re.DOTALL)


def renamed(error: UsageError | WorkspaceError, names: Mapping[str, str]) -> UsageError | WorkspaceError:
    """``error`` with the argument that its message begins with called as ``names`` says, if it is there."""
    name, rest = _NAMED.fullmatch(str(error)).groups()  # type: ignore[union-attr]  # it matches any text
    kind = UsageError if isinstance(error, UsageError) else WorkspaceError
    return kind(f"{names[name]}{rest}") if name in names else error
