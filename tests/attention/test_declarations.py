"""Public signatures, the typed tensors of calls and their options are what the operators declare."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import pytest

from cubin_runtime.attention import append, draft_masks, merge, mla, prefill, sparse_mla
from cubin_runtime.attention.append_operator import APPEND_KV, AppendTensors
from cubin_runtime.attention.decode_operator import DecodeOperator
from cubin_runtime.attention.plain_operator import PlainOperator

RUN = {"workspace", "stream"}
PLAN = {"runtime", "device_facts"}
CALL = RUN | {"runtime"}


class Declared(NamedTuple):
    """An operator, the typed tensors of its calls, and its functions; ``more`` are further arguments of the call."""

    operator: PlainOperator | DecodeOperator
    tensors: type
    run: Callable[..., Any]
    plan: Callable[..., Any]
    call: Callable[..., Any]
    more: frozenset[str] = frozenset()


DECLARED = {
    "append_kv": Declared(APPEND_KV, AppendTensors, append.AppendKvPlan.run, append.plan_append_kv, append.append_kv),
    "merge_states": Declared(
        merge.MERGE_STATES,
        merge.MergeTensors,
        merge.MergeStatesPlan.run,
        merge.plan_merge_states,
        merge.merge_states,
    ),
    "draft_mask": Declared(
        draft_masks.DRAFT_MASK,
        draft_masks.DraftMaskTensors,
        draft_masks.DraftMaskPlan.run,
        draft_masks.plan_draft_mask,
        draft_masks.draft_mask,
        frozenset({"max_q_len"}),
    ),
    "sparse_mla_decode": Declared(
        sparse_mla.SPARSE_MLA_DECODE,
        sparse_mla.SparseMlaTensors,
        sparse_mla.SparseMlaDecodePlan.run,
        sparse_mla.plan_sparse_mla_decode,
        sparse_mla.sparse_mla_decode,
    ),
    "mla_decode": Declared(mla.MLA_DECODE, mla.MlaTensors, mla.MlaDecodePlan.run, mla.plan_mla_decode, mla.mla_decode),
    "context_attention": Declared(
        prefill.CONTEXT_ATTENTION,
        prefill.ContextTensors,
        prefill.ContextAttentionPlan.run,
        prefill.plan_context_attention,
        prefill.context_attention,
    ),
}


def names_of(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


def options_of(declared: Declared) -> dict[str, Any]:
    """Defaults of the options that are no scales."""
    operator = declared.operator
    if isinstance(operator, DecodeOperator):
        return {item.name: item.default for item in fields(operator.options_type) if item.name in operator.options}
    return {item.name: item.default for item in fields(operator.options) if item.name not in operator.scales}


def bound_of(declared: Declared) -> set[str]:
    return {"max_seq_len"} if isinstance(declared.operator, DecodeOperator) else set()


@pytest.mark.parametrize("name", DECLARED)
def test_the_typed_tensors_are_the_declared_ones_in_their_order(name: str) -> None:
    declared = DECLARED[name]
    assert list(declared.tensors.__annotations__) == [arg.name for arg in declared.operator.tensors]


@pytest.mark.parametrize("name", DECLARED)
def test_an_optional_tensor_may_be_none(name: str) -> None:
    declared = DECLARED[name]
    kinds = {name: kind.__forward_arg__ for name, kind in declared.tensors.__annotations__.items()}
    optional = {name for name, kind in kinds.items() if kind.endswith("| None")}
    # A decode makes an output that is left out.
    made = {"out"} if isinstance(declared.operator, DecodeOperator) else set()
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
