"""All tables of figures, of the pages and of the README, and all pictures, from the JSON; measures nothing.

Run: ``make figures``, or ``python benchmarks/figures.py [PICTURE ...]``: with names only these are drawn; ``--text``
draws none, and needs no matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from decode import plots  # noqa: E402
from decode.freshness import SWEEP  # noqa: E402
from decode.tables import Report, report_of, rewrite  # noqa: E402
from parts import client_plots, host_cost_plot, throughput_plot  # noqa: E402
from parts.pages import PAGES  # noqa: E402
from prefill import page as prefill_page  # noqa: E402

from tools import readme_figures  # noqa: E402

RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
# Picture -> its measurement and what draws it.
PICTURES: Mapping[str, tuple[str, Callable[[Report, Path], None]]] = MappingProxyType(
    {
        "decode_bandwidth": (SWEEP, plots.draw_bandwidth),
        "decode_roofline": ("decode", plots.draw_roofline),
        "prefill_roofline": ("prefill", prefill_page.draw),
        "host_cost": ("host_cost", host_cost_plot.draw),
        "flashinfer_tests": ("flashinfer_tests", client_plots.draw_flashinfer),
        "serving_latency": ("serving", client_plots.draw_serving),
        "transformers": ("transformers", client_plots.draw_transformers),
        "divided_keys": ("context_parallel_alone", client_plots.draw_divided),
        "fetch_throughput": ("fetch", throughput_plot.draw),
    }
)


def write_pages() -> None:
    """All pages with figures between markers, and the README."""
    for name, figures in PAGES.items():
        path = DOCS / f"{name}.md"
        path.write_text(rewrite(path.read_text(), figures(RESULTS)))
    for page in readme_figures.PAGES:
        (ROOT / page).write_text(readme_figures.written(page))


def main() -> None:
    """Write and draw what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pictures", nargs="*", metavar="PICTURE", help=f"of {', '.join(PICTURES)} (all)")
    parser.add_argument("--text", action="store_true", help="draw no picture")
    given = parser.parse_args()
    write_pages()
    for name in () if given.text else given.pictures or PICTURES:
        source, draw = PICTURES[name]
        draw(report_of(RESULTS / f"{source}.json"), DOCS / f"{name}.png")


if __name__ == "__main__":
    main()
