"""Our read-only tests: the bandwidth of the best way, contestants of a sequence, and their limit."""

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


BEST = "bulk_read, evict_first, 2 CTAs a multiprocessor"


@dataclass
class Launches:
    """Stands in for the kernel and its clock: any way but ``BEST`` takes twice as long."""

    made: list[tuple[int, int, int, int, str, int]] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)

    def make(self, runtime: Any, data: int, nbytes: int, sums: int, counters: int, way: Any, ctas: int) -> Any:
        self.made.append((data, nbytes, sums, counters, str(way), ctas))
        return SimpleNamespace(run=self.streams.append)

    def median_us(self, call: Callable[[], None], rep_ms: float) -> float:
        call()
        _, nbytes, _, _, way, _ = self.made[-1]
        return nbytes / 1e6 * (1.0 if way == BEST else 2.0)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    made = Launches()
    monkeypatch.setattr(reading, "streaming_read", made.make)
    return made


def test_bandwidth_is_that_of_the_best_way_beside_the_others(launches: Launches) -> None:
    found: Any = reading.StreamingReads(RUNTIME, 64, 7, launches.median_us).bandwidth(1 << 20, 4_000_000)
    assert (found["bytes"], found["tb_per_s"]) == (4_000_000, 1.0)
    assert found["tb_per_s_by_way"] == {str(way): 1.0 if str(way) == BEST else 0.5 for way in reading.WAYS}
    assert set(launches.streams) == {7}


def test_every_way_has_as_many_ctas_as_it_says_and_its_own_sums(launches: Launches) -> None:
    reading.StreamingReads(RUNTIME, 64, 7, launches.median_us).bandwidth(1 << 20, 4_000_000)
    assert [ctas for *_, ctas in launches.made] == [way.ctas * MULTIPROCESSORS for way in reading.WAYS]
    assert {(sums, counters) for _, _, sums, counters, _, _ in launches.made} == {(64 + reading.COUNTERS_BYTES, 64)}


def test_each_layer_of_a_sequence_reads_the_next_bytes(launches: Launches) -> None:
    makers = reading.StreamingReads(RUNTIME, 0, 0, launches.median_us).makers(1 << 20, 1_000_000, 3)
    calls = makers[f"read: {BEST}"](SimpleNamespace(cuda_stream=9))
    assert [(data, nbytes) for data, nbytes, *_ in launches.made] == [
        ((1 << 20) + layer * 1_000_000, 1_000_000) for layer in range(3)
    ]
    for call in calls:
        call()
    assert launches.streams == [9, 9, 9]


def test_the_limit_is_the_fastest_way_that_did_not_fail() -> None:
    times = {"read: slow": {"us": 3.0}, "read: fast": {"us": 2.0}, "read: broken": {"error": "x"}, "ours": {"us": 1.0}}
    assert reading.limit_of(times) == {"read_alone_us": 2.0, "read_alone_way": "fast"}
