"""FlashInfer's MLA over lists on native kernels: what reaches the kernel's parameters, at first and again; refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cubin_runtime.attention import BackendError, Runtime
from cubin_runtime.attention.fast_path import operator_function
from cubin_runtime.compat import flashinfer
from cubin_runtime.compat.flashinfer import sparse_mla
from cubin_runtime.errors import UsageError, WorkspaceError
from cubin_runtime.kernels.native.problem import LOG2_E
from cubin_runtime.kernels.native.sparse_mla.params import SPARSE_MLA_DECODE
from cubin_runtime.testing import StandIn
from tests.attention.trtllm_calls import MadeUpMemory, made, tensor
from tests.attention.xqa_calls import (
    SEMAPHORE_BYTES,
    mla_list_arguments,
    mla_list_arguments_of_656_bytes,
    mla_list_arguments_of_ragged_queries,
)

pytestmark = pytest.mark.usefixtures("hopper")
decode = flashinfer.trtllm_batch_decode_with_kv_cache_mla


def sent(standin: StandIn) -> dict[str, Any]:
    """The parameters of the last launch."""
    return SPARSE_MLA_DECODE.unpack(bytes.fromhex(standin.calls("cuLaunchKernelEx")[-1].seen["parameter0"]))


@pytest.fixture
def full_calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The calls that take the full path, of which the first of a form is the only one."""
    taken: list[object] = []
    plain = sparse_mla.launch_batch
    monkeypatch.setattr(operator_function, "FULL_RUNS", 1)
    monkeypatch.setattr(sparse_mla, "launch_batch", lambda *given, **more: (taken.append(given), plain(*given, **more)))
    return taken


def test_tensors_and_sizes_arrive(standin: StandIn, memory: MadeUpMemory) -> None:
    given = mla_list_arguments_of_656_bytes(memory)
    assert decode(**given) is given["out"]
    seen = sent(standin)
    names = {"q": "query", "kv_cache": "kv_cache", "indices": "block_tables", "topk_lens": "seq_lens"}
    names |= {"out": "out", "lse": "lse", "status": "workspace_buffer"}
    assert {name: seen[name] for name in names} == {name: given[own].pointer for name, own in names.items()}
    assert seen["sinks"] == given["sinks"][0].pointer
    sizes = ("batch", "heads", "width", "rows", "row_bytes", "splits")
    assert [seen[name] for name in sizes] == [4, 16, 256, 65536, 656, 0]
    assert (seen["softmax_scale"], seen["output_scale"]) == (pytest.approx(0.07), 1.0)
    assert (seen["lse_sink"], seen["lse_from_log2"]) == (1, 1.0)
    assert memory.made == []


def test_other_tensors_and_scales_arrive_in_repeated_calls(
    standin: StandIn, memory: MadeUpMemory, full_calls: list[object]
) -> None:
    for number in range(4):
        given = mla_list_arguments_of_656_bytes(memory)
        given |= {"bmm1_scale": 0.1 + number, "bmm2_scale": 2.0 + number, "max_seq_len": 256 << number}
        assert decode(**given) is given["out"]
        seen = sent(standin)
        assert seen["indices"] == given["block_tables"].pointer
        assert (seen["q"], seen["kv_cache"]) == (given["query"].pointer, given["kv_cache"].pointer)
        assert (seen["topk_lens"], seen["sinks"]) == (given["seq_lens"].pointer, given["sinks"][0].pointer)
        assert (seen["softmax_scale"], seen["output_scale"]) == (pytest.approx(0.1 + number), 2.0 + number)
    assert len(full_calls) == 1


def test_scales_on_the_device_are_read_there(standin: StandIn, memory: MadeUpMemory, full_calls: list[object]) -> None:
    for _ in range(3):
        scores, output = memory.tensor("float32", 1), memory.tensor("float32")
        decode(**mla_list_arguments_of_656_bytes(memory) | {"bmm1_scale": scores, "bmm2_scale": output})
        seen = sent(standin)
        assert (seen["softmax_scale_device"], seen["output_scale_device"]) == (scores.pointer, output.pointer)
        assert (seen["softmax_scale"], seen["output_scale"]) == (1.0, 1.0)
    assert len(full_calls) == 1


def test_calls_of_other_options_are_not_alike(standin: StandIn, memory: MadeUpMemory, full_calls: list[object]) -> None:
    plain = mla_list_arguments_of_656_bytes(memory, heads=64)
    for changes in ({}, {"batch_invariant": True}, {"return_lse_base": "basee"}, {"sinks": None}, {}):
        decode(**plain | changes)
        seen = sent(standin)
        assert (seen["splits"] > 0) == ("batch_invariant" in changes)
        assert seen["lse_from_log2"] == pytest.approx(1 / LOG2_E if "return_lse_base" in changes else 1.0)
        assert (seen["sinks"] == 0) == ("sinks" in changes)
    assert len(full_calls) == 4


@pytest.mark.parametrize(
    ("columns", "heads", "page"), [(576, 128, 64), (512, 1, 32), (576, 65, 1), (512, 6, 48)], ids=str
)
@pytest.mark.parametrize("rank", [3, 4])
def test_rows_of_bf16_with_and_without_rope_columns(
    standin: StandIn, memory: MadeUpMemory, columns: int, heads: int, page: int, rank: int
) -> None:
    cache = memory.tensor("bfloat16", 100, *(1,) * (rank - 3), page, columns)
    query = memory.tensor("bfloat16", 4, 2, heads, columns)
    out = decode(**mla_list_arguments(memory, query=query, kv_cache=cache, qk_rope_head_dim=columns - 512))
    seen = sent(standin)
    assert (seen["batch"], seen["heads"], seen["rows"]) == (8, heads, 100 * page)
    assert (seen["row_bytes"], seen["out"], out.shape) == (2 * columns, out.pointer, (4, 2, heads, 512))


def test_several_query_tokens_count_the_keys_up_to_themselves(standin: StandIn, memory: MadeUpMemory) -> None:
    decode(**mla_list_arguments(memory, out=memory.tensor("bfloat16", 4, 2, 16, 512)))
    ((what, lens),) = memory.made
    assert (what, lens.shape, lens.dtype) == ("seq_lens of 2 tokens each", (8,), "int32")
    assert sent(standin)["topk_lens"] == lens.pointer


def test_ragged_queries_have_a_list_for_each_token(standin: StandIn, memory: MadeUpMemory) -> None:
    given = mla_list_arguments_of_ragged_queries(memory)
    out = decode(**given)
    (counted,) = [lens for what, lens in memory.made if what.startswith("seq_lens of tokens as")]
    seen = sent(standin)
    assert (seen["batch"], seen["indices"], seen["topk_lens"]) == (7, given["block_tables"].pointer, counted.pointer)
    assert (out.shape, memory.reads) == ((7, 16, 512), [])


def test_ragged_queries_without_a_bound_are_checked_on_the_host(memory: MadeUpMemory) -> None:
    sums = memory.tensor("int32", 5, values=(0, 3, 3, 4, 6))
    with pytest.raises(UsageError, match="cum_seq_lens_q: ends with 6, expected 7"):
        decode(**mla_list_arguments_of_ragged_queries(memory, cum_seq_lens_q=sums, max_q_len=None))


@pytest.mark.parametrize(
    "arguments", [mla_list_arguments, mla_list_arguments_of_ragged_queries], ids=["same number", "ragged"]
)
def test_lengths_of_lists_replace_those_of_keys(
    standin: StandIn, memory: MadeUpMemory, arguments: Callable[..., dict[str, Any]]
) -> None:
    given = arguments(memory)
    tokens = 7 if "max_q_len" in given else 8
    for _ in range(2):
        lens = memory.tensor("int32", tokens)
        decode(**given, sparse_mla_top_k_lens=lens)
        assert sent(standin)["topk_lens"] == lens.pointer
    assert not any("seq_lens" in what for what, _ in memory.made)


@pytest.mark.parametrize("shape", [(4, 2), (8,)])
@pytest.mark.parametrize(("dtype", "columns"), [("bfloat16", 576), ("uint8", 656)])
def test_lengths_may_be_those_of_lists(
    standin: StandIn, memory: MadeUpMemory, shape: tuple[int, ...], dtype: str, columns: int
) -> None:
    lens, cache = memory.tensor("int32", *shape), memory.tensor(dtype, 1024, 64, columns)
    decode(**mla_list_arguments(memory, seq_lens=lens, kv_cache=cache))
    assert sent(standin)["topk_lens"] == lens.pointer


@pytest.mark.parametrize(
    "arguments",
    [mla_list_arguments, mla_list_arguments_of_656_bytes, mla_list_arguments_of_ragged_queries],
    ids=["bf16", "656 bytes", "ragged"],
)
def test_without_lengths_all_entries_count(
    standin: StandIn, memory: MadeUpMemory, arguments: Callable[..., dict[str, Any]]
) -> None:
    decode(**arguments(memory) | {"seq_lens": None})
    assert sent(standin)["topk_lens"] == 0


def test_calls_with_and_without_lengths_are_not_alike(
    standin: StandIn, memory: MadeUpMemory, full_calls: list[object]
) -> None:
    for _ in range(3):
        given = mla_list_arguments_of_656_bytes(memory)
        decode(**given | {"seq_lens": None})
        assert sent(standin)["topk_lens"] == 0
        decode(**given)
        assert sent(standin)["topk_lens"] == given["seq_lens"].pointer
    assert len(full_calls) == 2


def test_without_lengths_of_keys_those_of_lists_count(standin: StandIn, memory: MadeUpMemory) -> None:
    lens = memory.tensor("int32", 7)
    decode(**mla_list_arguments_of_ragged_queries(memory, seq_lens=None, sparse_mla_top_k_lens=lens))
    assert sent(standin)["topk_lens"] == lens.pointer


@pytest.mark.parametrize("shape", [(0,), (1, 5)])
def test_sums_of_ragged_queries_are_checked_without_lengths(memory: MadeUpMemory, shape: tuple[int, ...]) -> None:
    sums = memory.tensor("int32", *shape)
    with pytest.raises(UsageError, match="cum_seq_lens_q: "):
        decode(**mla_list_arguments_of_ragged_queries(memory, seq_lens=None, cum_seq_lens_q=sums, max_q_len=None))


def test_all_keys_have_lengths(memory: MadeUpMemory) -> None:
    with pytest.raises(UsageError, match="seq_lens: None, expected lengths"):
        decode(**mla_list_arguments(memory, seq_lens=None, sparse_mla_top_k=0))


@pytest.mark.parametrize("shape", [None, (8, 16), (4, 2, 16)])
def test_the_log_sum_exp_is_returned(standin: StandIn, memory: MadeUpMemory, shape: tuple[int, ...] | None) -> None:
    given = None if shape is None else memory.tensor("float32", *shape)
    for base, factor in (("base2", 1.0), ("basee", 1 / LOG2_E), (None, 1.0)):
        _, lse = decode(**mla_list_arguments(memory, lse=given, return_lse=True, return_lse_base=base))
        seen = sent(standin)
        assert (lse.shape, lse is given) == (shape or (8, 16), shape is not None)
        assert (seen["lse"], seen["lse_token_stride"], seen["lse_head_stride"]) == (lse.pointer, 16, 1)
        assert seen["lse_from_log2"] == pytest.approx(factor)


@pytest.mark.parametrize("shape", [(4, 1, 16, 512), (4, 16, 512)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_outputs_of_every_form(standin: StandIn, memory: MadeUpMemory, shape: tuple[int, ...], dtype: str) -> None:
    out = memory.tensor(dtype, *shape)
    assert decode(**mla_list_arguments_of_656_bytes(memory) | {"out": out}) is out
    assert (sent(standin)["out"], sent(standin)["out_token_stride"]) == (out.pointer, 16 * 512)


def padded(memory: MadeUpMemory) -> Any:
    return replace(memory.tensor("bfloat16", 4, 2, 16, 576), strides=(4 * 16 * 576, 16 * 576, 576, 1))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"query": tensor("float8_e4m3fn", 4, 2, 16, 576)}, "query: dtype float8_e4m3fn, expected bfloat16"),
    ({"query": tensor("bfloat16", 4, 2, 129, 576)}, "query: 129 heads, expected 1 to 128"),
    ({"query": tensor("bfloat16", 8, 16, 576)}, "query: shape .*expected 4 dimensions"),
    ({"query": tensor("bfloat16", 4, 2, 16, 512)}, "query: head dimension 512, expected 576"),
    ({"query": padded}, "query: strides .*2 times the tokens' distance"),
    ({"kv_cache": tensor("float8_e4m3fn", 1024, 64, 576)}, "kv_cache: rows of 576 bytes, expected 656"),
    ({"kv_cache": tensor("bfloat16", 1024, 64, 512)}, "query: 576 columns per head, expected 512"),
    ({"kv_cache": tensor("float16", 1024, 64, 576)}, "kv_cache: dtype float16"),
    ({"kv_cache": tensor("bfloat16", 1024, 64, 1, 576)}, "kv_cache: shape"),
    ({"kv_lora_rank": 256, "query": tensor("bfloat16", 4, 2, 16, 320)}, "query: 320 columns per head, expected 576"),
    ({"kv_lora_rank": 128}, "kv_lora_rank=128"),
    ({"block_tables": tensor("int32", 4, 256)}, r"block_tables: shape \(4, 256\), expected \(4, 2, 256\)"),
    ({"block_tables": tensor("int32", 4, 2, 128)}, r"block_tables: shape .*, expected \(4, 2, 256\)"),
    ({"block_tables": tensor("int64", 4, 2, 256)}, "block_tables: dtype int64"),
    ({"block_tables": tensor("int32", 4, 2, 32769), "sparse_mla_top_k": 32769}, "block_tables: shape .*1 to 32768"),
    ({"sparse_mla_top_k": "256"}, "sparse_mla_top_k='256'"),
    ({"sparse_mla_top_k_lens": tensor("int32", 4)}, "sparse_mla_top_k_lens: 4 entries, expected 8"),
    ({"sparse_mla_top_k_lens": tensor("int64", 8)}, "sparse_mla_top_k_lens: dtype int64"),
    ({"seq_lens": tensor("int32", 3)}, r"seq_lens: shape \(3,\), expected \(4,\) or \(4, 2\)"),
    ({"seq_lens": tensor("uint32", 4)}, "seq_lens: dtype uint32, expected int32"),
    ({"seq_lens": tensor("int32", 4, 2, strides=(4, 2))}, "seq_lens: stride 2"),
    (
        {"kv_cache": tensor("uint8", 1024, 64, 656)},
        r"seq_lens: shape \(4,\) with 8 query tokens and rows of 656 bytes, expected shape \(4, 2\)",
    ),
    ({"kv_cache": tensor("uint8", 1024, 64, 656), "kv_scale_format": "ue8m0"}, "kv_scale_format='ue8m0': expected"),
    ({"kv_scale_format": "arbitrary_fp32"}, "kv_scale_format='arbitrary_fp32': .*expected 'auto'"),
    ({"skip_softmax_threshold_scale_factor": 1.0}, "skip_softmax_threshold_scale_factor with sparse_mla_top_k"),
    ({"uses_shared_paged_kv_idx": False}, "uses_shared_paged_kv_idx=False with sparse_mla_top_k"),
    ({"enable_dcp": True, "causal_seqlens_kv_global": tensor("int32", 4)}, "enable_dcp with sparse_mla_top_k"),
    ({"cp_world": 2}, "cp_world=2: .*expected 1"),
    ({"cute_dsl_impl": "modular"}, "cute_dsl_impl='modular'"),
    ({"use_fp16_softmax": True}, "use_fp16_softmax=True"),
    ({"return_lse_base": "10"}, "return_lse_base='10'"),
    ({"max_q_len": 2}, "max_q_len=2 without cum_seq_lens_q"),
    ({"max_seq_len": 0}, "max_seq_len=0: expected 1 to"),
    ({"bmm1_scale": 0.0}, "bmm1_scale=0.0: expected a number other than 0"),
    ({"bmm2_scale": tensor("float64", 1)}, "bmm2_scale"),
    ({"sinks": tensor("float32", 7)}, "sinks: shape"),
    ({"out": tensor("bfloat16", 4, 2, 16, 576)}, "out: shape"),
    ({"lse": tensor("float32", 4, 16)}, "lse: shape"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_is_not_honoured_is_refused_before_anything_loads(
    standin: StandIn, memory: MadeUpMemory, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        decode(**mla_list_arguments(memory, **made(memory, changes)))
    assert "cuModuleLoadData" not in standin.names()


def test_ragged_queries_over_rows_of_656_bytes_need_the_lengths_of_lists(
    standin: StandIn, memory: MadeUpMemory
) -> None:
    given = mla_list_arguments_of_ragged_queries(memory, kv_cache=memory.tensor("uint8", 1024, 64, 656))
    with pytest.raises(UsageError, match=r"seq_lens: .*rows of 656 bytes, expected sparse_mla_top_k_lens"):
        decode(**given)
    decode(**given, sparse_mla_top_k_lens=memory.tensor("int32", 7))
    assert (sent(standin)["row_bytes"], sent(standin)["batch"]) == (656, 7)


def test_too_little_scratch_is_refused_with_the_bytes(memory: MadeUpMemory) -> None:
    small = memory.tensor("uint8", SEMAPHORE_BYTES + 1024)
    with pytest.raises(WorkspaceError, match=r"workspace_buffer, behind its 8388608 .*: \d+ bytes are needed"):
        decode(**mla_list_arguments_of_656_bytes(memory, requests=8, heads=64) | {"workspace_buffer": small})


def test_a_device_without_kernels_over_lists_is_told_where_they_run(
    hopper: Runtime, standin: StandIn, memory: MadeUpMemory
) -> None:
    standin.pose_as(12, 0)
    with pytest.raises(BackendError, match=r"sparse_mla_decode on .*\(native: measured on 9\.0\)"):
        decode(**mla_list_arguments(memory))
