"""The figures of the page on vLLM and SGLang, from what benchmarks/engine_vllm.py and engine_sglang.py wrote."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from decode.tables import NOT_MEASURED, Report, report_of
from engine.ratios import best_of, ratios_of

Row = Mapping[str, Any]
ENGINES = ("vllm", "sglang")
OURS = {"vllm": "CUSTOM", "sglang": "cubin_runtime"}
NAMES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "CUSTOM": "ours",
    "cubin_runtime": "ours",
    "FLASH_ATTN": "FlashAttention-3",
    "FLASH_ATTN_MLA": "FlashAttention-3",
    "FLASHMLA": "FlashMLA",
    "FLASHMLA_SPARSE": "FlashMLA",
    "TRITON_ATTN": "Triton",
    "TRITON_MLA": "Triton",
    "triton": "Triton",
    "dsa": "FlashMLA",
}
MODELS = {
    "llama": "Llama 3 8B, 4 layers",
    "llama-shape": "Llama 3 8B, 32 layers",
    "llama-half-shape": "Llama 3 8B, 16 layers",
    "llama-rank-shape": "Llama 3 70B, 32 layers, a rank of eight",
    "one-kv-head": "32 heads on one KV head, 4 layers",
    "one-kv-head-shape": "32 heads on one KV head, 16 layers",
    "gptoss": "GPT-OSS, 4 layers, 8 experts",
    "gptoss-shape": "GPT-OSS 20B, 8 layers",
    "gemma2": "Gemma 2, 6 layers",
    "gemma3": "Gemma 3 4B, 6 layers",
    "gemma3-shape": "Gemma 3 12B, 8 layers",
    "qwen3moe": "Qwen3 MoE, 4 layers, 16 experts",
    "qwen3moe-shape": "Qwen3 30B-A3B, 8 layers",
    "deepseek": "DeepSeek V3 with 16 heads, 4 layers",
    "deepseek-lists": "DeepSeek V3.2 with 64 heads and lists of 512, 4 layers",
    **{f"deepseek-lists-{heads}": f"DeepSeek V3.2 with {heads} heads, 4 layers" for heads in (8, 16, 64, 128)},
    **{f"deepseek-lists-{heads}-shape": f"DeepSeek V3.2 with {heads} heads, 16 layers" for heads in (8, 16, 64, 128)},
    "deepseek-lists-mtp": "DeepSeek V3.2 with 16 heads, 4 layers and MTP",
    "deepseek-shape": "DeepSeek V3, 8 layers, 8 experts",
}

DIFFERED = "outputs of our attention that differed, of those with the same queries, keys and values"
WRONG = 10  # times our error
STEPS = (
    "Time of a step that decodes: median of the rounds and their range, engines in turns. A backend whose tokens are "
    f"wrong, with {WRONG} times our error, has none."
)


def figures(results: Path) -> str:
    """All sections of one GPU that were measured, in both engines, and vLLM's own tests."""
    parts = (_sections(results, SECTIONS), _own_tests(report_of(results / "vllm_tests.json")))
    return "\n\n".join(filter(None, parts)) or NOT_MEASURED


def ranks(results: Path) -> str:
    """The sections of two GPUs that were measured; nothing before."""
    return _sections(results, RANKS)


def _sections(results: Path, sections: Mapping[str, Callable[[str, Sequence[Row]], str]]) -> str:
    parts: list[str] = []
    for engine in ENGINES:
        for section, write in sections.items():
            report = report_of(results / f"{engine}_{section}.json")
            rows = [row for row in report.get("rows", ()) if "error" not in row]
            if rows and (lines := write(engine, rows)):
                parts += [
                    f"### {NAMES[engine]}: {TITLES[section]}",
                    f"{_place(engine, section, report)} {WORDS[section]}",
                    lines,
                ]
    return "\n\n".join(parts)


def _own_tests(report: Report) -> str:
    """Outcomes of vLLM's tests by function, and what was refused."""
    if not report:
        return ""
    outcomes = ("passed", "refused", "failed", "skipped")
    rows = [
        (f"`{function.partition(': ')[2]}`", *(f"{counts.get(outcome, 0):,}" for outcome in outcomes))
        for function, counts in report["functions"].items()
    ]
    refused = "; ".join(f"`{reason}` ({count:,})" for reason, count in report["reasons"]["refused"].items())
    return "\n\n".join(
        (
            "### vLLM: its own tests of attention backends",
            f"{_place('vllm', 'tests', report)} `tests/v1/attention` of its sources, all parameters, beside the tests' "
            "references in PyTorch. They skip prompt backends that the GPU or its packages lack, pages of 32 tokens "
            f"with lists and `fp8` caches with lists. Refused: {refused}.",
            _table(("test", *outcomes), rows),
        )
    )


def _place(engine: str, section: str, report: Report) -> str:
    environment = report["environment"]
    packages = environment["packages"]
    versions = f"{NAMES[engine]} {packages[engine]}, torch {packages['torch']}"
    return f"{environment['gpu']['name']}, {versions}, `{engine}_{section}.json`."


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _name(label: str) -> str:
    backend, _, more = label.partition(" ")
    shown = more.replace("eager", "without graphs").replace("drafts", "draft tokens")
    return " ".join(filter(None, (NAMES.get(backend, backend), shown)))


def _tokens(engine: str, rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(_name(label) for row in rows for label in row["made"]))
    lines = []
    for row in rows:
        if isinstance(row["judge"], str) or OURS[engine] not in row["judge"]:
            continue
        judged = {_name(label): each for label, each in row["judge"].items() if isinstance(each, dict)}
        errors = [_mean_error(judged[name]) if name in judged else "-" for name in names]
        lines.append((_model(row), f"{judged[_name(OURS[engine])]['tokens']:,}", *errors))
    return _table(("model", "tokens", *names), lines)


def _mean_error(judged: Row) -> str:
    """The mean error, with its standard error where that was measured."""
    spread = f" ± {judged['standard_error']:.4f}" if "standard_error" in judged else ""
    return f"{judged['mean_error']:.4f}{spread}"


def _tokens_with_lists(_: str, rows: Sequence[Row]) -> str:
    """Errors of requests that are within the lists' length, and of longer ones."""
    lines = []
    for row in rows:
        for label, judged in row["judge"].items():
            if isinstance(judged, dict):
                parts = [judged[part] for part in ("within_lists", "beyond_lists")]
                errors = [cell for part in parts for cell in (f"{part['tokens']:,}", _mean_error(part))]
                served = ", ".join(filter(None, (MODELS[row["model"]], row.get("drafter"))))
                lines.append((served, _name(label), *errors))
    heads = ("tokens within the lists", "error", "tokens beyond them", "error")
    return _table(("model", "backend and cache", *heads), lines)


def _layers_with_lists(_: str, rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        for label, layers in row["layers"].items():
            counted = [f"{layers[name]:,}" for name in ("calls", "tokens", "tokens_with_full_lists")]
            names = ("mean_relative_error", "relative_error", "absolute_error")
            errors = [f"{layers[name]:.4f}" if name in layers else "-" for name in names]
            lines.append((MODELS[row["model"]], _name(label), *counted, *errors))
    errors = ["mean relative error", "largest relative error", "absolute error"]
    heads = ("calls", "query tokens", "of them with full lists", *errors)
    return _table(("model", "backend and cache", *heads), lines)


def _model(row: Row) -> str:
    """A row's model, with the layers that it had, and where it ran if that differs between rows."""
    name = MODELS[row["model"]]
    if "num_layers" in row:
        name = re.sub(r"\d+ layers", f"{row['num_layers']} layers", name)
    runner = f"model runner {row['runner']}" if "runner" in row else None
    return ", ".join(filter(None, (name, row.get("gpu"), runner)))


def _jobs(engine: str, rows: Sequence[Row]) -> str:
    lines = []
    for row in (row for row in rows if "job" in row):
        ours = OURS[engine]
        kind = "whole" if all("whole" in each for each in row["rounds"][ours]) else "cached"
        best = {label: best_of(made)[kind] for label, made in row["rounds"].items()}
        peer = min(best.keys() - {ours}, key=best.__getitem__)  # the fastest
        ratios = ratios_of(row["rounds"], ours)
        shown = [f"{ratios[each]:.2f}" if each in ratios else "-" for each in (kind, "decode")]
        seconds = (f"{best[ours]:.2f}", f"{best[peer]:.2f} ({_name(peer)})")
        job = f"{row['job']}{', prompts cached' if kind == 'cached' else ''}"
        lines.append((_model(row), job, *seconds, *shown))
    return _table(("model", "requests x prompt + new tokens", "ours, s", "other, s", "job", "decodes"), lines)


def _rank_jobs(engine: str, rows: Sequence[Row]) -> str:
    """Jobs, and how long engines took to start, one after the other."""
    starts: dict[tuple[str, str], dict[int, float]] = {}
    for row in (row for row in rows if row.get("alone")):
        for label, started in row["start"].items():
            starts.setdefault((row["model"], label), {})[row["ranks"]] = started["engine_seconds"]
    lines = [
        (MODELS[model], _name(label), *(f"{seconds[ranks]:.1f}" if ranks in seconds else "-" for ranks in (2, 1)))
        for (model, label), seconds in starts.items()
    ]
    table = _table(("model", "backend", "start over two GPUs, s", "start on one GPU, s"), lines)
    said = "Engines that started one after the other, without weights to read:"
    return "\n\n".join((_jobs(engine, rows), said, table) if lines else (_jobs(engine, rows),))


def _dealt(engine: str, rows: Sequence[Row]) -> str:
    """Judged tokens, and the time of a step that decodes, of backends whose tokens are not wrong."""
    jobs, judged = ([row for row in rows if key in row] for key in ("job", "judge"))
    wrong = {(*_served(row), label) for row in judged for label in _wrong(engine, row)}
    rounds = [
        {_name(label): made for label, made in row["rounds"].items() if (*_served(row), label) not in wrong}
        for row in jobs
    ]
    names = list(dict.fromkeys(name for made in rounds for name in made))
    lines = [
        (_model(row), row["job"], *(_step(made[name], row["job"]) if name in made else "-" for name in names))
        for row, made in zip(jobs, rounds, strict=True)
    ]
    heads = ("model", "requests x cached prompt + new tokens", *(f"{name}, ms" for name in names))
    return "\n\n".join((_tokens(engine, judged), STEPS, _table(heads, lines)) if lines else (_tokens(engine, judged),))


def _served(row: Row) -> tuple[str, str | None]:
    """A model, of which more layers are the same, and vLLM's runner."""
    return row["model"].removesuffix("-shape"), row.get("runner")


def _wrong(engine: str, row: Row) -> list[str]:
    """Backends whose tokens are far from those of float32 while ours are near."""
    errors = {label: each["mean_error"] for label, each in row["judge"].items() if isinstance(each, dict)}
    return [label for label, error in errors.items() if error > WRONG * errors[OURS[engine]]]


def _step(rounds: Sequence[Row], job: str) -> str:
    """Milliseconds of a step that decodes: the median of the rounds, and their range."""
    steps = int(job.rpartition(" ")[2]) - 1
    times = sorted((each["cached"] - each["first"]) * 1e3 / steps for each in rounds)
    return f"{statistics.median(times):.2f} ({times[0]:.2f} to {times[-1]:.2f})"


def _cache_dtypes(engine: str, rows: Sequence[Row]) -> str:
    lines = []
    jobs = [row for row in rows if "job" in row]
    labels = list(dict.fromkeys(label for row in jobs for label in row["rounds"]))
    for row in jobs:
        requests, new = (int(row["job"].split(" ")[number]) for number in (0, -1))
        tokens = {"whole": requests * new, "decode": requests * (new - 1)}
        best = {label: best_of(rounds) for label, rounds in row["rounds"].items()}
        rates = {
            label: " / ".join(f"{tokens[kind] / times[kind]:,.0f}" if kind in times else "-" for kind in tokens)
            for label, times in best.items()
        }
        shown = [rates.get(label, "-") for label in labels]
        lines.append((_model(row), row["job"], *shown))
    return _table(("model", "requests x prompt + new tokens", *map(_name, labels)), lines)


def _readiness(engine: str, rows: Sequence[Row]) -> str:
    lines, requests, before = [], 0, {}
    for row in (row for row in rows if "after" in row):
        now = row["after"][OURS[engine]]
        requests = row["requests"] if row["requests"] == 20 else requests + row["requests"]
        paths = "functions" if "functions" in now else "fast_paths"  # its name until the counter of fast paths
        counted = [now.get(name, 0) - before.get(name, 0) for name in ("loads", "allocations", paths)]
        if row["requests"] != 20:
            lines.append((MODELS[row["model"]], requests, *counted))
        before = now
    table = _table(("model", "requests so far", "modules loaded", "allocations", "fast paths written"), lines)
    starts = [(row["model"], row["start"][OURS[engine]]) for row in rows if "start" in row]
    taken = [f"{start['ours_seconds']:.2f} s ({MODELS[model]})" for model, start in starts if "ours_seconds" in start]
    return f"{table}\n\nOur part of the engine's start took {', '.join(taken)}." if taken else table


def _drafts(engine: str, rows: Sequence[Row]) -> str:
    lines = []
    for row in (row for row in rows if "job" in row):
        cells = []
        for label in row["rounds"]:
            last = row["rounds"][label][-1]
            drafted = last.get("draft_tokens")
            cells.append(f"{last['accepted_tokens']:.0f} of {drafted:.0f}" if drafted else "-")
        served = (MODELS[row["model"]], row["drafter"]) if engine == "sglang" else (row["drafter"],)
        lines.append((", ".join(served), row["job"], *cells))
    labels = [f"accepted, {_name(label)}" for row in rows if "rounds" in row for label in row["rounds"]]
    return _table(("drafter", "requests x prompt", *dict.fromkeys(labels)), lines)


def _drafts_and_tokens(engine: str, rows: Sequence[Row]) -> str:
    """Accepted draft tokens, and where several models drafted, errors of the tokens."""
    judged = [row for row in rows if "judge" in row and "model" in row]
    return "\n\n".join((_drafts(engine, rows), *([_tokens(engine, judged)] if judged else [])))


def _drafts_with_lists(engine: str, rows: Sequence[Row]) -> str:
    """Accepted draft tokens, and errors of the tokens."""
    return f"{_drafts(engine, rows)}\n\n{_tokens_with_lists(engine, [row for row in rows if 'judge' in row])}"


def _server(engine: str, rows: Sequence[Row]) -> str:
    lines = []
    for backend in dict.fromkeys(row["backend"] for row in rows):
        bursts = [row["bursts"] for row in rows if row["backend"] == backend and "error" not in row["bursts"][0]]
        first = [each[0]["first_token_ms_p50"] for each in bursts]
        later = [burst["first_token_ms_p50"] for each in bursts for burst in each[1:5]]
        between = [burst["between_tokens_ms_p50"] for each in bursts for burst in each[1:5]]
        shown = [f"{statistics.median(each):.{digits}f}" for each, digits in ((first, 0), (later, 0), (between, 2))]
        lines.append((_name(backend), len(bursts), *shown))
    return _table(("backend", "starts", "first burst, ms", "later bursts, ms", "between tokens, ms"), lines)


def _host(engine: str, rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        for label, rounds in row["rounds"].items():
            times = [statistics.median(each[name] for each in rounds[1:]) for name in ("builder_us", "layers_us")]
            lines.append((row["step"], _name(label), *(f"{each:.0f}" for each in times), f"{sum(times):.0f}"))
    return _table(("a step of", "backend", "builder, us", "layers, us", "both, us"), lines)


def _states(engine: str, rows: Sequence[Row]) -> str:
    lines = []
    for row in (row for row in rows if "crowds" in row):
        counted = [f"{_name(label)} {each['equal']} of {each['of']}" for label, each in row["crowds"].items()]
        lines.append(("bitwise identical alone and among 84 requests", _model(row), "; ".join(counted)))
        traced = [
            f"{_name(label)} {each['attention']} of {each.get('repeated', each['rows']):,}"
            for label, each in row["crowds"].items()
            if "attention" in each
        ]
        if traced:
            lines.append((DIFFERED, _model(row), "; ".join(traced)))
    for row in (row for row in rows if "answers" in row):
        said = [f"{_name(label)} {'yes' if each['equal'] else 'no'}" for label, each in row["answers"].items()]
        compared = "tokens" if row["state"] == "dropped requests" else "tokens and logprobs"
        lines.append((f"the same {compared} after: {row['state']}", _model(row), "; ".join(said)))
    small = [row["after"] for row in rows if "after" in row]
    if small:
        memory = f"host {small[0]['host_mb']:,} to {small[-1]['host_mb']:,} MB"
        memory += f", device {small[0]['device_mb']:,} to {small[-1]['device_mb']:,} MB"
        lines.append((f"memory after 500 and {500 * len(small):,} requests, 600 MB of cache", MODELS["llama"], memory))
    return _table(("what", "model", "result"), lines)


def _ranks(engine: str, rows: Sequence[Row]) -> str:
    """Judged tokens, and how engines started."""
    judged = [row for row in rows if "made" in row]
    labels = list(dict.fromkeys(label for row in judged for label in row["start"]))
    lines = []
    for row in (row for row in rows if "first_start" in row):
        started = next((each["start"] for each in judged if each["model"] == row["model"]), {})
        seconds = [f"{started[label]['engine_seconds']:.1f}" if label in started else "-" for label in labels]
        most = max(row["sent"].values())
        sent = f"{len(row['sent'])} files, {'each once' if most == 1 else f'up to {most} times'}"
        first = f"{row['first_start']['engine_seconds']:.1f}"
        lines.append((MODELS[row["model"]], *seconds, first, sent, _loaded(row["ready"])))
    heads = (*(f"start, {_name(label)}, s" for label in labels), "ours, empty store, s", "fetched", "kernels loaded at")
    return "\n\n".join(filter(None, (_tokens(engine, judged), _table(("model", *heads), lines))))


def _loaded(lines: Sequence[str]) -> str:
    """The time of the first line of each rank."""
    times: dict[str, str] = {}
    for line in lines:
        rank, time = re.search(r"TP(\d+)", line), re.search(r"\d\d:\d\d:\d\d", line)
        if rank and time:
            times.setdefault(rank[1], time[0])
    return ", ".join(f"{time} (rank {rank})" for rank, time in sorted(times.items())) or "-"


def _refusals(engine: str, rows: Sequence[Row]) -> str:
    lines = [(row["refused"], f"`{_reason(row)}`") for row in rows]
    return _table(("asked for", "the engine's log says"), lines)


def _reason(row: Row) -> str:
    lines = row.get("lines") or [row.get("line", "-")]
    for mark in ("Reason: ", "UsageError: ", "Error: "):
        for line in lines:
            if mark in line:
                return str(line).rpartition(mark)[2].strip("[]'").replace("|", "/")
    return str(lines[0])[-120:].replace("|", "/")


SECTIONS: Mapping[str, Callable[[str, Sequence[Row]], str]] = {
    "figures": _jobs,
    "tokens": _tokens,
    "cache_dtypes": _cache_dtypes,
    "cache_dtypes_lists": _cache_dtypes,
    "tokens_fp8": _tokens,
    "tokens_lists": _tokens_with_lists,
    "lists": _layers_with_lists,
    "deterministic": _states,
    "drafts": _drafts_and_tokens,
    "drafts_lists": _drafts_with_lists,
    "server": _server,
    "host": _host,
    "readiness": _readiness,
    "states": _states,
    "invariance": _states,
    "refusals": _refusals,
}
RANKS: Mapping[str, Callable[[str, Sequence[Row]], str]] = {
    "ranks": _ranks,
    "rank_figures": _rank_jobs,
    "dealt": _dealt,
}
TITLES = {
    "ranks": "tensor parallelism over two GPUs",
    "rank_figures": "jobs over two GPUs",
    "dealt": "decode context parallelism over two GPUs",
    "figures": "jobs",
    "tokens": "tokens beside float32",
    "cache_dtypes": "jobs over 16-bit and e4m3 caches",
    "cache_dtypes_lists": "jobs of sparse MLA",
    "tokens_fp8": "tokens over an e4m3 cache beside float32",
    "tokens_lists": "tokens of sparse MLA beside float32",
    "lists": "layers of sparse MLA beside float32",
    "deterministic": "deterministic inference",
    "drafts": "draft tokens",
    "drafts_lists": "draft tokens of sparse MLA",
    "server": "HTTP server",
    "host": "host time of a step",
    "readiness": "after the first 20 requests",
    "states": "memory, sleep, dropped requests",
    "invariance": "batch invariance",
    "refusals": "refused at start",
}
WORDS = {
    "ranks": "As tokens beside float32 on one GPU: mean error of the chosen token's logprob. Then how long the engines "
    "took to start, all four of a model at the same time, and both ranks of ours at once on an empty store, with a "
    "server that counts what it sends.",
    "rank_figures": "Tensor parallelism of 2. Best of the rounds, engines in turns; the last two columns: the other's "
    "time over ours, of the whole job and of its decodes behind cached prompts.",
    "dealt": "Tensor and decode context parallelism of 2; undivided: tensor parallelism alone. Mean error of the "
    "chosen token's logprob beside float32.",
    "figures": "Best of the rounds, engines in turns; the last two columns: the other's time over ours, of the whole "
    "job and of its decodes behind cached prompts.",
    "tokens": "Random weights; 32 prompts of 1 to 3,500 tokens, 48 greedy tokens each: mean error of the chosen "
    "token's logprob beside float32.",
    "cache_dtypes": "New tokens a second, of the whole job / of its decodes behind cached prompts; best of the rounds, "
    "engines in turns. fp8: `kv_cache_dtype=fp8`, else bf16.",
    "cache_dtypes_lists": "As above, over lists of up to 2,048 rows; `fp8_ds_mla`: a cache of rows of 656 bytes, else "
    "bf16. Prompts of 1,024 tokens run on vLLM's MLA prefill in all engines; those of 7,000 tokens over bf16 rows with "
    "128 heads on FlashMLA in both. Two rounds: where prompts are short, and in decodes, which wait for the host, "
    "those of one engine differ by more than attention takes.",
    "tokens_fp8": "Scales of 1; as above.",
    "tokens_lists": "Mean error of the chosen token's logprob, as above. The engine's indexer scores keys in e4m3 with "
    "DeepGEMM, so beyond the lists' length float32 chooses other keys than all backends do; with random weights that "
    "outweighs their rounding. The last row judges our tokens by a model that attends to all keys. `fp8_ds_mla` and "
    "`fp8_e4m3`: a cache of rows of 656 bytes, else bf16.",
    "lists": "Without graphs, prompts of 1 to 7,000 tokens, 16 new tokens each, with drafters 64. A layer's output "
    "beside float32 over the queries, the cache and the lists that it got in the engine, for up to 8 query tokens of "
    "a call; the relative error is that of the norm over all heads of a token. `fp8_ds_mla`: a cache of rows of 656 "
    "bytes, which FlashMLA converts to bf16 for longer prompts with 32 heads and more; else bf16.",
    "deterministic": "Logprobs of a request alone, and among other requests.",
    "drafts": "Prompts that repeat themselves, 128 new tokens each; which draft tokens hold depends on the tokens, "
    "and so on the rounding of each backend.",
    "drafts_lists": "As above, 3 draft tokens, of n-grams or of a layer of the model (MTP), whose weights are random, "
    "so that none of them holds; it ran on FlashMLA in both. Then mean errors of the chosen token's logprob beside "
    "float32 with these drafters, as for other tokens of sparse MLA.",
    "server": "24 streaming clients at once, 64 tokens each: median time to the first token.",
    "host": "Eager steps of 32 layers: median of the rounds.",
    "readiness": "What each next 500 requests of 1 to 900 tokens caused.",
    "states": "Random weights.",
    "invariance": "Random weights, without graphs.",
    "refusals": "Our backend was named, and the engine ended with this reason.",
}
