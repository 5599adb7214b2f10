"""The picture of what calls cost on the host, from the JSON of ``gpu_host_cost.py``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_OTHERS = ("torch ", "FlashInfer ")
_LARGE = ("a new batch size", "torch.compile, ")  # tens of launches: of another scale
_LINE = 27  # characters of a label
_OURS, _OTHER = "#1f6fb4", "#9a9a9a"


def rows_of(report: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    """The rows that are drawn, in the order of the measurement."""
    table = report["microseconds"].items()
    return {name: row for name, row in table if not name.startswith(_LARGE) or "one more" in name}


def draw(report: Mapping[str, Any], image: Path) -> None:
    """A bar for each call, as long as its cost over that of a C loop that makes the same launch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    rows = rows_of(report)
    figure, axes = pyplot.subplots(figsize=(6.6, 0.36 * len(rows) + 1.5), layout="constrained")
    for place, (name, row) in enumerate(rows.items()):
        ratio = row["ratio"]
        axes.barh(place, ratio, height=0.68, color=_color(name), zorder=2)
        words = f"{ratio:.2f}  ({row['median']:.1f} us)"
        axes.annotate(words, (ratio, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [_wrapped(name.removeprefix("compat ")) for name in rows], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.9 * max(row["ratio"] for row in rows.values()))
    axes.axvline(1, color="#222222", linewidth=0.9, linestyle=(0, (5, 3)), zorder=4)
    axes.set_xlabel("host time / that of the same launch from C")
    axes.grid(True, axis="x", alpha=0.3)
    gpu = report["environment"]["gpu"]["name"]
    axes.set_title(f"Host time per call, {gpu}", fontsize=10)
    axes.legend(
        handles=[Patch(color=_OURS, label="cubin-runtime"), Patch(color=_OTHER, label="other libraries")],
        loc="center right",
        fontsize=9,
    )
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=140)
    pyplot.close(figure)


def _color(name: str) -> str:
    return _OTHER if name.startswith(_OTHERS) else _OURS


def _wrapped(name: str) -> str:
    """On several lines where it is long, so that the bars keep half of the width."""
    if len(name) <= _LINE:
        return name
    cut = 1 + max(name.rfind(mark, 0, _LINE) for mark in " _,(")
    return f"{name[:cut]}\n{_wrapped(name[cut:])}" if 0 < cut < len(name) else name
