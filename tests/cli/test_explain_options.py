"""Every argument of a public function that influences its launch is an option of ``explain``, on both backends."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from cubin_runtime import attention
from cubin_runtime.attention.call_sizes import CallSizes
from cubin_runtime.cli import explain_trtllm_gen
from cubin_runtime.cli.example_call import Shapes, example_call, example_decision
from cubin_runtime.cli.explain import explain
from cubin_runtime.cli.recorded_cases import call_of
from cubin_runtime.compat import flashinfer
from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.trtllm_gen.call import Call
from cubin_runtime.kernels.trtllm_gen.calls import ContextCall, DecodeCall, RaggedCall
from cubin_runtime.kernels.trtllm_gen.errors import KernelMissing, PlanRefused
from cubin_runtime.kernels.trtllm_gen.traits import Policy
from tests.kernels.example_cases import case_of
from tests.kernels.trtllm_examples import recorded_kernels

OURS = (
    attention.paged_decode,
    attention.mla_decode,
    attention.context_attention,
    attention.append_kv,
    attention.merge_states,
)
THEIRS = (
    flashinfer.trtllm_batch_decode_with_kv_cache,
    flashinfer.trtllm_batch_decode_with_kv_cache_mla,
    flashinfer.trtllm_batch_context_with_kv_cache,
)
# Arguments that influence the kernel, the grid, the attributes or the launches that follow -> options of `explain`.
STATED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("q", "query", "v", "parts"), ("batch", "heads_q", "head_dim", "dtype_q")),
    **dict.fromkeys(("k", "k_cache", "v_cache", "kv_cache"), ("heads_kv", "head_dim_v", "dtype_kv", "page")),
    **dict.fromkeys(("qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim"), ("head_dim", "head_dim_v")),
    **dict.fromkeys(("out", "out_dtype", "o_sf_vec_size"), ("dtype_out",)),
    **dict.fromkeys(("kv_cache_sf",), ("dtype_kv",)),
    **dict.fromkeys(("seq_lens", "batch_size"), ("batch",)),
    **dict.fromkeys(("max_seq_len", "max_kv_len"), ("kv_len",)),
    **dict.fromkeys(("max_q_len", "q_len_per_req"), ("q_len",)),
    **dict.fromkeys(("q_cu_seq_lens", "cum_seq_lens_q"), ("tokens", "q_len")),
    **dict.fromkeys(("lse", "return_lse"), ("lse",)),
    "causal": ("causal",),
    "backend": ("backend",),
    "batch_invariant": ("batch_invariant",),
    "enable_pdl": ("pdl",),
    "logit_soft_cap": ("soft_cap",),
    "skip_softmax_threshold_scale_factor": ("skip_softmax",),
    "sparse_mla_top_k": ("top_k",),
    "sparse_mla_top_k_lens": ("top_k_lens",),
    "uses_shared_paged_kv_idx": ("shared_index",),
    "window_left": ("window",),
}
# Arguments that only give addresses, strides or numbers to the same launch, or that say where it runs.
VALUES = {
    *("page_table", "block_tables", "kv_cu_seq_lens", "cum_seq_lens_kv", "page_indptr"),
    *("positions", "batch_indices", "lengths_include_new", "mask", "sinks", "q_rope", "draft_position"),
    *("global_seq_lens", "causal_seqlens_kv_global", "cp_world", "cp_rank", "cp_interleave", "enable_dcp"),
    *("softmax_scale", "output_scale", "k_scale", "v_scale", "bmm1_scale", "bmm2_scale", "bmm1_scale_log2", "o_scale"),
    *(
        "o_sf_scale",
        "lse_base",
        "lse_sink",
        "return_lse_base",
        "window_right",
        "kv_layout",
        "part_lses",
        "other",
        "other_lse",
    ),
    *("workspace", "workspace_buffer", "multi_ctas_kv_counter_buffer", "stream", "runtime"),
}
# FlashInfer's arguments that are accepted with one meaning, or refused.
FIXED = {
    *("enable_block_sparse_attention", "bf16q_fp8kv_transform_mode", "request_order", "request_order_plan"),
    *("is_var_seq", "cute_dsl_impl", "kv_scale_format", "use_fp16_softmax", "uses_spcompress", "sparse_top_k"),
    *("length_aware_schedule", "variable_window_token_starts", "variable_window_token_ends"),
}


@pytest.mark.parametrize("function", [*OURS, *THEIRS], ids=lambda function: function.__name__)
def test_each_argument_is_stated_or_influences_no_launch(function: Callable[..., Any]) -> None:
    known = STATED.keys() | VALUES | FIXED
    assert [name for name in inspect.signature(function).parameters if name not in known] == []


def test_what_is_stated_is_an_option() -> None:
    options = inspect.signature(explain).parameters.keys()
    assert {option for stated in STATED.values() for option in stated} <= options


@pytest.mark.parametrize("kind", [CallSizes, Shapes])
def test_each_size_and_option_of_a_backend_is_an_option(kind: type) -> None:
    assert {field.name for field in fields(kind)} <= inspect.signature(explain).parameters.keys()


@pytest.mark.parametrize("kind", [DecodeCall, ContextCall, RaggedCall])
def test_each_option_of_a_trtllm_gen_call_can_be_stated(kind: type[Call]) -> None:
    changes: dict[str, dict[str, Any]] = {
        "max_q": {"q_len": 2},
        "max_kv": {"kv_len": 64},
        "cum_seq_lens_q": {"tokens": 2, "q_len": 2, "batch": 2},
        "lse": {"lse": True},
        "window_left": {"window": 8},
        "skip_softmax_factor": {"skip_softmax": 1.0},
        "pdl": {"pdl": True},
        "batch_invariant": {"batch_invariant": True},
        "shares_index": {"shared_index": False},
        "top_k": {"top_k": 64, "head_dim": 576, "head_dim_v": 512, "heads_kv": 1},
        "causal": {"causal": False},
    }
    operation = {DecodeCall: "decode", ContextCall: "context", RaggedCall: "ragged"}[kind]
    plain = example_call(Shapes(operation=operation))
    own = {field.name for field in fields(kind)} & changes.keys()
    alike = [
        name
        for name in own
        if getattr(example_call(Shapes(operation=operation, **changes[name])), name) == getattr(plain, name)
        and not (name == "cum_seq_lens_q" and operation != "decode")
    ]
    assert alike == []


SPARSE_MLA = {"head_dim": 576, "head_dim_v": 512, "heads_q": 128, "heads_kv": 1, "top_k": 256, "page": 64}
ALIKE: list[dict[str, Any]] = [
    *({"operation": operation} for operation in ("decode", "context", "ragged")),
    *({"operation": operation, "tokens": 5, "batch": 3, "q_len": 2} for operation in ("decode", "context", "ragged")),
    {"lse": True, "window": 8, "pdl": True, "skip_softmax": 1.5, "causal": False, "operation": "context"},
    {"dtype_kv": "e2m1", "dtype_q": "e4m3", "dtype_out": "e2m1", "shared_index": False},
    {"head_dim": 576, "head_dim_v": 512, "heads_q": 128, "heads_kv": 1, "lse": True, "batch_invariant": True},
    *({**SPARSE_MLA, "top_k_lens": lens, "batch": 2, "q_len": q_len} for lens in (False, True) for q_len in (1, 3)),
]


@pytest.mark.parametrize("shapes", ALIKE, ids=str)
def test_the_call_of_shapes_is_that_of_the_recorded_case(shapes: dict[str, Any]) -> None:
    stated = Shapes(**shapes)
    assert example_call(stated) == call_of(case_of(stated))


@pytest.mark.parametrize("function", [explain, explain_trtllm_gen.explain_call, explain_trtllm_gen.explain_case])
def test_an_explanation_has_at_most_twenty_arguments(function: Callable[..., None]) -> None:
    assert function.__code__.co_argcount + function.__code__.co_kwonlyargcount <= 20


def symbol(**shapes: Any) -> str:
    return example_decision(Shapes(**shapes), recorded_kernels(), Policy.BEST).meta.symbol


MLA = {"heads_q": 128, "heads_kv": 1, "head_dim": 576, "head_dim_v": 512}


def test_a_batch_invariant_call_has_the_kernel_that_its_batch_does_not_decide() -> None:
    alone = {symbol(**MLA, batch_invariant=True, batch=batch, q_len=q_len) for batch in (1, 64) for q_len in (1, 4)}
    assert len(alone) == 1
    assert "HVPerCta256" in alone.pop()


def test_sparse_keys_of_differing_number_need_a_kernel_of_their_own() -> None:
    sparse = {**MLA, "top_k": 256, "page": 64}
    assert "StaticTokenSparse" in symbol(**sparse)
    with pytest.raises(KernelMissing, match="sparse dynamic"):
        symbol(**sparse, top_k_lens=True)


def test_what_the_operators_refuse_is_not_explained() -> None:
    with pytest.raises(UsageError, match="batch_invariant with skip_softmax_threshold_scale_factor"):
        example_call(Shapes(batch_invariant=True, skip_softmax=1.0))


def test_the_reference_launcher_has_no_batch_invariance() -> None:
    with pytest.raises(PlanRefused, match="batch_invariant with policy='reference'"):
        example_decision(Shapes(batch_invariant=True), recorded_kernels(), Policy.REFERENCE)


@pytest.mark.parametrize("tokens", [0, 5])
def test_tokens_beyond_the_bounds_are_refused(tokens: int) -> None:
    with pytest.raises(UsageError, match=f"tokens={tokens}: expected 1 to batch x q_len, 4"):
        example_call(Shapes(batch=2, q_len=2, tokens=tokens))
