"""Masks beside windows, which FlashInfer counts from a query token's index among those of its request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention.reference import paged_decode_reference
from cubin_runtime.compat import flashinfer
from cubin_runtime.testing import StandIn
from tests.attention.trtllm_calls import MadeUpMemory
from tests.attention.xqa_calls import HEAD_DIM, HEADS, sent, trtllm_arguments, xqa_arguments, xqa_batch_arguments

pytestmark = pytest.mark.usefixtures("hopper")

CAUSAL, PERMUTED, FULL, TREE = (1, 3, 7), (4, 5, 7), (7, 7, 7), (1, 3, 5)


@pytest.fixture(params=["xqa", "xqa_batch", "trtllm"])
def decode(request: pytest.FixtureRequest, standin: StandIn, memory: MadeUpMemory) -> Callable[[Any], dict[str, Any]]:
    """Decode with three drafts of four requests under one of three names, with a mask and a window of 101 keys."""

    def call(mask: Any) -> dict[str, Any]:
        if request.param == "xqa":
            q = memory.tensor("bfloat16", 4, 3, HEADS, HEAD_DIM)
            given = {"sliding_win_size": 101, "q_seq_len": 3, "mask": mask}
            flashinfer.xqa(**xqa_arguments(memory, q=q, output=replace(q), **given))
        else:
            name, made = {
                "xqa_batch": ("xqa_batch_decode_with_kv_cache", xqa_batch_arguments),
                "trtllm": ("trtllm_batch_decode_with_kv_cache", trtllm_arguments),
            }[request.param]
            getattr(flashinfer, name)(**made(memory, 12, q_len_per_req=3, mask=mask, window_left=100))
        return sent(standin)

    return call


def test_the_window_of_a_mask_counts_from_the_index_and_the_mask_stays_on_the_device(
    decode: Callable[[Any], dict[str, Any]], memory: MadeUpMemory
) -> None:
    mask = memory.tensor("uint16", 4, 3, 2)
    for _ in range(2):  # the second call takes the fast path
        seen = decode(mask)
        assert (seen["mask"], seen["window_left"], seen["positions_by_index"]) == (mask.pointer, 100, 1)
    assert memory.reads == []


@pytest.mark.parametrize("window", [1, 2, 5, 30])
@pytest.mark.parametrize("rows", [CAUSAL, PERMUTED, FULL, TREE])
def test_counting_from_the_index_is_flashinfers_rule(rows: tuple[int, ...], window: int) -> None:
    rng = np.random.default_rng(0)
    length, tokens = 21, len(rows)
    q, keys, values = rng.standard_normal((tokens, 1, 8)), *rng.standard_normal((2, 32, 8))
    native, _ = paged_decode_reference(
        q,
        keys.reshape(2, 16, 1, 8),
        values.reshape(2, 16, 1, 8),
        np.array([[0, 1]]),
        np.array([length]),
        1.0,
        q_cu_seq_lens=np.array([0, tokens]),
        mask=np.array(rows, dtype=np.uint32),
        window_left=window,
        draft_position="index",
    )
    place, key = np.arange(tokens)[:, None], np.arange(length)
    draft = key - (length - tokens)
    seen = (draft < 0) | (np.array(rows)[:, None] >> np.maximum(draft, 0) & 1 == 1)
    seen &= key >= length - tokens + place - window
    weights = np.exp(q[:, 0] @ keys[:length].T) * seen
    assert np.allclose(native[:, 0], weights @ values[:length] / weights.sum(axis=1, keepdims=True))
