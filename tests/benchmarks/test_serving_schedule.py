"""The schedule of the serving benchmark, which needs no GPU."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.serving_loop.schedule import Request, Scheduler, requests_at_random

REQUESTS = requests_at_random(200, 0, per_second=50.0, vocabulary=100, longest=900)


def served(requests: list[Request], **changes: int) -> tuple[dict[int, int], int]:
    """Run a schedule to its end: the tokens that each request made, and the steps."""
    sizes = {"pages": 60, "page_size": 64, "slots": 16, "step_tokens": 256, **changes}
    scheduler = Scheduler.of(requests, **sizes)
    made: dict[int, int] = {}
    steps, now = 0, 0.0
    while not scheduler.is_over:
        scheduler.admit(now)
        step = scheduler.step()
        in_use = [page for active in scheduler.active for page in active.pages]
        assert sorted(in_use + scheduler.free) == list(range(sizes["pages"]))
        assert len({active.slot for active in scheduler.active}) == len(scheduler.active) <= sizes["slots"]
        assert len(step.decodes) + sum(chunk.tokens for chunk in step.chunks) <= sizes["step_tokens"]
        for active in scheduler.active:
            assert active.length <= len(active.pages) * sizes["page_size"]
        makers, _ = scheduler.done(step)
        for active in makers:
            made[active.request.number] = made.get(active.request.number, 0) + 1
        steps, now = steps + 1, now + 0.01
        assert steps < 100_000
    return made, steps


def test_every_request_gets_all_its_tokens() -> None:
    made, _ = served(REQUESTS)
    assert made == {request.number: request.wanted for request in REQUESTS}


def test_a_larger_step_takes_fewer_steps() -> None:
    assert served(REQUESTS, step_tokens=2048)[1] < served(REQUESTS, step_tokens=64)[1]


def test_requests_arrive_in_order_and_nobody_is_admitted_before() -> None:
    assert [request.arrival for request in REQUESTS] == sorted(request.arrival for request in REQUESTS)
    scheduler = Scheduler.of(REQUESTS, pages=60, page_size=64, slots=16, step_tokens=256)
    assert scheduler.admit(REQUESTS[0].arrival / 2) == []
    assert [active.request for active in scheduler.admit(REQUESTS[1].arrival)] == REQUESTS[:2]


@pytest.mark.parametrize("shuffle", [1, 2])
def test_other_arrivals_are_of_the_same_requests_in_another_order(shuffle: int) -> None:
    others = requests_at_random(200, 0, per_second=50.0, vocabulary=100, longest=900, shuffle=shuffle)
    numbers = [request.number for request in others]
    assert sorted(numbers) == list(range(200))
    assert numbers != list(range(200))
    by_number = {request.number: request for request in REQUESTS}
    for request in others:
        assert request.wanted == by_number[request.number].wanted
        assert np.array_equal(request.prompt, by_number[request.number].prompt)
