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
    """``sections`` are for people, facts as (name, value) or tables; ``record`` is for JSON."""

    sections: tuple[Facts | Table, ...]
    record: Mapping[str, object]
