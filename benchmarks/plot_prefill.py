"""The page and the picture of context attention from its JSON; measures nothing, needs no GPU.

Run: ``python benchmarks/plot_prefill.py`` writes ``docs/results/prefill.md`` and draws ``docs/prefill_roofline.png``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from decode.freshness import beyond, marked, pinned
from decode.tables import report_of
from prefill.page import SCHEMA, draw, page

ROOT = Path(__file__).resolve().parents[1]


def text(results: Path) -> str:
    """The page from the folder of results, its rows marked where the pinned release has other cubins."""
    newest, single, profile = (
        report_of(results / f"{name}.json") for name in ("prefill", "prefill_single", "prefill_profile")
    )
    digests = pinned(results)
    return page(marked(newest, digests), marked(beyond(single, newest, "case"), digests), profile)


def main() -> int:
    """Write and draw; 1 without a measurement that this reads."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="the folder of the JSON")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="the folder of the page and the picture")
    parser.add_argument("--page", action="store_true", help="only write the page")
    given = parser.parse_args()
    report = report_of(given.results / "prefill.json")
    if report.get("schema") != SCHEMA:
        print(f"{given.results / 'prefill.json'}: schema {report.get('schema')}, expected {SCHEMA}")
        return 1
    (given.docs / "results" / "prefill.md").write_text(text(given.results))
    if not given.page:
        draw(report_of(given.results / "prefill_single.json"), given.docs / "prefill_roofline.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
