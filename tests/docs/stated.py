"""Measured figures in the sentences of pages, and whether a result that the page names has them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from words import prose_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# What a unit makes of a value of the JSON, which has seconds, milliseconds, microseconds, shares and rates.
SCALES = {
    "us": (1, 1e3, 1e6),
    "ms": (1, 1e-3, 1e3),
    "s": (1, 1e-3, 1e-6),
    "TB/s": (1, 1e-3),
    "GB/s": (1,),
    "MB/s": (1,),
    "TFLOP/s": (1,),
    "%": (100, 1),
    "times": (1,),
    "x": (1,),
}
_NUMBER = r"(?<![\d.,])\d(?:[\d,.]*\d)?"
_FIGURE = re.compile(rf"(?:(?P<low>{_NUMBER}) to )?(?P<high>{_NUMBER})(?P<gap> ?)(?P<unit>{'|'.join(SCALES)})(?![\w/])")
_GENERATED = re.compile(r"<!-- ([\w]+): begin -->.*?<!-- \1: end -->", re.DOTALL)


def figures_of(page: str) -> Iterator[tuple[str, str]]:
    """The figures in hand-written text with their units; both ends of "1.1 to 1.8 times"."""
    for found in _FIGURE.finditer(prose_of(_GENERATED.sub("", page))):
        numbers = (found["low"], found["high"])
        yield from ((number, found["unit"]) for number in numbers if number)


def results_of(page: str) -> list[Any]:
    """The results whose files a page names."""
    names = sorted(set(re.findall(r"([\w]+)\.json", page)))
    return [
        json.loads((RESULTS / f"{name}.json").read_text()) for name in names if (RESULTS / f"{name}.json").is_file()
    ]


def numbers_in(result: Any) -> Iterator[float]:
    """Every number of a result."""
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, list):
        for one in result:
            yield from numbers_in(one)
    elif isinstance(result, (int, float)) and not isinstance(result, bool):
        yield float(result)


def is_measured(number: str, unit: str, values: frozenset[float]) -> bool:
    """Whether a value, in some unit, is printed as this number."""
    digits = len(number.partition(".")[2])
    wanted = number.replace(",", "")
    return any(f"{value * scale:.{digits}f}" == wanted for value in values for scale in SCALES[unit])
