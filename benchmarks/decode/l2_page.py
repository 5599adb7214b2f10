"""The table of L2 policies, from the JSON of ``gpu_l2_policies.py``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from .rows import Row
from .tables import NOT_MEASURED, Report, table

# Family of rows -> what it reads, how the measured release read it, and the traits of the kernels that say how now.
FAMILIES: Mapping[str, tuple[str, str, str]] = {
    "decode": ("keys and values of a decode", "evict_first", "paged_decode"),
    "few heads": ("MLA keys that one CTA reads", "evict_first", "paged_mla_decode"),
    "MLA groups": ("MLA keys that several CTAs read", "evict_normal", "groups of paged_mla_decode"),
    "prefill": ("keys and values of context attention", "evict_normal", "context_attention"),
    "append": ("new keys and values of an append", "`__ldcs`", "loads"),
    "merge": ("states of a merge", "`__ldcs`", "loads"),
}
EXPERIMENTS = {"unchanged": "no hint", "first": "evict_first"}
HINTED = frozenset({"MLA groups", "prefill"})  # which the measured release read with the hint evict_normal
LOADS = frozenset({"append", "merge"})  # of which the second experiment changes nothing


def figures(report: Report, chosen: Mapping[str, str]) -> str:
    """A line for each family; ``chosen``: what the kernels read with now, by operation."""
    if not report:
        return NOT_MEASURED
    lines = []
    for family, (words, before, operation) in FAMILIES.items():
        rows = [row for row in report["rows"] if row["family"] == family and "ratio" in row]
        names = [name for name in EXPERIMENTS if name == "unchanged" or family not in LOADS]
        ratios = [_ratios(rows, name) if name in names else "-" for name in EXPERIMENTS]
        lines.append([words, str(len(rows)), before, *ratios, chosen[operation]])
    head = ["read", "rows", "before", *(f"{words}: before / it" for words in EXPERIMENTS.values()), "now"]
    environment, method = report["environment"], report["method"]
    place = f"{environment['gpu']['name']}; {environment['date'][:10]}; medians of {method['rounds']} rounds."
    same = all(all(row.get("same_bits", {}).values()) for row in report["rows"])
    bits = "All outputs are bitwise identical." if same else "Some outputs differ."
    ratios = "Median ratio of the rows (least to most); above 1 the policy is faster."
    return f"{place} {ratios} {bits}\n\n{_of_normal(report['rows'])}\n\n{table(head, lines)}"


def _of_normal(rows: list[Row]) -> str:
    """Where the ``evict_normal`` hint was faster than none, beside how far the rounds of such a row are apart."""
    hinted = [row for row in rows if row["family"] in HINTED and "ratio" in row]
    faster = [row for row in hinted if _ratio(row, "unchanged") < 1]
    named = "; ".join(
        f"{row['label']} ({_ratio(row, 'unchanged'):.3f}, rounds {_spread(row):.0%} apart)"
        for row in sorted(faster, key=lambda row: _ratio(row, "unchanged"))
    )
    return f"An `evict_normal` hint was faster than none in {len(faster)} of {len(hinted)} rows: {named or '-'}."


def _spread(row: Row) -> float:
    """How far the rounds of the release and of no hint are apart, the larger of both, by their median."""
    own = [found for name, found in row["times"].items() if name in row["same_bits"] and not name.endswith("-first")]
    return max((max(found["rounds_us"]) - min(found["rounds_us"])) / found["us"] for found in own)


def _ratio(row: Row, name: str) -> float:
    return next(float(ratio) for key, ratio in row["ratio"].items() if key.endswith(f"-{name}"))


def _ratios(rows: list[Row], name: str) -> str:
    found = [_ratio(row, name) for row in rows]
    return f"{statistics.median(found):.3f} ({min(found):.2f} to {max(found):.2f})"
