"""Whether a value fits a JSON Schema: the keywords that the schemas of the verbs use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

KINDS: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}
KNOWN = {
    *("$schema", "title", "description", "type", "properties", "required", "additionalProperties", "items"),
    *("anyOf", "const", "enum", "pattern", "minimum", "minItems"),
}


def misfits(value: Any, schema: dict[str, Any], place: str = "$") -> list[str]:
    """What does not fit, each with its place."""
    assert set(schema) <= KNOWN, set(schema) - KNOWN
    return list(_misfits(value, schema, place))


def _misfits(value: Any, schema: dict[str, Any], place: str) -> Iterator[str]:
    if "anyOf" in schema:
        found = [misfits(value, one, place) for one in schema["anyOf"]]
        if all(found):
            yield f"{place}: fits none of {len(found)}; nearest: {min(found, key=len)}"
        return
    kind = schema.get("type")
    if kind and (not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"{place}: is {value!r}, expected {kind}"
        return
    yield from (f"{place}: is {value!r}, expected {name} {schema[name]!r}" for name in _broken(value, schema))
    if kind == "array":
        for number, item in enumerate(value):
            yield from misfits(item, schema.get("items", {}), f"{place}[{number}]")
    if kind == "object":
        yield from _fields(value, schema, place)


def _broken(value: Any, schema: dict[str, Any]) -> list[str]:
    """The keywords whose rule a value breaks."""
    rules = {
        "const": lambda wanted: value == wanted,
        "enum": lambda wanted: value in wanted,
        "minimum": lambda wanted: value >= wanted,
        "minItems": lambda wanted: len(value) >= wanted,
        "pattern": lambda wanted: re.search(wanted, value) is not None,
    }
    return [name for name, holds in rules.items() if name in schema and not holds(schema[name])]


def _fields(value: dict[str, Any], schema: dict[str, Any], place: str) -> Iterator[str]:
    fields, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    yield from (f"{place}: lacks {name}" for name in schema.get("required", ()) if name not in value)
    for name, item in value.items():
        if name not in fields and others is False:
            yield f"{place}: has {name}"
        else:
            yield from misfits(item, fields.get(name, others), f"{place}.{name}")
