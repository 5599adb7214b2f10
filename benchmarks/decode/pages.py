"""The pages that hold figures, each from the JSON in the folder of results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from . import client_pages, host_page, mla_page, operator_pages, page, regime, serving_page
from .freshness import EARLIER, beyond, explained, marked, pinned
from .profile_table import profiled
from .tables import Report, report_of

SINGLE = (
    "Sections that were not measured in sequences of layers: medians of single calls, L2 cleared before each. "
    "The pictures show the same run, with its rows of the sections above."
)


def _decode(results: Path) -> str:
    digests = pinned(results)
    names = ("decode", "decode_single", "engine_regime", "method_check")
    newest, single, planned, methods = (report_of(results / f"{name}.json") for name in names)
    parts = [page.figures(marked(newest, digests), pictures=False), *regime.planned(marked(planned, digests))]
    parts += [*regime.other_methods(marked(methods, digests)), "## Single calls", SINGLE]
    parts += [page.figures(marked(beyond(single, newest), digests)), *_profiled(results, "decode")]
    return explained("\n\n".join(parts))


def _mla(results: Path) -> str:
    report = marked(report_of(results / "mla.json"), pinned(results))
    return explained("\n\n".join((mla_page.figures(report), *_profiled(results, "mla"))))


def _profiled(results: Path, name: str) -> tuple[str, ...]:
    title, *rest = profiled(report_of(results / "profile.json"), name)
    return title, EARLIER, *rest


def _h100(results: Path) -> str:
    decode, mla = (marked(report_of(results / f"{name}_h100.json"), pinned(results)) for name in ("decode", "mla"))
    parts = ("## Paged decode", page.figures(decode, pictures=False), "## MLA decode", mla_page.figures(mla))
    return explained("\n\n".join(parts))


def _earlier(figures: Callable[[Report], str], name: str) -> Callable[[Path], str]:
    """Figures of a report whose rows do not say which cubins they launched."""
    return lambda results: f"{EARLIER}\n\n{figures(report_of(results / f'{name}.json'))}"


# Name of a page in docs, and what stands between its markers.
PAGES: Mapping[str, Callable[[Path], str]] = MappingProxyType(
    {
        "results/decode": _decode,
        "results/mla": _mla,
        "results/h100": _h100,
        "results/host": lambda results: f"{EARLIER}\n\n{host_page.figures(results)}",
        "append": _earlier(operator_pages.copying, "append"),
        "batch_invariance": _earlier(operator_pages.invariance, "invariant"),
        "context_parallel": _earlier(client_pages.context_parallel, "context_parallel_alone"),
        "flashinfer": lambda results: client_pages.flashinfer(report_of(results / "flashinfer_tests.json")),
        "transformers": _earlier(client_pages.transformers, "transformers"),
        "results/serving": _earlier(serving_page.figures, "serving"),
    }
)
