"""The pages that hold figures, each from the JSON in the folder of results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from decode import (
    client_pages,
    divided_page,
    host_page,
    l2_page,
    mla_page,
    models_page,
    operator_pages,
    page,
    regime,
    serving_page,
    summary,
)
from decode.freshness import EARLIER, explained, is_fresh, marked, pinned
from decode.profile_table import profiled
from decode.tables import NOT_MEASURED, Report, report_of
from prefill import page as prefill_page

from kernels_src.variants import GROUP_L2_POLICY, L2_POLICIES, LOAD_FUNCTION
from parts import engines_page, fetch_page


def _reports(results: Path, *names: str) -> list[Report]:
    """Measurements whose stale rows are marked."""
    digests = pinned(results)
    return [marked(report_of(results / f"{name}.json"), digests) for name in names]


def _decode(results: Path) -> str:
    names = ("decode", "decode_groups", "engine_regime", "method_check")
    newest, groups, planned, methods = _reports(results, *names)
    parts = [*summary.slower(newest), page.figures(newest)]
    parts += ["### Groupings and batch invariance", page.figures(groups, pictures=False)]
    parts += [*regime.planned(planned), *regime.other_methods(methods), *_profiled(results, "decode")]
    return explained("\n\n".join(parts))


def _mla(results: Path) -> str:
    names = ("mla", "mla_flashmla", "engine_regime_mla", "sparse_mla", "sparse_mla_soak")
    report, flashmla, planned, sparse, soak = _reports(results, *names)
    beside = (mla_page.beside_flashmla(flashmla), *summary.slower(flashmla))
    own = (*summary.slower(report), mla_page.figures(report))
    lists = (*mla_page.sparse(sparse), *summary.slower(sparse), mla_page.sparse_soak(soak))
    return explained("\n\n".join((*own, *beside, *regime.planned(planned), *_profiled(results, "mla"), *lists)))


def _profiled(results: Path, name: str) -> tuple[str, ...]:
    report = report_of(results / "profile.json")
    title, *rest = profiled(report, name)
    return title, _aged("\n\n".join(rest), report["rows"], results)


def _prefill(results: Path) -> str:
    report, chunks, over_e4m3 = _reports(results, "prefill", "engine_chunks", "context_e4m3")
    if report.get("schema") != prefill_page.SCHEMA:
        return NOT_MEASURED
    profile = report_of(results / "prefill_profile.json")
    title, balance = prefill_page.balance(profile)
    parts = (*summary.slower(report), prefill_page.figures(report), title, _aged(balance, profile["rows"], results))
    parts += (*regime.chunks(chunks), *prefill_page.over_e4m3(over_e4m3))
    return explained("\n\n".join(parts))


def _h100(results: Path) -> str:
    names = ("decode", "engine_regime", "mla", "prefill")
    decode, planned, mla, prefill = _reports(results, *(f"{name}_h100" for name in names))
    parts = ["## Paged decode", *summary.slower(decode), page.figures(decode, pictures=False)]
    parts += regime.planned(planned) if planned else ()
    parts += ["## MLA decode", *summary.slower(mla), mla_page.figures(mla)]
    parts += ["## Context attention", *summary.slower(prefill), prefill_page.figures(prefill, pictures=False)]
    return explained("\n\n".join(parts))


def _host(results: Path) -> str:
    calls = report_of(results / "host_cost.json").get("microseconds", {})
    ours = [row for name, row in calls.items() if not name.startswith(host_page.NOT_OURS)]
    return _aged(host_page.figures(results), ours, results)


def _aged(text: str, rows: Iterable[Mapping[str, Any]], results: Path) -> str:
    """The text, behind a word on its age where a row was not measured with the pinned release."""
    digests = pinned(results)
    return text if all(is_fresh(row, digests) for row in rows) else f"{EARLIER}\n\n{text}"


def _append(results: Path) -> str:
    report = report_of(results / "append.json")
    return _aged(operator_pages.copying(report), (*report["append"], *report["merge"]), results)


def _invariance(results: Path) -> str:
    report = report_of(results / "invariant.json")
    over_e4m3 = report_of(results / "invariant_e4m3_h200.json")
    parts = [_aged(operator_pages.invariance(own), own["rows"], results) for own in (report, over_e4m3) if own]
    data = "[`invariant_e4m3_h200.json`](../benchmarks/results/invariant_e4m3_h200.json)"
    return f"\n\nOver e4m3 caches ({data}): ".join(parts)


def _policies(results: Path) -> str:
    chosen = {**L2_POLICIES, "groups of paged_mla_decode": GROUP_L2_POLICY, "loads": f"`{LOAD_FUNCTION}`"}
    words = {name: "no hint" if policy == "evict_unchanged" else policy for name, policy in chosen.items()}
    report = report_of(results / "l2_policies.json")
    return _aged(l2_page.figures(report, words), report["rows"], results)


def _earlier(figures: Callable[[Report], str], name: str) -> Callable[[Path], str]:
    """Figures of a report whose rows do not say which cubins they launched."""
    return lambda results: f"{EARLIER}\n\n{figures(report_of(results / f'{name}.json'))}"


def _transformers(results: Path) -> str:
    report = report_of(results / "transformers.json")
    measured = _aged(client_pages.transformers(report), report["steps"], results)
    return "\n\n".join((measured, models_page.figures(report_of(results / "transformers_models.json"))))


def _divided(results: Path) -> str:
    measured = report_of(results / "context_parallel.json")
    title, _, rest = client_pages.context_parallel(report_of(results / "context_parallel_alone.json")).partition("\n\n")
    alone = "\n\n".join((title, EARLIER, rest))
    text = divided_page.steps(measured)
    return "\n\n".join((_aged(text, measured["rows"], results), alone)) if text else alone


def _several(results: Path) -> str:
    report = report_of(results / "soak.json")
    text = divided_page.soak(report)
    parts = [divided_page.outcome(report_of(results / "gpu_run_two_gpus.json"))]
    parts.append(divided_page.parallel(report_of(results / "flashinfer_parallel.json")))
    parts += [_aged(text, report["rows"], results) if text else NOT_MEASURED, engines_page.ranks(results)]
    return "\n\n".join(filter(None, parts))


# Name of a page in docs, and what stands between its markers.
PAGES: Mapping[str, Callable[[Path], str]] = MappingProxyType(
    {
        "results/index": summary.overview,
        "results/decode": _decode,
        "results/mla": _mla,
        "results/prefill": _prefill,
        "results/h100": _h100,
        "results/host": _host,
        "results/l2_policies": _policies,
        "append": _append,
        "engines": engines_page.figures,
        "batch_invariance": _invariance,
        "context_parallel": _divided,
        "several_gpus": _several,
        "flashinfer": lambda results: client_pages.flashinfer(report_of(results / "flashinfer_tests.json")),
        "flash_attn": lambda results: client_pages.flash_attn(report_of(results / "flash_attn_tests.json")),
        "sparse_mla": lambda results: client_pages.flash_mla(report_of(results / "flash_mla_tests.json")),
        "transformers": _transformers,
        "results/fetching": lambda results: fetch_page.figures(report_of(results / "fetch.json")),
        "speculative": _earlier(operator_pages.draft_tokens, "drafts"),
        "results/serving": _earlier(serving_page.figures, "serving"),
    }
)
