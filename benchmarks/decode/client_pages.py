"""The figures of the pages of FlashInfer's functions and of transformers' models, as Markdown from the JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .tables import Report, table, us

# Outcomes of FlashInfer's tests, as the report counts them, in words.
OUTCOMES = {
    "passed": "passed",
    "refused": "refused",
    "failed": "failed",
    "untouched": "untouched",
    "skipped": "skipped by the tests",
    "not run": "not run in time",
}


def flashinfer(report: Report) -> str:
    """What FlashInfer's own tests say: the picture and the totals."""
    total = {name: report["total"].get(name, 0) for name in OUTCOMES}
    untouched = f" {total['untouched']:,} never called our functions." if total["untouched"] else ""
    return (
        "![FlashInfer's tests by file: passed, refused, failed, skipped](flashinfer_tests.png)\n\n"
        f"On an {report['gpu']}, {report['jobs']} processes ran {report['ran']:,} of {report['sample']:,} sampled "
        f"tests of {report['tests']} in {report['seconds']:.0f} seconds: {total['passed']:,} passed, "
        f"{total['refused']:,} were refused, {total['failed']:,} failed.{untouched} The tests skip "
        f"{total['skipped']:,} themselves; the time was up before {total['not run']:,}."
    )


def transformers(report: Report) -> str:
    """Times of steps and ratios of the peers; nothing before they are measured."""
    if not report:
        return ""
    environment = report["environment"]
    packages, rows = environment["packages"], report["steps"]
    layers = "; ".join(dict.fromkeys(f"{row['layers']} layers of {row['model']}" for row in rows))
    peers = tuple(dict.fromkeys(name for row in rows for name in row["ratios"]))
    one_model = len({row["model"] for row in rows}) == 1
    lines = [
        (
            step_label(row, one_model),
            _own(row["times"][report["ours"]]),
            *(_ratio(row["ratios"], name) for name in peers),
        )
        for row in rows
    ]
    heads = ("step", "ours (in a graph)", *(f"{name}, ratio" for name in peers))
    return "\n\n".join(
        (
            "## Measured",
            "![Time of a peer by ours, for prompts and for new tokens](transformers.png)",
            f"{environment['gpu']['name']}, transformers {packages.get('transformers', '-')}, torch "
            f"{packages.get('torch', '-')}; {environment['date'][:10]}. {layers}, random weights, bf16. Medians of "
            f"{report['rounds']} rounds in which the implementations take turns. A ratio is a peer's time by ours, "
            "above 1 where ours is faster; in brackets that of CUDA graph replays. Times are of the whole model, not "
            "of attention alone. `sdpa flash` and `sdpa cuDNN` are sdpa on that backend of torch alone. Data: "
            "[`transformers.json`](../benchmarks/results/transformers.json).",
            table(heads, lines),
            *_batching(report["continuous_batching"], report["ours"]),
            *_absent(rows, report["ours"]),
        )
    )


def step_label(row: Mapping[str, Any], one_model: bool) -> str:
    """A step in words."""
    model = "" if one_model else f"{row['model']}, "
    if row["cache"] == "none":
        return f"{model}{row['batch']} x prompt of {row['tokens']:,}"
    tokens = "1 token" if row["tokens"] == 1 else f"{row['tokens']:,} tokens"
    return f"{model}{row['batch']} x {tokens} after {row['past']:,}, {row['cache']} cache"


def _own(times: Any) -> str:
    if isinstance(times, str):
        return "failed"
    graph = times.get("graph_us")
    return us(times["us"]) + (f" ({us(graph)})" if isinstance(graph, float) else "")


def _ratio(ratios: Mapping[str, Mapping[str, float]], name: str) -> str:
    found = ratios.get(name)
    if not found:
        return "-"
    return f"{found['us']:.2f}" + (f" ({found['graph_us']:.2f})" if "graph_us" in found else "")


def _batching(rows: list[dict[str, Any]], ours: str) -> list[str]:
    words = []
    for row in rows:
        speeds = ", ".join(
            f"{'ours' if name == ours else name} {f'{speed:,.0f}' if isinstance(speed, float) else 'failed'}"
            for name, speed in row["tokens_per_s"].items()
        )
        words.append(
            f"Continuous batching of {row['requests']} requests with prompts of up to {row['longest_prompt']:,} tokens "
            f"and {row['new']} new ones, in tokens per second: {speeds}."
        )
    return words


def _absent(rows: list[dict[str, Any]], ours: str) -> list[str]:
    """Each implementation that has no time for a step, with the first error."""
    errors: dict[str, tuple[str, int]] = {}
    for row in rows:
        for name, found in row["times"].items():
            if isinstance(found, str):
                first, count = errors.get(name, (found, 0))
                errors[name] = (first, count + 1)
    if not errors:
        return []
    lines = [
        (
            "ours" if name == ours else name,
            f"{count} of {len(rows)}",
            f"`{error.replace('|', '/').replace('`', chr(39))}`",
        )
        for name, (error, count) in errors.items()
    ]
    return [table(("not available", "steps", "error"), lines)]
