"""Names that arguments had in the last minor version: accepted with a warning until the next one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

from ..errors import UsageError
from .user_frame import stacklevel_of_user

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def renamed_options(function: str, former: Mapping[str, str], options: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments that were given by name, with the names of today in place of the ``former`` ones.

    Raises:
        UsageError: an argument is given by both.
    """
    renamed = dict[str, Any]()
    for name, value in options.items():
        today = former.get(name, name)
        if today in renamed or (today != name and today in options):
            raise UsageError(f"given with {today}, of which it is the former name, expected one of them", argument=name)
        if today != name:
            words = f"{function}: {name} is now called {today}; the next minor version refuses the old name"
            warnings.warn(words, DeprecationWarning, stacklevel=stacklevel_of_user())
        renamed[today] = value
    return renamed


def takes_former_names(former: Mapping[str, str]) -> Callable[[FunctionT], FunctionT]:
    """Let a function take its arguments by the ``former`` names, too."""

    def decorate(function: FunctionT) -> FunctionT:
        @wraps(function)
        def renaming(*arguments: Any, **options: Any) -> Any:
            return function(*arguments, **renamed_options(function.__name__, former, options))

        return renaming  # type: ignore[return-value]

    return decorate
