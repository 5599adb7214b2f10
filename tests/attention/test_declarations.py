"""Public signatures, the typed tensors of calls and their options are what the operators declare."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

import pytest

from cubin_runtime.attention.attention_operator import AttentionOperator
from cubin_runtime.attention.operator import Operator
from cubin_runtime.attention.operators import (
    append_kv,
    context_attention,
    draft_mask,
    merge_states,
    mla_decode,
    paged_decode,
    sparse_mla_decode,
)

RUN = {"workspace", "stream"}
PLAN = {"runtime", "device_facts"}
CALL = RUN | {"runtime"}


class Declared(NamedTuple):
    """An operator, the typed tensors of its calls, and its functions; ``more`` are further arguments of the call."""

    operator: Operator
    tensors: type
    run: Callable[..., Any]
    plan: Callable[..., Any]
    call: Callable[..., Any]
    more: frozenset[str] = frozenset()


DECLARED = {
    "append_kv": Declared(
        append_kv.APPEND_KV,
        append_kv.AppendTensors,
        append_kv.AppendKvPlan.run,
        append_kv.plan_append_kv,
        append_kv.append_kv,
    ),
    "merge_states": Declared(
        merge_states.MERGE_STATES,
        merge_states.MergeTensors,
        merge_states.MergeStatesPlan.run,
        merge_states.plan_merge_states,
        merge_states.merge_states,
    ),
    "draft_mask": Declared(
        draft_mask.DRAFT_MASK,
        draft_mask.DraftMaskTensors,
        draft_mask.DraftMaskPlan.run,
        draft_mask.plan_draft_mask,
        draft_mask.draft_mask,
        frozenset({"max_q_len"}),
    ),
    "sparse_mla_decode": Declared(
        sparse_mla_decode.SPARSE_MLA_DECODE,
        sparse_mla_decode.SparseMlaTensors,
        sparse_mla_decode.SparseMlaDecodePlan.run,
        sparse_mla_decode.plan_sparse_mla_decode,
        sparse_mla_decode.sparse_mla_decode,
    ),
    "paged_decode": Declared(
        paged_decode.PAGED_DECODE,
        paged_decode.PagedDecodeTensors,
        paged_decode.PagedDecodePlan.run,
        paged_decode.plan_paged_decode,
        paged_decode.paged_decode,
    ),
    "mla_decode": Declared(
        mla_decode.MLA_DECODE,
        mla_decode.MlaTensors,
        mla_decode.MlaDecodePlan.run,
        mla_decode.plan_mla_decode,
        mla_decode.mla_decode,
    ),
    "context_attention": Declared(
        context_attention.CONTEXT_ATTENTION,
        context_attention.ContextTensors,
        context_attention.ContextAttentionPlan.run,
        context_attention.plan_context_attention,
        context_attention.context_attention,
    ),
}


def names_of(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


def options_of(declared: Declared) -> dict[str, Any]:
    """Defaults of the options that are no scales; the bound on lengths has none."""
    kinds = declared.operator.option_kinds
    return {
        item.name: inspect.Parameter.empty if item.default is MISSING else item.default
        for item in fields(declared.operator.options)
        if item.name in kinds
    }


def bound_of(declared: Declared) -> set[str]:
    return {"max_seq_len"} if isinstance(declared.operator, AttentionOperator) else set()


@pytest.mark.parametrize("name", DECLARED)
def test_the_typed_tensors_are_the_declared_ones_in_their_order(name: str) -> None:
    declared = DECLARED[name]
    assert list(declared.tensors.__annotations__) == [arg.name for arg in declared.operator.tensors]


@pytest.mark.parametrize("name", DECLARED)
def test_an_optional_tensor_may_be_none(name: str) -> None:
    declared = DECLARED[name]
    kinds = {name: kind.__forward_arg__ for name, kind in declared.tensors.__annotations__.items()}
    optional = {name for name, kind in kinds.items() if kind.endswith("| None")}
    # An output that is left out is made.
    made = set() if declared.operator.output is None else {"out"}
    assert optional == {arg.name for arg in declared.operator.tensors if arg.optional} | made


@pytest.mark.parametrize("name", DECLARED)
def test_functions_take_the_declared_tensors_and_options(name: str) -> None:
    declared = DECLARED[name]
    tensors, options = {arg.name for arg in declared.operator.tensors} | bound_of(declared), options_of(declared)
    assert names_of(declared.run) == tensors | RUN
    assert names_of(declared.plan) == tensors | options.keys() | PLAN
    assert names_of(declared.call) == tensors | options.keys() | CALL | declared.more


@pytest.mark.parametrize("name", DECLARED)
def test_options_have_their_declared_defaults(name: str) -> None:
    declared = DECLARED[name]
    for function in (declared.plan, declared.call):
        parameters = inspect.signature(function).parameters
        assert {option: parameters[option].default for option in options_of(declared)} == options_of(declared)
