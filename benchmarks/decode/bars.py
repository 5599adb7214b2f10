"""Bars: what a row has to reach, as conditions on its own figures, and whether it does. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

READ_SHARE = 0.93
MATRIX_SHARE = "matrix_share"
_WORDS = {
    "ratio": "x",
    "read_share": " of read",
    "ratio_fa2": "x fa2",
    "ratio_fa2_plan_run": "x its plan + run",
    "time_over_q1": "x one token",
    "over_default": "x default",
    "over_bf16": "x bf16",
    MATRIX_SHARE: " of matrix",
}
# Shares are printed as percentages.
_SHARES = frozenset({"read_share", MATRIX_SHARE})


@dataclass(frozen=True, slots=True)
class Condition:
    """A figure of the row by its key, and the least or most that it may be."""

    key: str
    limit: float
    is_most: bool = False

    def holds(self, row: Mapping[str, float | None]) -> bool | None:
        """None: the row lacks the figure."""
        value = row.get(self.key)
        if value is None:
            return None
        return value <= self.limit if self.is_most else value >= self.limit

    def __str__(self) -> str:
        limit = f"{100 * self.limit:.0f}%" if self.key in _SHARES else f"{self.limit:.2f}"
        return f"{'at most ' if self.is_most else ''}{limit}{_WORDS[self.key]}"


@dataclass(frozen=True, slots=True)
class Bar:
    """Alternatives, each a set of conditions that hold together; none at all: the row is only shown."""

    alternatives: tuple[tuple[Condition, ...], ...] = ()

    def met(self, row: Mapping[str, float | None]) -> bool | None:
        """Whether an alternative holds; None: there is no bar, or a figure that could decide it is not there."""
        verdicts = [_all([condition.holds(row) for condition in part]) for part in self.alternatives]
        if True in verdicts:
            return True
        return False if verdicts and None not in verdicts else None

    def __str__(self) -> str:
        return " or ".join(" and ".join(str(condition) for condition in part) for part in self.alternatives)


def _all(verdicts: list[bool | None]) -> bool | None:
    if False in verdicts:
        return False
    return None if None in verdicts else True


NO_BAR = Bar()


def at_least(key: str, limit: float) -> Condition:
    return Condition(key, limit)


def at_most(key: str, limit: float) -> Condition:
    return Condition(key, limit, is_most=True)


def ratio_or_share(ratio: float | None, share: float = READ_SHARE) -> Bar:
    """The best peer's time over ours, or so much of the measured read bandwidth; no ratio: no bar."""
    return Bar(((at_least("ratio", ratio),), (at_least("read_share", share),))) if ratio is not None else NO_BAR
