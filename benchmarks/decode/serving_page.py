"""The figures of ``docs/results/serving.md``, as Markdown from the JSON."""

from __future__ import annotations

import re
from typing import Any

from .tables import NOT_MEASURED, Report, table

_LATENCIES = ("first_token_ms", "between_tokens_ms")
_PERCENTILES = (50, 90, 99)


def figures(report: Report) -> str:
    """The text between the markers: the load, throughput and latencies, and what was checked."""
    if not report:
        return NOT_MEASURED
    load, environment = report["load"], report["environment"]
    errors = ", ".join(f"{error:.1e} ({name})" for name, error in report["worst_relative_error"].items())
    others = report["other_arrivals"]
    return "\n\n".join(
        (
            f"{environment['gpu']['name']}, torch {environment['packages']['torch']}; {environment['date'][:10]}. "
            f"{load['requests']:,} requests with {load['prompt_tokens']:,} prompt tokens and {load['output_tokens']:,} "
            f"output tokens arrive at {load['arrivals_per_second']:.0f} per second; {load['layers']} layers, pages of "
            f"{load['page_size']} tokens, at most {load['step_tokens']:,} tokens per step.",
            "![First token and time between tokens, percentiles of each engine](../serving_latency.png)",
            _engines(report["engines"]),
            f"Largest relative error of the sampled outputs: {errors}. With other arrivals in another order, "
            f"{others['with_other_tokens']} of {others['requests']:,} requests of the batch-invariant engine got other "
            "tokens.",
            *_speculation(report.get("speculation")),
        )
    )


def _engines(engines: dict[str, dict[str, float]]) -> str:
    heads = ("engine", "tokens/s", "first token, ms (p50 / p90 / p99)", "between tokens, ms", "graph / mixed steps")
    rows = [
        (
            re.sub(r"\bdrafts$", "draft tokens", name),
            f"{found['tokens_per_second']:,.0f}",
            *(" / ".join(f"{found[f'{kind}_p{p}']:.1f}" for p in _PERCENTILES) for kind in _LATENCIES),
            f"{found['graph_steps']:.0f} / {found['mixed_steps']:.0f}",
        )
        for name, found in engines.items()
    ]
    return table(heads, rows)


def _speculation(found: dict[str, Any] | None) -> tuple[str, ...]:
    if found is None:
        return ()
    return (
        f"Speculative decoding (model with an LM head): trees of {found['drafts']} draft tokens, {found['levels']} "
        f"levels deep, with an acceptance rate of {found['right_at_each_level']} per level. A step of a request gives "
        f"{found['tokens_per_request_and_step']} tokens; {100 * found['equal_tokens']:.1f}% of all tokens are those of "
        "single steps.",
        _engines(found["engines"]),
    )
