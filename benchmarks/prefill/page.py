"""The figures of context attention as Markdown and as a picture, from the JSON of its benchmark."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Report = Mapping[str, Any]
SCHEMA = 3
PICTURE = "![TFLOP/s of causal prompts, ours and the fastest other](../prefill_roofline.png)"
BALANCE_TITLE = "## Balance, and masked tiles"
BALANCE = """In Nsight Compute (`benchmarks/gpu_prefill_profile.py`, `prefill_profile.json`). A CTA stays on its
multiprocessor, so the multiprocessor's active cycles are how long it took: here when the first one ends and when they
do on average, of the time of the last. The products that ran are compared with those that the mask leaves: tiles that
it hides are skipped, those on its edges are computed whole.

"""
E4M3_TITLE = "## Over e4m3 caches"
E4M3 = """`benchmarks/gpu_context_e4m3.py`, [`context_e4m3.json`](../../benchmarks/results/context_e4m3.json): 32 query
heads over 8 KV heads, or over 32 where the case says so; pages of 64 tokens; calls in turns. *Ratio*: the time over a
16-bit cache of the same numbers divided by that over the e4m3 cache, and in the last columns by that where no cache is
converted before, as with scales by head. All outputs are bitwise identical to those over 16 bits.

"""
E4M3_PARTS = """The conversion alone, and attention behind it (torch's profiler, bf16):

"""
# A warp's share of a product of 64 rows and 16 columns or keys: where values have 64 columns, or tiles 64 keys, one of
# the two products is half as wide.
FLOP_OF_WARP_INSTRUCTION = {64: 131072 / 3, 128: 65536, 192: 65536, 256: 131072 / 3}
PEERS = {"fa3": "fa3", "fa2": "fa2", "cudnn": "cuDNN"}
# Sections that the picture shows: label, marker and colour.
SECTIONS = {
    "causal 128": ("head_dim 128", "o-", "#1f6fb4"),
    "causal 64": ("head_dim 64", "D-", "#2a9d8f"),
    "causal 256": ("head_dim 256", "s-", "#8e5ea2"),
    "causal 192": ("head_dim 192, values of 128", "^-", "#c1440e"),
}


def time_of(us: float) -> str:
    """Microseconds below a millisecond, else milliseconds."""
    return f"{us:.1f} us" if us < 1000 else f"{us / 1000:.2f} ms"


def _cell(row: Mapping[str, Any], name: str) -> str:
    return time_of(row["us"][name]) if name in row["us"] else "-"


def _line(row: Mapping[str, Any], single: bool) -> str:
    ours = f"{_cell(row, 'ours')}, {row['tflop_per_s']['ours']:.0f}"
    ragged = f"{row['of_ragged']:.2f}" if "of_ragged" in row else ""
    ratio = f"{row['ratio']:.2f}" if "ratio" in row else "-"
    clock = f"{row['sm_clock_mhz']['median']:.0f}" if row.get("sm_clock_mhz") else ""
    peers = (_cell(row, name) for name in PEERS)
    cells = (row["case"], ours, *peers, ratio, ragged, clock, *((_single(row),) if single else ()))
    return f"| {' | '.join(cells)} |"


def _single(row: Mapping[str, Any]) -> str:
    single = row.get("single_us", {})
    best = min((us for name, us in single.items() if not name.startswith("ours")), default=None)
    return f"{time_of(single['ours'])} / {time_of(best)} ({best / single['ours']:.2f})" if best else ""


def _mixed(row: Mapping[str, Any]) -> list[str]:
    lines = [f"{row['case']}, all times of both launches:", "", "| how | time |", "| --- | --- |"]
    lines += [f"| {name} | {time_of(us)} |" for name, us in row["us"].items()]
    if "ratio" in row:
        lines += ["", f"The fastest others take {row['ratio']:.2f} times as long as *{row['best']}*."]
    return ["", *lines]


def _rounds(report: Report) -> str:
    return f" Medians of {report['method']['rounds']} rounds." if "method" in report else ""


def figures(report: Report, *, pictures: bool = True) -> str:
    """All rows, as Markdown; ``pictures``: with that drawn from this report."""
    gpu, packages = report["environment"]["gpu"], report["environment"]["packages"]
    place = (
        f"{gpu['name']}, driver {gpu['driver_version']}; flashinfer-python {packages.get('flashinfer-python', '-')}, "
        f"torch {packages['torch']}; {report['environment']['date'][:10]}. bf16 matrix product of torch "
        f"{report['matrix_tflop_per_s']:.0f} TFLOP/s.{_rounds(report)}"
    )
    heads = ("case", "ours, TFLOP/s", *PEERS.values(), "ratio", "of ragged keys", "SM MHz")
    single = any("single_us" in row for row in report["rows"])
    heads += ("single calls: ours / fastest other (ratio)",) if single else ()
    lines = [place, "", *((PICTURE, "") if pictures else ()), f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    rows = report["rows"]
    lines += [_line(row, single) for row in rows if "ours" in row["us"]]
    for row in rows:
        if "ours" not in row["us"]:
            lines += _mixed(row)
    return "\n".join(lines)


def balance(profile: Report) -> tuple[str, str]:
    """A heading, and when CTAs end and which products run, from the profiler, as Markdown."""
    lines = ["| case | first CTA ends | mean | products, of those that the mask leaves |", "| --- | --- | --- | --- |"]
    for row in profile["rows"]:
        first, mean, last = (row["metrics"][f"sm__cycles_active.{one}"][0] for one in ("min", "avg", "max"))
        named = re.search(r" D (\d+) ", row["case"])
        flop = FLOP_OF_WARP_INSTRUCTION[int(named[1]) if named else 128]
        products = row["metrics"]["sm__inst_executed_pipe_tensor_op_gmma.sum"][0] * flop / row["flop"]
        lines.append(f"| {row['case']} | {first / last:.1%} | {mean / last:.1%} | {products:.3f} |")
    return BALANCE_TITLE, BALANCE + "\n".join(lines)


def over_e4m3(report: Report) -> tuple[str, str]:
    """A heading, and the times over e4m3 caches and of the parts of such a call, as Markdown."""
    environment = report["environment"]
    place = (
        f"{environment['gpu']['name']}, torch {environment['packages']['torch']}; {environment['date'][:10]}. "
        f"Medians of {len(report['rows'][0]['rounds_us']['e4m3'])} rounds."
    )
    heads = ("case", "head_dim", "dtype", "16 bits", "e4m3", "ratio", "converted in the kernel", "ratio")
    lines = [place, "", f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for row in report["rows"]:
        case = row["case"] + ", `batch_invariant`" * row["batch_invariant"]
        times = (f"{time_of(row['us'][name])} | {row['ratio'][name]:.2f}" for name in ("e4m3", "e4m3, in the kernel"))
        before = (case, str(row["head_dim"]), row["dtype"], time_of(row["us"]["16 bits"]))
        lines.append(f"| {' | '.join((*before, *times))} |")
    lines += ["", E4M3_PARTS + "| case | head_dim | conversion | attention |", "| --- | --- | --- | --- |"]
    for row in report["parts"]["rows"]:
        conversion, attention = (min(one) for one in zip(*next(iter(row["us"].values())), strict=True))
        lines.append(f"| {row['case']} | {row['head_dim']} | {time_of(conversion)} | {time_of(attention)} |")
    return E4M3_TITLE, E4M3 + "\n".join(lines)


def draw(report: Report, image: Path) -> None:
    """TFLOP/s of ours and of the fastest other implementation against the length, under torch's matrix product."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.8, 4.4), layout="constrained")
    for section, (label, style, color) in SECTIONS.items():
        rows = [row for row in report["rows"] if row["section"] == section]
        if not rows:
            continue
        lengths = [int(row["case"].rpartition(" ")[2]) for row in rows]
        axes.plot(lengths, [row["tflop_per_s"]["ours"] for row in rows], style, color=color, label=label)
        best = [max((row["tflop_per_s"][name] for name in PEERS if name in row["us"]), default=None) for row in rows]
        axes.plot(lengths, best, "x:", color=color)
    axes.plot([], [], "x:", color="#6f6f6f", label="fastest other, same colour")
    axes.axhline(report["matrix_tflop_per_s"], color="#222222", linewidth=1.0, linestyle=(0, (5, 3)))
    axes.annotate("matrix product", (2048, report["matrix_tflop_per_s"]), xytext=(0, 3), textcoords="offset points")
    axes.set_xscale("log", base=2)
    axes.set_xticks([2048, 8192, 16384], ["2,048", "8,192", "16,384"])
    axes.minorticks_off()
    axes.set_ylim(0, 1.08 * report["matrix_tflop_per_s"])
    axes.set_xlabel("tokens of one causal prompt")
    axes.set_ylabel("TFLOP/s")
    axes.grid(True, alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.set_title(
        f"Context attention, bf16, {report['environment']['gpu']['name']}; in a sequence of layers", fontsize=9
    )
    figure.savefig(image, dpi=150)
    pyplot.close(figure)
