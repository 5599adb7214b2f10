"""The reference documents what is public, all of it and nothing else: docs/reference/public.md lists the modules."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import pytest

from tests.docs.pages import PAGES

REFERENCE = {page: text for page, text in PAGES.items() if page.startswith("docs/reference/")}
MODULES = re.findall(r"^\| `(cubin_runtime[\w.]*)` \|", REFERENCE["docs/reference/public.md"], re.MULTILINE)
# The version is no object with a page.
WITHOUT_PAGE = {"__version__"}


class Directive(NamedTuple):
    """What a page shows of an object: itself, or of a module the named members."""

    page: str
    name: str
    members: list[str] | None

    @property
    def shown(self) -> object:
        return pkgutil.resolve_name(self.name)

    def documented(self) -> list[object]:
        """The objects that the directive documents, without methods."""
        if not isinstance(self.shown, ModuleType):
            return [self.shown]
        own = [name for name, value in vars(self.shown).items() if getattr(value, "__module__", "") == self.name]
        return [getattr(self.shown, name) for name in (own if self.members is None else self.members)]


def directives() -> Iterator[Directive]:
    for page, text in REFERENCE.items():
        for name, options in re.findall(r"^::: (\S+)\n((?:    .*\n)*)", text + "\n", re.MULTILINE):
            listed = re.search(r"members: \[(.*?)\]", options)
            yield Directive(page, name, re.findall(r"\w+", listed[1]) if listed else None)


DIRECTIVES = list(directives())
DOCUMENTED = [one for directive in DIRECTIVES for one in directive.documented()]


def public(module: str) -> dict[str, object]:
    found = pkgutil.resolve_name(module)
    return {name: getattr(found, name) for name in found.__all__ if name not in WITHOUT_PAGE}


def among(value: object, others: list[object]) -> bool:
    return any(value is other for other in others)


def test_the_page_lists_modules() -> None:
    assert {"cubin_runtime", "cubin_runtime.attention", "cubin_runtime.testing"} < set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference(module: str) -> None:
    names = public(module)
    assert names
    assert [name for name, value in names.items() if not among(value, DOCUMENTED)] == []


@pytest.mark.parametrize("directive", DIRECTIVES, ids=lambda one: one.name)
def test_what_is_in_the_reference_is_public(directive: Directive) -> None:
    exported = [value for module in MODULES for value in public(module).values()]
    hidden = [getattr(one, "__qualname__", one) for one in directive.documented() if not among(one, exported)]
    assert hidden == []


@pytest.mark.parametrize("directive", DIRECTIVES, ids=lambda one: one.name)
def test_the_members_that_a_page_names_are_there(directive: Directive) -> None:
    annotated = {
        name for kind in getattr(directive.shown, "__mro__", ()) for name in vars(kind).get("__annotations__", ())
    }
    missing = [name for name in directive.members or () if not hasattr(directive.shown, name)]
    assert [name for name in missing if name not in annotated] == []


@pytest.mark.parametrize("directive", DIRECTIVES, ids=lambda one: one.name)
def test_the_members_that_a_page_names_say_what_they_are(directive: Directive) -> None:
    named = [getattr(directive.shown, name, None) for name in directive.members or ()]
    assert [one for one in named if callable(one) and not (one.__doc__ or "").strip()] == []
