"""The picture of what calls cost on the host, from the JSON of ``gpu_host_cost.py``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Rows of the JSON -> the most that they may cost, as a ratio to the C loop.
BARS = {
    "plan.run, same tensors": 2.0,
    "plan.run, other q and out": 2.1,
    "bound step(q, table, lens, out), other q and out": 1.7,
    "everything bound": 1.2,
    "paged_decode(out=out)": 2.4,
    "paged_decode()": 2.8,
    "compat xqa_batch_decode_with_kv_cache": 2.5,
    "compat trtllm_batch_decode_with_kv_cache": 2.5,
    "MLA plan.run": 2.0,
    "compat xqa_batch_decode_with_kv_cache_mla": 2.5,
    "compat trtllm_batch_decode_with_kv_cache_mla": 2.5,
}
_PEERS = ("torch ", "FlashInfer ")
_LARGE = ("a new batch size", "torch.compile, ")  # tens of launches: of another scale
_MET, _MISSED, _WITHOUT, _PEER = "#1f6fb4", "#d1722a", "#8fb7dc", "#9a9a9a"


def rows_of(report: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    """The rows that are drawn, in the order of the measurement."""
    table = report["microseconds"].items()
    return {name: row for name, row in table if not name.startswith(_LARGE) or "one more" in name}


def draw(report: Mapping[str, Any], image: Path) -> None:
    """A bar for each call, as long as its cost over that of a C loop that makes the same launch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = rows_of(report)
    figure, axes = pyplot.subplots(figsize=(8.6, 0.32 * len(rows) + 1.6), layout="constrained")
    for place, (name, row) in enumerate(rows.items()):
        ratio, most = row["ratio"], BARS.get(name)
        axes.barh(place, ratio, height=0.68, color=_color(name, ratio), zorder=2)
        if most is not None:
            axes.plot([most, most], [place - 0.42, place + 0.42], color="#111111", linewidth=1.6, zorder=3)
        words = f"{ratio:.2f}  ({row['least']:.1f} us)"
        axes.annotate(words, (max(ratio, most or 0), place), xytext=(6, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), [name.removeprefix("compat ") for name in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.28 * max(max(row["ratio"], BARS.get(name, 0)) for name, row in rows.items()))
    axes.axvline(1, color="#222222", linewidth=0.9, linestyle=(0, (5, 3)), zorder=4)
    axes.set_xlabel("host time of a call / host time of the same launch from C")
    axes.grid(True, axis="x", alpha=0.3)
    gpu = report["environment"]["gpu"]["name"]
    axes.set_title(f"Host time per call, {gpu}", fontsize=10)
    known = {_color(name, row["ratio"]) for name, row in rows.items()}
    words = {_MET: "within its bar", _MISSED: "over its bar", _WITHOUT: "without a bar", _PEER: "other libraries"}
    legend: list[Any] = [Patch(color=color, label=text) for color, text in words.items() if color in known]
    legend.append(Line2D([], [], color="#111111", linewidth=1.6, label="bar"))
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False, fontsize=8)
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=140)
    pyplot.close(figure)


def _color(name: str, ratio: float) -> str:
    if name.startswith(_PEERS):
        return _PEER
    most = BARS.get(name)
    if most is None:
        return _WITHOUT
    return _MET if round(ratio, 2) <= most else _MISSED
