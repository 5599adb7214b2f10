"""Pictures and figures of the decode from its JSON; measures nothing, needs no GPU.

Run: ``python benchmarks/plot_decode.py`` draws ``docs/decode_bandwidth.png`` and ``docs/decode_roofline.png`` and
writes the figures of ``docs/decode.md`` between its markers; ``--doc`` writes only these, ``--images`` draws only.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from decode.page import SCHEMA, rewrite
from decode.plots import draw_bandwidth, draw_roofline

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Draw and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "decode.json")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="the folder of decode.md and the pictures")
    parser.add_argument("--doc", action="store_true", help="only write the figures of decode.md")
    parser.add_argument("--images", action="store_true", help="only draw the pictures")
    given = parser.parse_args()
    report = json.loads(given.json.read_text())
    if given.doc or not given.images:
        page = given.docs / "decode.md"
        page.write_text(rewrite(page.read_text(), report))
    if (given.images or not given.doc) and report["schema"] == SCHEMA:
        if any(row["section"] == "sweep" for row in report["rows"]):
            draw_bandwidth(report, given.docs / "decode_bandwidth.png")
        draw_roofline(report, given.docs / "decode_roofline.png")


if __name__ == "__main__":
    main()
