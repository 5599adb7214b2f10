"""Whether Python of a page fits the package, without running it: imports exist, calls match signatures."""

from __future__ import annotations

import ast
import importlib
import inspect
from typing import Any


def problems_of(text: str) -> list[str]:
    """What does not fit: an import of the package that fails, or a call of what was imported with wrong arguments."""
    tree, names, problems = ast.parse(text), {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "cubin_runtime":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    problems.append(f"{node.module} has no {alias.name}")
                else:
                    names[alias.asname or alias.name] = getattr(module, alias.name)
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return problems + [problem for call in calls for problem in _problem(call, names)]


def _problem(call: ast.Call, names: dict[str, Any]) -> list[str]:
    if not isinstance(call.func, ast.Name) or call.func.id not in names:
        return []
    if any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords):
        return []
    keywords = {one.arg: None for one in call.keywords if one.arg is not None}
    try:
        inspect.signature(names[call.func.id]).bind(*call.args, **keywords)
    except TypeError as error:
        return [f"line {call.lineno}: {call.func.id}: {error}"]
    return []
