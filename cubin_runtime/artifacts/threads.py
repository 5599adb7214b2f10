"""Work in threads, of which the system may refuse some or all: the caller's own does what the others do not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def try_start(thread: threading.Thread) -> bool:
    """Start a thread; return False if the system refuses one more, as under a limit on processes."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def map_in_threads(work: Callable[[ItemT], ResultT], items: Sequence[ItemT], jobs: int) -> list[ResultT]:
    """The results of ``work`` in the order of ``items``, computed by up to ``jobs`` threads, the caller's included.

    Nothing new is begun after an error or an interrupt, which is raised when what was begun has ended.
    """
    places: Iterator[int] = iter(range(len(items)))
    next_place = threading.Lock()
    results: dict[int, ResultT] = {}
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while not errors:
                with next_place:
                    place = next(places, None)
                if place is None:
                    return
                results[place] = work(items[place])
        except BaseException as error:
            errors.append(error)

    helpers = [threading.Thread(target=run) for _ in range(min(jobs, len(items)) - 1)]
    started: list[threading.Thread] = []
    try:
        started += filter(try_start, helpers)
        run()
        for helper in started:
            helper.join()
    except BaseException as error:  # an interrupt: nothing of ours runs on behind it
        errors.append(error)
        for helper in started:
            helper.join()
    if errors:
        raise errors[0]
    return [results[place] for place in range(len(items))]
