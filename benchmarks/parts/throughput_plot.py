"""The plot of a cold fetch's throughput against its jobs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def draw(report: Mapping[str, Any], image: Path) -> None:
    """Draw ``throughput`` of the JSON report."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.8, 4.2), layout="constrained")
    beside = report.get("measured_apart", {}).get("throughput", report["versions"])["peer"]
    styles = {"ours": ("cubin-runtime", "o-", "#1f6fb4"), "peer": (beside, "s--", "#8a8a8a")}
    for side, (label, style, color) in styles.items():
        points = report["throughput"][side]
        jobs = [point["jobs"] for point in points]
        rates = [point["MB_per_s"] for point in points]
        axes.plot(jobs, rates, style, color=color, label=label)
        for x, y in zip(jobs, rates, strict=True):
            axes.annotate(f"{y:.0f}", (x, y), textcoords="offset points", xytext=(0, 7), ha="center", fontsize=8)
    ticks = sorted({point["jobs"] for side in styles for point in report["throughput"][side]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylim(bottom=0, top=1.15 * max(p["MB_per_s"] for side in styles for p in report["throughput"][side]))
    axes.set_xlabel("files at a time (--jobs)")
    axes.set_ylabel("MB/s, hashed and published")
    versions, machine = report["versions"], report["machine"]
    size = f"{versions['files']:,} files, {versions['bytes'] / 1e9:.2f} GB"
    loads = [point["load"] for side in styles for point in report["throughput"][side]]
    place = f"nginx on loopback, {machine['cores']} cores, one-minute load {min(loads):.1f} to {max(loads):.1f}"
    axes.set_title(f"Cold fetch of {versions['release']} ({size})\n{place}", fontsize=9)
    axes.grid(True, alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=140)
