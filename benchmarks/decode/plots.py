"""The pictures of a decode measurement: bandwidth against batch and length, and a roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Report = Mapping[str, Any]

# Label, line and colour of who is measured.
SIDES = {
    "ours": ("cubin-runtime", "o-", "#1f6fb4"),
    "xqa": ("XQA", "s--", "#d1722a"),
    "fa2": ("fa2", "^:", "#6f6f6f"),
}
# Label, marker and colour of the sections that the roofline shows.
ROOF_SECTIONS = {
    "gqa": ("bf16, one token", "o", "#1f6fb4"),
    "speculative": ("bf16, 1 to 8 tokens", "D", "#2a9d8f"),
    "fp8": ("e4m3 keys and values", "^", "#c1440e"),
    "grouped": ("e4m3, 1 to 8 tokens", "s", "#8e5ea2"),
    "grouped_bf16": ("bf16, models of the grouping tables", "v", "#b8860b"),
}
# Sections of one ratio, and others beside ours, lie so far from each other, in powers of two, instead of overprinting.
_SIDE_BY_SIDE = 0.15
_PEER_BESIDE = 0.075
# Each has its own piece of the roof above it, this far to its left, because the whole roof is at the true ratio.
_ROOF_LEFT = 0.03
_PEER_COLOR = "#9a9a9a"


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def place(report: Report) -> str:
    """On what it was measured, in one line."""
    clock = report.get("sm_clock_mhz", {})
    mhz = f", SM clock {clock['min']:.0f} to {clock['max']:.0f} MHz" if clock else ""
    return f"{report['environment']['gpu']['name']}{mhz}"


def _time_us(row: Mapping[str, Any], side: str) -> float | None:
    found = row["ours"] if side == "ours" else row["peers"].get(side, {})
    return found.get("us")


def draw_bandwidth(report: Report, image: Path) -> None:
    """TB/s of keys and values read against the batch, a panel for each length of the section ``sweep``."""
    pyplot = _pyplot()
    rows = [row for row in report["rows"] if row["section"] == "sweep"]
    lengths = sorted({row["length"] for row in rows})
    peak = report["read"]["tb_per_s"]
    columns = min(len(lengths), 2)  # two abreast, so that a phone's reader sees them
    lines = -(-len(lengths) // columns)
    figure, panels = pyplot.subplots(
        lines, columns, figsize=(2.9 * columns, 2.2 * lines + 1.0), sharey=True, squeeze=False, layout="constrained"
    )
    for axes in panels.flat[len(lengths) :]:
        axes.remove()
    for axes, length in zip(panels.flat, lengths, strict=False):
        here = sorted((row for row in rows if row["length"] == length), key=lambda row: row["batch"])
        for side, (label, style, color) in reversed(SIDES.items()):
            points = [(row["batch"], row["kv_bytes"] / us / 1e6) for row in here if (us := _time_us(row, side))]
            axes.plot(*zip(*points, strict=True), style, color=color, label=label, markersize=4.5) if points else None
        axes.axhline(peak, color="#222222", linewidth=0.9, linestyle=(0, (5, 3)))
        axes.set_xscale("log", base=2)
        ticks = sorted({row["batch"] for row in here})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_title(f"{length:,} keys", fontsize=10)
        axes.set_xlabel("batch")
        axes.grid(True, alpha=0.3)
    first, last = panels.flat[0], panels.flat[len(lengths) - 1]
    first.set_ylim(0, 1.1 * peak)
    for axes in panels[:, 0]:
        axes.set_ylabel("keys and values, TB/s")
    first.annotate(f"read only: {peak:.2f}", (1, peak), xytext=(0, 3), textcoords="offset points", fontsize=8)
    handles, labels = first.get_legend_handles_labels()
    last.legend(handles[::-1], labels[::-1], loc="lower right", frameon=False, fontsize=8)
    case = "64 query over 8 KV heads, head_dim 128, bf16,\npages of 64, one query token"
    figure.suptitle(f"Paged decode: {case}\n{place(report)}; in a sequence of layers", fontsize=9)
    _save(figure, image)


def draw_roofline(report: Report, image: Path) -> None:
    """FLOP/s reached against FLOP for each byte of keys and values, under what was measured as read and product."""
    pyplot = _pyplot()
    read, matrix = report["read"]["tb_per_s"], report["matrix_tflop_per_s"]
    figure, axes = pyplot.subplots(figsize=(5.8, 5.6), layout="constrained")
    shifts = _shifts(report["rows"])
    for section, (label, marker, color) in ROOF_SECTIONS.items():
        rows = [row for row in report["rows"] if row["section"] == section]
        ours = [row["ours"].get("us") for row in rows]
        peers = [_best_peer(row) for row in rows]
        _ranges(axes, rows, peers, shifts, beside=_PEER_BESIDE, marker="x", markersize=4, color=_PEER_COLOR, width=1.0)
        _ranges(axes, rows, ours, shifts, marker=marker, markersize=5, color=color, width=2.0, label=label)
    axes.plot([], [], marker="x", color=_PEER_COLOR, linewidth=1.0, label="fastest other, same cases")
    left, ridge, right = 5.0, matrix / read, 256.0
    axes.plot([left, ridge, right], [left * read, matrix, matrix], color="#bbbbbb", linewidth=1.2, zorder=1)
    for (_, ratio), shift in shifts.items():
        ends = [ratio * 2 ** (shift + end) for end in (-_ROOF_LEFT, _ROOF_LEFT + _PEER_BESIDE)]
        axes.plot(ends, [min(matrix, ratio * read)] * 2, color="#222222", linewidth=1.4, zorder=2)
    axes.plot([], [], color="#222222", linewidth=1.4, label="roof at this ratio")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    ticks = [8, 16, 32, 64, 128, 256]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.annotate(
        f"read bandwidth {read:.2f} TB/s",
        (22, 22 * read),
        xytext=(-6, 6),
        textcoords="offset points",
        fontsize=8,
        ha="right",
    )
    axes.annotate(
        f"bf16 matrix peak, measured: {matrix:.0f} TFLOP/s",
        (right, matrix),
        xytext=(-4, 4),
        ha="right",
        fontsize=8,
        textcoords="offset points",
    )
    marks = [1, 3, 10, 30, 100, 300, 1000]
    axes.set_yticks(marks, [str(mark) for mark in marks])
    axes.minorticks_off()
    lowest = min((row["tflop_per_s"] for row in report["rows"] if _is_on_roof(row)), default=10.0)
    axes.set_ylim(min(10.0, 0.6 * lowest), 1.6 * matrix)
    axes.set_xlabel("FLOP per byte of keys and values (equal ratios side by side)")
    axes.set_ylabel("TFLOP/s without padding, slowest to fastest batch")
    axes.set_title(f"Paged decode: roofline\n{place(report)}; in a sequence of layers", fontsize=9)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(loc="lower right", frameon=False, fontsize=8, title="marker: fastest batch", title_fontsize=8)
    _save(figure, image)


def _is_on_roof(row: Mapping[str, Any]) -> bool:
    return row["section"] in ROOF_SECTIONS and "tflop_per_s" in row


def _best_peer(row: Mapping[str, Any]) -> float | None:
    found = row["peers"].get(row.get("best_peer", ""), {})
    return found.get("us")


def _shifts(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, float], float]:
    """Where the rows of a section and a ratio stand beside those of other sections with this ratio."""
    sections: dict[float, list[str]] = {}
    for section in ROOF_SECTIONS:
        for ratio in {row["flops"] / row["kv_bytes"] for row in rows if row["section"] == section}:
            sections.setdefault(ratio, []).append(section)
    return {
        (section, ratio): _SIDE_BY_SIDE * (i - (len(names) - 1) / 2)
        for ratio, names in sections.items()
        for i, section in enumerate(names)
    }


def _ranges(
    axes: Any,
    rows: Sequence[Mapping[str, Any]],
    times: Sequence[float | None],
    shifts: Mapping[tuple[str, float], float],
    *,
    width: float,
    beside: float = 0.0,
    **style: Any,
) -> None:
    """A line from the least to the most for the rows of each ratio, with a marker at the most."""
    found: dict[tuple[str, float], list[float]] = {}
    for row, us in zip(rows, times, strict=True):
        if us:
            found.setdefault((row["section"], row["flops"] / row["kv_bytes"]), []).append(row["flops"] / us / 1e6)
    for (section, ratio), rates in sorted(found.items()):
        x = ratio * 2 ** (shifts[section, ratio] + beside)
        axes.plot([x, x], [min(rates), max(rates)], color=style["color"], linewidth=width, zorder=2)
        axes.plot([x], [max(rates)], linestyle="none", markeredgewidth=1.1, zorder=3, **style)
        style.pop("label", None)


def _save(figure: Any, image: Path) -> None:
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=140)
