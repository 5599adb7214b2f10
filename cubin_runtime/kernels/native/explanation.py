"""The explanation of native launches, from the selections of any family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ...launch.driver import DeviceFacts
from ..explanation import Explanation, Facts, Table
from .cost_model import Costs, Estimate, costs_of, stated
from .l2_policy import L2Choice, l2_choice
from .selection import Candidate, Selection

# Columns of the table of candidates -> terms of an estimate.
_TERMS = {"DRAM us": "dram_us", "L2 us": "l2_us", "tiles us": "tiles_us", "merging us": "merge_us"}


def explain_launches(
    names: Mapping[str, str], shape: Any, device: DeviceFacts, selections: Sequence[Selection], *, pdl: bool
) -> Explanation:
    """The explanation of an operator's launches on ``device``.

    Args:
        names: the ``backend``, ``operator`` and ``operation`` that are explained.
        shape: the problem, a dataclass; ``selections`` are what was chosen for it.
        pdl: whether the launches are programmatic dependent ones.
    """
    estimates = [estimate for selection in selections if (estimate := _chosen(selection).estimate)]
    costs = costs_of(device.name) if estimates else None
    total = sum(estimate.microseconds for estimate in estimates)
    record: dict[str, object] = {
        "backend": names["backend"],
        "operator": names["operator"],
        "launches": [_record(selection, shape, device) for selection in selections],
        "pdl": pdl,
        "shape": fields_of(shape),
        "device": fields_of(device),
    }
    if costs:
        calibration = costs.calibration._asdict()
        record |= {
            "microseconds": total,
            "costs": {"gpu": costs.gpu, "calibration": calibration, **stated(costs)},
        }
    details: list[Facts | Table] = [head] if (head := _of_all(names, device, selections, costs, pdl=pdl)) else []
    for selection in selections:
        details += [facts] if (facts := _details(selection, shape, several=len(selections) > 1)) else []
        details.append(_table(selection, device))
    return Explanation(_choice(selections, shape, device, estimates), tuple(details), record)


def fields_of(value: Any) -> dict[str, object]:
    """The fields of a dataclass by name."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _choice(selections: Sequence[Selection], shape: Any, device: DeviceFacts, estimates: Sequence[Estimate]) -> Facts:
    """The launches; of one launch also why, of several the reasons are details."""
    facts: list[tuple[str, object]] = [("launches", len(selections))] if len(selections) > 1 else []
    for selection in selections:
        kernel = selection.kernel
        grid = f"{selection.ctas} CTAs of {kernel.threads} threads, {kernel.dynamic_shared_bytes} bytes shared memory"
        why = (("why", selection.reason),) if len(selections) == 1 else ()
        facts += [("kernel", kernel.name), *why, ("grid", grid), *selection.facts(shape)]
    policies = dict.fromkeys(choice.policy for selection in selections if (choice := _l2_choice(selection)))
    if policies:
        facts.append(("L2", ", ".join(policies)))
    if not estimates:
        return (*facts, ("device", f"{device.name}, {device.multiprocessors} multiprocessors"))
    limits = " and ".join(dict.fromkeys(estimate.limit for estimate in estimates))
    microseconds = sum(estimate.microseconds for estimate in estimates)
    return (*facts, ("predicted", f"{microseconds:.1f} us on {device.name}, limited by {limits}"))


def _of_all(
    names: Mapping[str, str], device: DeviceFacts, selections: Sequence[Selection], costs: Costs | None, *, pdl: bool
) -> Facts:
    """Details of all launches together."""
    facts: list[tuple[str, object]] = []
    if costs:
        where = f"{device.name}, {device.multiprocessors} multiprocessors, costs of {costs.gpu}"
        facts += [("device", where), ("fitted to", costs.calibration_text)]
    elsewhere = {c.kernel.name: c.kernel.architecture for c in selections[0].candidates if not _runs_on(c, device)}
    if elsewhere:
        targets = ", ".join(sorted(set(map(str, elsewhere.values()))))
        facts.append(("other SMs", f"{len(elsewhere)} more {names['operation']} kernels for {targets}"))
    if pdl:
        facts.append(("attributes", "programmatic dependent launch"))
    return tuple(facts)


def _details(selection: Selection, shape: Any, *, several: bool) -> Facts:
    """Details of a launch."""
    facts: list[tuple[str, object]] = []
    if several:
        facts += [("kernel", selection.kernel.name), ("why", selection.reason)]
    facts += selection.details(shape)
    if choice := _l2_choice(selection):
        facts.append(("L2", f"{choice.policy}: {choice.reason}"))
    if estimate := _chosen(selection).estimate:
        facts.append(("time", f"{estimate.microseconds:.1f} us: {_sum(estimate)}"))
    return tuple(facts)


def _l2_choice(selection: Selection) -> L2Choice | None:
    return l2_choice(selection.kernel, getattr(selection, "cta_group_size", 1))


def _sum(time: Estimate) -> str:
    return (
        f"{time.fixed_us:.1f} to the first byte + the largest of {time.dram_us:.1f} DRAM, {time.l2_us:.1f} L2, "
        f"{time.tiles_us:.1f} tiles of one CTA + {time.merge_us:.1f} merging"
    )


def _table(selection: Selection, device: DeviceFacts) -> Table:
    shown = [(candidate, _cells(candidate)) for candidate in _candidates(selection, device)]
    columns = tuple(shown[0][1])  # those that fit come first
    rows = [(c.kernel.name, *(cells.get(column, "") for column in columns), c.unfit) for c, cells in shown]
    return Table(("kernel", *columns, "why not"), tuple(rows))


def _cells(candidate: Candidate) -> dict[str, object]:
    cells, time = {} if candidate.unfit else candidate.cells(), candidate.estimate
    if time:
        cells |= {column: f"{getattr(time, term):.1f}" for column, term in _TERMS.items()}
        cells["predicted us"] = f"{time.microseconds:.1f}"
    return cells


def _record(selection: Selection, shape: Any, device: DeviceFacts) -> dict[str, object]:
    kernel = selection.kernel
    stated = {name: value for name, value in fields_of(selection).items() if name != "explain"}
    if choice := _l2_choice(selection):
        stated["l2_policy"] = choice._asdict()
    return stated | {
        "kernel": kernel.name,
        "reason": selection.reason,
        "symbol": kernel.symbol,
        "file": kernel.file,
        "status": kernel.status,
        "grid": list(selection.grid(shape)),
        "block": [kernel.threads, 1, 1],
        "smem": kernel.dynamic_shared_bytes,
        "candidates": [_candidate_record(candidate) for candidate in _candidates(selection, device)],
    }


def _candidate_record(candidate: Candidate) -> dict[str, object]:
    stated, time = {"kernel": candidate.kernel.name, "traits": dict(candidate.kernel.traits)}, candidate.estimate
    if candidate.unfit:
        return stated | {"fits": False, "why_not": candidate.unfit}
    terms = {"microseconds": time.microseconds, "terms": time._asdict(), "limit": time.limit} if time else {}
    return stated | {"fits": True, **candidate.record(), **terms}


def _chosen(selection: Selection) -> Candidate:
    return next(c for c in selection.candidates if c.kernel == selection.kernel and not c.unfit)


def _candidates(selection: Selection, device: DeviceFacts) -> list[Candidate]:
    """Return the candidates built for the device: the chosen one, others that fit by time, those that do not fit."""

    def order(candidate: Candidate) -> tuple[bool, float, bool]:
        microseconds = candidate.estimate.microseconds if candidate.estimate else 0.0
        return bool(candidate.unfit), microseconds, candidate.kernel != selection.kernel

    return sorted((c for c in selection.candidates if _runs_on(c, device)), key=order)


def _runs_on(candidate: Candidate, device: DeviceFacts) -> bool:
    major, minor = device.capability
    return candidate.kernel.architecture.runs_on(10 * major + minor)
