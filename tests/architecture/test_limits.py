"""Counts of what the package shall have fewer of, or none: each may only fall, and a fall is written down here."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "cubin_runtime"


class Limit(NamedTuple):
    """``count`` of a syntax node is 1 where it is one of those counted; ``today`` of them are in ``folder``."""

    name: str
    today: int
    goal: int
    count: Callable[[ast.AST], bool]
    folder: str = ""


def calls(name: str) -> Callable[[ast.AST], bool]:
    def count(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == name

    return count


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
    return bool(re.match(r"(What|Which|How|Where|Whether)\b", str(node.value.value)))


def is_participle(node: ast.AST) -> bool:
    """A value that is named for how it came about, not for what it is."""
    stored = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else getattr(node, "arg", None)
    return not isinstance(node, ast.keyword) and stored in ("found", "given", "made", "wanted")


LIMITS = (
    Limit("calls of locals()", 0, 0, calls("locals")),
    Limit("calls of exec()", 1, 0, calls("exec")),
    Limit("functions compiled from text", 0, 0, calls("compiled")),
    Limit("calls of nextafter()", 0, 0, calls("nextafter")),
    Limit("addresses found by containment", 0, 0, is_containment, "attention/fast_path"),
    Limit("numbers found by equality of floats", 0, 0, is_product_equality, "attention/fast_path"),
    Limit("docstrings that begin with a question word", 0, 0, is_question_docstring),
    Limit("values named by participles", 0, 0, is_participle),
)
SNIPPETS = {
    "calls of locals()": "run(locals())",
    "calls of exec()": "exec(text, names)",
    "functions compiled from text": "compiled('send', source, scope)",
    "calls of nextafter()": "x = math.nextafter(1.0, 0.0)",
    "addresses found by containment": "[i for i in known if i.view.pointer <= value < i.end]",
    "numbers found by equality of floats": "next(f for f in factors if scale * f == value)",
    "docstrings that begin with a question word": 'def form() -> str:\n    """What it has."""',
    "values named by participles": "found = look()",
}


def counted(limit: Limit, source: str) -> int:
    return sum(limit.count(node) for node in ast.walk(ast.parse(source)))


def counted_in_the_package(limit: Limit) -> int:
    return sum(counted(limit, file.read_text()) for file in (PACKAGE / limit.folder).rglob("*.py"))


def unreached() -> list[Any]:
    return [limit for limit in LIMITS if limit.today > limit.goal]


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.name)
def test_the_count_is_the_recorded_one(limit: Limit) -> None:
    assert counted_in_the_package(limit) == limit.today


@pytest.mark.parametrize("limit", unreached(), ids=lambda limit: limit.name)
@pytest.mark.xfail(reason="the goal is not reached yet", strict=True)
def test_the_goal_is_reached(limit: Limit) -> None:
    assert counted_in_the_package(limit) <= limit.goal


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.name)
def test_the_counter_finds_one_more(limit: Limit) -> None:
    assert counted(limit, SNIPPETS[limit.name]) == 1
