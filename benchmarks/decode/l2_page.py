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
    bits = "The bits of all outputs are the same." if same else "Some outputs have other bits."
    return f"{place} Median ratio of the rows (least to most); above 1 the policy is faster. {bits}\n\n" + table(
        head, lines
    )


def _ratios(rows: list[Row], name: str) -> str:
    found = [next(ratio for key, ratio in row["ratio"].items() if key.endswith(f"-{name}")) for row in rows]
    return f"{statistics.median(found):.3f} ({min(found):.2f} to {max(found):.2f})"
