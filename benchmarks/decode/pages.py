"""The pages that hold figures, each from the JSON in the folder of results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from . import client_pages, host_page, mla_page, operator_pages, page, serving_page
from .profile_table import profiled
from .tables import Report, report_of


def _profiled_too(name: str, figures: Callable[[Report], str]) -> Callable[[Path], str]:
    def text(results: Path) -> str:
        profile = profiled(report_of(results / "profile.json"), name)
        return "\n\n".join((figures(report_of(results / f"{name}.json")), *profile))

    return text


def _h100(results: Path) -> str:
    decode = page.figures(report_of(results / "decode_h100.json"), pictures=False)
    mla = mla_page.figures(report_of(results / "mla_h100.json"))
    return "\n\n".join(("## Paged decode", decode, "## MLA decode", mla))


# Name of a page in docs, and what stands between its markers.
PAGES: Mapping[str, Callable[[Path], str]] = MappingProxyType(
    {
        "results/decode": _profiled_too("decode", page.figures),
        "results/mla": _profiled_too("mla", mla_page.figures),
        "results/h100": _h100,
        "results/host": host_page.figures,
        "append": lambda results: operator_pages.copying(report_of(results / "append.json")),
        "batch_invariance": lambda results: operator_pages.invariance(report_of(results / "invariant.json")),
        "context_parallel": lambda results: client_pages.context_parallel(
            report_of(results / "context_parallel_alone.json")
        ),
        "flashinfer": lambda results: client_pages.flashinfer(report_of(results / "flashinfer_tests.json")),
        "transformers": lambda results: client_pages.transformers(report_of(results / "transformers.json")),
        "results/serving": lambda results: serving_page.figures(report_of(results / "serving.json")),
    }
)
