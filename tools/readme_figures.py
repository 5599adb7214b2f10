"""Write the README's support matrix, its figures and those of the home page, the GPUs of FlashInfer's functions, and
what attention on Hopper takes.

They come from the code and the JSON. ``make figures`` writes them; a test compares the pages with what that writes.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.decode.freshness import SWEEP, fresh_rows, is_fresh, pinned  # noqa: E402
from benchmarks.engine.ratios import ratios_of  # noqa: E402
from cubin_runtime import attention  # noqa: E402
from cubin_runtime.attention.backends import TABLE, Support  # noqa: E402
from kernels_src.variants import VARIANTS  # noqa: E402

# The operation of an operator's kernels, where their names differ.
OPERATIONS = {"mla_decode": "paged_mla_decode"}
# What the kernels of an operator take, where it is not a trait: dtypes and head_dim.
TAKEN = {
    "append_kv": ("bf16, fp16, e4m3", "32 to 1024, in steps of 16"),
    "merge_states": ("bf16, fp16, fp32", "8 to 4096, in steps of 8"),
    "sparse_mla_decode": ("bf16, e4m3 with scales", "512, 512 + 64"),
}
PICTURE = "![Bandwidth of keys and values read by paged decode, against batch and length](docs/decode_bandwidth.png)"
EARLIER = "measured with an earlier kernel"
# Engine -> its name, our backend there, the shape of Llama that was measured, its layers, and the other backend.
ENGINES = {
    "vllm": ("vLLM", "CUSTOM", "llama-shape", 32, "FlashAttention-3"),
    "sglang": ("SGLang", "cubin_runtime", "llama-half-shape", 16, "Triton"),
}
PUBLISHED = ("trtllm-gen", "SM100, SM103", "bf16, fp16, e4m3, e2m1", "by the release", "published, not run here")
_DTYPES = ("bf16", "fp16", "fp32", "e4m3")


def support_matrix() -> str:
    """Operator, SM, cache dtypes, head_dim and state, one row for each group of SMs that have the same kernels."""
    rows: list[Sequence[str]] = []
    for operator in (name for name in TABLE if hasattr(attention, name)):
        rows += _native_rows(operator)
    rows.append((f"{PUBLISHED[0]} through FlashInfer's names", *PUBLISHED[1:]))
    return _table(("operator", "GPU", "cache dtypes", "head_dim", "state"), rows)


def _native_rows(operator: str) -> list[Sequence[str]]:
    kernels = [variant for variant in VARIANTS if variant.operation == OPERATIONS.get(operator, operator)]
    by_sm: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {}
    own = {kernel.sm for kernel in kernels}
    for sm in dict.fromkeys(kernel.sm for kernel in kernels if f"{kernel.sm}a" not in own):
        traits = [kernel.traits for kernel in kernels if kernel.sm == sm]
        dtypes = {str(found) for trait in traits if (found := trait.get("kv_dtype", trait.get("dtype")))}
        widths = {width for trait in traits if (width := _width(trait))}
        state = next(kernel.status for kernel in kernels if kernel.sm == sm)
        by_sm[sm] = (tuple(d for d in _DTYPES if d in dtypes), tuple(sorted(widths, key=_number)), state)
    taken = TAKEN.get(operator, ("all", "all"))
    grouped: dict[Any, list[str]] = defaultdict(list)
    for sm, facts in by_sm.items():
        grouped[facts].append(sm)
    ordered = sorted(grouped.items(), key=lambda item: (item[0][2] != "measured", -len(item[1])))
    return [
        (
            f"`{operator}`",
            ", ".join(f"SM{sm}" for sm in sms),
            ", ".join(dtypes) or taken[0],
            ", ".join(widths) or taken[1],
            state,
        )
        for (dtypes, widths, state), sms in ordered
    ]


def forms_matrix() -> str:
    """The dtypes of queries and caches on SM90a, one row for head dimensions that have the same kernels."""
    grouped: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for operator in ("paged_decode", "context_attention", "mla_decode"):
        kernels = [v for v in VARIANTS if v.operation == OPERATIONS.get(operator, operator) and v.sm == "90a"]
        alike = {_form(kernel.traits) for kernel in kernels if _has_segments(kernel.traits)}
        for kernel in kernels:
            width, queries, cache = _form(kernel.traits)
            for q in queries.split(","):
                same = any((width, one, cache) in alike for one in (q, queries))
                bits = "the same" if same else "not promised" if operator != "mla_decode" else "no prompts"
                grouped[f"`{operator}`", q, cache, bits, kernel.status].add(width)
    rows = [
        (operator, ", ".join(sorted(widths, key=_number)), *of)
        for (operator, *of), widths in sorted(grouped.items(), key=lambda row: _order(row[0]))
    ]
    head = ("operator", "head_dim", "queries", "cache", "bits of prompts and decodes, `batch_invariant`", "state")
    return _table(head, rows)


def _form(traits: Mapping[str, Any]) -> tuple[str, str, str]:
    """Width, dtypes of queries and dtype of the cache."""
    cache = str(traits.get("kv_dtype", traits["dtype"]))
    width = str(traits.get("value_dim", "")) if traits.get("value_dim") != traits.get("head_dim") else ""
    return _width(traits) + (width and f" / {width}"), str(traits.get("q_dtypes", traits["dtype"])), cache


def _has_segments(traits: Mapping[str, Any]) -> bool:
    return traits.get("segments") is True or traits.get("arithmetic") == "segments"


def _order(row: Sequence[str]) -> tuple[object, ...]:
    operator, q, cache, bits, _ = row
    operators = ("`paged_decode`", "`context_attention`", "`mla_decode`")
    return operators.index(operator), _DTYPES.index(cache), _DTYPES.index(q), bits != "the same"


def _width(traits: Mapping[str, Any]) -> str:
    if "latent" in traits:
        return f"{traits['latent']} + {traits['rope']}" if traits["rope"] else str(traits["latent"])
    return str(traits.get("head_dim", ""))


def _number(text: str) -> tuple[int, str]:
    return int(text.split()[0]), text


def backend_matrix() -> str:
    """FlashInfer's function, and its backends with their SMs by state, one row for functions that have the same."""
    grouped: dict[Any, list[str]] = defaultdict(list)
    for function, backends in TABLE.items():
        if not hasattr(attention, function):
            cells = tuple(_backend_cell(backends, state) for state in ("measured", "published", "built"))
            grouped[cells].append(f"`{function}`")
    head = ("function", "measured", "published by NVIDIA, not run here", "built, not run: warns")
    return _table(head, [(", ".join(functions), *cells) for cells, functions in grouped.items()])


def _backend_cell(backends: Mapping[str, Support], state: str) -> str:
    cells = []
    for name, support in backends.items():
        sms = sorted(10 * major + minor for major, minor in getattr(support, state))
        if sms:
            followed = " (`auto` too)" if state == "built" and support.followed == support.built else ""
            cells.append(f"`{name}`: {', '.join(f'SM{sm}' for sm in sms)}{followed}")
    return "; ".join(cells) or "-"


def headlines(results: Path = ROOT / "benchmarks" / "results") -> str:
    """Up to five figures, each with where it comes from, and the picture of the decode.

    A figure of kernels is left out where no row of its kind was measured with the pinned release.
    """
    rows = (*_decode(results), *_prompt(results), *_engine(results), *_call(results), _cold_fetch(results))
    swept = [row for row in _report(results, SWEEP)["rows"] if row["section"] == "sweep"]
    age = "" if all(is_fresh(row, pinned(results)) for row in swept) else f"\n\nThe picture was {EARLIER}."
    return f"{_table(('figure', 'what was measured', 'details'), rows)}\n\n{PICTURE}{age}"


def _decode(results: Path) -> list[Sequence[str]]:
    """The decode of one query token that reads fastest, if there is one."""
    report = _report(results, "decode")
    alike = [row for row in fresh_rows(report, pinned(results)) if row["q_len"] == 1 and row["kv_dtype"] == "bf16"]
    beside = [row for row in alike if "ratio" in row and row["length"]]
    return [
        (
            f"**{row['read_share']:.0%} of read bandwidth**",
            f"paged decode on an {report['environment']['gpu']['name']}, bf16, {row['batch']} requests of "
            f"{row['length']:,} keys: {row['tb_per_s']:.2f} TB/s of {report['read']['tb_per_s']:.2f}; "
            f"{row['ratio']:.2f} times the speed of the fastest other implementation, in a sequence of layers",
            "[results](docs/results/decode.md)",
        )
        for row in sorted(beside, key=lambda row: row["read_share"])[-1:]
    ]


def _prompt(results: Path) -> list[Sequence[str]]:
    report = _report(results, "prefill")
    return [
        (
            f"**{row['tflop_per_s']['ours']:.0f} TFLOP/s of prefill**",
            f"context attention on an {report['environment']['gpu']['name']}, bf16, head_dim 128, a causal prompt of "
            f"8,192 tokens: {row['ratio']:.2f} times the speed of the fastest other implementation, in a sequence of "
            "layers",
            "[results](docs/results/prefill.md)",
        )
        for row in fresh_rows(report, pinned(results))
        if row["case"] == "causal D 128 S 8192"
    ]


def _engine(results: Path) -> list[Sequence[str]]:
    """The jobs of the shape of Llama in both engines; the run that starts them says which cubins they launched."""
    speeds, measured = [], []
    for engine, (name, ours, model, layers, peer) in ENGINES.items():
        report = _report(results, f"{engine}_figures")
        jobs, fresh = [], False
        for row in (row for row in report["rows"] if row["model"] == model):
            fresh = is_fresh(row, pinned(results)) if "cubins" in row else fresh
            ratios = ratios_of(row["rounds"], ours) if fresh and "job" in row else {}
            jobs += [ratios["whole"]] if "whole" in ratios else []
        if jobs:
            environment = report["environment"]
            speeds.append(f"{min(jobs):.2f} to {max(jobs):.2f} times the speed of {peer} in {name}")
            measured.append(
                f"{len(jobs)} jobs of {layers} layers of Llama 3 8B in {name} {environment['packages'][engine]} on an "
                f"{environment['gpu']['name']}"
            )
    return [(f"**{', '.join(speeds)}**", "; ".join(measured), "[engines](docs/engines.md#measured)")] if speeds else []


def _call(results: Path) -> list[Sequence[str]]:
    report = _report(results, "host_cost")
    call = report["microseconds"]["plan.run, same tensors"]
    words = (
        f"**{call['ratio']:.1f} times a loop in C**",
        f"host time of a planned call, `plan.run` with torch tensors{_accelerated(report)}: {call['median']:.1f} us, "
        f"beside {call['floor']:.1f} us of a C loop that makes the same launch",
        "[results](docs/results/host.md)",
    )
    return [words] if is_fresh(call, pinned(results)) else []


def _cold_fetch(results: Path) -> Sequence[str]:
    fetch = _report(results, "fetch")
    medians = fetch["medians"]
    return (
        f"**{fetch['ratios']['cold_speedup']:.2f} times faster cold fetch**",
        f"{fetch['versions']['files']:,} verified files, {fetch['versions']['bytes'] / 1e9:.2f} GB: "
        f"{medians['ours_cold_s']:.1f} s; flashinfer-python {medians['peer_cold_s']:.1f} s",
        "[results](docs/results/fetching.md)",
    )


def _report(results: Path, name: str) -> Any:
    return json.loads((results / f"{name}.json").read_text())


def _accelerated(report: Mapping[str, Any]) -> str:
    known = {True: " and the accelerator", False: ", without the accelerator"}
    return known.get(report.get("accelerator"), "")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


PAGES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "README.md": {"support": support_matrix, "figures": headlines},
    "docs/index.md": {"figures": lambda: headlines().replace("](docs/", "](")},
    "docs/flashinfer.md": {"backends": backend_matrix},
    "docs/getting_started.md": {"forms": forms_matrix},
}


def written(page: str) -> str:
    """The text of a page with its tables between their markers."""
    text = (ROOT / page).read_text()
    for name, make in PAGES[page].items():
        table = make()
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"expected one {begin} and one {end}")
        text = re.sub(f"{begin}.*{end}", lambda _, t=table, b=begin, e=end: f"{b}\n{t}\n{e}", text, flags=re.DOTALL)  # type: ignore[misc]
    return text
