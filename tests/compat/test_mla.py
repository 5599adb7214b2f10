"""What reaches the kernel's parameters from the MLA operators on Hopper, and what they refuse."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cubin_runtime.attention import BackendError
from cubin_runtime.attention.torch_memory import TorchMemory
from cubin_runtime.compat import flashinfer
from cubin_runtime.errors import UsageError, WorkspaceError
from cubin_runtime.testing import StandIn
from tests.attention.latent_examples import PARAMS, view
from tests.attention.trtllm_calls import MadeUpMemory, made, mla_arguments, tensor
from tests.attention.xqa_calls import mla_batch_arguments, xqa_mla_arguments

pytestmark = pytest.mark.usefixtures("hopper")

HEADS, LATENT, PAGES, PAGE, COLUMNS = 128, 512, 1024, 64, 256
LOG2_E = math.log2(math.e)
SEMAPHORE_BYTES = 8 << 20


def sent(standin: StandIn) -> dict[str, Any]:
    return PARAMS.unpack(bytes.fromhex(standin.calls("cuLaunchKernelEx")[-1].seen["parameter0"]))


BATCH_OPERATORS = {
    "xqa_batch": flashinfer.xqa_batch_decode_with_kv_cache_mla,
    "trtllm": flashinfer.trtllm_batch_decode_with_kv_cache_mla,
}


@pytest.fixture(params=BATCH_OPERATORS)
def decode(request: pytest.FixtureRequest, standin: StandIn, memory: MadeUpMemory) -> Callable[..., dict[str, Any]]:
    """Call one of the batch operators with its usual arguments changed; what arrived."""

    def call(**changes: Any) -> dict[str, Any]:
        BATCH_OPERATORS[request.param](**mla_batch_arguments(memory, **changes))
        return sent(standin)

    return call


def test_sizes_and_defaults_arrive(decode: Callable[..., dict[str, Any]], memory: MadeUpMemory) -> None:
    seen = decode()
    sizes = ("batch", "tokens", "q_len", "heads", "page_size_log2", "num_pages", "max_seq_len", "splits")
    assert [seen[name] for name in sizes] == [4, 4, 1, HEADS, 6, PAGES, 16000, 0]
    absent = ("lse", "q_cu_seq_lens", "mask", "sinks", "softmax_scale_device", "output_scale_device")
    assert [seen[name] for name in absent] == [0] * len(absent)
    ((_, out),) = memory.made
    assert (seen["out"], out.shape, out.dtype) == (out.pointer, (4, 1, HEADS, LATENT), "bfloat16")


def test_scales_are_those_of_scores_and_output(decode: Callable[..., dict[str, Any]], memory: MadeUpMemory) -> None:
    seen = decode(bmm1_scale=0.125, bmm2_scale=0.5)
    assert (seen["softmax_scale_log2"], seen["output_scale"]) == (pytest.approx(0.125 * LOG2_E), 0.5)
    scores, output = memory.tensor("float32", 1), memory.tensor("float32")
    seen = decode(bmm1_scale=scores, bmm2_scale=output)
    assert (seen["softmax_scale_device"], seen["output_scale_device"]) == (scores.pointer, output.pointer)


@pytest.mark.parametrize(("base", "changes"), [(None, []), ("base2", []), ("basee", ["scaled in place by 0.6931"])])
@pytest.mark.parametrize("given", [True, False])
def test_the_lse_has_the_base_that_is_asked_for(
    memory: MadeUpMemory, base: str | None, changes: list[str], given: bool
) -> None:
    lse = memory.tensor("float32", 4, HEADS) if given else None
    arguments = mla_batch_arguments(memory, lse=lse, return_lse=True, return_lse_base=base)
    returned = flashinfer.trtllm_batch_decode_with_kv_cache_mla(**arguments)[1]
    scaled = [what for what, tensor in memory.made if tensor is returned and what.startswith("scaled")]
    assert (scaled, returned is lse) == (changes, given)


def dealt(memory: MadeUpMemory) -> dict[str, Any]:
    lengths = memory.tensor("int32", 4)
    return mla_arguments(memory, enable_dcp=True, cp_world=2, causal_seqlens_kv_global=lengths)


def on_pages(memory: MadeUpMemory, page: int) -> dict[str, Any]:
    return mla_batch_arguments(memory, kv_cache=memory.tensor("bfloat16", PAGES, page, 576))


def of_heads(memory: MadeUpMemory, heads: int) -> dict[str, Any]:
    return mla_batch_arguments(memory, query=memory.tensor("bfloat16", 4, 1, heads, 576))


OF_CUTE_DSL: dict[str, Callable[[MadeUpMemory], dict[str, Any]]] = {
    "keys of other ranks": dealt,
    "ragged queries": lambda memory: ragged(memory, max_q_len=4),
    "pages of 128 tokens": lambda memory: on_pages(memory, 128),
    "65 heads": lambda memory: of_heads(memory, 65),
    "127 heads": lambda memory: of_heads(memory, 127),
}
OF_TRTLLM_GEN: dict[str, Callable[[MadeUpMemory], dict[str, Any]]] = {
    "pages of 32 tokens": lambda memory: on_pages(memory, 32),
    "64 heads": lambda memory: of_heads(memory, 64),
    "128 heads": lambda memory: of_heads(memory, 128),
}


@pytest.mark.parametrize("kind", [*OF_CUTE_DSL, *OF_TRTLLM_GEN])
@pytest.mark.parametrize("base", [None, "base2", "basee"])
def test_a_base_that_is_left_out_is_that_of_flashinfer_s_kernel_for_the_call(
    memory: MadeUpMemory, kind: str, base: str | None
) -> None:
    arguments = {**OF_CUTE_DSL, **OF_TRTLLM_GEN}[kind](memory)
    flashinfer.trtllm_batch_decode_with_kv_cache_mla(**arguments, return_lse=True, return_lse_base=base)
    natural = kind in OF_CUTE_DSL if base is None else base == "basee"
    assert [what for what, _ in memory.made if what.startswith("scaled")] == ["scaled in place by 0.6931"] * natural


@pytest.mark.parametrize("arguments", [dealt, lambda memory: mla_batch_arguments(memory, return_lse_base="basee")])
def test_a_log_sum_exp_that_cannot_be_scaled_is_refused_before_the_launch(
    standin: StandIn, memory: MadeUpMemory, monkeypatch: pytest.MonkeyPatch, arguments: Callable[..., dict[str, Any]]
) -> None:
    monkeypatch.setattr(memory, "check_scalable", TorchMemory().check_scalable)
    given = arguments(memory)
    lse = memory.tensor("float32", given["query"].shape[0] * given["query"].shape[1], HEADS)
    with pytest.raises(UsageError, match="lse: got TensorView, expected a torch tensor where its base is changed"):
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(**given, lse=lse)
    assert "cuLaunchKernelEx" not in standin.names()


def test_a_base_of_no_lse_changes_nothing(memory: MadeUpMemory) -> None:
    flashinfer.trtllm_batch_decode_with_kv_cache_mla(**mla_batch_arguments(memory, return_lse_base="basee"))
    assert [what for what, _ in memory.made if what.startswith("scaled")] == []


@pytest.mark.parametrize("shape", [(4, 1, HEADS, LATENT), (4, HEADS, LATENT)])
def test_an_output_may_lack_the_one_token(
    standin: StandIn, memory: MadeUpMemory, decode: Callable[..., dict[str, Any]], shape: tuple[int, ...]
) -> None:
    out = memory.tensor("bfloat16", *shape)
    seen = decode(out=out)
    assert (seen["out"], seen["out_token_stride"], memory.made) == (out.pointer, HEADS * LATENT, [])


def test_a_given_output_is_what_comes_back(memory: MadeUpMemory) -> None:
    out = memory.tensor("bfloat16", 4, HEADS, LATENT)
    assert flashinfer.xqa_batch_decode_with_kv_cache_mla(**mla_batch_arguments(memory, out=out)) is out


@pytest.mark.parametrize("kv", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(PAGES, PAGE), (PAGES, 1, PAGE)])
@pytest.mark.parametrize("latent", [512, 256])
def test_caches_of_every_form(
    decode: Callable[..., dict[str, Any]],
    standin: StandIn,
    memory: MadeUpMemory,
    kv: str,
    shape: tuple[int, ...],
    latent: int,
) -> None:
    cache = memory.tensor(kv, *shape, latent + 64)
    query = memory.tensor("bfloat16", 4, 1, HEADS, latent + 64)
    seen = decode(query=query, kv_cache=cache, kv_lora_rank=latent)
    assert (seen["num_pages"], seen["q_head_stride"]) == (PAGES, latent + 64)
    assert int(standin.calls("cuTensorMapEncodeTiled")[-1].seen["address"], 0) == cache.pointer


@pytest.mark.parametrize(("latent", "rope"), [(512, 0), (256, 32), (128, 32)])
def test_rows_without_rope_columns_and_narrow_ones(
    decode: Callable[..., dict[str, Any]], memory: MadeUpMemory, latent: int, rope: int
) -> None:
    width = latent + rope
    query, cache = memory.tensor("bfloat16", 4, 1, HEADS, width), memory.tensor("bfloat16", PAGES, PAGE, width)
    seen = decode(query=query, kv_cache=cache, kv_lora_rank=latent, qk_rope_head_dim=rope)
    assert (seen["q_head_stride"], seen["out_head_stride"]) == (width, latent)


def test_a_table_of_any_width_is_taken(decode: Callable[..., dict[str, Any]], memory: MadeUpMemory) -> None:
    assert decode(block_tables=memory.tensor("int32", 4, 3))["max_seq_len"] == 3 * PAGE


def test_sinks_and_batch_invariance(decode: Callable[..., dict[str, Any]], memory: MadeUpMemory) -> None:
    sinks = memory.tensor("float32", HEADS)
    seen = decode(sinks=sinks, batch_invariant=True)
    assert seen["sinks"] == sinks.pointer
    assert seen["splits"] > 0


def test_the_workspace_is_split_behind_8_mib(decode: Callable[..., dict[str, Any]], memory: MadeUpMemory) -> None:
    buffer = memory.tensor("float32", 32 << 20)
    seen = decode(workspace_buffer=buffer)
    assert buffer.pointer == seen["status"] < seen["counters"] < buffer.pointer + SEMAPHORE_BYTES
    assert seen["partial_statistics"] == buffer.pointer + SEMAPHORE_BYTES < seen["partial_out"]


def test_too_little_scratch_is_refused_with_the_bytes(
    decode: Callable[..., dict[str, Any]], memory: MadeUpMemory
) -> None:
    with pytest.raises(WorkspaceError, match=r"workspace_buffer, behind its 8388608 .*: \d+ bytes are needed"):
        decode(workspace_buffer=memory.tensor("uint8", SEMAPHORE_BYTES + 1024))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kv_lora_rank": 128}, "kv_lora_rank=128"),
    ({"qk_nope_head_dim": 0}, "qk_nope_head_dim=0"),
    ({"query": tensor("bfloat16", 4, HEADS, 576)}, "query: shape .*expected 4 dimensions"),
    ({"query": tensor("bfloat16", 3, 1, HEADS, 576)}, "query: batch 3, seq_lens has 4"),
    ({"query": tensor("bfloat16", 4, 1, 129, 576)}, "query: 129 heads"),
    ({"query": tensor("float16", 4, 1, HEADS, 576)}, "query: dtype float16"),
    ({"kv_cache": tensor("bfloat16", PAGES, 2, PAGE, 576)}, "kv_cache: shape"),
    ({"kv_cache": tensor("bfloat16", PAGES, 8, 576)}, "kv_cache: page size 8"),
    ({"block_tables": tensor("int64", 4, COLUMNS)}, "block_tables: dtype int64"),
    ({"out": tensor("bfloat16", 4, HEADS, 576)}, "out: shape"),
    ({"bmm1_scale": math.inf}, "bmm1_scale=inf"),
    ({"bmm2_scale": tensor("float64", 1)}, "bmm2_scale"),
    ({"sinks": tensor("float32", 7)}, "sinks: shape"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_is_wrong_is_named(
    decode: Callable[..., dict[str, Any]], standin: StandIn, memory: MadeUpMemory, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        decode(**made(memory, changes))
    assert "cuModuleLoadData" not in standin.names()


TRTLLM_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"sparse_mla_top_k": -4}, r"sparse_mla_top_k=-4: expected 0 \(off\) or more"),
    ({"sparse_mla_top_k_lens": tensor("int32", 4)}, "sparse_mla_top_k_lens without sparse_mla_top_k"),
    ({"kv_scale_format": "arbitrary_fp32"}, "kv_scale_format='arbitrary_fp32': .*expected 'auto'"),
    ({"skip_softmax_threshold_scale_factor": -1.0}, "skip_softmax_threshold_scale_factor=-1.0"),
    ({"uses_shared_paged_kv_idx": False}, r"block_tables: shape \(4, 256\), expected \[batch, 2, columns\]"),
    (
        {"uses_shared_paged_kv_idx": False, "block_tables": tensor("int32", 4, 3, COLUMNS)},
        r"block_tables: shape \(4, 3, 256\), expected \[batch, 2, columns\]",
    ),
    ({"enable_dcp": True}, "causal_seqlens_kv_global: None with enable_dcp"),
    ({"enable_dcp": True, "causal_seqlens_kv_global": tensor("int32", 4), "cp_world": 0}, "cp_world=0: expected 2"),
    ({"enable_dcp": True, "causal_seqlens_kv_global": tensor("int32", 5), "cp_world": 2}, "causal_seqlens_kv_global: "),
    ({"cp_world": 4}, "cp_world=4: .*expected 1"),
    ({"cp_rank": 1}, "cp_rank=1: .*expected 0"),
    ({"causal_seqlens_kv_global": tensor("int32", 4)}, "causal_seqlens_kv_global=a TensorView: .*expected None"),
    ({"use_fp16_softmax": True}, "use_fp16_softmax=True: .*expected None"),
    ({"return_lse_base": "base10"}, "return_lse_base='base10': expected None, 'basee' or 'base2'"),
    ({"max_q_len": 2}, "max_q_len=2 without cum_seq_lens_q"),
    ({"backend": "cute-dsl"}, "backend='cute-dsl': expected auto or one of xqa, trtllm-gen"),
]


@pytest.mark.parametrize(("changes", "words"), TRTLLM_ONLY)
def test_what_our_kernels_do_not_do_is_refused(memory: MadeUpMemory, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(**mla_batch_arguments(memory, **made(memory, changes)))


def test_keys_divided_over_ranks_arrive(standin: StandIn, memory: MadeUpMemory) -> None:
    lengths = view("int32", 4, pointer=0x7F0000006000)
    given = mla_arguments(memory, enable_dcp=True, cp_world=4, cp_rank=3, causal_seqlens_kv_global=lengths)
    for _ in range(2):  # the second call takes the fast path
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(**given)
        seen = sent(standin)
        assert (seen["global_seq_lens"], seen["cp_begin"], seen["cp_interleave"]) == (lengths.pointer, 3, 1)
        assert seen["cp_round"].divisor == 4


def test_one_rank_has_all_keys(standin: StandIn, memory: MadeUpMemory) -> None:
    lengths = view("int32", 4, pointer=0x7F0000006000)
    given = mla_arguments(memory, enable_dcp=True, causal_seqlens_kv_global=lengths)
    flashinfer.trtllm_batch_decode_with_kv_cache_mla(**given)
    assert sent(standin)["global_seq_lens"] == 0


def test_of_two_page_tables_the_one_of_keys_serves_as_values_lie_in_them(
    standin: StandIn, memory: MadeUpMemory
) -> None:
    tables = memory.tensor("int32", 4, 2, COLUMNS)
    given = mla_batch_arguments(memory, block_tables=tables, uses_shared_paged_kv_idx=False)
    flashinfer.trtllm_batch_decode_with_kv_cache_mla(**given)
    seen = sent(standin)
    assert (seen["page_table"], seen["table_stride"], seen["max_seq_len"]) == (tables.pointer, 2 * COLUMNS, 16000)


def test_keys_of_little_weight_count_too(standin: StandIn, memory: MadeUpMemory) -> None:
    given = mla_batch_arguments(memory, skip_softmax_threshold_scale_factor=1.0)
    flashinfer.trtllm_batch_decode_with_kv_cache_mla(**given)
    assert sent(standin)["tokens"] == 4


@pytest.mark.parametrize("backend", ["auto", "xqa"])
def test_hopper_runs_our_kernels_without_a_warning(standin: StandIn, memory: MadeUpMemory, backend: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(**mla_arguments(memory, backend=backend))
    assert (sent(standin)["tokens"], sent(standin)["q_len"]) == (8, 2)


@pytest.mark.parametrize("operator", ["xqa_mla", "xqa_batch_decode_with_kv_cache_mla"])
def test_another_device_is_told_where_it_runs(standin: StandIn, memory: MadeUpMemory, operator: str) -> None:
    standin.pose_as(8, 9)
    given = xqa_mla_arguments(memory) if operator == "xqa_mla" else mla_batch_arguments(memory)
    with pytest.raises(BackendError, match=rf"{operator} on .*\(xqa: measured on 9\.0, built for 12\.0, 12\.1\)"):
        getattr(flashinfer, operator)(**given)


def ragged(memory: MadeUpMemory, tokens: int = 7, **changes: Any) -> dict[str, Any]:
    given = mla_arguments(memory, query=memory.tensor("bfloat16", tokens, HEADS, 576))
    return {**given, "cum_seq_lens_q": memory.tensor("int32", 5, values=(0, 3, 3, 4, 7)), **changes}


def test_ragged_queries_with_a_bound_are_not_read_back(standin: StandIn, memory: MadeUpMemory) -> None:
    given = ragged(memory, max_q_len=9)
    out = flashinfer.trtllm_batch_decode_with_kv_cache_mla(**given)
    seen = sent(standin)
    assert (seen["batch"], seen["tokens"], seen["q_len"], memory.reads) == (4, 7, 9, [])
    assert (seen["q_cu_seq_lens"], out.shape) == (given["cum_seq_lens_q"].pointer, (7, HEADS, LATENT))


def test_ragged_queries_without_a_bound_are_read_back_once(standin: StandIn, memory: MadeUpMemory) -> None:
    given = ragged(memory)
    flashinfer.trtllm_batch_decode_with_kv_cache_mla(**given)
    assert (sent(standin)["q_len"], memory.reads) == (3, [given["cum_seq_lens_q"].pointer])


def test_a_bound_that_is_read_back_is_the_longest_query(standin: StandIn, memory: MadeUpMemory) -> None:
    lengths = memory.tensor("int32", 5, values=(0, 1, 1, 2, 3))
    flashinfer.trtllm_batch_decode_with_kv_cache_mla(**ragged(memory, tokens=3, cum_seq_lens_q=lengths))
    assert sent(standin)["q_len"] == 1


RAGGED: list[tuple[dict[str, Any], str]] = [
    ({"cum_seq_lens_q": tensor("int32", 4)}, "cum_seq_lens_q: 4 entries, expected 5"),
    ({"cum_seq_lens_q": tensor("int64", 5)}, "cum_seq_lens_q: dtype int64"),
    ({"cum_seq_lens_q": tensor("int32", 5, device=1), "max_q_len": 4}, "cum_seq_lens_q: on device 1"),
    ({"cum_seq_lens_q": tensor("int32", 5, values=(0, 3, 2, 4, 7))}, "cum_seq_lens_q"),
    ({"cum_seq_lens_q": tensor("int32", 5, values=(0, 3, 3, 4, 8))}, "cum_seq_lens_q"),
    ({"query": tensor("bfloat16", 4, 2, HEADS, 576)}, "query: shape .*expected 3 dimensions"),
    ({"max_q_len": 0}, "max_q_len=0: expected 1 to 16"),
    ({"max_q_len": 17}, "max_q_len=17: expected 1 to 16"),
    ({"out": tensor("bfloat16", 8, HEADS, LATENT), "max_q_len": 4}, "out: shape"),
]


@pytest.mark.parametrize(("changes", "words"), RAGGED)
def test_what_is_wrong_with_ragged_queries_is_named_before_anything_loads(
    standin: StandIn, memory: MadeUpMemory, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(**ragged(memory, **made(memory, changes)))
    assert "cuModuleLoadData" not in standin.names()


def test_the_log_sum_exp_is_made_and_returned(standin: StandIn, memory: MadeUpMemory) -> None:
    out, lse = flashinfer.trtllm_batch_decode_with_kv_cache_mla(**mla_arguments(memory, return_lse=True))
    seen = sent(standin)
    assert (lse.dtype, lse.shape, out.shape) == ("float32", (8, HEADS), (4, 2, HEADS, LATENT))
    assert (seen["lse"], seen["lse_token_stride"], seen["lse_head_stride"]) == (lse.pointer, HEADS, 1)


@pytest.mark.parametrize("shape", [(8, HEADS), (4, 2, HEADS)])
def test_a_given_log_sum_exp_of_either_form_is_filled(
    standin: StandIn, memory: MadeUpMemory, shape: tuple[int, ...]
) -> None:
    lse = memory.tensor("float32", *shape)
    flashinfer.trtllm_batch_decode_with_kv_cache_mla(**mla_arguments(memory, lse=lse))
    assert (sent(standin)["lse"], sent(standin)["lse_token_stride"]) == (lse.pointer, HEADS)


def test_the_lowest_operator_multiplies_its_scales_and_nothing_more(standin: StandIn, memory: MadeUpMemory) -> None:
    given = xqa_mla_arguments(memory, q_scale=2.0, kv_scale=0.5)
    flashinfer.xqa_mla(**given)
    seen = sent(standin)
    assert seen["softmax_scale_log2"] == pytest.approx(2.0 * 0.5 * LOG2_E)
    assert (seen["output_scale"], seen["out"], seen["max_seq_len"]) == (0.5, given["output"].pointer, PAGE * COLUMNS)
    assert seen["status"] == given["semaphores"].pointer


@pytest.mark.parametrize("shape", [(PAGES, PAGE), (PAGES, 1, PAGE), (PAGES, PAGE, 1)])
def test_the_lowest_operator_takes_every_form_of_its_cache(
    standin: StandIn, memory: MadeUpMemory, shape: tuple[int, ...]
) -> None:
    keys = memory.tensor("bfloat16", *shape, 576)
    values = replace(keys, shape=(*shape, LATENT))
    flashinfer.xqa_mla(**xqa_mla_arguments(memory, k_cache=keys, v_cache=values))
    assert (sent(standin)["num_pages"], sent(standin)["page_size_log2"]) == (PAGES, 6)


@pytest.mark.parametrize(("latent", "rope"), [(512, 0), (256, 32), (128, 32)])
@pytest.mark.parametrize("whole", [False, True])
def test_the_lowest_operator_takes_rows_of_every_width(
    standin: StandIn, memory: MadeUpMemory, latent: int, rope: int, whole: bool
) -> None:
    keys = memory.tensor("bfloat16", PAGES, PAGE, latent + rope)
    values = keys if whole else replace(keys, shape=(PAGES, PAGE, latent))
    q, output = (memory.tensor("bfloat16", 4, 1, HEADS, columns) for columns in (latent + rope, latent))
    flashinfer.xqa_mla(**xqa_mla_arguments(memory, q=q, k_cache=keys, v_cache=values, output=output))
    assert (sent(standin)["q_head_stride"], sent(standin)["out_head_stride"]) == (latent + rope, latent)


@pytest.mark.parametrize("columns", [576, LATENT])
@pytest.mark.parametrize("shape", [(PAGES, PAGE), (PAGES, 1, PAGE), (PAGES, PAGE, 1)])
def test_the_lowest_operator_takes_values_in_memory_of_their_own(
    standin: StandIn, memory: MadeUpMemory, shape: tuple[int, ...], columns: int
) -> None:
    keys, values = memory.tensor("float8_e4m3fn", *shape, 576), memory.tensor("float8_e4m3fn", *shape, columns)
    q = memory.tensor("float8_e4m3fn", 4, 1, HEADS, 576)
    flashinfer.xqa_mla(**xqa_mla_arguments(memory, q=q, k_cache=keys, v_cache=values))
    maps = [call.seen for call in standin.calls("cuTensorMapEncodeTiled")]
    assert {int(seen["address"], 0) for seen in maps} == {keys.pointer, values.pointer}
    assert "separate_values" in standin.calls("cuLaunchKernelEx")[-1].seen["symbol"]


LOWEST: list[tuple[dict[str, Any], str]] = [
    ({"v_cache": tensor("bfloat16", PAGES, PAGE, 576)}, "v_cache: other memory than k_cache"),
    (
        {"v_cache": tensor("bfloat16", PAGES, PAGE, 64)},
        "v_cache: shape .*, expected 576 columns, like k_cache, or its latent ones",
    ),
    ({"page_size": 32}, "page_size=32: k_cache has 64"),
    ({"sm_count": 7}, "sm_count=7"),
    ({"q": tensor("bfloat16", 4, 2, HEADS, 576)}, "q: shape"),
    ({"output": tensor("bfloat16", 4, 1, HEADS, 576)}, "output: shape"),
    ({"output": tensor("float32", 4, 1, HEADS, LATENT)}, "output: dtype float32"),
    ({"page_table": tensor("int32", 4)}, "page_table: shape"),
    ({"seq_lens": tensor("uint32", 3, 1)}, "seq_lens: shape"),
    ({"page_size": "64"}, "page_size='64': expected an integer"),
    (
        {"workspace_buffer": tensor("uint8", 1 << 27, pointer=0x7F08)},
        "workspace_buffer: address 0x7f08, expected a mul",
    ),
    ({"q_scale": 1e30, "kv_scale": 1e30}, r"^q_scale \* kv_scale=.*: expected a finite number"),
]


@pytest.mark.parametrize(("changes", "words"), LOWEST)
def test_what_the_lowest_operator_cannot_take_is_named(
    standin: StandIn, memory: MadeUpMemory, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        flashinfer.xqa_mla(**xqa_mla_arguments(memory, **made(memory, changes)))
    assert "cuModuleLoadData" not in standin.names()


def test_too_little_scratch_of_the_lowest_operator_goes_by_its_name(memory: MadeUpMemory) -> None:
    with pytest.raises(WorkspaceError, match=r"^workspace_buffer of 1024 bytes: \d+ bytes are needed"):
        flashinfer.xqa_mla(**xqa_mla_arguments(memory, workspace_buffer=memory.tensor("uint8", 1024)))
