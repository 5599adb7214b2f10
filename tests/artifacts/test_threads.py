from __future__ import annotations

import threading

import pytest

from cubin_runtime.artifacts.threads import map_in_threads


@pytest.mark.parametrize("jobs", [1, 3, 100])
def test_results_are_in_the_order_of_the_items(jobs: int) -> None:
    assert map_in_threads(str, range(50), jobs) == [str(number) for number in range(50)]


def test_nothing_to_do_gives_nothing() -> None:
    assert map_in_threads(str, (), 4) == []


@pytest.mark.parametrize("error", [ValueError("first"), KeyboardInterrupt()])
def test_after_an_error_nothing_new_is_begun_and_no_thread_is_left(error: BaseException) -> None:
    before = threading.active_count()
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        raise error

    with pytest.raises(type(error)):
        map_in_threads(work, range(1000), 4)
    assert len(begun) <= 4
    assert threading.active_count() == before
