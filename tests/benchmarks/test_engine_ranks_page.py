"""The tables of vLLM over two GPUs say what made-up rows say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from parts.engines_page import ranks

ENVIRONMENT = {"gpu": {"name": "GPU"}, "packages": {"vllm": "0.26.0", "torch": "2"}}
LINE = "(Worker_TP{rank} pid=7) INFO 11-25 23:14:0{rank} [readiness.py:39] cubin_runtime: layers of {n} run on a, b"


def write(folder: Path, section: str, *rows: dict[str, Any]) -> None:
    (folder / f"vllm_{section}.json").write_text(json.dumps({"environment": ENVIRONMENT, "rows": rows}))


def test_a_start_on_an_empty_store_and_judged_tokens(tmp_path: Path) -> None:
    first = {"first_start": {"engine_seconds": 31.25}, "sent": {"/a": 1, "/b": 1}}
    first |= {"ready": [LINE.format(rank=rank, n=n) for rank, n in ((1, 4), (0, 4), (1, 8))]}
    labels = ("CUSTOM", "FLASH_ATTN", "CUSTOM one GPU")
    judged: dict[str, Any] = {"start": {label: {"engine_seconds": 20.0} for label in labels}}
    judged |= {
        "made": {each: {} for each in labels},
        "judge": {each: {"mean_error": 0.02, "tokens": 9} for each in labels},
    }
    write(
        tmp_path, "ranks", {"model": "llama", **first}, {"model": "llama", **judged}, {"model": "gptoss", "error": ""}
    )
    text = ranks(tmp_path)
    assert "| Llama 3 8B, 4 layers | 9 | 0.0200 | 0.0200 | 0.0200 |" in text
    assert "| 20.0 | 20.0 | 20.0 | 31.2 | 2 files, each once | 23:14:00 (rank 0), 23:14:01 (rank 1) |" in text


def test_a_file_that_was_sent_again_is_told(tmp_path: Path) -> None:
    first = {"first_start": {"engine_seconds": 1.0}, "sent": {"/a": 1, "/b": 2}, "ready": []}
    write(tmp_path, "ranks", {"model": "llama", **first})
    assert "| 2 files, up to 2 times | - |" in ranks(tmp_path)


def test_engines_that_started_one_after_the_other(tmp_path: Path) -> None:
    start = {"CUSTOM": {"engine_seconds": 10.04}, "FLASH_ATTN": {"engine_seconds": 12.0}}
    rows = [{"model": "gptoss-shape", "ranks": 2, "alone": True, "start": start}]
    rows.append({"model": "gptoss-shape", "ranks": 1, "alone": True, "start": {"CUSTOM": {"engine_seconds": 8.0}}})
    write(tmp_path, "rank_figures", {"model": "llama-shape", "ranks": 2, "start": start}, *rows)
    text = ranks(tmp_path)
    assert "| GPT-OSS 20B, 8 layers | ours | 10.0 | 8.0 |" in text
    assert text.endswith("| GPT-OSS 20B, 8 layers | FlashAttention-3 | 12.0 | - |")


def test_a_step_over_keys_on_two_ranks(tmp_path: Path) -> None:
    labels = ("CUSTOM", "FLASH_ATTN", "CUSTOM undivided", "CUSTOM eager")
    judged = {each: {"mean_error": 0.02, "tokens": 9} for each in labels}
    rounds = {
        each: [{"cached": 1.5 + number + late, "first": 0.5} for late in (0, 0.5, 2)]
        for number, each in enumerate(labels[:3])
    }
    model = {"model": "one-kv-head", "runner": "V2"}
    job = {**model, "job": "1 x 30,000 + 65", "rounds": rounds}
    write(tmp_path, "dealt", {**model, "start": {}}, job, {**model, "made": dict.fromkeys(labels), "judge": judged})
    text = ranks(tmp_path)
    assert "| model | tokens | ours | FlashAttention-3 | ours undivided | ours without graphs |" in text
    assert "| 32 heads on one KV head, 4 layers, model runner V2 | 9 | 0.0200 |" in text
    step = "| 23.44 (15.62 to 46.88) | 39.06 (31.25 to 62.50) | 54.69 (46.88 to 78.12) |"
    assert f"| 32 heads on one KV head, 4 layers, model runner V2 | 1 x 30,000 + 65 {step}" in text


def test_a_backend_whose_tokens_are_wrong_has_no_time(tmp_path: Path) -> None:
    model = {"model": "one-kv-head", "runner": "V2"}
    rounds = {each: [{"cached": 1.0, "first": 0.36}] for each in ("CUSTOM", "FLASH_ATTN")}
    errors = {"CUSTOM": {"mean_error": 0.02, "tokens": 9}, "FLASH_ATTN": {"mean_error": 4.9, "tokens": 9}}
    judged = {**model, "made": dict.fromkeys(errors), "judge": {**errors, "requests of FLASH_ATTN": 0}}
    other = {**model, "model": "one-kv-head-shape", "runner": "V1", "job": "1 x 30,000 + 65", "rounds": rounds}
    shaped = {**model, "model": "one-kv-head-shape", "job": "1 x 9 + 65", "rounds": rounds}
    write(tmp_path, "dealt", shaped, other, judged)
    text = ranks(tmp_path)
    assert "| 0.0200 | 4.9000 |" in text
    assert "| 1 x 9 + 65 | 10.00 (10.00 to 10.00) | - |" in text
    assert "| 1 x 30,000 + 65 | 10.00 (10.00 to 10.00) | 10.00 (10.00 to 10.00) |" in text


def test_backends_of_one_name_share_a_column(tmp_path: Path) -> None:
    rows = []
    for model, peer in (("one-kv-head", "FLASH_ATTN"), ("deepseek", "FLASH_ATTN_MLA")):
        labels = ("CUSTOM", peer)
        judged = {label: {"mean_error": 0.02, "tokens": 9} for label in labels}
        rounds = {label: [{"cached": 1.0, "first": 0.36}] for label in labels}
        rows.append({"model": model, "made": dict.fromkeys(labels), "judge": judged})
        rows.append({"model": model, "job": "1 x 9 + 65", "rounds": rounds})
    write(tmp_path, "dealt", *rows)
    text = ranks(tmp_path)
    assert "| model | tokens | ours | FlashAttention-3 |\n" in text
    assert text.endswith(
        "| DeepSeek V3 with 16 heads, 4 layers | 1 x 9 + 65 | 10.00 (10.00 to 10.00) | 10.00 (10.00 to 10.00) |"
    )


def test_nothing_is_said_before_there_is_a_measurement(tmp_path: Path) -> None:
    assert ranks(tmp_path) == ""
