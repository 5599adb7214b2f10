"""The reference that recorded definitions carry, run in torch, against ours in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention import TensorView
from cubin_runtime.attention.attention_operator import AttentionCall
from cubin_runtime.attention.operator import CallTensors
from cubin_runtime.attention.operators.paged_decode import PAGED_DECODE, PagedDecodeOptions
from cubin_runtime.attention.reference import paged_decode_reference
from cubin_runtime.debug.tracing.decode import traced_decode

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

KV_HEADS, GROUP, HEAD_DIM, PAGE, LENGTHS = 2, 3, 16, 8, (21, 2, 0, 40)
NUMBERS = {"softmax_scale": 0.3, "output_scale": 0.7, "window_left": 9, "max_seq_len": 64}


def view_of(tensor: Any) -> TensorView:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorView(0x1000, dtype, tuple(tensor.shape), tuple(tensor.stride()))


def tensors_of(given: dict[str, Any]) -> CallTensors:
    views = [view_of(given[arg.name]) if arg.name in given else None for arg in PAGED_DECODE.tensors]
    return CallTensors(PAGED_DECODE.tensors, views)


def run(given: dict[str, Any], **numbers: Any) -> Any:
    """``run`` of the definition of a call with these tensors."""
    call = traced_decode(AttentionCall(tensors_of(given), PagedDecodeOptions(**{**NUMBERS, **numbers})))
    space: dict[str, Any] = {}
    exec(call.definition()["reference"], space)
    values = {**NUMBERS, **numbers, **given}
    return space["run"](*(values[part.name] for part in call.inputs))


def made(tokens: tuple[int, ...]) -> dict[str, Any]:
    """Random tensors of a decode with log-sum-exp; ``tokens`` are the leading dimensions of q."""
    made_by = torch.Generator().manual_seed(1)
    cache = (30, PAGE, KV_HEADS, HEAD_DIM)
    heads = KV_HEADS * GROUP
    return {
        "q": torch.randn(*tokens, heads, HEAD_DIM, generator=made_by),
        "k_cache": torch.randn(*cache, generator=made_by),
        "v_cache": torch.randn(*cache, generator=made_by),
        "page_table": torch.randperm(30, generator=made_by)[:24].reshape(4, 6).int(),
        "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32),
        "out": torch.empty(*tokens, heads, HEAD_DIM),
        "lse": torch.empty(*tokens, heads),
    }


def expected(given: dict[str, Any], words: Any = None, **more: Any) -> tuple[Any, Any]:
    q = given["q"].numpy().reshape(-1, KV_HEADS * GROUP, HEAD_DIM)
    names = ("k_cache", "v_cache", "page_table", "seq_lens")
    arrays = [given[name].numpy() for name in names]
    options = {"output_scale": 0.7, "window_left": 9, "mask": words, **more}
    return paged_decode_reference(q, *arrays, 0.3, **options)


def agree(found: tuple[Any, Any], wanted: tuple[Any, Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.numpy().reshape(other.shape), other, rtol=1e-5, atol=1e-6)


def test_one_token_a_request() -> None:
    given = made((4,))
    agree(run(given), expected(given))


def test_drafts_with_a_mask_and_sinks() -> None:
    given, words = made((4, 3)), np.random.default_rng(2).integers(0, 8, 12).astype(np.uint32)
    sinks = torch.linspace(-1, 1, KV_HEADS * GROUP)
    halves = torch.from_numpy(words.view(np.int16).reshape(4, 3, 2).copy())
    found = run({**given, "mask": halves, "sinks": sinks})
    agree(found, expected(given, words, sinks=sinks.numpy()))


def test_a_mask_of_two_words_a_token() -> None:
    given = made((4, 40)) | {"seq_lens": torch.tensor([40, 41, 45, 48], dtype=torch.int32)}
    words = np.random.default_rng(3).integers(0, 1 << 40, 160).astype(np.uint64)
    found = run({**given, "mask": torch.from_numpy(words.view(np.int32).reshape(160, 2).copy())})
    agree(found, expected(given, words))


def test_drafts_of_different_length() -> None:
    given, starts = made((9,)), np.array([0, 4, 5, 5, 9], dtype=np.int32)
    found = run({**given, "q_cu_seq_lens": torch.from_numpy(starts)}, max_q_len=4)
    agree(found, expected(given, q_cu_seq_lens=starts))


def test_drafts_with_a_mask_and_a_window_that_counts_by_index() -> None:
    given, words = made((4, 3)), np.random.default_rng(2).integers(0, 8, 12).astype(np.uint32)
    halves = torch.from_numpy(words.view(np.int16).reshape(4, 3, 2).copy())
    found = run({**given, "mask": halves}, window_left=1, draft_position="index")
    wanted = expected(given, words, window_left=1, draft_position="index")
    agree(found, wanted)
    assert not np.allclose(wanted[0], expected(given, words, window_left=1)[0])


def test_tables_of_keys_and_of_values() -> None:
    given = made((4,))
    table = torch.stack([given["page_table"], given["page_table"].flip(0)], dim=1)
    agree(run({**given, "page_table": table}), expected({**given, "page_table": table}))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_keys_of_one_rank(rank: int) -> None:
    given, everywhere = made((4, 3)), np.array([30, 5, 0, 64], dtype=np.int32)
    own = [sum(key // 4 % 2 == rank for key in range(keys)) for keys in everywhere]
    given["seq_lens"] = torch.tensor(own, dtype=torch.int32)
    dealt = {"cp_world": 2, "cp_rank": rank, "cp_interleave": 4}
    found = run({**given, "global_seq_lens": torch.from_numpy(everywhere)}, **dealt)
    agree(found, expected(given, global_seq_lens=everywhere, **dealt))
