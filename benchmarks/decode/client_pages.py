"""The figures of the pages of clients and of context parallelism, as Markdown from the JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from .tables import Report, table, us

# Outcomes of FlashInfer's tests, as the report counts them, in words.
OUTCOMES = {
    "passed": "passed",
    "refused": "refused",
    "failed": "failed",
    "untouched": "untouched",
    "skipped": "skipped by the tests",
    "not run": "not run in time",
}
# Outcomes of FlashMLA's tests.
FLASH_MLA_OUTCOMES = ("passed", "refused", "failed", "not run")
# Outcomes of FlashAttention-3's tests.
FLASH_ATTN_OUTCOMES = ("passed", "passed in part", "refused", "failed", "skipped")


LAYOUTS = {"gqa": "64 query over 8 KV heads of 128", "mla": "MLA, 128 heads"}


def flashinfer(report: Report) -> str:
    """What FlashInfer's own tests say: the picture and the totals."""
    total = {name: report["total"].get(name, 0) for name in OUTCOMES}
    late = f"; the time was up before {total['not run']:,}" if total["not run"] else ""
    untouched = f" {total['untouched']:,} never called our functions." if total["untouched"] else ""
    return (
        "![FlashInfer's tests by file: passed, refused, failed, skipped](flashinfer_tests.png)\n\n"
        f"On an {report['gpu']}, {report['jobs']} processes ran {report['ran']:,} of {report['sample']:,} sampled "
        f"tests of {report['tests']} in {report['seconds']:.0f} seconds: {total['passed']:,} passed, "
        f"{total['refused']:,} were refused, {total['failed']:,} failed.{untouched} The tests skip "
        f"{total['skipped']:,} themselves{late}."
    )


def flash_attn(report: Report) -> str:
    """What FlashAttention-3's own tests say: outcomes by function, and what was refused."""
    total = report["total"]
    heads = ("test", *FLASH_ATTN_OUTCOMES)
    rows = [
        (f"`{name}`", *(f"{counts.get(outcome, 0):,}" for outcome in FLASH_ATTN_OUTCOMES))
        for name, counts in report["functions"].items()
    ]
    refused = Counter[str]()
    for of in ("refused", "passed in part"):
        for reason, count in report["reasons"][of].items():
            refused[_argument_of(reason)] += count
    reasons = [(f"{count:,}", f"`{name}`") for name, count in refused.most_common()]
    return "\n\n".join(
        (
            f"On an {report['environment']['gpu']['name']}, {report['jobs']} processes ran {report['ran']:,} of "
            f"{report['sample']:,} sampled tests of commit `{report['tests'][:12]}` in {report['seconds']:.0f} "
            f"seconds: {total.get('passed', 0):,} passed, {total.get('passed in part', 0):,} passed until a part that "
            f"we refuse, {total.get('refused', 0):,} were refused at once, {total.get('failed', 0):,} failed; "
            f"{total['with 16-bit queries for e4m3']:,} have e4m3 keys and values. The tests skip "
            f"{total.get('skipped', 0):,}. "
            "Data: [`flash_attn_tests.json`](../benchmarks/results/flash_attn_tests.json).",
            table(heads, rows),
            "What was refused, by the argument that the error names:",
            table(("tests", "argument"), reasons),
        )
    )


def flash_mla(report: Report) -> str:
    """What FlashMLA's own tests say: outcomes by group of tests, and what was refused."""
    total = report["total"]
    rows = [
        (name, *(f"{counts.get(outcome, 0):,}" for outcome in FLASH_MLA_OUTCOMES))
        for name, counts in report["groups"].items()
    ]
    refused = report["reasons"]["refused"].items()
    reasons = [(f"{count:,}", f"`{reason.partition(', expected')[0]}`") for reason, count in refused]
    return "\n\n".join(
        (
            f"On an {report['environment']['gpu']['name']}, {report['jobs']} processes ran {report['ran']:,} of "
            f"{report['collected']:,} tests of commit `{report['tests'][:12]}` in {report['seconds']:.0f} seconds, as "
            f"many of each group, with seed {report['seed']}: {total.get('passed', 0):,} passed, "
            f"{total.get('refused', 0):,} were refused, {total.get('failed', 0):,} failed. "
            "Data: [`flash_mla_tests.json`](../benchmarks/results/flash_mla_tests.json).",
            table(("tests", *FLASH_MLA_OUTCOMES), rows),
            "What was refused, with N for numbers:",
            table(("tests", "error"), reasons),
        )
    )


def _argument_of(reason: str) -> str:
    """The argument that an error begins with, and what of it."""
    name = re.split(r"[=:]", reason)[0]
    words = {
        "q": "q: head dimension",
        "v": "v: other head dimension than k",
        "k_cache": "k_cache: page size",
        "k": "k: number of keys",
    }
    return words.get(name, name)


def transformers(report: Report) -> str:
    """Times of steps and ratios of the other implementations; nothing before they are measured."""
    if not report:
        return ""
    environment = report["environment"]
    packages, rows = environment["packages"], report["steps"]
    layers = "; ".join(dict.fromkeys(f"{row['layers']} layers of {row['model']}" for row in rows))
    peers = tuple(dict.fromkeys(name for row in rows for name in row["ratios"]))
    one_model = len({row["model"] for row in rows}) == 1
    lines = [
        (
            step_label(row, one_model),
            _own(row["times"][report["ours"]]),
            *(_ratio(row["ratios"], name) for name in peers),
        )
        for row in rows
    ]
    heads = ("step", "ours (in a graph)", *(f"{name}, ratio" for name in peers))
    return "\n\n".join(
        (
            "## Measured",
            "![Speed-up over other implementations, for prompts and for new tokens](transformers.png)",
            f"{environment['gpu']['name']}, transformers {packages.get('transformers', '-')}, torch "
            f"{packages.get('torch', '-')}; {environment['date'][:10]}. {layers}, random weights, bf16. Medians of "
            f"{report['rounds']} rounds in which the implementations take turns. A ratio is another's "
            "time divided by ours, above 1 if ours is faster; in brackets that of CUDA graph replays. Times are of the "
            "whole model, not of attention alone. `sdpa flash` and `sdpa cuDNN` are sdpa on that backend of torch "
            f"alone.{_flash(report)} Data: "
            "[`transformers.json`](../benchmarks/results/transformers.json).",
            table(heads, lines),
            *_host_times(rows, report["ours"], one_model),
            *_batching(report["continuous_batching"], report["ours"]),
            *_absent(rows, report["ours"]),
        )
    )


def _flash(report: Report) -> str:
    """Where FlashAttention-3 came from."""
    if not any("flash_attention_3" in row["ratios"] for row in report["steps"]):
        return ""
    return (
        " FlashAttention-3 is that of vLLM 0.26.0, whose build takes requests by their lengths alone and appends "
        "nothing: lengths are made once, and continuous batching appends with our `append_kv`. An implementation whose "
        "logits are far from sdpa's is not timed."
    )


def context_parallel(report: Report) -> str:
    """A rank's decode and merge; nothing before they are measured."""
    if not report:
        return ""
    environment, rows = report["environment"], report["rows"]
    by_rank = [row for row in rows if row["exchange"] == "all_to_all"]
    worlds = tuple(dict.fromkeys(row["world"] for row in by_rank))
    found: dict[tuple[str, int, int], dict[int, Mapping[str, Any]]] = {}
    for row in by_rank:
        found.setdefault((row["layout"], row["kv_len"], row["batch"]), {})[row["world"]] = row
    lines = [
        (
            LAYOUTS[layout],
            f"{batch} x {kv_len:,}",
            us(next(iter(own.values()))["one_gpu_us"]),
            *(_rank(own[world]) for world in worlds),
        )
        for (layout, kv_len, batch), own in found.items()
    ]
    merges = {
        name: [row["merge_us"] for row in rows if row["exchange"] == name] for name in ("all_to_all", "gather_reduce")
    }
    most = max(row["sent_bytes"] for row in by_rank)
    return "\n\n".join(
        (
            "### One rank of up to 64 GPUs, without the exchange",
            "![Decode and merge of one rank on 1 to 64 GPUs](divided_keys.png)",
            f"{environment['gpu']['name']}, {environment['date'][:10]}; bf16, pages of 64 tokens. One GPU did in turn "
            "what the first rank of each group does: decode its keys, and merge as many parts as there are ranks. "
            "Times are of CUDA graph replays whose rounds read different pages. In brackets: one GPU with all keys by "
            "that time. `all_to_all`; **the exchange is not part of it**.",
            table(("decode", "batch x keys", "one GPU", *(f"{world} GPUs" for world in worlds)), lines),
            f"The merges alone take {min(merges['all_to_all']):.1f} to {max(merges['all_to_all']):.1f} us with "
            f"`all_to_all` and {min(merges['gather_reduce']):.1f} to {max(merges['gather_reduce']):.1f} us with "
            f"`gather_reduce`. A rank sends at most {most / 1e6:.1f} MB here with `all_to_all`, which at 450 GB/s, the "
            f"bandwidth of NVLink on this GPU in one direction, takes {most / 450e3:.0f} us, and the latency of the "
            "collective in addition. Data: "
            "[`context_parallel_alone.json`](../benchmarks/results/context_parallel_alone.json).",
        )
    )


def _rank(row: Mapping[str, Any]) -> str:
    return f"{us(row['step_us'])} ({row['speedup']:.1f})"


def step_label(row: Mapping[str, Any], one_model: bool) -> str:
    """A step in words."""
    model = "" if one_model else f"{row['model']}, "
    if row["cache"] == "none":
        return f"{model}{row['batch']} x prompt of {row['tokens']:,}"
    tokens = "1 token" if row["tokens"] == 1 else f"{row['tokens']:,} tokens"
    return f"{model}{row['batch']} x {tokens} after {row['past']:,}, {row['cache']} cache"


def _own(times: Any) -> str:
    if isinstance(times, str):
        return "failed"
    graph = times.get("graph_us")
    return us(times["us"]) + (f" ({us(graph)})" if isinstance(graph, float) else "")


def _ratio(ratios: Mapping[str, Mapping[str, float]], name: str) -> str:
    found = ratios.get(name)
    if not found:
        return "-"
    return f"{found['us']:.2f}" + (f" ({found['graph_us']:.2f})" if "graph_us" in found else "")


def _batching(rows: list[dict[str, Any]], ours: str) -> list[str]:
    words = []
    for row in rows:
        speeds = ", ".join(
            f"{'ours' if name == ours else name} {f'{speed:,.0f}' if isinstance(speed, float) else 'failed'}"
            for name, speed in row["tokens_per_s"].items()
        )
        options = row.get("options", {}).items()
        given = "".join(f", `{option}={value}`" for option, value in options)
        given += ", in an earlier run of three rounds" if row.get("rounds") == 3 else ""
        given += f", on an {row['gpu']}" if "gpu" in row else ""
        words.append(
            f"Continuous batching of {row['requests']} requests with prompts of up to {row['longest_prompt']:,} tokens "
            f"and {row['new']} new ones{given}, in tokens per second: {speeds}.{_inputs(row, ours)}"
        )
    return words


def _inputs(row: dict[str, Any], ours: str) -> str:
    """What transformers' host takes to write the inputs of a step of each implementation, where it was measured."""
    times = [f"{ms:.1f} ms ({'ours' if name == ours else name})" for name, ms in row.get("inputs_ms", {}).items()]
    return f" transformers takes {', '.join(times)} a step to write its inputs." if times else ""


def _host_times(rows: list[dict[str, Any]], ours: str, one_model: bool) -> list[str]:
    """The host's time in the attention function of one layer, where it was measured."""
    timed = [row for row in rows if row.get("host_us_per_layer")]
    names = tuple(dict.fromkeys(name for row in timed for name in row["host_us_per_layer"]))
    if not names:
        return []
    times = [row["host_us_per_layer"] for row in timed]
    lines = [
        (step_label(row, one_model), *(us(found[name]) if name in found else "-" for name in names))
        for row, found in zip(timed, times, strict=True)
    ]
    heads = ("the host's time in one layer's attention", *("ours" if name == ours else name for name in names))
    return [table(heads, lines)]


def _absent(rows: list[dict[str, Any]], ours: str) -> list[str]:
    """Each implementation that has no time for a step, with the first error."""
    errors: dict[str, tuple[str, int]] = {}
    for row in rows:
        for name, found in row["times"].items():
            if isinstance(found, str):
                first, count = errors.get(name, (found, 0))
                errors[name] = (first, count + 1)
    if not errors:
        return []
    lines = [
        (
            "ours" if name == ours else name,
            f"{count} of {len(rows)}",
            f"`{error.replace('|', '/').replace('`', chr(39))}`",
        )
        for name, (error, count) in errors.items()
    ]
    return [table(("not available", "steps", "error"), lines)]
