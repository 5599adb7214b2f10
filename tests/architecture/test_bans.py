"""Constructs that the package does without, counted in its syntax trees."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "cubin_runtime"


class Ban(NamedTuple):
    """``matches`` is true of the syntax nodes that ``folder`` of the package must not contain."""

    name: str
    matches: Callable[[ast.AST], bool]
    folder: str = ""


def calls(name: str) -> Callable[[ast.AST], bool]:
    return lambda node: isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == name


def is_containment(node: ast.AST) -> bool:
    """``pointer <= value < end``: the tensor that an address belongs to, found by comparing numbers."""
    if not isinstance(node, ast.Compare) or len(node.ops) < 2:
        return False
    return any(isinstance(part, ast.Attribute) and part.attr == "pointer" for part in (node.left, *node.comparators))


def is_product_equality(node: ast.AST) -> bool:
    """``scale * factor == value``: the argument that a number follows, found by comparing floats."""
    if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], ast.Eq):
        return False
    return any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult) for part in (node.left, *node.comparators))


def is_question_docstring(node: ast.AST) -> bool:
    """A docstring that is a clause, such as "What it does", and no sentence about the thing."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return bool(re.match(r"(What|Which|How|Where|Whether|When|Why|Who)\b", str(node.value.value)))


def is_participle(node: ast.AST) -> bool:
    """A value that is named for how it came about, not for what it is."""
    stored = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else getattr(node, "arg", None)
    return not isinstance(node, ast.keyword) and stored in ("found", "given", "made", "wanted", "known", "own", "its")


BANS = (
    Ban("calls of locals()", calls("locals")),
    Ban("calls of exec()", calls("exec")),
    Ban("calls of eval()", calls("eval")),
    Ban("functions compiled from text", calls("compiled")),
    Ban("calls of nextafter()", calls("nextafter")),
    Ban("addresses found by containment", is_containment, "attention/fast_path"),
    Ban("numbers found by equality of floats", is_product_equality, "attention/fast_path"),
    Ban("docstrings that begin with a question word", is_question_docstring),
    Ban("values named by participles", is_participle),
)
SNIPPETS = {
    "calls of locals()": "run(locals())",
    "calls of exec()": "exec(text, names)",
    "calls of eval()": "eval(text, names)",
    "functions compiled from text": "compiled('send', source, scope)",
    "calls of nextafter()": "x = math.nextafter(1.0, 0.0)",
    "addresses found by containment": "[i for i in known if i.view.pointer <= value < i.end]",
    "numbers found by equality of floats": "next(f for f in factors if scale * f == value)",
    "docstrings that begin with a question word": 'def form() -> str:\n    """What it has."""',
    "values named by participles": "found = look()",
}


def count(ban: Ban, source: str) -> int:
    return sum(ban.matches(node) for node in ast.walk(ast.parse(source)))


@pytest.mark.parametrize("ban", BANS, ids=lambda ban: ban.name)
def test_the_package_has_none(ban: Ban) -> None:
    files = (PACKAGE / ban.folder).rglob("*.py")
    assert [str(file.relative_to(PACKAGE)) for file in files if count(ban, file.read_text())] == []


@pytest.mark.parametrize("ban", BANS, ids=lambda ban: ban.name)
def test_a_snippet_is_counted(ban: Ban) -> None:
    assert count(ban, SNIPPETS[ban.name]) == 1
