"""Jobs that engines do in turns, so that what changes with time changes for all of them."""

from __future__ import annotations

from typing import Any

from .driver import Engine, Run


def take_turns(
    run: Run, engines: list[Engine], jobs: dict[str, tuple[list[int], int]], fresh: bool = True, **named: Any
) -> None:
    """Jobs in turns, the last engine of a round first in the next; ``fresh``: with prompts that are not cached."""
    for name, (prompts, new) in jobs.items():
        for engine in engines:
            engine.ask("job", prompts=prompts, new=min(new, 8), seed=1)
        rounds: dict[str, list[Any]] = {engine.label: [] for engine in engines}
        for number in range(run.rounds):
            seed = 2 + number if fresh else 1
            for engine in engines if number % 2 else engines[::-1]:
                rounds[engine.label].append(engine.ask("job", prompts=prompts, new=new, seed=seed, fresh=fresh))
        run.row(**named, job=name, rounds=rounds, ratios=_ratios(rounds, run.ours))


def _ratios(rounds: dict[str, list[dict[str, Any]]], ours: str) -> dict[str, float]:
    """The other backend's best time over ours, for the whole job and for its decodes."""
    kinds = [kind for kind in ("whole", "decode") if all(kind in each for of in rounds.values() for each in of)]
    best = {kind: {backend: min(each[kind] for each in rounds[backend]) for backend in rounds} for kind in kinds}
    return {
        kind: round(min(of for name, of in times.items() if name != ours) / times[ours], 4)
        for kind, times in best.items()
    }
