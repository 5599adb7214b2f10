"""Plans that a runtime keeps for calls that make none themselves."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class PlanCache:
    """Plans by key, least recently used out first; safe between threads."""

    def __init__(self, entries: int = 256) -> None:
        self._limit = entries
        self._lock = threading.RLock()
        self._plans: OrderedDict[Hashable, Any] = OrderedDict()
        self.made = self.found = 0

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The plan for ``key``, made on first use; a failure to make it is not kept."""
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
                self.found += 1
                return plan
        plan = make()
        with self._lock:
            plan = self._plans.setdefault(key, plan)
            self.made += 1
            while len(self._plans) > self._limit:
                self._plans.popitem(last=False)
        return plan
