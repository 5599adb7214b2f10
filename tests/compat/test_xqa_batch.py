"""What reaches the kernel's parameters from the two operators that take a batch of queries flat."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cubin_runtime.attention import Runtime, pipeline
from cubin_runtime.attention.fast_path.operator_function import full_path
from cubin_runtime.attention.torch_ops import TORCH_SCRATCH
from cubin_runtime.compat import flashinfer
from cubin_runtime.errors import WorkspaceError
from cubin_runtime.testing import StandIn
from tests.attention.trtllm_calls import MadeUpMemory, made, tensor
from tests.attention.xqa_calls import (
    CACHE,
    COLUMNS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    PAGE,
    PAGES,
    SEMAPHORE_BYTES,
    sent,
    trtllm_arguments,
    xqa_batch_arguments,
)

pytestmark = pytest.mark.usefixtures("hopper")

FP8 = "float8_e4m3fn"
LOG2_E = math.log2(math.e)
OPERATORS = {
    "xqa_batch": (flashinfer.xqa_batch_decode_with_kv_cache, xqa_batch_arguments),
    "trtllm": (flashinfer.trtllm_batch_decode_with_kv_cache, trtllm_arguments),
}


@pytest.fixture(params=OPERATORS)
def decode(request: pytest.FixtureRequest, standin: StandIn, memory: MadeUpMemory) -> Callable[..., dict[str, Any]]:
    """Call one of the operators with its usual arguments changed; what arrived."""
    operator, arguments = OPERATORS[request.param]

    def call(tokens: int = 4, **changes: Any) -> dict[str, Any]:
        operator(**arguments(memory, tokens, **changes))
        return sent(standin)

    return call


CAUSAL = (1, 0, 3, 0, 7, 0)  # the words of three query tokens


def fp8_cache(memory: MadeUpMemory) -> Any:
    """A pair whose layouts are one: as many tokens in a page as heads."""
    return (memory.tensor(FP8, PAGES, 32, 32, HEAD_DIM), memory.tensor(FP8, PAGES, 32, 32, HEAD_DIM))


def test_sizes_and_defaults_arrive(decode: Callable[..., dict[str, Any]]) -> None:
    seen = decode()
    sizes = ("batch", "tokens", "q_len", "kv_heads", "group", "page_size_log2", "window_left", "max_seq_len")
    assert [seen[name] for name in sizes] == [4, 4, 1, KV_HEADS, HEADS // KV_HEADS, 6, -1, 1000]
    absent = ("lse", "q_cu_seq_lens", "mask", "sinks", "softmax_scale_device", "output_scale_device")
    assert [seen[name] for name in absent] == [0] * len(absent)


@pytest.mark.parametrize("name", OPERATORS)
def test_calls_that_torch_captures_have_memory_of_torch(
    standin: StandIn, memory: MadeUpMemory, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, arguments = OPERATORS[name]
    asked, places = [], iter((0x7F_AA00_0000, 0x7F_AB00_0000))

    def of_torch(size: int, device: int, *, zeroed: bool) -> Any:
        asked.append((device, zeroed))
        place = next(places)
        return SimpleNamespace(data_ptr=lambda: place)

    monkeypatch.setattr(pipeline, "torch_bytes", of_torch)
    full_path(operator)(**arguments(memory, 4, workspace_buffer=TORCH_SCRATCH))
    assert asked == [(0, True), (0, False)]
    assert 0x7F_AB00_0000 <= sent(standin)["partial_out"] < 0x7F_AC00_0000


def test_the_scales_are_those_of_scores_and_output(decode: Callable[..., dict[str, Any]]) -> None:
    seen = decode(bmm1_scale=0.125, bmm2_scale=0.5)
    assert (seen["softmax_scale_log2"], seen["output_scale"]) == (pytest.approx(0.125 * LOG2_E), 0.5)


def test_the_scales_are_one_by_default(decode: Callable[..., dict[str, Any]]) -> None:
    seen = decode()
    assert (seen["softmax_scale_log2"], seen["output_scale"]) == (pytest.approx(LOG2_E), 1.0)


def test_scales_on_the_device_go_as_they_are(decode: Callable[..., dict[str, Any]], memory: MadeUpMemory) -> None:
    scores, output = memory.tensor("float32", 1), memory.tensor("float32")
    seen = decode(bmm1_scale=scores, bmm2_scale=output, out=memory.tensor("bfloat16", 4, HEADS, HEAD_DIM))
    assert (seen["softmax_scale_device"], seen["output_scale_device"]) == (scores.pointer, output.pointer)
    assert (seen["softmax_scale_log2"], seen["output_scale"]) == (pytest.approx(LOG2_E), 1.0)
    assert memory.made == []


@pytest.mark.parametrize("numbers", [(1.0, 0.5), (0.5, 0.25)])
def test_a_scale_in_base_2_takes_the_place_of_the_other(
    standin: StandIn, memory: MadeUpMemory, numbers: tuple[float, float]
) -> None:
    for number in numbers:  # the second beside the first's fast path
        scale = memory.tensor("float32", 1)
        given = trtllm_arguments(memory, 4, bmm1_scale=number, bmm1_scale_log2=scale)
        flashinfer.trtllm_batch_decode_with_kv_cache(**given)
        seen = sent(standin)
        assert (seen["softmax_scale_device"], seen["softmax_scale_log2"]) == (scale.pointer, 1.0)


def test_an_e4m3_output_has_its_scale_in_the_second_factor(
    decode: Callable[..., dict[str, Any]], memory: MadeUpMemory
) -> None:
    out = memory.tensor(FP8, 4, HEADS, HEAD_DIM)
    seen = decode(kv_cache=fp8_cache(memory), out=out, bmm1_scale=0.125, bmm2_scale=0.5, o_scale=0.25)
    assert (seen["softmax_scale_log2"], seen["output_scale"]) == (pytest.approx(0.125 * LOG2_E), 0.5)


def test_any_other_output_is_multiplied_by_the_output_scale(
    decode: Callable[..., dict[str, Any]], memory: MadeUpMemory
) -> None:
    factor = memory.tensor("float32", 1)
    assert decode(bmm2_scale=0.5, o_scale=0.25)["output_scale"] == 0.125
    seen = decode(bmm2_scale=factor, o_scale=0.25)
    assert (seen["output_scale"], seen["output_scale_device"]) == (0.25, factor.pointer)


def test_an_output_is_made_like_the_query(decode: Callable[..., dict[str, Any]], memory: MadeUpMemory) -> None:
    seen = decode(tokens=8, q_len_per_req=2)
    ((what, out),) = memory.made
    assert (what, out.dtype, out.shape) == ("empty", "bfloat16", (8, HEADS, HEAD_DIM))
    assert seen["out"] == out.pointer


def test_an_e4m3_query_makes_an_e4m3_output(decode: Callable[..., dict[str, Any]], memory: MadeUpMemory) -> None:
    seen = decode(query=memory.tensor(FP8, 4, HEADS, HEAD_DIM), kv_cache=fp8_cache(memory))
    assert (seen["q_type"], seen["out_type"]) == (2, 2)


def test_drafts_lie_flat(decode: Callable[..., dict[str, Any]], memory: MadeUpMemory) -> None:
    mask = memory.tensor("uint16", 4, 3, 2)
    seen = decode(tokens=12, q_len_per_req=3, mask=mask)
    assert (seen["batch"], seen["tokens"], seen["q_len"], seen["mask"]) == (4, 12, 3, mask.pointer)
    assert seen["q_token_stride"] == HEADS * HEAD_DIM


def test_drafts_without_a_mask_are_causal(decode: Callable[..., dict[str, Any]]) -> None:
    assert decode(tokens=12, q_len_per_req=3)["mask"] == 0


@pytest.mark.parametrize("left", [-1, 0, 127])
def test_the_window_goes_as_it_is(decode: Callable[..., dict[str, Any]], left: int) -> None:
    assert decode(window_left=left)["window_left"] == left


@pytest.mark.parametrize("shape", [(HEADS,), (KV_HEADS, HEADS // KV_HEADS)])
def test_sinks(decode: Callable[..., dict[str, Any]], memory: MadeUpMemory, shape: tuple[int, ...]) -> None:
    sinks = memory.tensor("float32", *shape)
    assert decode(sinks=sinks)["sinks"] == sinks.pointer


def test_everything_at_once(decode: Callable[..., dict[str, Any]], memory: MadeUpMemory) -> None:
    seen = decode(
        tokens=12,
        q_len_per_req=3,
        kv_cache=fp8_cache(memory),
        mask=memory.tensor("uint16", 4, 3, 2, values=CAUSAL * 4),
        sinks=memory.tensor("float32", HEADS),
        window_left=100,
        batch_invariant=True,
    )
    assert (seen["window_left"], seen["splits"], seen["group"]) == (100, 1, 2)
    assert 0 not in (seen["mask"], seen["sinks"])


def test_the_workspace_is_split_behind_8_mib(decode: Callable[..., dict[str, Any]], memory: MadeUpMemory) -> None:
    buffer = memory.tensor("float32", 32 << 20)
    seen = decode(workspace_buffer=buffer, batch_invariant=True)
    assert buffer.pointer == seen["status"] < seen["counters"] < buffer.pointer + SEMAPHORE_BYTES
    assert seen["partial_statistics"] == buffer.pointer + SEMAPHORE_BYTES < seen["partial_out"]


def test_a_workspace_of_semaphores_alone_is_refused(
    decode: Callable[..., dict[str, Any]], memory: MadeUpMemory
) -> None:
    with pytest.raises(WorkspaceError, match="workspace_buffer: 8388608 bytes, expected more than 8388608"):
        decode(workspace_buffer=memory.tensor("uint8", SEMAPHORE_BYTES))


def test_too_little_scratch_is_refused_with_the_bytes(
    decode: Callable[..., dict[str, Any]], memory: MadeUpMemory
) -> None:
    with pytest.raises(
        WorkspaceError, match=r"workspace_buffer, behind its 8388608 .*: scratch of 1024 bytes: \d+ bytes are needed"
    ):
        decode(workspace_buffer=memory.tensor("uint8", SEMAPHORE_BYTES + 1024), batch_invariant=True)


def test_a_bound_over_the_block_table_is_what_the_table_holds(decode: Callable[..., dict[str, Any]]) -> None:
    assert decode(max_seq_len=1 << 20)["max_seq_len"] == COLUMNS * PAGE


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_one_tensor_holds_both_halves(
    decode: Callable[..., dict[str, Any]], standin: StandIn, memory: MadeUpMemory, layout: str
) -> None:
    tokens_heads = (PAGE, KV_HEADS) if layout == "NHD" else (KV_HEADS, PAGE)
    cache = memory.tensor("bfloat16", PAGES, 2, *tokens_heads, HEAD_DIM)
    seen = decode(kv_cache=cache, kv_layout=layout)
    assert (seen["kv_heads"], seen["page_size_log2"], seen["num_pages"]) == (KV_HEADS, 6, PAGES)
    addresses = [int(call.seen["address"], 0) for call in standin.calls("cuTensorMapEncodeTiled")]
    assert addresses == [cache.pointer, cache.pointer + 2 * KV_HEADS * PAGE * HEAD_DIM]


def test_one_half_is_both(decode: Callable[..., dict[str, Any]], standin: StandIn, memory: MadeUpMemory) -> None:
    cache = memory.tensor("bfloat16", PAGES, 1, 64, 64, HEAD_DIM)
    decode(kv_cache=cache)
    assert {int(call.seen["address"], 0) for call in standin.calls("cuTensorMapEncodeTiled")} == {cache.pointer}


def test_a_pair_of_caches(decode: Callable[..., dict[str, Any]], standin: StandIn, memory: MadeUpMemory) -> None:
    key, value = memory.tensor("bfloat16", PAGES, 64, 64, HEAD_DIM), memory.tensor("bfloat16", PAGES, 64, 64, HEAD_DIM)
    decode(kv_cache=(key, value))
    addresses = [int(call.seen["address"], 0) for call in standin.calls("cuTensorMapEncodeTiled")]
    assert addresses == [key.pointer, value.pointer]


def test_ragged_drafts_of_xqa(standin: StandIn, memory: MadeUpMemory) -> None:
    cu = memory.tensor("uint32", 5)
    given = xqa_batch_arguments(memory, 7, q_cu_seq_lens=cu, q_len_per_req=4, mask=memory.tensor("uint16", 7, 2))
    flashinfer.xqa_batch_decode_with_kv_cache(**given)
    seen = sent(standin)
    assert (seen["batch"], seen["tokens"], seen["q_len"], seen["q_cu_seq_lens"]) == (4, 7, 4, cu.pointer)


def test_ragged_drafts_of_trtllm(standin: StandIn, memory: MadeUpMemory) -> None:
    cu = memory.tensor("int32", 5)
    given = trtllm_arguments(memory, 7, cum_seq_lens_q=cu, max_q_len=4, q_len_per_req=None)
    flashinfer.trtllm_batch_decode_with_kv_cache(**given)
    seen = sent(standin)
    assert (seen["batch"], seen["tokens"], seen["q_len"], seen["q_cu_seq_lens"]) == (4, 7, 4, cu.pointer)


def test_ragged_drafts_without_a_bound_are_read_back(standin: StandIn, memory: MadeUpMemory) -> None:
    cu = memory.tensor("int32", 5, values=(0, 3, 3, 4, 7))
    given = trtllm_arguments(memory, 7, cum_seq_lens_q=cu, q_len_per_req=None)
    flashinfer.trtllm_batch_decode_with_kv_cache(**given)
    assert (sent(standin)["q_len"], memory.reads) == (3, [cu.pointer])


def test_the_log_sum_exp_is_made_and_returned(standin: StandIn, memory: MadeUpMemory) -> None:
    out, lse = flashinfer.trtllm_batch_decode_with_kv_cache(
        **trtllm_arguments(memory, 12, q_len_per_req=3, return_lse=True)
    )
    seen = sent(standin)
    assert (lse.dtype, lse.shape) == ("float32", (12, HEADS))
    assert (seen["out"], seen["lse"]) == (out.pointer, lse.pointer)
    assert (seen["lse_token_stride"], seen["lse_head_stride"]) == (HEADS, 1)


def test_a_given_log_sum_exp_is_filled_and_not_returned(standin: StandIn, memory: MadeUpMemory) -> None:
    lse = replace(memory.tensor("float32", 4, HEADS), strides=(1, 4))
    given = trtllm_arguments(memory, lse=lse, out=memory.tensor("bfloat16", 4, HEADS, HEAD_DIM))
    assert flashinfer.trtllm_batch_decode_with_kv_cache(**given) is given["out"]
    seen = sent(standin)
    assert (seen["lse"], seen["lse_token_stride"], seen["lse_head_stride"]) == (lse.pointer, 1, 4)


@pytest.mark.parametrize(("dtype", "code"), [("torch.float16", 1), ("torch.float8_e4m3fn", 2)])
def test_the_dtype_of_the_output_is_chosen(standin: StandIn, memory: MadeUpMemory, dtype: str, code: int) -> None:
    flashinfer.trtllm_batch_decode_with_kv_cache(**trtllm_arguments(memory, out_dtype=dtype))
    assert sent(standin)["out_type"] == code


@pytest.mark.parametrize("backend", ["auto", "xqa"])
def test_hopper_runs_our_kernels(
    standin: StandIn, memory: MadeUpMemory, hopper: Runtime, recwarn: pytest.WarningsRecorder, backend: str
) -> None:
    flashinfer.trtllm_batch_decode_with_kv_cache(**trtllm_arguments(memory, backend=backend))
    assert sent(standin)["batch"] == 4
    assert list(recwarn) == []


RANK = {"cp_world": 4, "cp_rank": 3}


def rank_of(seen: dict[str, Any]) -> tuple[int, ...]:
    """What a launch was told of the keys' ranks."""
    return seen["global_seq_lens"], seen["cp_begin"], seen["cp_interleave"], seen["cp_round"].divisor


@pytest.mark.parametrize("changes", [{"q_len_per_req": 3}, {"q_len_per_req": 3, "window_left": 99}])
def test_keys_of_a_rank_are_counted_with_those_of_the_query_tokens(
    standin: StandIn, memory: MadeUpMemory, changes: dict[str, Any]
) -> None:
    given = trtllm_arguments(memory, 12, **RANK, causal_seqlens_kv_global=memory.tensor("int32", 4), **changes)
    given["out"] = memory.tensor("bfloat16", 12, HEADS, HEAD_DIM)
    for _ in range(2):
        flashinfer.trtllm_batch_decode_with_kv_cache(**given)
        what, counts = memory.made[-1]
        assert (what, counts.dtype, counts.shape) == ("causal_seqlens_kv_global, 3 more", "int32", (4,))
        assert rank_of(sent(standin)) == (counts.pointer, 3, 1, 4)


def test_one_query_token_with_a_window_is_counted_too(standin: StandIn, memory: MadeUpMemory) -> None:
    given = trtllm_arguments(memory, **RANK, causal_seqlens_kv_global=memory.tensor("int32", 4), window_left=99)
    flashinfer.trtllm_batch_decode_with_kv_cache(**given)
    (counts,) = (view for what, view in memory.made if what == "causal_seqlens_kv_global, 1 more")
    assert rank_of(sent(standin)) == (counts.pointer, 3, 1, 4)


def test_ragged_query_tokens_are_counted_by_request(standin: StandIn, memory: MadeUpMemory) -> None:
    cu, counts = memory.tensor("int32", 5), memory.tensor("int32", 4)
    ragged = {"cum_seq_lens_q": cu, "max_q_len": 4, "q_len_per_req": None}
    flashinfer.trtllm_batch_decode_with_kv_cache(
        **trtllm_arguments(memory, 7, **RANK, **ragged, causal_seqlens_kv_global=counts)
    )
    what = f"causal_seqlens_kv_global, as {cu.pointer:#x} says more"
    assert rank_of(sent(standin)) == (dict(memory.made)[what].pointer, 3, 1, 4)


@pytest.mark.parametrize(
    "changes",
    [
        {**RANK, "return_lse": True},
        {"cp_world": 1, "query": tensor("bfloat16", 12, HEADS, HEAD_DIM), "q_len_per_req": 3, "window_left": 99},
        {"cp_world": 1, "sinks": tensor("float32", HEADS)},
    ],
)
def test_where_the_lengths_of_a_rank_say_it_all_nothing_is_counted(
    standin: StandIn, memory: MadeUpMemory, changes: dict[str, Any]
) -> None:
    given = {**trtllm_arguments(memory), "causal_seqlens_kv_global": memory.tensor("int32", 4)}
    flashinfer.trtllm_batch_decode_with_kv_cache(**{**given, **made(memory, changes)})
    assert rank_of(sent(standin)) == (0, 0, 1, 1)
    assert {what for what, _ in memory.made} == {"empty"}


def test_counters_of_the_other_backend_are_not_needed(standin: StandIn, memory: MadeUpMemory) -> None:
    counters = memory.tensor("int32", 1024)
    flashinfer.trtllm_batch_decode_with_kv_cache(**trtllm_arguments(memory, multi_ctas_kv_counter_buffer=counters))
    assert sent(standin)["batch"] == 4


def test_cache_of_xqa_is_nhd_by_default(standin: StandIn, memory: MadeUpMemory) -> None:
    cache = memory.tensor("bfloat16", PAGES, 2, *CACHE[1:])
    flashinfer.xqa_batch_decode_with_kv_cache(**xqa_batch_arguments(memory, kv_cache=cache))
    assert sent(standin)["kv_heads"] == KV_HEADS
