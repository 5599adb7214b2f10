"""Times of the streaming read: the best grid's, once for each size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.decode import reading

MULTIPROCESSORS = 10
RUNTIME: Any = SimpleNamespace(
    driver=SimpleNamespace(device=lambda ordinal: SimpleNamespace(multiprocessors=MULTIPROCESSORS))
)


@dataclass
class Launches:
    """Stands in for the kernel and its clock: a call with any other grid than 30 CTAs takes twice as long."""

    made: list[tuple[int, int, int]] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)

    def make(self, runtime: Any, data: int, nbytes: int, sums: int, ctas: int) -> Any:
        self.made.append((data, nbytes, ctas))
        return SimpleNamespace(run=self.streams.append)

    def median_us(self, call: Callable[[], None], rep_ms: float) -> float:
        call()
        _, nbytes, ctas = self.made[-1]
        return nbytes / 1e6 * (1.0 if ctas == 30 else 2.0)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    made = Launches()
    monkeypatch.setattr(reading, "streaming_read", made.make)
    return made


def test_reading_alone_takes_the_best_grids_time(launches: Launches) -> None:
    reads = reading.StreamingReads(RUNTIME, 0, 7, launches.median_us)
    assert reads.alone_us(1 << 20, 5_000_000) == 5.0
    assert [ctas for _, _, ctas in launches.made] == [10, 20, 30, 40, 80]
    assert set(launches.streams) == {7}


def test_reading_alone_is_measured_once_for_each_size(launches: Launches) -> None:
    reads = reading.StreamingReads(RUNTIME, 0, 0, launches.median_us)
    times = [reads.alone_us(1 << 20, nbytes) for nbytes in (1_000_000, 2_000_000, 1_000_000)]
    assert times == [1.0, 2.0, 1.0]
    assert len(launches.made) == 2 * len(reading.CTAS_PER_MULTIPROCESSOR)


def test_bandwidth_is_that_of_the_best_grid_beside_the_others(launches: Launches) -> None:
    found = reading.StreamingReads(RUNTIME, 0, 0, launches.median_us).bandwidth(1 << 20, 4_000_000)
    assert (found["bytes"], found["tb_per_s"]) == (4_000_000, 1.0)
    assert found["tb_per_s_by_ctas"] == {"10": 0.5, "20": 0.5, "30": 1.0, "40": 0.5, "80": 0.5}
