"""Measured figures in the sentences of pages, and the rows of results that they are taken from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.docs.words import prose_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
EARLIER = "earlier release of the kernels"
# Results of fetching, verifying and planning, which launch no kernel.
WITHOUT_KERNELS = frozenset({"artifacts", "host_new_tokens"})
_NUMBER = r"(?<![\d.,])\d(?:[\d,.]*\d)?"
_UNITS = r"us|ms|s|[TGM]B/s|TFLOP/s|%|times|x|tests|launches|pairs"
_FIGURE = re.compile(rf"(?:{_NUMBER} to )?{_NUMBER} ?(?:{_UNITS})(?![\w/])")
_LOOSE = "131072"
_MLA_TURNS = "launch_turns_mla_h200"
_GENERATED = re.compile(r"<!-- ([\w]+): begin -->.*?<!-- \1: end -->", re.DOTALL)
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Stated:
    """Words of a page with measured figures, which stand in it exactly as ``values`` of the result fill them in.

    Attributes:
        words: the text, with a format for each figure.
        result: the JSON file that has them.
        rows: which rows of the result; those of the whole file are one.
        values: the figures of these rows, in order.
    """

    words: str
    result: str
    values: Callable[[list[Row]], tuple[object, ...]]
    rows: Callable[[Row], bool] = lambda _: True

    def cited(self) -> list[Row]:
        """The rows that the figures are taken from."""
        report = json.loads((RESULTS / f"{self.result}.json").read_text())
        rows = [row for row in report.get("rows", [report]) if self.rows(row)]
        assert rows, f"{self.words}: no such row in {self.result}.json"
        return rows

    def text(self) -> str:
        """The words with the figures of the result."""
        return self.words.format(*self.values(self.cited()))


def unexplained(page: str, stated: Iterable[Stated]) -> list[str]:
    """The figures with a unit in the hand-written text of a page that are in none of these statements."""
    text = hand_written(page)
    for one in stated:
        text = text.replace(one.text(), " ")
    return [found[0] for found in _FIGURE.finditer(prose_of(text))]


def hand_written(page: str) -> str:
    """A page but what is generated and its blocks of code, on one line."""
    return " ".join(re.sub(r"^```.*?^```$", " ", _GENERATED.sub("", page), flags=re.MULTILINE | re.DOTALL).split())


def extremes(name: str) -> Callable[[list[Row]], tuple[object, ...]]:
    """The least and the largest value of a key of rows."""
    return lambda rows: (min(row[name] for row in rows), max(row[name] for row in rows))


def case(*parts: str) -> Callable[[Row], bool]:
    """Rows whose case or label has all of these parts."""
    return lambda row: all(part in str(row.get("case", row.get("label"))) for part in parts)


def _artifacts(*keys: str, scale: float = 1) -> Callable[[list[Row]], tuple[object, ...]]:
    def value(rows: list[Row]) -> tuple[object, ...]:
        found: Any = rows[0]
        for key in keys:
            found = found[key]
        return (found["median_ms"] * scale,)

    return value


def _last_line(pattern: str) -> Callable[[list[Row]], tuple[object, ...]]:
    def value(rows: list[Row]) -> tuple[object, ...]:
        lines = (re.search(pattern, step["last_line"]) for step in rows[0]["steps"])
        return tuple(int(number) for found in lines if found for number in found.groups())

    return value


def _call(name: str) -> Stated:
    steps = ("new", "second", "third", "repeated")
    *before, operator = name.rpartition(" ")
    return Stated(
        f"| {''.join(before)}`{operator}` | {{:.0f}} | {{:.0f}} | {{:.0f}} | {{:.0f}} |",
        "host_new_tokens",
        lambda rows: tuple(rows[0]["microseconds"][f"{name}: tokens"][step] for step in steps),
    )


def _faster(rows: list[Row]) -> tuple[object, ...]:
    ratios = [row["before"][_LOOSE] / row["after"][_LOOSE] for row in rows]
    return min(ratios), max(ratios)


def _changes(rows: list[Row]) -> list[float]:
    """The time after a change over that before it, at each bound."""
    return [row["after"][bound] / us for row in rows for bound, us in row["before"].items()]


def _most_lost(rows: list[Row]) -> tuple[object, ...]:
    return (max(_changes(rows)),)


def _most_gained(rows: list[Row]) -> tuple[object, ...]:
    return (min(_changes(rows)),)


def _loosely(when: str) -> Callable[[list[Row]], tuple[object, ...]]:
    return lambda rows: (min(row[when][_LOOSE] for row in rows), max(row[when][_LOOSE] for row in rows))


def _mean_under_a_loose_bound(rows: list[Row]) -> tuple[object, ...]:
    return (fmean(row["after"][_LOOSE] / row["before"][_LOOSE] for row in rows if _LOOSE in row["before"]),)


def _mean_change(rows: list[Row]) -> tuple[object, ...]:
    return (fmean(_changes(rows)),)


def _lengths_of(distribution: str) -> Callable[[Row], bool]:
    return lambda row: row["name"].startswith(f"MLA 128 bf16 {distribution}")


def _keys(row: Row) -> int:
    """Of each request."""
    return int(row["name"].rpartition("x")[2])


def _alone(form: str, least: int, most: int) -> Callable[[Row], bool]:
    """A single request of so many keys."""
    return lambda row: row["name"].startswith(f"{form} 1x") and least <= _keys(row) <= most


# Page -> what its sentences say of measurements. Whatever has a unit in a page and is not here was chosen by somebody.
STATED: Mapping[str, tuple[Stated, ...]] = {
    "docs/batch_invariance.md": (
        Stated(
            "{:.1f} to {:.1f} times up to 8,192 keys",
            "invariant",
            extremes("ratio"),
            lambda row: case("batch 1, q_len 1,")(row) and int(row["case"].split()[-1]) <= 8192,
        ),
        Stated("**Prefill,** {:.2f} to {:.2f} times.", "invariant", extremes("ratio"), case("prefill")),
        Stated(
            "{:.2f} times with 16 requests at head_dim 64",
            "invariant",
            lambda rows: (rows[0]["ratio"],),
            case("decode d64", "batch 16, q_len 8,"),
        ),
        Stated(
            "{:.2f} times with 64 at head_dim 128",
            "invariant",
            lambda rows: (rows[0]["ratio"],),
            case("decode d128", "batch 64, q_len 8,"),
        ),
    ),
    "docs/decode_kernels.md": (
        Stated(
            "{:.2f} to {:.2f} times as fast as before with one KV head",
            "launch_turns_h200",
            _faster,
            _alone("8/1 d128 bf16", 6000, 131072),
        ),
        Stated(
            "{:.2f} to {:.2f} times in MLA with 16 heads",
            "launch_turns_h200",
            _faster,
            _alone("MLA 16 bf16", 6000, 131072),
        ),
        Stated(
            "keys takes {:.2f} to {:.2f} us under a bound of 131,072",
            "launch_turns_alone_h200",
            _loosely("after"),
            _alone("8/1 d128 bf16 q_len 1", 512, 4096),
        ),
        Stated(
            "where it took {:.2f} to {:.2f} us",
            "launch_turns_alone_h200",
            _loosely("before"),
            _alone("8/1 d128 bf16 q_len 1", 512, 4096),
        ),
        Stated(
            "keys take {:.2f} times as long as before in the mean",
            "launch_turns_alone_h200",
            _mean_under_a_loose_bound,
            lambda row: " 1x" in row["name"] and _keys(row) <= 11000,
        ),
        Stated(
            "longer ones {:.2f} times",
            "launch_turns_alone_h200",
            _mean_under_a_loose_bound,
            lambda row: " 1x" in row["name"] and _keys(row) > 11000,
        ),
        Stated("The row that loses most takes {:.2f} times as long", "launch_turns_alone_h200", _most_lost),
        Stated(
            "two query tokens and 64 query heads are {:.2f} to {:.2f} times as fast",
            "launch_turns_h100",
            _faster,
            lambda row: row["name"] in {f"64/8 d128 bf16 q_len 2 16x{keys}" for keys in (6144, 10000, 24000)},
        ),
        Stated("loses most takes {:.2f} times as long", "launch_turns_h100", _most_lost),
    ),
    "docs/launch_path.md": tuple(map(_call, ("context_attention", "append_kv", "ragged paged_decode"))),
    "docs/prefill.md": (
        Stated("{:,} launches on two streams of each of two", "soak", lambda rows: (sum(r["launches"] for r in rows),)),
    ),
    "docs/results/correctness.md": (
        Stated("On an H200, {:,} tests passed.", "gpu_run", _last_line(r"(\d+) passed")),
        Stated("{} were skipped:", "gpu_run", _last_line(r"(\d+) skipped")),
        Stated("On an H100, {:,} tests passed", "gpu_run_h100", _last_line(r"(\d+) passed")),
        Stated(
            "{1} pairs of accesses reported, {0} of them shown",
            "gpu_run",
            _last_line(r"(\d+) hazards displayed \((\d+) errors"),
        ),
    ),
    "docs/results/decode.md": (
        Stated(
            "query token the kernel is DRAM-bound, at {:.0f} to {:.0f}% of peak",
            "profile",
            extremes("dram_share"),
            lambda row: (
                any(name in row["label"] for name in ("128 x 2048", "q_len 1, 32 x 16384", "q_len 1, 64 x 16384"))
                and row["section"] != "fp8"
            ),
        ),
    ),
    "docs/results/mla.md": (
        Stated("take {:.2f} times as long in the mean where", _MLA_TURNS, _mean_change, _lengths_of("exponential")),
        Stated("{:.2f} times where uniformly", _MLA_TURNS, _mean_change, _lengths_of("uniform")),
        Stated("{:.2f} times where all are equal", _MLA_TURNS, _mean_change, _lengths_of("equal")),
        Stated("an e4m3 cache, takes {:.2f} times as long", _MLA_TURNS, _most_gained),
        Stated("The row that loses most takes {:.2f} times as long", _MLA_TURNS, _most_lost),
        Stated(
            "tensor pipe runs at {:.0f} to {:.0f}% of its peak",
            "profile",
            extremes("tensor_share"),
            case("heads, 64 x 4096"),
        ),
    ),
    "docs/results/fetching.md": (
        Stated("warm page cache, {}.", "artifacts", lambda rows: (rows[0]["date"][:10],)),
        Stated("one process | {:.2f} s", "artifacts", _artifacts("verify_release", "cubin-runtime verify", scale=1e-3)),
        Stated("(coreutils 9.1) | {:.2f} s", "artifacts", _artifacts("verify_release", "sha256sum -c", scale=1e-3)),
        Stated("hashing included | {:.1f} ms", "artifacts", _artifacts("index", "open_and_find_one")),
        Stated("without the index | {:.0f} ms", "artifacts", _artifacts("index", "rebuild_from_header")),
        Stated("`import cubin_runtime` | {:.0f} ms", "artifacts", _artifacts("import", "import_alone")),
        Stated("from the store | {:.2f} ms", "artifacts", _artifacts("load", "load")),
    ),
}
