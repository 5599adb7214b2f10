"""The pictures of the clients' pages from their JSON."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from decode.client_pages import LAYOUTS, OUTCOMES, step_label
from decode.tables import Report

_OURS, _OURS_TOO, _PEER = "#1f6fb4", "#8fb7dc", "#9a9a9a"
_OUTCOME_COLORS = {
    "passed": _OURS,
    "refused": "#d1722a",
    "failed": "#a01818",
    "untouched": "#b8860b",
    "skipped": "#c4c4c4",
    "not run": "#e8e8e8",
}
_PEER_COLORS = ("#d1722a", "#2a9d8f", "#8e5ea2", "#6f6f6f", "#b8860b", "#c1440e")
_BATCHES = {1: "#1f6fb4", 8: "#2a9d8f", 64: "#d1722a"}
_LATENCIES = {"first_token_ms": "arrival to first token", "between_tokens_ms": "between tokens of a request"}


def _figure(title: str, height: float = 4.4, **panels: Any) -> tuple[Any, Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.8, height), layout="constrained", **panels)
    figure.suptitle(textwrap.fill(title, 72), fontsize=9)
    return pyplot, figure, axes


def _save(pyplot: Any, figure: Any, image: Path) -> None:
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=150)
    pyplot.close(figure)


def draw_flashinfer(report: Report, image: Path) -> None:
    """A bar for each file of FlashInfer's tests, divided by outcome."""
    title = (
        f"FlashInfer's tests ({report['tests']}) on our functions, {report['gpu']}: {report['sample']:,} sampled tests"
    )
    pyplot, figure, axes = _figure(title)
    files = dict(sorted(report["files"].items(), key=lambda one: -sum(one[1].get(name, 0) for name in OUTCOMES)))
    longest = max(sum(counts.get(name, 0) for name in OUTCOMES) for counts in files.values())
    for place, counts in enumerate(files.values()):
        left = 0
        for name, color in _OUTCOME_COLORS.items():
            count = counts.get(name, 0)
            axes.barh(place, count, left=left, height=0.68, color=color, zorder=2)
            if count > 0.035 * longest:
                ink = "#ffffff" if name in ("passed", "refused", "failed") else "#222222"
                axes.text(left + count / 2, place, str(count), ha="center", va="center", fontsize=8, color=ink)
            left += count
    axes.set_yticks(range(len(files)), [Path(name).name for name in files], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("tests")
    axes.grid(True, axis="x", alpha=0.3)
    total = report["total"]
    known = [name for name in OUTCOMES if total.get(name)]
    from matplotlib.patches import Patch

    handles = [Patch(color=_OUTCOME_COLORS[name], label=f"{OUTCOMES[name]}: {total[name]:,}") for name in known]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    _save(pyplot, figure, image)


def draw_serving(report: Report, image: Path) -> None:
    """Percentiles of the two latencies of each engine."""
    load, gpu = report["load"], report["environment"]["gpu"]["name"]
    title = (
        f"Serving loop, {gpu}: {load['requests']:,} requests, {load['arrivals_per_second']:.0f} per second, "
        f"{load['layers']} layers; FlashInfer's wrappers in the same loop"
    )
    pyplot, figure, panels = _figure(title, ncols=2)
    engines, percentiles = report["engines"], (50, 90, 99)
    colors = dict(zip([name for name in engines if name != "flashinfer"], (_OURS, _OURS_TOO), strict=False))
    width = 0.8 / len(engines)
    for axes, (key, words) in zip(panels, _LATENCIES.items(), strict=True):
        for beside, (name, found) in enumerate(engines.items()):
            places = [place + width * (beside - (len(engines) - 1) / 2) for place in range(len(percentiles))]
            times = [found[f"{key}_p{p}"] for p in percentiles]
            bars = axes.bar(places, times, width=0.92 * width, color=colors.get(name, _PEER), label=name, zorder=2)
            axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=2)
        axes.set_xticks(range(len(percentiles)), [f"p{p}" for p in percentiles])
        axes.set_ylabel("ms")
        axes.set_title(words, fontsize=10)
        axes.margins(y=0.1)
        axes.grid(True, axis="y", alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    _save(pyplot, figure, image)


def draw_transformers(report: Report, image: Path) -> None:
    """The speed-up over each other implementation: of every step as transformers runs it, and of graph replays."""
    environment, rows = report["environment"], [row for row in report["steps"] if row["ratios"]]
    graphs = [row for row in rows if any("graph_us" in found for found in row["ratios"].values())]
    peers = list(dict.fromkeys(name for row in rows for name in row["ratios"]))
    models = dict.fromkeys(f"{row['layers']} layers of {row['model']}" for row in rows)
    title = (
        f"transformers {environment['packages'].get('transformers', '')}, {', '.join(models)}, "
        f"{environment['gpu']['name']}: forward pass"
    )
    parts = [("us", "as transformers runs it", rows)]
    parts += [("graph_us", "replayed as a CUDA graph", graphs)] if graphs else []
    heights = [len(of_part) for _, _, of_part in parts]
    pyplot, figure, panels = _figure(
        title,
        max(4.6, 0.27 * sum(heights) + 1.9),
        nrows=len(parts),
        squeeze=False,
        sharex=True,
        gridspec_kw={"height_ratios": heights},
    )
    for axes, (key, words, of_part) in zip(panels.flat, parts, strict=True):
        for peer, color, marker in zip(peers, _PEER_COLORS, "osD^vP", strict=False):
            points = [
                (row["ratios"][peer][key], place)
                for place, row in enumerate(of_part)
                if key in row["ratios"].get(peer, {})
            ]
            style = {"color": color, "marker": marker, "markersize": 6, "linestyle": "none", "alpha": 0.85}
            axes.plot([ratio for ratio, _ in points], [place for _, place in points], label=peer, **style)
        axes.set_yticks(range(len(of_part)), [step_label(row, len(models) == 1) for row in of_part], fontsize=8)
        axes.set_ylim(len(of_part) - 0.4, -0.6)
        axes.axvline(1, color="#222222", linewidth=0.9, linestyle=(0, (5, 3)), zorder=1)
        axes.set_title(words, fontsize=9)
        axes.set_xscale("log")
        axes.grid(True, alpha=0.3)
    low, high = panels.flat[-1].get_xlim()
    ticks = [tick for tick in (0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30) if low <= tick <= high]
    panels.flat[-1].set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    for axes in panels.flat:
        axes.minorticks_off()
    panels.flat[-1].set_xlabel("time / ours (above 1: ours is faster)")
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    _save(pyplot, figure, image)


def draw_divided(report: Report, image: Path) -> None:
    """Decode and merge of a rank, when requests are divided over 1 to 64 GPUs."""
    gpu = report["environment"]["gpu"]["name"]
    rows = [row for row in report["rows"] if row["exchange"] == "all_to_all"]
    longest = max(row["kv_len"] for row in rows)
    title = f"Decode and merge of one rank of {longest:,} keys, measured on one {gpu}; without the exchange"
    pyplot, figure, panels = _figure(title, ncols=2, sharey=True)
    worlds = (1, *dict.fromkeys(row["world"] for row in rows))
    for axes, (layout, words) in zip(panels, LAYOUTS.items(), strict=True):
        for batch, color in _BATCHES.items():
            own = [row for row in rows if (row["layout"], row["batch"], row["kv_len"]) == (layout, batch, longest)]
            times = [own[0]["one_gpu_us"], *(row["step_us"] for row in own)]
            axes.plot(worlds, times, "o-", color=color, markersize=4, label=f"batch {batch}")
            axes.plot(worlds, [times[0] / world for world in worlds], ":", color=color, linewidth=0.9)
            for world, time in zip(worlds, times, strict=True):
                axes.annotate(
                    f"{time:,.0f}", (world, time), xytext=(0, 5), textcoords="offset points", fontsize=7, ha="center"
                )
        axes.plot([], [], ":", color="#222222", linewidth=0.9, label="one GPU's time / GPUs")
        axes.set_title(words, fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(worlds, [str(world) for world in worlds])
        axes.minorticks_off()
        axes.grid(True, alpha=0.3)
        axes.set_xlabel("GPUs per request")
    panels[0].set_ylabel("us")
    panels[0].legend(loc="lower left", frameon=False, fontsize=8)
    _save(pyplot, figure, image)
