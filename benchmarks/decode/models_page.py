"""What the sweep over transformers' causal models found, as Markdown from its JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .tables import Report, table

# Status -> what the page says of it, in the order of the page.
STATUSES = {
    "right": "every case that transformers runs is right",
    "own attention": "right, and the model never calls an attention function: it computes attention itself",
    "partly refused": "some cases are right, others raise UsageError",
    "refused": "raises UsageError",
    "failed": "ends in another error",
    "wrong": "other logits than transformers' own attention",
    "not run": "does not run on text alone",
    "not built": "no small configuration that its rules allow",
    "not reached": "the time was up",
}
DECISIVE = 0.1  # as in tests/integrations/sweep_cases.py
_REASONED = ("partly refused", "refused", "failed", "wrong")


def figures(report: Report) -> str:
    """The counts, the models of each status, and why models are refused; nothing before the sweep."""
    if not report:
        return ""
    environment, models = report["environment"], report["models"]
    packages = environment["packages"]
    groups = {status: [kind for kind, row in models.items() if row["status"] == status] for status in STATUSES}
    counted = [(status, str(len(kinds)), STATUSES[status]) for status, kinds in groups.items() if kinds]
    named = [f"- **{status}**: {', '.join(f'`{kind}`' for kind in kinds)}" for status, kinds in groups.items() if kinds]
    reasons = [
        (f"`{kind}`", _named(cases, models[kind]), f"`{reason}`")
        for status in _REASONED
        for kind in groups[status]
        for reason, cases in _reasons(models[kind]).items()
    ]
    parts = [
        "## Every causal model",
        f"{environment['gpu']['name']}, transformers {packages.get('transformers', '-')}, torch "
        f"{packages.get('torch', '-')}; {environment['date'][:10]}. {len(models)} types of models: those of "
        "`MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`, and of `MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES` on text; small, "
        "random weights, bf16. Cases: a prompt; a prompt, a chunk and single tokens on dynamic and static caches, with "
        "and without padding on the left; a batch of mixed lengths; greedy `generate`; continuous batching. Logits are "
        "right if their error beside float32 (root mean square) is at most 1.5 times that of sdpa in bf16, or of "
        f"eager where sdpa is wrong itself; the largest ratio is {_largest(models):.2f}. A "
        "greedy token is right if its logit in float32 is at most a tenth of the largest below the best, or 1.5 times "
        f"as far as that of transformers' own attention; in {_weak(models)} cases that one is further than a tenth "
        "itself, and the case says little. A case that transformers does not run does not count. Data: "
        "[`transformers_models.json`](../benchmarks/results/transformers_models.json).",
        table(("status", "models", "meaning"), counted),
        "\n".join(named),
    ]
    return "\n\n".join([*parts, *([table(("model", "cases", "error"), reasons)] if reasons else [])])


def _reasons(row: Mapping[str, Any]) -> dict[str, list[str]]:
    """Why cases are not right -> these cases."""
    found: dict[str, list[str]] = {}
    for name, case in row.get("cases", {}).items():
        if case["verdict"] in ("refused", "failed", "wrong"):
            error = case["error"] if isinstance(case.get("error"), str) else f"wrong: {case}"
            found.setdefault(_short(error), []).append(name)
    return found


def _named(cases: list[str], row: Mapping[str, Any]) -> str:
    """The cases, or that these are all that transformers runs."""
    ran = [name for name, case in row["cases"].items() if case["verdict"] != "absent"]
    return "all" if cases == ran else ", ".join(cases)


def _short(error: str) -> str:
    words = error.removeprefix("UsageError: ").replace("|", "/").replace("`", "'")
    return words if len(words) <= 120 else f"{words[:117]}..."


def _largest(models: Mapping[str, Mapping[str, Any]]) -> float:
    return max(_ratios(models), default=0.0)


def _weak(models: Mapping[str, Mapping[str, Any]]) -> int:
    """Cases of tokens in which transformers' own attention is far from float32."""
    cases = (case for row in models.values() for case in row.get("cases", {}).values())
    return sum("regret" in case and case["beside"] > DECISIVE for case in cases)


def _ratios(models: Mapping[str, Mapping[str, Any]]) -> Iterator[float]:
    for row in models.values():
        for case in row.get("cases", {}).values():
            if case["verdict"] == "right" and "error" in case and min(case["beside"].values()) > 0:
                yield case["error"] / min(case["beside"].values())
