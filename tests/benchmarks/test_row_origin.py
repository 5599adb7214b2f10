"""What a row says of the cubins that were launched for it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from row_origin import origin_of_calls


class Driver:
    """Keeps the last three launches, whoever made them."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @property
    def launches(self) -> int:
        return len(self.names)

    def last_launches(self) -> tuple[Any, ...]:
        return tuple(SimpleNamespace(kernel=name, sha256=f"digest of {name}") for name in self.names[-3:])

    def launch(self, *names: str) -> None:
        self.names += names


def test_a_row_has_the_cubins_of_its_own_calls_alone() -> None:
    driver = Driver()
    driver.launch("earlier", "earlier")
    origin = origin_of_calls(driver, lambda: driver.launch("decode"), lambda: driver.launch("merge", "merge"))
    assert origin["cubins"] == {"decode": "digest of decode", "merge": "digest of merge"}


def test_a_call_without_a_launch_adds_nothing() -> None:
    driver = Driver()
    driver.launch("earlier")
    assert origin_of_calls(driver, lambda: None)["cubins"] == {}
