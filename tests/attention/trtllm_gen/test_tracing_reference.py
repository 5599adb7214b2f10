"""The reference that recorded definitions of trtllm-gen calls carry, run in torch, against ours in float64."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention.context_reference import context_attention_reference
from cubin_runtime.attention.reference import mla_decode_reference, paged_decode_reference
from cubin_runtime.attention.trtllm_gen import ContextCall, DecodeCall, RaggedCall, Scale
from cubin_runtime.debug.tracing import TracedCall
from cubin_runtime.debug.tracing.trtllm_gen import traced_trtllm_gen

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from tests.attention.test_context_tracing_reference import HEADS, KV_HEADS, random, sums  # noqa: E402  (they need torch)
from tests.attention.test_tracing_reference import agree, view_of  # noqa: E402

DIM, PAGE, PAGES, LENGTHS, Q_LENS = 16, 8, 30, (21, 2, 9, 40), (4, 1, 0, 4)
SCALES = {"bmm1_scale": 0.3, "bmm2_scale": 0.7, "bmm1": Scale(0.3), "bmm2": Scale(0.7)}


def run(kind: Any, given: dict[str, Any]) -> Any:
    """``run`` of the definition of a call with these fields, tensors in torch."""
    named = {field.name for field in fields(kind)} & given.keys()
    made = {name: view_of(given[name]) if isinstance(given[name], torch.Tensor) else given[name] for name in named}
    call = traced_trtllm_gen(kind(**made))
    assert isinstance(call, TracedCall)
    space: dict[str, Any] = {}
    exec(call.definition()["reference"], space)
    return space["run"](*(given[part.name] for part in call.inputs))


def paged(tokens: int, heads: int = HEADS, kv_heads: int = KV_HEADS, dim: int = DIM, out: int = DIM) -> dict[str, Any]:
    table = torch.randperm(PAGES, generator=torch.Generator().manual_seed(3))[:24].reshape(4, 6).int()
    key = random(PAGES, kv_heads, PAGE, dim)
    return {
        "query": random(tokens, heads, dim),
        "key": key,
        "value": key if out < dim else key.flip(0),
        "block_tables": table,
        "seq_lens": torch.tensor(LENGTHS).int(),
        "out": torch.empty(tokens, heads, out),
        "lse": torch.empty(tokens, heads),
        "max_q": 4,
        "max_kv": 48,
        "window_left": -1,
        **SCALES,
    }


def in_numpy(given: dict[str, Any]) -> list[Any]:
    """Query, key and value as ours take them, table and lengths."""
    key, value = (given[name].transpose(1, 2).numpy() for name in ("key", "value"))
    return [given["query"].numpy(), key, value, given["block_tables"].numpy(), np.array(LENGTHS)]


@pytest.mark.parametrize("window_left", [-1, 6])
@pytest.mark.parametrize("q_len", [1, 2])
def test_decode_of_tokens_of_equal_number(q_len: int, window_left: int) -> None:
    given = {**paged(4 * q_len), "window_left": window_left}
    wanted = paged_decode_reference(*in_numpy(given), 0.3, output_scale=0.7, window_left=window_left)
    agree(run(DecodeCall, given), wanted)


def test_ragged_decode_with_sinks_and_scales_on_the_device() -> None:
    begins, sinks = sums(Q_LENS), torch.linspace(-1, 1, HEADS)
    of_scores, of_output = torch.tensor([0.3 / math.log(2)]), torch.tensor([0.7])
    scales = {"bmm1_scale_device": of_scores, "bmm2_scale_device": of_output}
    given = {**paged(9), "cum_seq_lens_q": begins, "sinks": sinks, "lse": None, **scales}
    given |= {"bmm1": Scale(pointer=0x1000), "bmm2": Scale(pointer=0x2000)}
    options = {"output_scale": 0.7, "q_cu_seq_lens": begins.numpy(), "sinks": sinks.numpy()}
    wanted = paged_decode_reference(*in_numpy(given), 0.3, **options)
    agree((run(DecodeCall, given),), wanted[:1])


def test_separate_tables() -> None:
    given = paged(4)
    given["block_tables"] = torch.stack([given["block_tables"], given["block_tables"].flip(0)], dim=1)
    agree(
        run(DecodeCall, {**given, "shares_index": False}),
        paged_decode_reference(*in_numpy(given), 0.3, output_scale=0.7),
    )


def test_mla_decode() -> None:
    given = paged(8, heads=3, kv_heads=1, dim=80, out=16)
    q, key, _, table, lengths = in_numpy(given)
    wanted = mla_decode_reference(q, key[:, :, 0], table, lengths, 0.3, latent=16, output_scale=0.7)
    agree(run(DecodeCall, given), wanted)


@pytest.mark.parametrize("causal", [True, False])
def test_context_over_pages(causal: bool) -> None:
    given = {**paged(9), "cum_seq_lens_q": sums(Q_LENS), "cum_seq_lens_kv": sums(LENGTHS), "causal": causal}
    q, key, value, table, lengths = in_numpy(given)
    options: dict[str, Any] = {"page_table": table, "causal": causal, "output_scale": 0.7}
    agree(run(ContextCall, given), context_attention_reference(q, key, value, Q_LENS, lengths, 0.3, **options))


def test_ragged_context() -> None:
    keys = {name: random(sum(LENGTHS), KV_HEADS, dim) for name, dim in (("key", DIM), ("value", 24))}
    given = {**paged(9, out=24), **keys, "cum_seq_lens_q": sums(Q_LENS), "cum_seq_lens_kv": sums(LENGTHS)}
    q, key, value = (given[name].numpy() for name in ("query", "key", "value"))
    wanted = context_attention_reference(q, key, value, Q_LENS, LENGTHS, 0.3, output_scale=0.7)
    agree(run(RaggedCall, given), wanted)
