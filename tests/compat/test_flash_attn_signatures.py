"""Positions, names and defaults of the parameters are flash-attention's, of version 2 and of version 3."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from cubin_runtime.attention.checks import option_checks
from cubin_runtime.compat import flash_attn, flash_attn_interface

VERSION_2 = {
    "flash_attn_func": """q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        alibi_slopes=None, deterministic=False, return_attn_probs=False""",
    "flash_attn_varlen_func": """q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None""",
    "flash_attn_with_kvcache": """q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None,
        cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
        return_softmax_lse=False""",
}
VERSION_3 = {
    "flash_attn_func": """q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
        v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
        deterministic=False, sm_margin=0, return_attn_probs=False""",
    "flash_attn_varlen_func": """q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
        seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0, return_attn_probs=False""",
    "flash_attn_with_kvcache": """q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
        cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None,
        cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None,
        softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
        rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
        return_softmax_lse=False""",
}
CASES = [(flash_attn, name, text) for name, text in VERSION_2.items()]
CASES += [(flash_attn_interface, name, text) for name, text in VERSION_3.items()]


def by_position(function: Callable[..., Any]) -> str:
    """Parameters and defaults without annotations, but for those that are taken by name alone."""
    parameters = inspect.signature(function).parameters.values()
    kept = [parameter for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    return ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in kept)


@pytest.mark.parametrize(("module", "name", "text"), CASES)
def test_positions_and_defaults_are_those_of_the_peer(module: ModuleType, name: str, text: str) -> None:
    assert by_position(getattr(module, name)) == " ".join(text.split())


@pytest.mark.parametrize("name", VERSION_3)
def test_version_2_takes_by_name_what_version_3_has(name: str) -> None:
    own, later = (inspect.signature(getattr(of, name)).parameters for of in (flash_attn, flash_attn_interface))
    assert set(later) <= set(own)
    differing = {argument for argument in later if own[argument].default != later[argument].default}
    assert differing == set()


@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface])
def test_the_modules_offer_the_peers_names(module: ModuleType) -> None:
    assert sorted(module.__all__) == sorted(VERSION_2)


@pytest.mark.parametrize("name", VERSION_2)
def test_every_option_with_a_kind_is_checked_under_its_name(name: str) -> None:
    function = getattr(flash_attn, name)
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(function))) if isinstance(node, ast.Call)]
    (checked,) = (node for node in calls if ast.unparse(node.func) == "check_kinds")
    assert ast.unparse(checked.args[0]) == name
    names = [option for option, _, _ in option_checks(inspect.get_annotations(function))]
    assert {str(keyword.arg): ast.unparse(keyword.value) for keyword in checked.keywords} == dict(zip(names, names))  # noqa: B905
