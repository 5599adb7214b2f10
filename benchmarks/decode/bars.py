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
    "time_us": " us",
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

    def time_us(self, row: Mapping[str, float | None], us: float) -> float | None:
        """The longest time with which it holds, if ``us`` gives the row's figure; None: the row lacks that.

        A figure that may be at most so much grows with the time, and one that must be at least so much falls with it.
        """
        value = row.get(self.key)
        if not value:
            return None
        return us * self.limit / value if self.is_most else us * value / self.limit

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

    def time_us(self, row: Mapping[str, float | None], us: float) -> float | None:
        """The longest time that meets it, if ``us`` gives the row's figures.

        None: there is no bar, or nothing is known of an alternative.
        """
        parts = [[condition.time_us(row, us) for condition in part] for part in self.alternatives]
        known = [[time for time in part if time is not None] for part in parts]
        return max(map(min, known)) if known and all(known) else None

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
