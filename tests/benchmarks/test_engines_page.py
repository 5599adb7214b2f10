"""The page on engines shows what was measured, and leaves out what failed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from parts.engines_page import figures  # noqa: E402

PACKAGES = {"vllm": "0.26.0", "sglang": "0.5.16", "torch": "2.11.0"}


def page(folder: Path, name: str, *rows: dict[str, Any]) -> str:
    report = {"environment": {"gpu": {"name": "a GPU"}, "packages": PACKAGES}, "rows": rows}
    (folder / f"{name}.json").write_text(json.dumps(report))
    return figures(folder)


def test_nothing_was_measured(tmp_path: Path) -> None:
    assert figures(tmp_path) == "No measurement is committed yet."


def test_a_section_of_rows_that_failed_is_left_out(tmp_path: Path) -> None:
    assert page(tmp_path, "vllm_tokens", {"model": "llama", "error": "it ended"}) == "No measurement is committed yet."


def test_errors_stand_beside_each_other_by_backend(tmp_path: Path) -> None:
    ours, other = ({"mean_error": error, "tokens": 1536} for error in (0.01234, 0.02))
    made, judge = {"CUSTOM": {}, "FLASH_ATTN": {}}, {"CUSTOM": ours, "FLASH_ATTN": other}
    text = page(tmp_path, "vllm_tokens", {"model": "llama", "made": made, "judge": judge})
    assert "| model | tokens | ours | FlashAttention-3 |" in text
    assert text.endswith("| Llama 3 8B, 4 layers | 1,536 | 0.0123 | 0.0200 |")


def test_errors_within_and_beyond_lists(tmp_path: Path) -> None:
    within, beyond = ({"mean_error": error, "standard_error": 0.003, "tokens": 960} for error in (0.02, 2))
    judged = {"within_lists": within, "beyond_lists": beyond}
    row = {"model": "deepseek-lists", "judge": {"CUSTOM fp8_ds_mla eager": judged, "requests of CUSTOM": 3}}
    text = page(tmp_path, "vllm_tokens_lists", row)
    assert text.endswith(" 4 layers | ours fp8_ds_mla without graphs | 960 | 0.0200 ± 0.0030 | 960 | 2.0000 ± 0.0030 |")


def test_draft_tokens_of_sparse_mla_and_the_errors_of_the_tokens(tmp_path: Path) -> None:
    within, beyond = ({"mean_error": error, "tokens": 960} for error in (0.02, 2))
    judged = {"within_lists": within, "beyond_lists": beyond}
    model = {"model": "deepseek-lists-mtp", "drafter": "n-gram"}
    rounds = {"CUSTOM": [{"draft_tokens": 9, "accepted_tokens": 4}]}
    text = page(
        tmp_path,
        "vllm_drafts_lists",
        {**model, "job": "1 x 512", "rounds": rounds},
        {**model, "judge": {"CUSTOM": judged}},
    )
    assert "| n-gram | 1 x 512 | 4 of 9 |" in text
    assert text.endswith(" and MTP, n-gram | ours | 960 | 0.0200 | 960 | 2.0000 |")


def test_attention_to_the_same_lists_in_crowds(tmp_path: Path) -> None:
    crowds = {"CUSTOM": {"equal": 3, "of": 12, "rows": 23912, "repeated": 8647, "attention": 0}}
    text = page(tmp_path, "vllm_invariance", {"model": "deepseek-lists-mtp", "crowds": crowds})
    assert text.endswith(" 4 layers and MTP | ours 0 of 8,647 |")


def test_errors_of_layers_over_their_lists(tmp_path: Path) -> None:
    counted = {"calls": 68, "tokens": 1348, "tokens_with_full_lists": 212}
    errors = {"relative_error": 0.00235, "mean_relative_error": 0.00181, "absolute_error": 0.0125}
    layers = {"CUSTOM": {**counted, **errors}}
    text = page(tmp_path, "vllm_lists", {"model": "deepseek-lists", "layers": layers})
    assert text.endswith(" 4 layers | ours | 68 | 1,348 | 212 | 0.0018 | 0.0024 | 0.0125 |")


def test_the_best_of_the_rounds_and_the_ratios_of_a_job(tmp_path: Path) -> None:
    rounds = {"cubin_runtime": [{"whole": 2.0}, {"whole": 1.5}], "triton": [{"whole": 3.0}, {"whole": 1.8}]}
    row = {"model": "llama-shape", "job": "1 x 8 + 2", "rounds": rounds, "ratios": {"whole": 1.2}}
    text = page(tmp_path, "sglang_figures", row)
    assert text.endswith("| Llama 3 8B, 32 layers | 1 x 8 + 2 | 1.50 | 1.80 (Triton) | 1.20 | - |")


def test_decodes_have_no_ratio_where_one_new_token_took_longer(tmp_path: Path) -> None:
    rounds = {
        "CUSTOM": [{"whole": 2.0, "cached": 1.0, "first": 1.5}, {"whole": 2.1, "cached": 1.1, "first": 1.2}],
        "FLASH_ATTN": [{"whole": 3.0, "cached": 1.2, "first": 0.2}, {"whole": 3.1, "cached": 1.3, "first": 0.3}],
    }
    text = page(tmp_path, "vllm_figures", {"model": "llama-shape", "job": "1 x 8 + 2", "rounds": rounds})
    assert text.endswith("| Llama 3 8B, 32 layers | 1 x 8 + 2 | 2.00 | 3.00 (FlashAttention-3) | 1.50 | - |")


def test_new_tokens_a_second_over_caches_of_two_dtypes(tmp_path: Path) -> None:
    rounds = {
        label: [{"whole": 2.0 * seconds, "cached": 1.5 * seconds, "first": 0.5 * seconds}]
        for label, seconds in (("CUSTOM", 2), ("CUSTOM fp8", 1))
    }
    row = {"model": "llama-half-shape", "job": "64 x 1,024 + 257", "rounds": rounds}
    text = page(tmp_path, "vllm_cache_dtypes", row)
    assert "| ours | ours fp8 |" in text
    assert text.endswith("| Llama 3 8B, 16 layers | 64 x 1,024 + 257 | 4,112 / 8,192 | 8,224 / 16,384 |")


def test_a_row_of_a_model_that_had_fewer_layers(tmp_path: Path) -> None:
    rounds = {"CUSTOM": [{"whole": 2.0, "cached": 1.5, "first": 0.5}]}
    row = {"model": "deepseek-lists-16-shape", "num_layers": 8, "job": "2 x 8 + 2", "rounds": rounds}
    text = page(tmp_path, "vllm_cache_dtypes_lists", row)
    assert text.endswith("| DeepSeek V3.2 with 16 heads, 8 layers | 2 x 8 + 2 | 2 / 2 |")


def test_what_came_after_the_first_requests_is_counted_from_there(tmp_path: Path) -> None:
    counts = {20: (2, 52, 12), 500: (2, 53, 14)}
    names = ("loads", "allocations", "functions")
    rows = [
        {"model": "llama", "requests": number, "after": {"CUSTOM": dict(zip(names, counted, strict=True))}}
        for number, counted in counts.items()
    ]
    text = page(tmp_path, "vllm_readiness", *rows)
    assert text.endswith("| Llama 3 8B, 4 layers | 520 | 0 | 1 | 2 |")


def test_the_reason_of_a_refusal(tmp_path: Path) -> None:
    lines = ["a warning: not supported here", "ValueError: Selected backend. Reason: ['head_size not supported']"]
    text = page(tmp_path, "vllm_refusals", {"refused": "head_dim 512", "lines": lines})
    assert text.endswith("| head_dim 512 | `head_size not supported` |")


def test_outcomes_of_the_engines_own_tests(tmp_path: Path) -> None:
    functions = {"test_a.py: test_a": {"passed": 1200, "skipped": 3}, "test_b.py: test_b": {"refused": 2}}
    report = {"functions": functions, "reasons": {"refused": {"causal: expected a causal step": 2}}}
    environment = {"gpu": {"name": "a GPU"}, "packages": PACKAGES}
    (tmp_path / "vllm_tests.json").write_text(json.dumps({"environment": environment, **report}))
    text = figures(tmp_path)
    assert "a GPU, vLLM 0.26.0" in text
    assert "Refused: `causal: expected a causal step` (2)." in text
    assert text.endswith("| `test_a` | 1,200 | 0 | 0 | 3 |\n| `test_b` | 0 | 2 | 0 | 0 |")


def test_draft_tokens_of_several_models(tmp_path: Path) -> None:
    rounds = {"triton": [{}, {"accepted_tokens": 5, "draft_tokens": 9}]}
    judged = {"made": {"triton": {}}, "judge": {"cubin_runtime": {"mean_error": 0.01, "tokens": 9}, "triton": {}}}
    judged["judge"]["triton"] = {"mean_error": 0.02, "tokens": 9}
    row = {"model": "deepseek", "drafter": "n-gram"}
    text = page(tmp_path, "sglang_drafts", row | {"job": "1 x 512", "rounds": rounds}, row | judged)
    assert "| DeepSeek V3 with 16 heads, 4 layers, n-gram | 1 x 512 | 5 of 9 |" in text
    assert text.endswith("| DeepSeek V3 with 16 heads, 4 layers | 9 | 0.0200 |")
