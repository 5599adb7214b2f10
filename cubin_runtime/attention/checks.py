"""Checks of single arguments; each error names the argument, what came and what was expected."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from ..errors import UsageError
from ..tensor import TensorView


def check_switches(**switches: object) -> None:
    """Raise ``UsageError`` unless each switch is True or False: 1 would hash like True in a plan's key."""
    for name, switch in switches.items():
        if switch is not True and switch is not False:
            raise UsageError(f"{name}={switch!r}: expected True or False")


def check_words(**words: object) -> None:
    """Raise ``UsageError`` unless each argument is text."""
    for name, word in words.items():
        if not isinstance(word, str):
            raise UsageError(f"{name}={word!r}: expected a word")


def integer(name: str, value: Any) -> int:
    """``value`` as an int.

    Raises:
        UsageError: it is not one.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise UsageError(f"{name}={value!r}: expected an integer") from None


def check_dtype(name: str, view: TensorView | None, expected: Sequence[str], why: str = "") -> None:
    """Raise ``UsageError`` unless ``view`` is None or has one of the dtypes ``expected``."""
    if view is not None and view.dtype not in expected:
        raise UsageError(f"{name}: dtype {view.dtype}, expected {listed(expected)}{why}")


def check_shape(name: str, view: TensorView | None, *expected: tuple[int, ...]) -> None:
    """Raise ``UsageError`` unless ``view`` is None or has one of the shapes ``expected``."""
    if view is not None and view.shape not in expected:
        raise UsageError(f"{name}: shape {view.shape}, expected {' or '.join(map(str, expected))}")


def listed(values: Sequence[object]) -> str:
    """``values`` as text."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last
