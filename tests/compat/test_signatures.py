"""Names, order and defaults of the parameters are FlashInfer's; ``batch_invariant`` stands behind them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from cubin_runtime.compat import flashinfer

SIGNATURES = {
    "xqa": """q, k_cache, v_cache, page_table, seq_lens, output, workspace_buffer, semaphores, num_kv_heads, page_size,
        sinks=None, q_scale=1.0, kv_scale=1.0, sliding_win_size=0, kv_layout='NHD', sm_count=None, enable_pdl=None,
        rcp_out_scale=1.0, q_seq_len=1, mask=None, q_cu_seq_lens=None, k_sf_cache=None, v_sf_cache=None""",
    "xqa_batch_decode_with_kv_cache": """query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len,
        bmm1_scale=1.0, bmm2_scale=1.0, window_left=-1, out=None, sinks=None, kv_layout='NHD', enable_pdl=None,
        q_len_per_req=1, o_scale=1.0, mask=None, kv_cache_sf=None, q_cu_seq_lens=None""",
    "xqa_mla": """q, k_cache, v_cache, page_table, seq_lens, output, workspace_buffer, semaphores, page_size,
        q_scale=1.0, kv_scale=1.0, sm_count=None, enable_pdl=None""",
    "xqa_batch_decode_with_kv_cache_mla": """query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank,
        qk_rope_head_dim, block_tables, seq_lens, max_seq_len, out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None,
        enable_pdl=None""",
    "trtllm_batch_decode_with_kv_cache": """query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len,
        bmm1_scale=1.0, bmm2_scale=1.0, window_left=-1, out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None,
        sinks=None, kv_layout='HND', enable_pdl=None, backend='auto', q_len_per_req=1, o_scale=1.0, mask=None,
        max_q_len=None, cum_seq_lens_q=None, skip_softmax_threshold_scale_factor=None, kv_cache_sf=None,
        uses_shared_paged_kv_idx=True, lse=None, return_lse=False, bmm1_scale_log2=None,
        multi_ctas_kv_counter_buffer=None, enable_block_sparse_attention=False, bf16q_fp8kv_transform_mode=None""",
    "trtllm_batch_decode_with_kv_cache_mla": """query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank,
        qk_rope_head_dim, block_tables, seq_lens, max_seq_len, sparse_mla_top_k=0, out=None, bmm1_scale=1.0,
        bmm2_scale=1.0, sinks=None, skip_softmax_threshold_scale_factor=None, enable_pdl=None, backend='auto',
        is_var_seq=True, uses_shared_paged_kv_idx=True, lse=None, return_lse=False, cute_dsl_impl='auto',
        kv_scale_format='auto', cum_seq_lens_q=None, max_q_len=None, multi_ctas_kv_counter_buffer=None,
        sparse_mla_top_k_lens=None, enable_dcp=False, cp_world=1, cp_rank=0, causal_seqlens_kv_global=None,
        use_fp16_softmax=None""",
    "trtllm_batch_context_with_kv_cache": """query, kv_cache, workspace_buffer, block_tables, seq_lens, max_q_len,
        max_kv_len, bmm1_scale, bmm2_scale, batch_size, cum_seq_lens_q, cum_seq_lens_kv, window_left=-1, out=None,
        out_dtype=None, o_sf_scale=None, o_sf_vec_size=None, kv_layout='HND', enable_pdl=None, sinks=None,
        kv_cache_sf=None, skip_softmax_threshold_scale_factor=None, uses_shared_paged_kv_idx=True, causal=True,
        lse=None, return_lse=False, multi_ctas_kv_counter_buffer=None, use_fp16_softmax=None, uses_spcompress=None,
        backend='trtllm-gen'""",
    "trtllm_ragged_attention_deepseek": """query, key, value, workspace_buffer, seq_lens, max_q_len, max_kv_len,
        bmm1_scale, bmm2_scale, o_sf_scale, batch_size, window_left, cum_seq_lens_q, cum_seq_lens_kv, enable_pdl,
        is_causal, return_lse, attention_sinks=None, skip_softmax_threshold_scale_factor=None, out=None, lse=None,
        sage_attn_sfs=(None, None, None, None), num_elts_per_sage_attn_blk=(0, 0, 0, 0), backend='trtllm-gen',
        q_seq_lens_cpu=None, kv_seq_lens_cpu=None, use_fp16_softmax=None, uses_spcompress=None,
        skip_all_rows_active_check=True""",
}


# What they compute of a token depends on no other, so they have no ``batch_invariant``.
PLAIN_SIGNATURES = {
    "append_paged_kv_cache": """append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices,
        kv_indptr, kv_last_page_len, kv_layout='NHD'""",
    "append_paged_mla_kv_cache": """append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices,
        kv_indptr, kv_last_page_len""",
    "merge_state": "v_a, s_a, v_b, s_b",
    "merge_state_in_place": "v, s, v_other, s_other, mask=None",
    "merge_states": "v, s",
}


def stated(operator: Callable[..., Any]) -> str:
    """Parameters and defaults without annotations."""
    parameters = inspect.signature(operator).parameters.values()
    return ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in parameters)


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_and_defaults_are_those_of_the_peer(name: str) -> None:
    expected = " ".join(SIGNATURES[name].split())
    assert stated(getattr(flashinfer, name)).replace(" = ", "=") == f"{expected}, batch_invariant=False"


@pytest.mark.parametrize("name", PLAIN_SIGNATURES)
def test_operators_without_neighbours_have_the_peer_s_parameters_alone(name: str) -> None:
    expected = " ".join(PLAIN_SIGNATURES[name].split())
    assert stated(getattr(flashinfer, name)).replace(" = ", "=") == expected


@pytest.mark.parametrize("name", SIGNATURES)
def test_batch_invariant_is_keyword_only_and_last(name: str) -> None:
    last = list(inspect.signature(getattr(flashinfer, name)).parameters.values())[-1]
    assert (last.name, last.kind) == ("batch_invariant", last.KEYWORD_ONLY)


def test_what_the_peer_takes_by_name_alone_is_so_here() -> None:
    parameters = inspect.signature(flashinfer.xqa).parameters
    by_name = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    assert by_name == ["q_cu_seq_lens", "k_sf_cache", "v_sf_cache", "batch_invariant"]
