"""Users' pages, messages and public docstrings are in the words of the field; private ones stand in the glossary."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT
from tests.docs.words import (
    exported,
    messages_of,
    printed_by,
    private_words,
    prose_of,
    published,
    text_of_picture,
    text_of_program,
)

PACKAGE = ROOT / "cubin_runtime"
REFERENCE = [page for page in PAGES if page.startswith("docs/reference/") and "\n::: " in PAGES[page]]


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("docs/contributing/")])
def test_a_users_page_has_no_private_word(page: str) -> None:
    assert private_words(prose_of(PAGES[page])) == []


@pytest.mark.parametrize(
    "folder", ["*.py", *(f"{found.name}/**/*.py" for found in PACKAGE.iterdir() if found.is_dir())]
)
def test_errors_and_help_have_no_private_word(folder: str) -> None:
    modules: list[Path] = sorted(PACKAGE.glob(folder))
    assert [found for module in modules for text in messages_of(module) for found in private_words(text)] == []


@pytest.mark.parametrize("module", sorted((PACKAGE / "cli").glob("*.py")), ids=lambda module: module.stem)
def test_what_a_verb_prints_has_no_private_word(module: Path) -> None:
    assert [found for text in printed_by(module) for found in private_words(text)] == []


@pytest.mark.parametrize("program", sorted((ROOT / "examples").rglob("*.py")), ids=lambda program: program.stem)
def test_an_example_has_no_private_word(program: Path) -> None:
    assert [found for text in text_of_program(program) for found in private_words(text)] == []


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").glob("*.svg")), ids=lambda picture: picture.stem)
def test_a_picture_has_no_private_word(picture: Path) -> None:
    assert private_words(text_of_picture(picture)) == []


def test_the_changelog_has_no_private_word() -> None:
    assert private_words(prose_of((ROOT / "CHANGELOG.md").read_text())) == []


PUBLIC = (
    "",
    ".attention",
    ".attention.trtllm_gen",
    ".compat.flashinfer",
    ".compat.flash_attn",
    ".distributed",
    ".testing",
)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_docstrings_have_no_private_word(name: str) -> None:
    texts = [inspect.getdoc(one) or "" for one in exported(importlib.import_module(f"cubin_runtime{name}"))]
    assert texts
    assert [found for text in texts for found in private_words(text)] == []


@pytest.mark.parametrize("page", REFERENCE)
def test_the_reference_has_no_private_word(page: str) -> None:
    texts = [inspect.getdoc(one) or "" for one in published(PAGES[page])]
    assert texts
    assert [found for text in texts for found in private_words(text)] == []


@pytest.mark.parametrize(
    "text",
    [
        "as fast as the best peer",
        "Read alone",
        "calls of the same form",
        "the bits of a request",
        "e4m3 is refused by name",
    ],
)
def test_a_private_word_is_found(text: str) -> None:
    assert private_words(prose_of(text)) != []


def test_code_and_addresses_are_no_prose() -> None:
    assert private_words(prose_of("`--peers` ![plot](divided_keys.png)\n```sh\nmake bars\n```\n")) == []
