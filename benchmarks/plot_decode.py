"""Pictures and figures of the decodes from their JSON; measures nothing, needs no GPU.

Run: ``python benchmarks/plot_decode.py`` draws ``docs/decode_bandwidth.png`` and ``docs/decode_roofline.png`` from
``decode_single.json``, which has all sections, and writes the figures of all pages that have them (``decode.pages``)
between their markers; ``--doc`` writes only these, ``--images`` draws only. ``plot_clients.py`` draws the pictures of
the other pages.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from decode import page
from decode.pages import PAGES
from decode.plots import draw_bandwidth, draw_roofline
from decode.tables import report_of, rewrite

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Draw and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="the folder of the JSON")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="the folder of the pages and the pictures")
    parser.add_argument("--doc", action="store_true", help="only write the figures of the pages")
    parser.add_argument("--images", action="store_true", help="only draw the pictures")
    given = parser.parse_args()
    if given.doc or not given.images:
        for name, figures in PAGES.items():
            text = given.docs / f"{name}.md"
            text.write_text(rewrite(text.read_text(), figures(given.results)))
    report = report_of(given.results / "decode_single.json")
    if (given.images or not given.doc) and report.get("schema") == page.SINGLE_CALLS:
        if any(row["section"] == "sweep" for row in report["rows"]):
            draw_bandwidth(report, given.docs / "decode_bandwidth.png")
        draw_roofline(report, given.docs / "decode_roofline.png")


if __name__ == "__main__":
    main()
