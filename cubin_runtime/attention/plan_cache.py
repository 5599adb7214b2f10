"""Plans that a runtime keeps for calls that make none themselves, and the lengths that share one."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

SMALLEST_BOUND = 64


def shared_bounds(length: int, smallest: int = SMALLEST_BOUND) -> tuple[int, int]:
    """The least and the largest bound on lengths that share a plan with ``length``; the largest is a power of two.

    Lengths grow step by step, so that one plan serves many steps.
    """
    largest = max(smallest, 1 << (length - 1).bit_length())
    return 0 if largest == smallest else largest // 2 + 1, largest


class PlanCache:
    """Plans by key, least recently used out first; safe between threads."""

    def __init__(self, entries: int = 256) -> None:
        self._limit = entries
        self._lock = threading.RLock()
        self._plans: OrderedDict[Hashable, Any] = OrderedDict()
        self.hits = self.misses = 0

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The plan for ``key``, made on first use; a failure to make it is not kept."""
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
                self.hits += 1
                return plan
        plan = make()
        with self._lock:
            plan = self._plans.setdefault(key, plan)
            self.misses += 1
            while len(self._plans) > self._limit:
                self._plans.popitem(last=False)
        return plan
