"""What pytest plugins of others' tests share: a process's part of a sample, and a record of how each test ended."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sampling import sampled

FATAL = ("illegal memory access", "misaligned address", "unspecified launch failure", "device-side assert")


class Recording:
    """The settings of a process, which ``run.py`` wrote into a variable of its environment, and its file of records."""

    def __init__(self, variable: str) -> None:
        self.settings: dict[str, Any] = json.loads(os.environ.get(variable, "{}"))

    def share_of(self, items: Sequence[pytest.Item]) -> list[pytest.Item]:
        """This process's part of a sample in which every test function has its share."""
        job, jobs = self.settings.get("job", 0), self.settings.get("jobs", 1)
        size, seed = self.settings.get("sample", len(items)), self.settings.get("seed", 0)
        chosen = sampled(items, size, seed, lambda item: item.nodeid.split("[")[0])
        self.write({"collected": len(items), "sample": len(chosen)})
        # Long tests are neighbours, so that each process gets as many.
        return chosen[job::jobs]

    def passes_over(self, item: pytest.Item) -> bool | None:
        """Return whether the time is up for a test, as ``pytest_runtest_protocol`` says it."""
        if time.time() <= self.settings.get("until", float("inf")):
            return None
        self.write({"test": item.nodeid, "outcome": "not run"})
        return True

    def end(self, item: pytest.Item, call: pytest.CallInfo[None], outcome: str, reason: str, **more: Any) -> None:
        """Write down how a test ended; a process whose device reports an error that stays ends, too."""
        record = {"test": item.nodeid, "outcome": outcome, "reason": reason, "seconds": round(call.duration, 3)}
        if outcome == "failed" and call.excinfo is not None:
            record["traceback"] = "".join(traceback.format_exception(call.excinfo.value, limit=-6))[-4000:]
        self.write(record | more)
        if outcome == "failed" and any(word in reason for word in FATAL):
            pytest.exit("the device reports an error that does not go away", returncode=1)

    def write(self, record: dict[str, Any]) -> None:
        """Append to this process's file, so that a run that is stopped leaves what it has."""
        if "records" in self.settings:
            with Path(self.settings["records"]).open("a") as opened:
                opened.write(json.dumps(record) + "\n")
