"""FlashMLA's decode functions on torch tensors: what reaches the kernel, and what is refused. Its CPU build serves."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest

from cubin_runtime.attention import Runtime
from cubin_runtime.compat import flash_mla
from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.mla.params import PAGED_MLA_DECODE
from cubin_runtime.kernels.native.sparse_mla.params import SPARSE_MLA_DECODE
from cubin_runtime.testing import StandIn
from tests.attention.host_tensors import memory_of_host_tensors

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
BF16, INT32 = torch.bfloat16, torch.int32
BATCH, Q_LEN, HEADS, WIDTH = 3, 2, 8, 128


@pytest.fixture(autouse=True)
def runtime(hopper: Runtime, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """One for whose calls host tensors are on device 0."""
    hopper.memory = memory_of_host_tensors(monkeypatch)
    return hopper


def call(q_len: int = Q_LEN, **changes: Any) -> dict[str, Any]:
    given = {
        "q": torch.zeros(BATCH, q_len, HEADS, 576, dtype=BF16),
        "k_cache": torch.zeros(10, 64, 1, 656, dtype=torch.uint8),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": flash_mla.get_mla_metadata()[0],
        "is_fp8_kvcache": True,
        "indices": torch.zeros(BATCH, q_len, WIDTH, dtype=INT32),
    }
    return {**given, **changes}


def dense(q_len: int = 1, **changes: Any) -> dict[str, Any]:
    own = {
        "k_cache": torch.zeros(10, 64, 1, 576, dtype=BF16),
        "block_table": torch.zeros(BATCH, 4, dtype=INT32),
        "cache_seqlens": torch.zeros(BATCH, dtype=INT32),
        "is_fp8_kvcache": False,
        "indices": None,
    }
    return call(q_len, **{**own, **changes})


def sent(standin: StandIn, layout: Any) -> dict[str, Any]:
    return layout.unpack(bytes.fromhex(standin.calls("cuLaunchKernelEx")[-1].seen["parameter0"]))


def test_lists_reach_the_sparse_kernel_as_query_tokens(standin: StandIn) -> None:
    given = call(attn_sink=torch.zeros(HEADS), topk_length=torch.tensor([1, 2, 3], dtype=INT32))
    out, lse = flash_mla.flash_mla_with_kvcache(**given)
    seen = sent(standin, SPARSE_MLA_DECODE)
    assert (seen["batch"], seen["heads"], seen["width"], seen["rows"]) == (BATCH * Q_LEN, HEADS, WIDTH, 640)
    assert (seen["q"], seen["kv_cache"]) == (given["q"].data_ptr(), given["k_cache"].data_ptr())
    assert (seen["indices"], seen["sinks"] != 0) == (given["indices"].data_ptr(), True)
    assert (seen["lse_sink"], seen["lse_from_log2"]) == (0, pytest.approx(math.log(2)))
    assert seen["softmax_scale"] == pytest.approx(576**-0.5)
    assert (tuple(out.shape), out.dtype) == ((BATCH, Q_LEN, HEADS, 512), BF16)
    assert (tuple(lse.shape), lse.dtype) == ((BATCH, HEADS, Q_LEN), torch.float32)


def test_infinite_sinks_become_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(flash_mla, "sparse_mla_decode", lambda *_, sinks, **__: seen.append(sinks))
    sinks = torch.tensor([math.inf, -math.inf, *[0.5] * (HEADS - 2)])
    flash_mla.flash_mla_with_kvcache(**call(attn_sink=sinks))
    assert torch.isfinite(seen[0][0])
    assert torch.equal(seen[0][1:], sinks[1:])


def test_rows_without_rope_columns_are_taken(standin: StandIn) -> None:
    q, rows = torch.zeros(BATCH, 1, HEADS, 512, dtype=BF16), torch.zeros(10, 64, 1, 512, dtype=BF16)
    out, _ = flash_mla.flash_mla_with_kvcache(**dense(q=q, k_cache=rows))
    seen = sent(standin, PAGED_MLA_DECODE)
    assert (seen["q_head_stride"], seen["softmax_scale_log2"]) == (512, pytest.approx(512**-0.5 / math.log(2)))
    assert tuple(out.shape) == (BATCH, 1, HEADS, 512)


def test_bf16_rows_are_taken_with_lists(standin: StandIn) -> None:
    rows = torch.zeros(10, 64, 1, 576, dtype=BF16)
    flash_mla.flash_mla_with_kvcache(**call(k_cache=rows, is_fp8_kvcache=False, softmax_scale=0.3))
    seen = sent(standin, SPARSE_MLA_DECODE)
    assert (seen["row_bytes"], seen["topk_lens"], seen["softmax_scale"]) == (1152, 0, pytest.approx(0.3))


def test_slots_of_pages_of_any_size_with_gaps_become_slots_of_rows_without(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(flash_mla, "sparse_mla_decode", lambda _, cache, lists, **__: seen.extend((cache, lists)))
    pages = torch.randint(0, 99, (10, 63, 656), dtype=torch.uint8)[:, :61]
    slots = torch.tensor([0, 60, 61, 345, 609, -1, -(2**31), 610, 2**31 - 1], dtype=INT32)
    indices = slots.expand(BATCH, Q_LEN, len(slots))
    flash_mla.flash_mla_with_kvcache(**call(k_cache=pages[:, :, None], indices=indices))
    rows, lists = seen
    assert rows.data_ptr() == pages.data_ptr()
    assert torch.equal(rows[lists[0, :5]], pages.reshape(-1, 656)[slots[:5]])
    assert (lists[:, 5:7] < 0).all()
    assert (lists[:, 7:] >= len(rows)).all()
    assert (tuple(lists.shape), lists.dtype) == ((BATCH * Q_LEN, len(slots)), INT32)


def test_slots_are_converted_where_gaps_are_no_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(flash_mla, "sparse_mla_decode", lambda _, cache, lists, **__: seen.extend((cache, lists)))
    memory = torch.randint(0, 99, (10 * (61 * 656 + 48),), dtype=torch.uint8)
    pages = memory.as_strided((10, 61, 1, 656), (61 * 656 + 48, 656, 656, 1))
    slots = torch.tensor([0, 60, 61, 345, 609, -1, -(2**31), 610, 2**31 - 1], dtype=INT32)
    flash_mla.flash_mla_with_kvcache(**call(k_cache=pages, indices=slots.expand(BATCH, Q_LEN, len(slots))))
    rows, lists = seen
    assert (rows.data_ptr(), rows.stride()) == (pages.data_ptr(), (16, 1))
    assert torch.equal(rows[lists[0, :5]], pages.reshape(-1, 656)[slots[:5]])
    assert (lists[:, 5:7] < 0).all()
    assert (lists[:, 7:] >= len(rows)).all()


def test_a_cache_with_such_gaps_reaches_the_kernel(standin: StandIn) -> None:
    memory = torch.zeros(10 * (61 * 656 + 48), dtype=torch.uint8)
    pages = memory.as_strided((10, 61, 1, 656), (61 * 656 + 48, 656, 656, 1))
    flash_mla.flash_mla_with_kvcache(**call(k_cache=pages))
    seen = sent(standin, SPARSE_MLA_DECODE)
    assert (seen["row_bytes"], seen["page_size_log2"], seen["kv_cache"]) == (16, 0, pages.data_ptr())
    assert seen["rows"] == (9 * (61 * 656 + 48) + 60 * 656) // 16 + 1


@pytest.mark.parametrize("page_size", [61, 64])
def test_other_caches_reach_the_kernel_as_they_are(standin: StandIn, page_size: int) -> None:
    pages = torch.zeros(10, 65, 1, 656, dtype=torch.uint8)
    cache = pages[:, :64] if page_size == 64 else pages[:, :61].contiguous()
    given = call(k_cache=cache)
    flash_mla.flash_mla_with_kvcache(**given)
    seen = sent(standin, SPARSE_MLA_DECODE)
    assert (seen["indices"], seen["rows"]) == (given["indices"].data_ptr(), 10 * page_size)


def test_requests_reach_the_dense_kernel(standin: StandIn) -> None:
    given = dense(2, causal=True)
    out, lse = flash_mla.flash_mla_with_kvcache(**given)
    seen = sent(standin, PAGED_MLA_DECODE)
    assert (seen["batch"], seen["q_len"], seen["heads"], seen["max_seq_len"]) == (BATCH, 2, HEADS, 256)
    assert seen["page_table"] == given["block_table"].data_ptr()
    assert (tuple(out.shape), tuple(lse.shape)) == ((BATCH, 2, HEADS, 512), (BATCH, HEADS, 2))


def test_a_query_token_without_keys_has_an_infinite_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_mla, "sparse_mla_decode", lambda *_, lse, **__: lse.fill_(-math.inf))
    assert (flash_mla.flash_mla_with_kvcache(**call())[1] == math.inf).all()


def test_lengths_of_requests_are_those_of_their_query_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(flash_mla, "sparse_mla_decode", lambda *_, **given: seen.update(given))
    flash_mla.flash_mla_with_kvcache(**call(topk_length=torch.tensor([1, 2, 3], dtype=INT32)))
    assert seen["topk_lens"].tolist() == [1, 1, 2, 2, 3, 3]


def test_the_parameters_are_flash_mlas() -> None:
    names = (
        "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits softmax_scale causal "
        "is_fp8_kvcache indices attn_sink extra_k_cache extra_indices_in_kvcache topk_length extra_topk_length"
    )
    assert list(inspect.signature(flash_mla.flash_mla_with_kvcache).parameters) == names.split()
    assert flash_mla.get_mla_metadata(torch.zeros(1), 3, num_heads_k=1)[1] is None


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "second cache": (call(extra_k_cache=torch.zeros(1)), "extra_k_cache: no kernel takes a second cache"),
    "lengths of a second list": (call(extra_topk_length=torch.zeros(1)), "extra_topk_length: no kernel"),
    "value columns": (call(head_dim_v=256), "head_dim_v=256: expected 512"),
    "two heads": (call(k_cache=torch.zeros(10, 64, 2, 656, dtype=torch.uint8)), "k_cache: shape .* expected one head"),
    "causal lists": (call(causal=True), "causal=True: with indices, expected False"),
    "no fp8": (call(is_fp8_kvcache=False), "is_fp8_kvcache=False: k_cache has dtype torch.uint8"),
    "lists of other requests": (
        call(indices=torch.zeros(2, Q_LEN, WIDTH, dtype=INT32)),
        r"indices: shape \(2, 2, 128\), expected \[3, 2, width\]",
    ),
    "sinks without lists": (dense(attn_sink=torch.zeros(HEADS)), "attn_sink: given without indices"),
    "fp8 without lists": (dense(is_fp8_kvcache=True), "is_fp8_kvcache=True: without indices"),
    "drafts that are not causal": (dense(2), "causal=False: with 2 query tokens per request, expected True"),
    "sinks that are a number": (call(attn_sink=1.0), "^attn_sink: got float, expected a TensorView"),
    "lengths that are a list": (call(topk_length=[1, 2, 3]), "^topk_length: got list, expected a TensorView"),
    "sinks of 16 bits": (call(attn_sink=torch.zeros(HEADS, dtype=torch.float16)), "attn_sink: dtype float16, expected"),
    "sparse sinks": (call(attn_sink=torch.zeros(HEADS).to_sparse()), "attn_sink: layout torch.sparse_coo"),
    "nested lengths": (call(topk_length=torch.nested.nested_tensor([torch.zeros(2)])), "topk_length: a nested tensor"),
    "complex lists": (
        call(
            k_cache=torch.zeros(10, 96, 1, 656, dtype=torch.uint8)[:, :48],
            indices=torch.zeros(BATCH, Q_LEN, WIDTH, dtype=torch.complex64),
        ),
        "indices: dtype complex64, expected int32",
    ),
    "no pages": (call(k_cache=torch.zeros(10, 96, 1, 656, dtype=torch.uint8)[:0, :48]), "k_cache: "),
    "no columns": (call(q=torch.zeros(BATCH, Q_LEN, HEADS, 0, dtype=BF16)), "q: "),
    "sinks of other heads": (call(attn_sink=torch.zeros(3)), "attn_sink: shape"),
    "lengths of other requests": (
        call(topk_length=torch.zeros(7, dtype=INT32)),
        r"topk_length: shape \(7,\), expected \(3,\)",
    ),
    "lengths of query tokens": (
        call(topk_length=torch.zeros(BATCH, Q_LEN, dtype=INT32)),
        r"topk_length: shape \(3, 2\), expected 1 dim",
    ),
    "a table of other requests": (
        dense(block_table=torch.zeros(7, 4, dtype=INT32)),
        "block_table: shape|cache_seqlens: ",
    ),
    "lengths of a wrong dtype": (dense(cache_seqlens=torch.zeros(BATCH)), "cache_seqlens: dtype"),
    "columns that are a tensor": (call(head_dim_v=torch.tensor([512, 3])), "head_dim_v"),
    "an order that is a tensor": (dense(causal=torch.tensor([1, 0])), "causal"),
    "an order that is a word": (dense(causal="x"), "causal='x'"),
    "a form that is a tensor": (call(is_fp8_kvcache=torch.tensor([1, 0])), "is_fp8_kvcache"),
    "nested queries": (call(q=torch.nested.nested_tensor([torch.zeros(2, 8, 576)] * 3)), "q: a nested tensor"),
    "rank of q": (call(q=torch.zeros(3, HEADS, 576, dtype=BF16)), "q: "),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_honoured_is_refused(standin: StandIn, name: str) -> None:
    given, words = REFUSALS[name]
    with pytest.raises(UsageError, match=words):
        flash_mla.flash_mla_with_kvcache(**given)
    assert not standin.calls("cuLaunchKernelEx")
