"""The explanation of a launch: facts and tables as text, and a record for programs."""

from __future__ import annotations

from collections.abc import Mapping

from ..values import dataclass

Facts = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of as many cells as there are columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """The launch and its reasons: ``choice`` has at most ten lines of 80 columns, ``details`` are shown on request.

    Facts are (name, value), tables list what was compared; ``record`` is for JSON.
    """

    choice: Facts
    details: tuple[Facts | Table, ...]
    record: Mapping[str, object]
