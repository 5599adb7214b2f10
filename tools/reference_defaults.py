"""Values in place of the names of constants among the defaults that the reference shows: "auto", not AUTO."""

from __future__ import annotations

import ast
from contextlib import suppress
from typing import Any

import griffe


class Defaults(griffe.Extension):
    """Loaded by mkdocs.yml."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Write the literals that a function's defaults name."""
        for parameter in func.parameters:
            if isinstance(parameter.default, griffe.ExprName):
                parameter.default = _value(func, parameter.default)


def _value(func: griffe.Function, name: griffe.ExprName) -> str | griffe.Expr:
    with suppress(KeyError, AttributeError, ValueError, SyntaxError):  # a name of another package, or no literal
        text = str(func.modules_collection[name.canonical_path].value)
        ast.literal_eval(text)
        return text
    return name
