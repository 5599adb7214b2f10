"""Ragged decodes that skip keys: what the reference launcher recorded passes the checks, but for MLA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from cubin_runtime.attention.trtllm_gen.checks import check_call
from cubin_runtime.cli.recorded_cases import call_of
from cubin_runtime.errors import UsageError
from tests.kernels.trtllm_examples import recorded_cases


def ragged_and_skipping(families: tuple[str, ...]) -> Iterator[Mapping[str, Any]]:
    """The recorded cases of these families that were launched."""
    for record in recorded_cases():
        case = record["case"]
        skips = case["scalars"].get("skip_softmax_threshold_scale_factor")
        if record["ok"] and case["family"] in families and skips and "cum_seq_lens_q" in case["tensors"]:
            yield case


def test_ragged_queries_of_many_heads_may_skip_keys() -> None:
    calls = [
        call_of({**case, "multi_ctas_kv_enabled": True})
        for case in ragged_and_skipping(("decode_gqa", "decode_gqa_tileq", "decode_gqa_nvfp4out"))
    ]
    for call in calls:
        check_call(call)
    assert len(calls) == 38


def test_ragged_queries_of_mla_skip_none() -> None:
    calls = [call_of(case) for case in ragged_and_skipping(("mla_decode",))]
    for call in calls:
        with pytest.raises(UsageError, match="with cum_seq_lens_q: ragged queries of MLA skip no softmax"):
            check_call(call)
    assert len(calls) == 12
