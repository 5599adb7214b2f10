"""Steps of context parallelism on several GPUs and their soak, as Markdown from the JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cubin_runtime.attention.tolerances import ELEMENT_TOLERANCE

from .client_pages import LAYOUTS
from .tables import Report, table, us

EXCHANGES = ("all_to_all", "gather_reduce")
LAUNCHERS = {"threads": "thread", "processes": "process"}
Row = Mapping[str, Any]


def steps(report: Report) -> str:
    """Steps with their exchange, where they win, errors, and the predictions; nothing before they are measured."""
    if not report:
        return ""
    environment, rows, link = report["environment"], report["rows"], report["link"]
    world = report["world"]
    errors = ", ".join(f"{error:.4f} ({name.replace('_', '-')})" for name, error in report["errors"].items())
    return "\n\n".join(
        (
            f"### {world} GPUs, with the exchange",
            f"{world} x {environment['gpu']['name']}, torch {environment['packages']['torch']}, NCCL without NVLink "
            f"multicast; {environment['date'][:10]}. bf16, pages of 64 tokens; times are of CUDA graph replays whose "
            "rounds read different pages, on the slowest rank. A step is decode, exchange and merge in one graph; its "
            "parts are timed in graphs of their own, and their sum is not the step. In brackets: one GPU with all keys "
            "by that time, above 1 where dividing the keys wins. An all-to-all of "
            f"{link['sent_bytes'] / 1e6:.0f} MB sends {link['gb_per_s']:.0f} GB/s in one direction while as much "
            "arrives; *by the link* is the time that the bytes of the exchange take at that rate. Data: "
            "[`context_parallel.json`](../benchmarks/results/context_parallel.json).",
            table(
                (
                    *("decode", "batch x keys", "one GPU", "step, all-to-all", "its decode", "exchange", "by the link"),
                    *("merge", "step, gather-reduce"),
                ),
                [_line(*pair, link["gb_per_s"]) for pair in _pairs(rows)],
            ),
            _wins(rows),
            "The largest difference between a step's output and that of one GPU with all keys, by the largest value: "
            f"{errors}. Tests with random arguments allow {ELEMENT_TOLERANCE:g}. Steps ran as calls and as replays "
            "with other queries and lengths.",
            f"**Predictions, not measured.** The times of {world} GPUs continued along bytes read and bytes sent, to "
            "more GPUs that are linked as these are; the higher number if each further GPU adds as much latency to "
            "the exchange as the measured one:",
            _predicted(report["model"]),
        )
    )


def soak(report: Report) -> str:
    """Launches from threads and processes on all GPUs; nothing before they are measured."""
    if not report or "rows" not in report:
        return ""
    environment, rows = report["environment"], report["rows"]
    lines = [
        (
            f"a {LAUNCHERS[row['by']]} for each GPU",
            str(row["device"]),
            f"{row['launches']:,}",
            f"{row['ended'] - row['began']:.1f} s",
            ", ".join(f"{name}: {count}" for name, count in row["different_elements"].items()),
        )
        for row in rows
    ]
    return "\n\n".join(
        (
            f"{report['devices']} x {environment['gpu']['name']}, {environment['date'][:10]}. Context attention on two "
            "streams of each GPU, all GPUs at once; every output is compared with the first one, bit for bit. Data: "
            "[`soak.json`](../benchmarks/results/soak.json).",
            table(("launched from", "GPU", "launches", "in", "elements that differ"), lines),
        )
    )


def outcome(report: Report) -> str:
    """How the tests of two GPUs ended; nothing before they ran."""
    if not report:
        return ""
    environment = report["environment"]
    (step,) = report["steps"]
    releases = ", ".join(f"{name} ({digest[:12]})" for name, digest in report["releases"].items())
    return (
        f"Tests that need two GPUs: {step['last_line'].strip('= ')}; {environment['gpu']['name']}, "
        f"{environment['date'][:10]}, {releases}. Data: "
        "[`gpu_run_two_gpus.json`](../benchmarks/results/gpu_run_two_gpus.json)."
    )


def parallel(report: Report) -> str:
    """How FlashInfer's tests of parallel attention ended; nothing before they ran."""
    if not report:
        return ""
    environment, outcomes = report["environment"], list(report["outcomes"].values())
    counted = ", ".join(f"{outcomes.count(each)} {each}" for each in dict.fromkeys(outcomes))
    return (
        f"FlashInfer {environment['packages']['flashinfer-python']}'s tests of Ulysses and ring attention on our names "
        f"of FlashAttention-3, {report['ranks']} processes with NCCL: {counted}; {environment['gpu']['name']}, "
        f"{environment['date'][:10]}. Data: "
        "[`flashinfer_parallel.json`](../benchmarks/results/flashinfer_parallel.json)."
    )


def _pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """The rows of both exchanges of each case."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["layout"], row["batch"], row["kv_len"]), {})[row["exchange"]] = row
    first, second = EXCHANGES
    return [(pair[first], pair[second]) for pair in found.values()]


def _line(packed: Row, gathered: Row, rate: float) -> tuple[str, ...]:
    return (
        LAYOUTS[packed["layout"]],
        f"{packed['batch']} x {packed['kv_len']:,}",
        us(packed["one_gpu_us"]),
        f"{us(packed['step_us'])} ({packed['speedup']:.2f})",
        us(packed["decode_us"]),
        us(packed["communication_us"]),
        us(packed["sent_bytes"] / rate / 1e3),
        us(packed["merge_us"]),
        f"{us(gathered['step_us'])} ({gathered['speedup']:.2f})",
    )


def _wins(rows: Sequence[Row]) -> str:
    """From which measured length on a step with the better exchange is faster than one GPU."""
    lengths: dict[tuple[str, int], dict[int, float]] = {}
    for packed, gathered in _pairs(rows):
        speedup = max(packed["speedup"], gathered["speedup"])
        lengths.setdefault((packed["layout"], packed["batch"]), {})[packed["kv_len"]] = speedup
    parts = []
    for (layout, batch), speedups in lengths.items():
        slower = [length for length, speedup in speedups.items() if speedup <= 1]
        longer = [length for length in speedups if length > max(slower, default=0)]
        words = f"from {min(longer):,} keys on" if longer else "at no measured length"
        parts.append(f"{LAYOUTS[layout]}, batch {batch}: {words}")
    return f"Dividing the keys wins, with the better of the two exchanges: {'; '.join(parts)}."


def _predicted(model: Sequence[Row]) -> str:
    worlds = tuple(dict.fromkeys(row["world"] for row in model))
    found: dict[tuple[str, int, int], dict[int, Row]] = {}
    for row in model:
        if row["exchange"] == EXCHANGES[0]:
            found.setdefault((row["layout"], row["batch"], row["kv_len"]), {})[row["world"]] = row
    longest = sorted({kv_len for _, _, kv_len in found})[-2:]
    lines = [
        (LAYOUTS[layout], f"{batch} x {kv_len:,}", *(_range(of[world]) for world in worlds))
        for (layout, batch, kv_len), of in found.items()
        if kv_len in longest
    ]
    return table(("step, all-to-all", "batch x keys", *(f"{world} GPUs, predicted" for world in worlds)), lines)


def _range(row: Row) -> str:
    low, high = us(row["low_us"]), us(row["high_us"])
    return low if low == high else f"{low} to {high}"
