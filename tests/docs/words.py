"""Words of this project's own, and what a reader of this field calls them instead."""

from __future__ import annotations

import ast
import html
import pkgutil
import re
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType

# Pattern -> the plain term. None stands in a page, a picture, a message, an example or a public docstring.
PRIVATE: Mapping[str, str] = MappingProxyType(
    {
        r"(?<!progress )bars?\b(?! (?:chart|for each|is))": "target",
        r"peers?": "other implementation, client or GPU",
        r"read[ -]alone": "read-only time",
        r"forms?(?! one\b)": "shape, strides and dtype, or layout",
        r"full path": "without the fast path",
        r"drafts": "draft tokens",
        r"divided keys": "context-parallel keys",
        r"(?:refused|chosen|only|taken) by name": "raises UsageError that names it, or asked for with backend=",
        r"(?:same|equal|other|wrong|these|own) bits": "bitwise identical",
        r"bits (?:of|that) (?:a|do|the) (?:not|request|rank|token|query|output|prefill)": "output, bit for bit",
        r"(?:times?|ratio|peer|library) by ours": "relative to ours",
        r"what lacks": "what is missing",
        r"taken out of": "removed from",
    }
)
_ANY = re.compile("|".join(rf"\b{pattern}\b" for pattern in PRIVATE), re.IGNORECASE)


def private_words(text: str) -> list[str]:
    """The private words of a text, each with what stands around it."""
    return [text[max(0, found.start() - 30) : found.end() + 30].replace("\n", " ") for found in _ANY.finditer(text)]


def prose_of(page: str) -> str:
    """The text of a page of Markdown without code, addresses of links, and HTML comments."""
    without = re.sub(r"^```.*?^```$|<!--.*?-->|`[^`\n]*`", " ", page, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", without)


def messages_of(module: Path) -> Iterator[str]:
    """The literal text of a module's errors, and of its options' help."""
    for node in ast.walk(ast.parse(module.read_text())):
        parts = [node.exc] if isinstance(node, ast.Raise) and node.exc else []
        parts += [one.value for one in node.keywords if one.arg == "help"] if isinstance(node, ast.Call) else []
        for part in (inner for outer in parts for inner in ast.walk(outer)):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value


def printed_by(module: Path) -> Iterator[str]:
    """The literal text of a module but its docstrings: what a verb may print."""
    tree = ast.parse(module.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, documented)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in docstrings:
            yield node.value


def text_of_program(program: Path) -> Iterator[str]:
    """The docstrings, comments and literal text of a program that users read."""
    with program.open("rb") as file:
        yield from (
            token.string
            for token in tokenize.tokenize(file.readline)
            if token.type in (tokenize.COMMENT, tokenize.STRING)
            or tokenize.tok_name[token.type].startswith("FSTRING_MIDDLE")
        )


def text_of_picture(picture: Path) -> str:
    """The words of an SVG."""
    return html.unescape(" ".join(re.findall(r">([^<>]+)<", picture.read_text())))


def published(page: str) -> Iterator[object]:
    """What a page of the reference shows: the objects that it names, and their public members."""
    for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE):
        yield from with_members(pkgutil.resolve_name(name))


def exported(module: ModuleType) -> Iterator[object]:
    """The public names of a module, and their public members."""
    for name in module.__all__:
        yield from with_members(getattr(module, name))


def with_members(found: object) -> Iterator[object]:
    """An object, and its public functions and properties."""
    yield found
    members = vars(found).items() if isinstance(found, (type, ModuleType)) else ()
    for key, member in members:
        if not key.startswith("_") and (callable(member) or isinstance(member, property)):
            yield member
