"""Attention over a KV cache under flash-attention's names: decoding or context attention, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from cubin_runtime.compat.flash_attn import flash_attn_with_kvcache
from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.decode.params import PAGED_DECODE_TMA
from cubin_runtime.testing import StandIn
from tests.attention.flash_attn_calls import (
    BATCH,
    COLUMNS,
    DIM,
    HEADS,
    KV_HEADS,
    PAGE,
    PAGES,
    TOKENS,
    cache_arguments,
    sent,
)
from tests.attention.trtllm_calls import MadeUpMemory, made, tensor

pytestmark = pytest.mark.usefixtures("hopper")


def decoded(standin: StandIn) -> dict[str, Any]:
    """The parameters of the only launch that is not a merge, a decode."""
    first = standin.calls("cuLaunchKernelEx")[0]
    assert "paged_decode" in first.seen["symbol"]
    return PAGED_DECODE_TMA.unpack(bytes.fromhex(first.seen["parameter0"]))


@pytest.mark.parametrize(("q_len", "causal"), [(1, False), (1, True), (8, True)])
def test_few_tokens_of_each_request_are_decoded(
    standin: StandIn, memory: MadeUpMemory, q_len: int, causal: bool
) -> None:
    given = cache_arguments(memory, q_len, causal=causal)
    out = flash_attn_with_kvcache(**given)
    seen = decoded(standin)
    assert (out.shape, seen["out"]) == ((BATCH, q_len, HEADS, DIM), out.pointer)
    assert [seen[name] for name in ("batch", "q_len", "tokens", "max_seq_len")] == [BATCH, q_len, 3 * q_len, 1024]
    pointers = given["block_table"].pointer, given["cache_seqlens"].pointer
    assert (seen["page_table"], seen["seq_lens"]) == pointers


def test_a_decode_has_window_scale_and_sinks(standin: StandIn, memory: MadeUpMemory) -> None:
    sinks = memory.tensor("float32", HEADS)
    flash_attn_with_kvcache(**cache_arguments(memory, window_size=(100, 0), softmax_scale=0.5, s_aux=sinks))
    seen = decoded(standin)
    assert (seen["window_left"], seen["sinks"]) == (100, sinks.pointer)
    assert seen["softmax_scale_log2"] == pytest.approx(0.5 * 1.4426950408889634)


@pytest.mark.parametrize(
    ("more", "invariant"),
    [({}, False), ({"num_splits": 1}, True), ({"deterministic": True}, True), ({"num_splits": 4}, False)],
)
def test_one_split_makes_a_decode_batch_invariant(
    standin: StandIn, memory: MadeUpMemory, more: dict[str, Any], invariant: bool
) -> None:
    flash_attn_with_kvcache(**cache_arguments(memory, **more))
    assert bool(decoded(standin)["splits"]) is invariant


@pytest.mark.parametrize(
    ("q_len", "more"),
    [(9, {"causal": True}), (2, {}), (1, {"softcap": 30.0}), (1, {"return_softmax_lse": True})],
    ids=["too many", "not causal", "softcap", "log-sum-exp"],
)
def test_all_else_is_context_attention(
    standin: StandIn, memory: MadeUpMemory, q_len: int, more: dict[str, Any]
) -> None:
    given = cache_arguments(memory, q_len, **more)
    flash_attn_with_kvcache(**given)
    seen = sent(standin)
    assert [seen[name] for name in ("batch", "q_len", "num_pages", "max_seq_len")] == [BATCH, q_len, PAGES, 1024]
    pointers = given["block_table"].pointer, given["cache_seqlens"].pointer
    assert (seen["page_table"], seen["seq_lens"]) == pointers


def test_head_dimensions_that_no_decode_kernel_has_are_context_attention(
    standin: StandIn, memory: MadeUpMemory
) -> None:
    keys, values = (memory.tensor("bfloat16", PAGES, PAGE, KV_HEADS, width) for width in (192, 128))
    q = memory.tensor("bfloat16", BATCH, 1, HEADS, 192)
    out = flash_attn_with_kvcache(**cache_arguments(memory, q=q, k_cache=keys, v_cache=values))
    assert (out.shape, sent(standin)["num_pages"]) == ((BATCH, 1, HEADS, 128), PAGES)


@pytest.mark.parametrize(
    ("more", "invariant"),
    [({}, False), ({"num_splits": 1}, True), ({"deterministic": True}, True), ({"num_splits": 4}, False)],
)
def test_one_split_gives_context_attention_the_bits_of_a_decode(
    standin: StandIn, memory: MadeUpMemory, more: dict[str, Any], invariant: bool
) -> None:
    flash_attn_with_kvcache(**cache_arguments(memory, 100, causal=True, **more))
    assert ("segments" in standin.calls("cuLaunchKernelEx")[-1].seen["symbol"]) == invariant


@pytest.mark.parametrize("lengths", [True, False])
def test_a_cache_without_pages(standin: StandIn, memory: MadeUpMemory, lengths: bool) -> None:
    cache = {name: memory.tensor("bfloat16", BATCH, 500, KV_HEADS, DIM) for name in ("k_cache", "v_cache")}
    given = cache_arguments(memory, **cache, block_table=None)
    flash_attn_with_kvcache(**given | ({} if lengths else {"cache_seqlens": None}))
    seen = sent(standin)
    assert [seen[name] for name in ("page_table", "kv_tokens", "max_seq_len")] == [0, 500, 500]
    assert seen["seq_lens"] == (given["cache_seqlens"].pointer if lengths else 0)


def test_ragged_queries(standin: StandIn, memory: MadeUpMemory) -> None:
    sums = memory.tensor("int32", BATCH + 1)
    q = memory.tensor("bfloat16", TOKENS, HEADS, DIM)
    flash_attn_with_kvcache(**cache_arguments(memory, q=q, cu_seqlens_q=sums, max_seqlen_q=120))
    seen = sent(standin)
    assert [seen[name] for name in ("q_cu_seq_lens", "q_len", "tokens")] == [sums.pointer, 120, TOKENS]


def test_running_sums_of_new_tokens_without_new_tokens_are_unused(standin: StandIn, memory: MadeUpMemory) -> None:
    flash_attn_with_kvcache(**cache_arguments(memory, cu_seqlens_k_new=memory.tensor("int32", BATCH + 1)))
    assert decoded(standin)["batch"] == BATCH


NEW = tensor("bfloat16", BATCH, 1, KV_HEADS, DIM)
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({name: tensor("float32", 1)}, f"{name}=a TensorView") for name in ("rotary_cos", "rotary_sin")),
    ({"cache_leftpad": tensor("int32", 3)}, "cache_leftpad=a TensorView"),
    (
        {"cache_batch_idx": tensor("int32", 3)},
        "block_table: its rows by cache_batch_idx would be taken from a TensorVi",
    ),
    ({"cache_batch_idx": tensor("int64", 3), "block_table": None}, "cache_batch_idx: dtype int64, expected int32"),
    ({"cache_batch_idx": tensor("int32", 3, 1), "block_table": None}, r"cache_batch_idx: shape \(3, 1\), expected 1"),
    ({"cache_seqlens": 7}, "cache_seqlens: lengths would be made from a number"),
    ({"cache_seqlens": None}, "cache_seqlens: lengths would be made from a number"),
    ({"cache_seqlens": tensor("int32", 5)}, r"cache_seqlens: shape \(5,\)"),
    ({"max_seqlen_q": 4}, "max_seqlen_q=4: expected only with cu_seqlens_q"),
    ({"cu_seqlens_q": tensor("int32", 4)}, "q: shape .*expected 3 dimensions"),
    ({"q": tensor("bfloat16", TOKENS, HEADS, DIM)}, "q: shape .*expected 4 dimensions"),
    ({"k_cache": tensor("bfloat16", PAGES, PAGE, DIM)}, "k_cache: shape .*expected 4 dimensions"),
    ({"v_cache": tensor("bfloat16", PAGES, PAGE, 1, DIM)}, "v_cache: shape"),
    ({"block_table": tensor("int32", 3)}, "block_table: shape .*expected 2 dimensions"),
    ({"block_table": tensor("int32", 5, COLUMNS)}, r"block_table: shape \(5, 16\)"),
    ({"block_table": None, "page_table": tensor("int32", 5, COLUMNS)}, r"page_table: shape \(5, 16\)"),
    ({"k": NEW}, "v: None with k"),
    ({"k": NEW, "v": NEW}, "cache_seqlens: lengths with the new tokens would be made"),
    ({"k": tensor("bfloat16", BATCH, KV_HEADS, DIM), "v": NEW}, "k: shape .*expected 4 dimensions"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_cannot_be_honoured_names_the_argument(
    standin: StandIn, memory: MadeUpMemory, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        flash_attn_with_kvcache(**cache_arguments(memory, **made(memory, changes)))
    assert standin.calls("cuLaunchKernelEx") == []


def test_a_decodes_errors_are_in_the_callers_names_too(memory: MadeUpMemory) -> None:
    with pytest.raises(UsageError, match=r"window_size=1\.5: expected an integer"):
        flash_attn_with_kvcache(**cache_arguments(memory, window_size=(1.5, 0)))
    table = made(memory, {"page_table": tensor("int32", BATCH, COLUMNS, device=1)})
    with pytest.raises(UsageError, match="page_table: on device 1"):
        flash_attn_with_kvcache(**cache_arguments(memory, block_table=None, **table))
