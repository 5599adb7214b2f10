"""Our read-only tests: contestants of a sequence, their bandwidth, and the limit of a row."""

from __future__ import annotations

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
    """Stands in for the kernel."""

    made: list[tuple[int, int, int, int, str, int]] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)

    def make(self, runtime: Any, data: int, nbytes: int, sums: int, counters: int, way: Any, ctas: int) -> Any:
        self.made.append((data, nbytes, sums, counters, str(way), ctas))
        return SimpleNamespace(run=self.streams.append)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    made = Launches()
    monkeypatch.setattr(reading, "streaming_read", made.make)
    return made


def test_every_way_has_as_many_ctas_as_it_says_and_its_own_sums(launches: Launches) -> None:
    for make in reading.StreamingReads(RUNTIME, 64).makers(1 << 20, 4_000_000, 1).values():
        make(SimpleNamespace(cuda_stream=7))
    assert [ctas for *_, ctas in launches.made] == [way.ctas * MULTIPROCESSORS for way in reading.WAYS]
    assert {(sums, counters) for _, _, sums, counters, _, _ in launches.made} == {(64 + reading.COUNTERS_BYTES, 64)}


def test_each_layer_of_a_sequence_reads_the_next_bytes(launches: Launches) -> None:
    makers = reading.StreamingReads(RUNTIME, 0).makers(1 << 20, 1_000_000, 3)
    calls = makers["read: bulk_read, evict_first, 2 CTAs a multiprocessor"](SimpleNamespace(cuda_stream=9))
    assert [(data, nbytes) for data, nbytes, *_ in launches.made] == [
        ((1 << 20) + layer * 1_000_000, 1_000_000) for layer in range(3)
    ]
    for call in calls:
        call()
    assert launches.streams == [9, 9, 9]


def test_each_layer_of_a_sequence_reads_the_rows_of_its_list(monkeypatch: pytest.MonkeyPatch) -> None:
    made, streams = list[tuple[Any, ...]](), list[int]()

    def make(runtime: Any, *values: Any) -> Any:
        made.append(values)
        return SimpleNamespace(run=streams.append)

    monkeypatch.setattr(reading, "row_read", make)
    rows = reading.Rows(1 << 20, 656, 2048)
    makers = reading.StreamingReads(RUNTIME, 64).makers_of_rows(rows, [8, 16])
    (_, calls) = (make_calls(SimpleNamespace(cuda_stream=9)) for make_calls in makers.values())
    assert made == [
        (rows, at, 64 + reading.COUNTERS_BYTES, policy, MULTIPROCESSORS)
        for policy in reading.POLICIES
        for at in (8, 16)
    ]
    for call in calls:
        call()
    assert streams == [9, 9]


TIMES: dict[str, dict[str, Any]] = {
    "read: slow": {"us": 3.0},
    "read: fast": {"us": 2.0},
    "read: broken": {"error": "x"},
    "ours": {"us": 1.0},
}


def test_bandwidth_in_a_sequence_is_that_of_the_fastest_way_beside_the_others() -> None:
    assert reading.bandwidth_of(TIMES, 6_000_000) == {
        "bytes": 6_000_000,
        "tb_per_s": 3.0,
        "tb_per_s_by_way": {"slow": 2.0, "fast": 3.0},
    }


def test_the_limit_is_the_fastest_way_that_did_not_fail() -> None:
    assert reading.limit_of(TIMES) == {"read_alone_us": 2.0, "read_alone_way": "fast"}
