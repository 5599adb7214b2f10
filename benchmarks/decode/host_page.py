"""The figures of ``docs/results/host.md``, as Markdown from the JSON, so that they cannot disagree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .tables import NOT_MEASURED, Report, report_of, table

_PLANNING = "a new batch size"
NOT_OURS = ("torch x", "FlashInfer ", _PLANNING)  # what rows begin with that launch none of our kernels, or many
_STATES = {"plain": "Without torch", "torch": "With torch"}


def figures(results: Path) -> str:
    """The text between the markers: host time per call, and time to the first launch of a process."""
    return "\n\n".join(
        (*_calls(report_of(results / "host_cost.json")), *_first(report_of(results / "first_launch.json")))
    )


def _calls(report: Report) -> list[str]:
    if "microseconds" not in report:
        return [NOT_MEASURED]
    rows: dict[str, Any] = report["microseconds"]
    calls = {name: row for name, row in rows.items() if not name.startswith(_PLANNING)}
    lines = [
        (name.removeprefix("compat "), f"{row['median']:.1f} us", f"{row['floor']:.1f} us", f"{row['ratio']:.2f}")
        for name, row in calls.items()
    ]
    new = {name.removeprefix(_PLANNING).strip(" :,"): row for name, row in rows.items() if name not in calls}
    planning = "; ".join(f"{name} {row['least']:.0f} us, median {row['median']:.0f} us" for name, row in new.items())
    return [
        "## Host time per call",
        f"{_place(report)}.",
        table(("call", "time", "C loop", "ratio"), lines),
        *([f"With a new batch size: {planning}."] if planning else []),
    ]


def _first(report: Report) -> list[str]:
    parts = ["## First launch of a new process"]
    if not report:
        return [*parts, NOT_MEASURED]
    parts.append(f"{_place(report)}. The store is warm; figures are medians of {report['processes']} processes.")
    if report["schema"] == 1:
        return [*parts, _steps(report["median_ms"])]
    for name in _STATES:
        if name in report:
            own = f"{report[name]['own_ms']:.0f} ms without the CUDA context and the tensors"
            parts += [f"**{_STATES[name]}**: {own}.", _steps(report[name]["median_ms"])]
    return parts


def _steps(steps: Report) -> str:
    lines = [(name, f"{ms:.1f} ms") for name, ms in steps.items()]
    first = sum(ms for name, ms in steps.items() if not name.startswith("later"))
    return table(("step", "time"), [*lines, ("total up to the first launch", f"{first:.0f} ms")])


def _place(report: Report) -> str:
    environment = report["environment"]
    known = {True: ", with the accelerator", False: ", without the accelerator"}
    accelerated = known.get(report.get("accelerator"), "")
    torch = environment["packages"].get("torch", "-")
    gpu, date = environment["gpu"]["name"], environment["date"][:10]
    return f"{gpu}, Python {environment['python']}, torch {torch}{accelerated}; {date}"
