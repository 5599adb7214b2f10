"""Trying the sources: which of them delivers the manifest of which release, within a time limit."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import CubinRuntimeError
from ...values import dataclass
from ..fetch.pinned_manifests import manifest_request
from ..sources.failover import FetchPolicy
from ..sources.http_pace import HttpLimits
from ..sources.source_list import SourceList
from ..threads import try_start

if TYPE_CHECKING:
    from ..library import Library
    from ..pins.pin import Pin
    from ..sources.source import SourceSpec

TRIAL_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class SourceTrial:
    """The outcome of asking a source for the pinned manifest of a release.

    ``delivers`` is None if it was not asked; ``problem`` says why it did not deliver, or why it was not asked.
    """

    source: str
    release: str
    delivers: bool | None
    seconds: float | None
    problem: str | None


def try_sources(library: Library, *, network: bool) -> tuple[SourceTrial, ...]:
    """Ask every source for the manifest of every release, all at a time; returns after ``TRIAL_SECONDS`` at the latest.

    Args:
        library: its sources are asked; nothing is written.
        network: whether sources on the network are asked, too; offline they never are.
    """
    policy = FetchPolicy(attempts=1)
    limits = HttpLimits(connect=TRIAL_SECONDS, headers=TRIAL_SECONDS, silence=TRIAL_SECONDS, window=TRIAL_SECONDS)
    sources = SourceList(replace(library.config, audit=None), limits, policy)
    trials = [(pin, spec) for pin in library.pins for spec in sources.specs(pin)]
    results: dict[int, SourceTrial] = {}
    threads: list[tuple[int, threading.Thread]] = []
    for number, (pin, spec) in enumerate(trials):
        if spec.kind == "http" and (library.config.offline or not network):
            why = "offline is set" if library.config.offline else "not tried"
            results[number] = SourceTrial(spec.label, pin.name, None, None, why)
        elif spec.kind != "http":
            results[number] = _try(sources, pin, spec)
        else:
            thread = threading.Thread(target=_keep, args=(results, number, sources, pin, spec), daemon=True)
            if try_start(thread):
                threads.append((number, thread))
            else:
                results[number] = _try(sources, pin, spec)
    deadline = time.monotonic() + TRIAL_SECONDS
    for _, thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = f"no whole answer within {TRIAL_SECONDS:g} s"
    return tuple(
        results.get(number) or SourceTrial(spec.label, pin.name, False, TRIAL_SECONDS, late)
        for number, (pin, spec) in enumerate(trials)
    )


def _keep(results: dict[int, SourceTrial], number: int, sources: SourceList, pin: Pin, spec: SourceSpec) -> None:
    results[number] = _try(sources, pin, spec)


def _try(sources: SourceList, pin: Pin, spec: SourceSpec) -> SourceTrial:
    began = time.monotonic()
    problem = None
    try:
        sources.read((spec,), manifest_request(pin))
    except CubinRuntimeError as error:
        _, _, reason = str(error).partition(":\n  ")
        problem = reason.removeprefix(spec.label).lstrip(": ") or str(error)
    return SourceTrial(spec.label, pin.name, problem is None, time.monotonic() - began, problem)
