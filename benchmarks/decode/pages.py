"""The pages that hold figures of the decodes, each from the JSON in the folder of results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from . import mla_page, page
from .profile_table import profiled
from .tables import report_of


def _decode(results: Path) -> str:
    profile = profiled(report_of(results / "profile.json"), mla=False)
    return "\n\n".join((page.figures(report_of(results / "decode.json")), *profile))


def _mla(results: Path) -> str:
    profile = profiled(report_of(results / "profile.json"), mla=True)
    return "\n\n".join((mla_page.figures(report_of(results / "mla.json")), *profile))


def _h100(results: Path) -> str:
    decode = page.figures(report_of(results / "decode_h100.json"), pictures=False)
    mla = mla_page.figures(report_of(results / "mla_h100.json"))
    return "\n\n".join(("## Paged decode", decode, "## MLA decode", mla))


# Name of a page in docs, and what stands between its markers.
PAGES: Mapping[str, Callable[[Path], str]] = MappingProxyType({"decode": _decode, "mla": _mla, "h100": _h100})
