"""The pictures of the clients' pages can be drawn from the measurements, and the pages show them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from decode.client_pages import OUTCOMES, context_parallel, flash_mla, transformers
from figures import PICTURES

ROOT = Path(__file__).resolve().parents[2]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
CLIENTS = {
    "flashinfer_tests": "flashinfer",
    "serving_latency": "results/serving",
    "divided_keys": "context_parallel",
    "transformers": "transformers",
}


def step(cache: str, tokens: int, **ratios: dict[str, float]) -> dict[str, Any]:
    """A step of 1 request; ours takes 100 us, and 50 us in a graph."""
    times: dict[str, Any] = {"mine": {"us": 100.0}, "flash_attention_2": "ImportError: no `flash` | here"}
    times["mine"] |= {"graph_us": 50.0} if cache == "static" else {}
    past = 0 if cache == "none" else 8192
    return {"model": "M", "layers": 4, "batch": 1, "tokens": tokens, "past": past, "cache": cache} | {
        "times": times,
        "ratios": ratios,
    }


REPORT: dict[str, Any] = {
    "environment": {
        "gpu": {"name": "GPU"},
        "packages": {"torch": "2", "transformers": "5"},
        "date": "2026-01-02T03:04",
    },
    "ours": "mine",
    "rounds": 5,
    "steps": [
        step("none", 512, sdpa={"us": 1.1}, eager={"us": 2.5}),
        step("static", 1, sdpa={"us": 1.25, "graph_us": 2.0}, eager={"us": 0.9, "graph_us": 3.0}),
        step("dynamic", 1, eager={"us": 0.95}),
        step("static", 512),
    ],
    "continuous_batching": [
        {"requests": 32, "longest_prompt": 1024, "new": 32, "tokens_per_s": {"mine": 2000.4, "sdpa": "E: no"}}
    ],
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn_from_its_json(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    source, draw = PICTURES[name]
    report = REPORT if name == "transformers" else json.loads((RESULTS / f"{source}.json").read_text())
    image = tmp_path / "image.png"
    draw(report, image)
    assert image.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", CLIENTS)
def test_a_page_shows_its_picture_once_it_is_measured(name: str) -> None:
    measured = (RESULTS / f"{PICTURES[name][0]}.json").is_file()
    assert (DOCS / f"{name}.png").is_file() == measured
    assert (f"/{name}.png)" in (text := page(name)) or f"({name}.png)" in text) == measured


def page(name: str) -> str:
    return (DOCS / f"{CLIENTS[name]}.md").read_text()


def test_every_test_of_flashinfers_is_in_its_picture() -> None:
    report = json.loads((RESULTS / "flashinfer_tests.json").read_text())
    for counts in (report["total"], *report["files"].values()):
        assert counts.keys() <= {*OUTCOMES, "with the backend made auto"}
    assert sum(counts.get(name, 0) for counts in report["files"].values() for name in OUTCOMES) == report["sample"]


def test_the_page_of_sparse_mla_says_what_its_tests_said() -> None:
    groups = {"sparse, V3.2 rows": {"passed": 240}, "dense": {"passed": 300, "refused": 3}}
    report = {"environment": {"gpu": {"name": "GPU"}}, "jobs": 8, "ran": 543, "collected": 7100, "tests": "9" * 40}
    report |= {"seconds": 61.2, "seed": 0, "total": {"passed": 540, "refused": 3}, "groups": groups}
    text = flash_mla({**report, "reasons": {"refused": {"k_cache: N heads": 3}}})
    assert "8 processes ran 543 of 7,100 tests of commit `999999999999` in 61 seconds" in text
    assert "540 passed, 3 were refused, 0 failed" in text
    assert "| dense | 300 | 3 | 0 | 0 |" in text
    assert "| 3 | `k_cache: N heads` |" in text


def test_the_page_of_transformers_has_the_time_of_the_host_in_a_layer() -> None:
    rows = [{**row, "host_us_per_layer": {"mine": 31.0, "sdpa": 12.5}} for row in REPORT["steps"][:1]]
    page = transformers({**REPORT, "steps": rows})
    assert "| the host's time in one layer's attention | ours | sdpa |" in page
    assert "| 1 x prompt of 512 | 31.0 us | 12.5 us |" in page


@pytest.mark.parametrize(
    "line",
    [
        "GPU, transformers 5, torch 2; 2026-01-02. 4 layers of M, random weights, bf16. Medians of 5 rounds ",
        "| 1 x prompt of 512 | 100 us | 1.10 | 2.50 |",
        "| 1 x 1 token after 8,192, static cache | 100 us (50.0 us) | 1.25 (2.00) | 0.90 (3.00) |",
        "| 1 x 1 token after 8,192, dynamic cache | 100 us | - | 0.95 |",
        "in tokens per second: ours 2,000, sdpa failed.",
        "| flash_attention_2 | 4 of 4 | `ImportError: no 'flash' / here` |",
    ],
)
def test_the_page_of_transformers_says_what_its_json_says(line: str) -> None:
    assert line in transformers(REPORT)


def test_the_page_of_context_parallelism_says_what_its_json_says() -> None:
    report = json.loads((RESULTS / "context_parallel_alone.json").read_text())
    text = context_parallel(report)
    for row in report["rows"]:
        if row["exchange"] == "all_to_all":
            assert f" ({row['speedup']:.1f})" in text
            assert f"{row['batch']} x {row['kv_len']:,}" in text
