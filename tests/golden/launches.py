"""Launches as the stand-in driver received them, as plain values; and where two of them differ first."""

from __future__ import annotations

import json
import lzma
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "data" / "golden_launches.jsonl.xz"

# A parameter struct as it was recorded: its size and (name, type, offset, size) of each field, in order.
Layout = tuple[int, Sequence[tuple[str, str, int, int]]]

_FORMATS = {"bool": "<?", "int32": "<i", "uint32": "<I", "int64": "<q", "uint64": "<Q", "float": "<f", "ptr": "<Q"}
# ``struct descriptor`` of the stand-in.
_DESCRIPTOR = struct.Struct("<Q5Q4Q5H5B6B")
_DESCRIPTOR_WORDS = ("type", "interleave", "swizzle", "promotion", "fill")


def launch_of(seen: Mapping[str, str], layout: Layout) -> dict[str, Any]:
    """One logged launch: numbers, attributes in their order, and the fields of the struct that are not 0."""
    words = list(seen.items())
    first = [name for name, _ in words].index("attributes") + 1
    return {
        "kernel": seen["symbol"],
        "grid": _numbers(seen["grid"]),
        "block": _numbers(seen["block"]),
        "shared": int(seen["shared"]),
        "stream": seen["stream"],
        "attributes": [f"{name}={value}" for name, value in words[first : first + int(seen["attributes"])]],
        "values": values_of(bytes.fromhex(seen["parameter0"]), layout),
    }


def values_of(data: bytes, layout: Layout) -> dict[str, Any]:
    """The fields of a struct that are not 0, and what lies between the fields if that is not 0."""
    size, fields = layout
    values: dict[str, Any] = {}
    if len(data) != size:
        values["bytes"] = len(data)
    rest = bytearray(data)
    for name, kind, offset, width in fields:
        raw = data[offset : offset + width]
        rest[offset : offset + width] = bytes(len(raw))
        if any(raw):
            values[name] = _value(kind, raw)
    if any(rest):
        values["padding"] = rest.hex()
    return values


def _value(kind: str, raw: bytes) -> Any:
    if kind in _FORMATS and len(raw) == struct.calcsize(_FORMATS[kind]):
        return struct.unpack(_FORMATS[kind], raw)[0]
    if kind == "CUtensorMap" and len(raw) == 128:
        return _descriptor(raw)
    return raw.hex()


def _descriptor(raw: bytes) -> dict[str, Any]:
    numbers = _DESCRIPTOR.unpack_from(raw)
    rank = numbers[20]
    words = dict(zip(_DESCRIPTOR_WORDS, numbers[21:], strict=True))
    return {
        "address": numbers[0],
        "dims": list(numbers[1 : 1 + rank]),
        "strides": list(numbers[6 : 5 + rank]),
        "box": list(numbers[10 : 10 + rank]),
        "steps": list(numbers[15 : 15 + rank]),
        **words,
    }


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def differences(came: Any, recorded: Any, where: str = "") -> Iterator[str]:
    """Every place where two values of JSON differ, in words."""
    if isinstance(came, dict) and isinstance(recorded, dict):
        for key in sorted({*came, *recorded}):
            # What is not there is 0: fields of a struct are left out so.
            yield from differences(came.get(key, 0), recorded.get(key, 0), f"{where}.{key}" if where else key)
    elif isinstance(came, list) and isinstance(recorded, list) and any(_holds(item) for item in came + recorded):
        for place, (a, b) in enumerate(zip_longest(came, recorded)):
            yield from differences(a, b, f"{where}[{place}]")
    elif came != recorded:
        yield f"{where}: {came}, recorded {recorded}"


def _holds(item: Any) -> bool:
    return isinstance(item, (dict, list))


def read() -> Iterator[dict[str, Any]]:
    """The lines of the recorded file: what all cases share, then a case each."""
    with lzma.open(FILE) as lines:
        yield from map(json.loads, lines)


def write(lines: Iterable[Mapping[str, Any]]) -> None:
    """Write the file; the same lines give the same bytes."""
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    FILE.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
