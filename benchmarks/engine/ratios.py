"""How much longer another backend takes for a job than ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Rounds = Mapping[str, Sequence[Mapping[str, Any]]]


def best_of(rounds: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The least seconds of ``whole``, a job with new prompts, and ``cached``, with prompts that are in the cache, and
    ``decode``: of the latter without the job of one new token, ``first``, unless that took longer in every round."""
    best = {kind: min(each[kind] for each in rounds) for kind in ("whole", "cached", "first") if kind in rounds[0]}
    decode = best["cached"] - best["first"] if "first" in best else 0.0
    return {**best, "decode": decode} if decode > 0 else best


def ratios_of(rounds: Rounds, ours: str) -> dict[str, float]:
    """The least time of any other backend over ours."""
    best = {name: best_of(made) for name, made in rounds.items()}
    others = [times for name, times in best.items() if name != ours]
    kinds = [kind for kind in ("whole", "cached", "decode") if all(kind in times for times in best.values())]
    return {kind: round(min(times[kind] for times in others) / best[ours][kind], 4) for kind in kinds}
