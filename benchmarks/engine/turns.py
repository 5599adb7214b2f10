"""Jobs that engines do in turns, so that what changes with time changes for all of them."""

from __future__ import annotations

from typing import Any

from .driver import Engine, Run
from .ratios import ratios_of


def take_turns(
    run: Run, engines: list[Engine], jobs: dict[str, tuple[list[int], int]], fresh: bool = True, **named: Any
) -> None:
    """Jobs in turns, the last engine of a round first in the next; ``fresh``: with prompts that are not cached, of the
    jobs that the command names."""
    for number, (name, (prompts, new)) in enumerate(jobs.items(), 1):
        if fresh and run.jobs and number not in run.jobs:
            continue
        for engine in engines:
            engine.ask("job", prompts=prompts, new=min(new, 8), seed=1)
        rounds: dict[str, list[Any]] = {engine.label: [] for engine in engines}
        for turn in range(run.rounds):
            seed = 2 + turn if fresh else 1
            for engine in engines if turn % 2 else engines[::-1]:
                rounds[engine.label].append(engine.ask("job", prompts=prompts, new=new, seed=seed, fresh=fresh))
        run.row(**named, job=name, rounds=rounds, ratios=ratios_of(rounds, run.ours))
