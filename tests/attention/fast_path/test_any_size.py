"""Calls that differ in sizes alone share a path, which launches each by the plan that the full path would make."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from cubin_runtime.attention import pipeline
from cubin_runtime.attention.fast_path import any_size, operator_function
from cubin_runtime.attention.operator_plan import OperatorPlan
from cubin_runtime.attention.runtime import PlanCache
from cubin_runtime.tensor import TensorView
from cubin_runtime.testing import StandIn
from tests.attention.any_size_calls import BUFFERS, OPERATORS, Tensors, call_of, calls_of
from tests.attention.fast_path_calls import Call, Caller, FullPaths, others_of


@pytest.fixture(autouse=True)
def _no_path_for_one_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the paths here are those for all sizes."""
    monkeypatch.setattr(operator_function, "FULL_RUNS", 1 << 30)


@pytest.fixture(params=OPERATORS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def calls(caller: Caller, name: str) -> list[Call]:
    """Calls of different sizes."""
    return calls_of(name, caller.memory, caller.runtime, 40)


def planned_anew(caller: Caller, call: Call) -> tuple[Any, Any]:
    """What the full path does, and its plan, without any plan of before."""
    runtime = caller.runtime
    kept, runtime.plans = runtime.plans, PlanCache()
    try:
        outcome = caller.in_full(call)
        (plan,) = runtime.plans._plans.values()
    finally:
        runtime.plans = kept
    return outcome, plan


def test_from_the_third_size_on_calls_take_one_path(caller: Caller, calls: list[Call], full_paths: FullPaths) -> None:
    for call in calls:
        assert "symbol" in caller.outcome(call)[0]
    assert full_paths.count == 2
    assert [len(paths.entries) for paths in caller.runtime.family_paths.values()] == [1]


def test_calls_of_one_size_get_no_path_for_all_sizes(caller: Caller, calls: list[Call], full_paths: FullPaths) -> None:
    for _ in range(4):
        caller.outcome(calls[0])
    assert full_paths.count == 4
    assert not any(caller.runtime.family_paths.values())


def test_each_size_is_launched_as_if_it_were_planned_anew(caller: Caller, calls: list[Call]) -> None:
    runtime = caller.runtime
    for call in calls:
        came = caller.outcome(call)
        its = next(reversed(runtime.plans._plans.values()))
        wanted, plan = planned_anew(caller, call)
        assert came == wanted == caller.outcome(call)
        assert its is not plan
        for part in ("launches", "specs", "regions", "workspace_bytes", "options", "bounds"):
            assert getattr(its, part) == getattr(plan, part)


def test_a_call_of_other_arguments_does_what_the_full_path_does(caller: Caller, calls: list[Call]) -> None:
    first, second, third = calls[:3]
    for call in (first, second):
        caller.outcome(call)
    different = []
    for argument, value in third.arguments.items():
        for other in others_of(third, argument, caller):
            changed = third.changed(**{argument: other})
            came, wanted = caller.outcome(changed), caller.in_full(changed)
            # Zeros of either sign share a plan.
            anew = wanted if str(other) == "-0.0" else planned_anew_or_refused(caller, changed)
            if not came == wanted == anew:
                different.append(f"{argument}={other!r} instead of {value!r}: {came}"[:400])
    assert not different, f"{len(different)} differ:\n" + "\n".join(different[:8])


def test_sizes_that_do_not_fit_each_other_are_refused_as_the_full_path_does(caller: Caller, calls: list[Call]) -> None:
    for call in calls[:4]:
        caller.outcome(call)
    tensors = {name: value for name, value in calls[4].arguments.items() if isinstance(value, TensorView)}
    for names in (*combinations(tensors, 1), *combinations(tensors, 2)):
        longer = {
            name: replace(tensors[name], shape=(tensors[name].shape[0] + 2, *tensors[name].shape[1:])) for name in names
        }
        changed = calls[4].changed(**longer)
        anew = planned_anew_or_refused(caller, changed)  # by no plan that the path may have kept
        assert caller.outcome(changed) == anew, names


def planned_anew_or_refused(caller: Caller, call: Call) -> Any:
    try:
        return planned_anew(caller, call)[0]
    except ValueError:  # no plan
        return caller.in_full(call)


def test_a_size_is_planned_for_its_first_call_alone(
    caller: Caller, calls: list[Call], full_paths: FullPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = replace(BUFFERS, context=caller.runtime.driver.primary_context(0))
    for workspace, new in ((named, calls[:12]), (None, calls[12:24])):
        own = [call.changed(workspace=workspace) for call in new]
        outcomes = [caller.outcome(call) for call in own]
        path, *_ = next(iter(caller.runtime.family_paths.values())).entries
        with monkeypatch.context() as changed:
            changed.setattr(path, "_launch", None)
            assert [caller.outcome(call) for call in own[2:]] == outcomes[2:]
        assert [caller.in_full(call) for call in own] == outcomes
    assert full_paths.count == 4


def test_launches_of_a_size_are_planned_once_whether_or_not_it_has_a_plan_of_its_own(
    caller: Caller, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, original = [], pipeline._launches

    def launches(*arguments: Any) -> Any:
        planned.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(pipeline, "_launches", launches)
    named = replace(BUFFERS, context=caller.runtime.driver.primary_context(0))
    for number, call in enumerate(calls, 1):
        assert "symbol" in caller.outcome(call.changed(workspace=named))[0]
        assert len(planned) <= number


@pytest.mark.parametrize("name", ["context_attention over ragged keys"])
def test_a_bound_is_within_the_room_of_each_call_not_of_another(caller: Caller, calls: list[Call]) -> None:
    named, memory = replace(BUFFERS, context=caller.runtime.driver.primary_context(0)), caller.memory
    in_room = [(290, 256), (300, 256), (280, 256), (160, 150), (150, 150), (300, 250)]
    for keys, longest in (*in_room[:4], (160, 161), (150, 160), *in_room[4:]):
        rows = {name: memory.tensor("bfloat16", 33, 64, 128) for name in ("q", "out")}
        own = {name: memory.tensor("bfloat16", keys, 8, 128) for name in ("k", "v")}
        call = calls[0].changed(**rows, **own, max_seq_len=longest, workspace=named)
        came = caller.outcome(call)
        assert came == caller.in_full(call)
        assert (came[0] != "UsageError") == ((keys, longest) in in_room)


@pytest.mark.parametrize("name", ["context_attention over pages", "paged_decode of ragged queries"])
def test_lengths_of_several_requests_lie_side_by_side_whatever_those_of_one_did(
    caller: Caller, calls: list[Call]
) -> None:
    named, kinds = replace(BUFFERS, context=caller.runtime.driver.primary_context(0)), []
    for tokens, batch in ((8, 1), (9, 1), (10, 1), (10, 2)):
        lens, table = (calls[0].arguments[name] for name in ("seq_lens", "page_table"))
        call = calls[0].changed(
            seq_lens=replace(lens, shape=(batch,), strides=(5,)),
            page_table=replace(table, shape=(batch, table.shape[1])),
            q_cu_seq_lens=caller.memory.tensor("int32", batch + 1),
            workspace=named,
            **{name: None for name in ("lse", "mask") if name in calls[0].arguments},
            **{name: caller.memory.tensor("bfloat16", tokens, 64, 128) for name in ("q", "out")},
        )
        came = caller.outcome(call)
        assert came == caller.in_full(call)
        kinds.append(came[0] if came[0] == "UsageError" else "launched")
    assert kinds == ["launched", "launched", "launched", "UsageError"]


SCALES = ("k_scale", "v_scale")
SCALED = (
    "context_attention over scaled pages",
    "append_kv with scales of each request",
    "paged_decode over scaled pages",
)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_single_scale_of_keys_or_values_may_have_any_number_of_dimensions(
    caller: Caller, calls: list[Call], shape: tuple[int, ...]
) -> None:
    scales = {name: caller.memory.tensor("float32", *shape) for name in SCALES}
    for call in calls[:5]:
        scaled = call.changed(**scales)
        came = caller.outcome(scaled)
        assert "symbol" in came[0], came
        assert came == planned_anew(caller, scaled)[0]
    assert [len(paths.entries) for paths in caller.runtime.family_paths.values()] == [1]


@pytest.mark.parametrize("name", SCALED)
def test_several_scales_do_not_pass_for_a_single_one_of_as_many_dimensions(caller: Caller, calls: list[Call]) -> None:
    kinds = []
    for call, rows in zip(calls, (1, 1, 1, 8, 1), strict=False):
        scales = {name: caller.memory.tensor("float32", rows, 1) for name in SCALES}
        came = caller.outcome(call.changed(**scales))
        assert came == planned_anew_or_refused(caller, call.changed(**scales))
        kinds.append("symbol" in came[0])
    assert kinds == [True, True, True, False, True]


@pytest.mark.parametrize("name", ["context_attention over scaled pages"])
@pytest.mark.parametrize("rows", [1, 4, 64])
def test_scales_of_each_request_have_as_many_rows_as_the_call_has_requests(
    caller: Caller, calls: list[Call], rows: int
) -> None:
    memory, outcomes = caller.memory, []
    scales = {name: memory.tensor("float32", rows, 8) for name in ("k_scale", "v_scale")}
    changes = {**scales, "workspace": replace(BUFFERS, context=caller.runtime.driver.primary_context(0))}
    for requests in (rows, rows, rows, 7, rows + 1, rows):
        table, lens = (calls[0].arguments[name] for name in ("page_table", "seq_lens"))
        own = {"page_table": replace(table, shape=(requests, 16)), "seq_lens": replace(lens, shape=(requests,))}
        tokens = 70 + len(outcomes)
        of_tokens = {name: memory.tensor("bfloat16", tokens, 64, 128) for name in ("q", "out")}
        sums = memory.tensor("int32", requests + 1)
        call = calls[0].changed(**of_tokens, **own, **changes, q_cu_seq_lens=sums, lse=None)
        outcomes.append(caller.outcome(call))
        assert outcomes[-1] == caller.in_full(call)
    assert ["symbol" in came[0] for came in outcomes] == [True, True, True, False, False, True]


@pytest.mark.parametrize(
    "name",
    [
        "context_attention over scaled pages",
        "append_kv with scales of each request",
        "paged_decode over scaled pages",
    ],
)
@pytest.mark.parametrize("first", [1, 3])
def test_scales_of_a_single_head_are_a_stride_apart_in_several_requests_alone(
    caller: Caller, name: str, first: int
) -> None:
    memory, tensor = caller.memory, Tensors(caller.memory)
    workspace = replace(BUFFERS, context=caller.runtime.driver.primary_context(0))
    for tokens, batch in ((20, first), (21, first), (22, first), (23, 1), (24, 4), (25, 2), (26, 1)):
        call = call_of(name, tensor, caller.runtime, tokens, batch, 9)
        changes: dict[str, Any] = {
            of: replace(value, shape=(*value.shape[:-2], 1, value.shape[-1]))
            for of, value in call.arguments.items()
            if of in ("k", "v", "k_cache", "v_cache")
        }
        if "q" in call.arguments:
            changes |= {of: memory.tensor("bfloat16", tokens, 8, 128) for of in ("q", "out")} | {"lse": None}
        scales = {of: replace(memory.tensor("float32", batch, 7), shape=(batch, 1)) for of in ("k_scale", "v_scale")}
        changed = call.changed(**changes, **scales, workspace=workspace)
        came = caller.outcome(changed)
        assert "symbol" in came[0], came
        assert came == planned_anew(caller, changed)[0]


@pytest.mark.parametrize("name", ["context_attention over pages"])
@pytest.mark.parametrize("changes", [{"softmax_scale": 1e38}, {"output_scale": -1e38}], ids=repr)
def test_scales_whose_product_is_too_large_are_refused_before_a_cache_is_converted(
    caller: Caller, calls: list[Call], changes: dict[str, float]
) -> None:
    caches = {name: caller.memory.tensor("float8_e4m3fn", 100, 64, 8, 128) for name in ("k", "v")}
    scaled = [call.changed(**caches, k_scale=8.0, v_scale=8.0, softmax_scale=0.1, output_scale=1.0) for call in calls]
    for call in (*scaled[:5], scaled[4]):
        caller.outcome(call)
        too_large = call.changed(**changes)
        came = caller.outcome(too_large)
        assert came == caller.in_full(too_large)
        assert came[0] == "UsageError"
        (name,) = changes
        assert came[1].startswith(f"{name}=")
        assert not caller.standin.calls("cuLaunchKernelEx")


@pytest.mark.parametrize("name", ["context_attention over pages"])
def test_tokens_between_heads_are_as_many_as_there_is_room_for(caller: Caller, calls: list[Call]) -> None:
    memory, outcomes = caller.memory, []
    for tokens in (20, 30, 40, 64, 65):
        out = replace(memory.tensor("bfloat16", tokens, 64, 128), strides=(128, 64 * 128, 1))
        call = calls[0].changed(q=memory.tensor("bfloat16", tokens, 64, 128), out=out, lse=None)
        outcomes.append(caller.outcome(call))
        assert outcomes[-1] == caller.in_full(call)
    assert ["symbol" in came[0] for came in outcomes] == [True] * 4 + [False]


@pytest.mark.parametrize("name", ["context_attention over pages"])
def test_no_requests_are_refused_as_the_full_path_does(caller: Caller, calls: list[Call]) -> None:
    for call in calls[:4]:
        caller.outcome(call)
    table, lens = (calls[4].arguments[name] for name in ("page_table", "seq_lens"))
    none = calls[4].changed(
        page_table=replace(table, shape=(0, 16)),
        seq_lens=replace(lens, shape=(0,)),
        q_cu_seq_lens=caller.memory.tensor("int32", 1),
    )
    came = caller.outcome(none)
    assert came == caller.in_full(none)
    assert came[0] == "UsageError"


@pytest.mark.parametrize("name", ["context_attention over pages"])
@pytest.mark.parametrize("longest", [900, 60000])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lse": None, "max_q_len": None},
        {"window_left": 100, "lse_base": "e"},
        {"logit_soft_cap": 30.0, "causal": False},
        {"batch_invariant": True},
        {"sinks": (64,), "enable_pdl": True},
        {"dtype": "float8_e4m3fn", "k_scale": 2.0},
        {"dtype": "float8_e4m3fn", "k_scale": (1,), "output_scale": (1,)},
    ],
    ids=repr,
)
def test_sizes_whose_launches_have_the_same_kernels_share_a_plan(
    caller: Caller, calls: list[Call], options: dict[str, Any], longest: int
) -> None:
    memory, drawn = caller.memory, random.Random(1)
    changes = {"workspace": replace(BUFFERS, context=caller.runtime.driver.primary_context(0)), **options}
    dtype = changes.pop("dtype", "bfloat16")
    changes |= {name: memory.tensor(dtype, 100, 64, 8, 128) for name in ("k", "v")}
    for name in ("k_scale", "output_scale", "sinks"):
        if isinstance(options.get(name), tuple):
            changes[name] = memory.tensor("float32", *options[name])
    sizes = [(1, 1, 1), (2, 1, 1), (1, 1, 4), (2, 2, 9)]
    for _ in range(60):
        sizes.append((drawn.randint(2, 1 << drawn.randint(1, 12)), drawn.randint(1, 9), drawn.randint(1, 3000)))
    table = memory.tensor("int32", 9, -(-longest // 64))
    rows = memory.tensor("bfloat16", 4096, 64, 128)
    for tokens, batch, q_len in sizes:
        its: dict[str, Any] = {
            "q": replace(rows, shape=(tokens, 64, 128)),
            "out": replace(rows, shape=(tokens, 64, 128), pointer=rows.pointer + (1 << 28)),
            "lse": memory.tensor("float32", tokens, 64),
            "page_table": replace(table, shape=(batch, table.shape[1])),
            "seq_lens": memory.tensor("int32", batch),
            "q_cu_seq_lens": memory.tensor("int32", batch + 1),
            "max_q_len": q_len,
            "max_seq_len": longest,
        }
        call = calls[0].changed(**{**its, **changes})
        came = caller.outcome(call)
        assert "symbol" in came[0], came
        assert came == caller.in_full(call) == caller.outcome(call)
    paths = [path for paths in caller.runtime.family_paths.values() for path in paths.entries]
    planned, kept = (sum(len(getattr(path, of)) for path in paths) for of in ("_plans", "_paths"))
    assert kept > 50
    assert planned < 8 or dtype != "bfloat16"  # a cache that is converted before is planned anew


DECODES = {
    "paged_decode of ragged queries": (
        {},
        {"mask": None, "batch_invariant": True},
        {"window_left": 100, "draft_position": "index", "enable_pdl": True},
        {"mask": None, "sinks": (64,), "output_scale": (1,), "softmax_scale": (1,)},
    ),
    "paged_decode": ({}, {"batch_invariant": True}, {"sinks": (8, 8)}),
    "paged_decode of even drafts": ({}, {"mask": None, "batch_invariant": True}),
    "paged_decode over scaled pages": ({}, {"k_scale": (8,), "v_scale": 2.0}, {"k_scale": None, "v_scale": (1,)}),
    "mla_decode of ragged queries": ({}, {"batch_invariant": True, "enable_pdl": True}),
    "mla_decode of rope columns elsewhere": ({},),
}


@pytest.mark.parametrize("longest", [900, 60000])
@pytest.mark.parametrize(("name", "options"), [(name, options) for name in DECODES for options in DECODES[name]])
def test_decodes_of_any_size_are_launched_as_if_they_were_planned_anew(
    caller: Caller, name: str, options: dict[str, Any], longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, original = [], pipeline._launches
    monkeypatch.setattr(pipeline, "_launches", lambda *arguments: checked.append(1) or original(*arguments))
    memory, drawn, tensor = caller.memory, random.Random(1), Tensors(caller.memory)
    changes = {of: memory.tensor("float32", *value) if type(value) is tuple else value for of, value in options.items()}
    changes["workspace"] = replace(BUFFERS, context=caller.runtime.driver.primary_context(0))
    most = 16 if "mla" in name else 32
    sizes = [(9, 4, 2), (8, 3, 2), (1, 1, 1), (2, 2, most), (1, 1, most)]
    for _ in range(40):
        batch, bound = drawn.randint(1, 1 << drawn.randint(1, 8)), drawn.randint(1, most)
        sizes.append((drawn.randint(1, batch * bound), batch, bound))
    in_full = 0
    for each in sizes:
        call = call_of(name, tensor, caller.runtime, *each)
        table = memory.tensor("int32", each[1], -(-longest // 64))
        call = call.changed(page_table=table, max_seq_len=longest, **changes)
        before = len(checked)
        came = caller.outcome(call)
        in_full += len(checked) - before
        assert "symbol" in came[0], came
        assert came == planned_anew(caller, call)[0] == caller.outcome(call)
    ((path,),) = (paths.entries for paths in caller.runtime.family_paths.values())
    assert in_full == 2
    assert len(path._bases) > 1  # of other kernels, or other parts of a workspace


@pytest.mark.parametrize(
    ("name", "most"), [("paged_decode of ragged queries", 64), ("mla_decode of ragged queries", 16)]
)
def test_bounds_on_query_tokens_are_refused_as_the_full_path_does(caller: Caller, name: str, most: int) -> None:
    tensor, kinds = Tensors(caller.memory), []
    sizes = [(9, 4, 2), (8, 3, 2), (7, 3, 2), (7, 3, 0), (7, 3, most), (7, 3, most + 1), (70, 6, 1 << 40), (7, 3, -1)]
    for tokens, batch, bound in sizes:
        call = call_of(name, tensor, caller.runtime, tokens, batch, bound)
        if "mask" in call.arguments and bound > 32:
            call = call.changed(mask=None if bound > most else caller.memory.tensor("uint16", tokens, 4))
        came = caller.outcome(call)
        assert came == planned_anew_or_refused(caller, call)
        kinds.append("symbol" in came[0])
    assert kinds == [True, True, True, False, True, False, False, False]


@pytest.mark.parametrize("name", ["paged_decode of ragged queries"])
def test_masks_have_as_many_words_as_the_bound_on_query_tokens_needs(caller: Caller, name: str) -> None:
    tensor, kinds = Tensors(caller.memory), []
    for bound, words in ((30, 1), (31, 1), (32, 1), (33, 1), (33, 2), (34, 2), (35, 2), (64, 2), (32, 2), (31, 1)):
        call = call_of(name, tensor, caller.runtime, 70 + len(kinds), 5, bound)
        call = call.changed(mask=caller.memory.tensor("uint16", 70 + len(kinds), 2 * words))
        came = caller.outcome(call)
        assert came == planned_anew_or_refused(caller, call)
        kinds.append("symbol" in came[0])
    assert kinds == [True, True, True, False, True, True, True, True, False, True]


@pytest.mark.parametrize("name", ["paged_decode of ragged queries", "paged_decode of even drafts"])
def test_more_tiles_than_a_launch_can_number_are_refused_as_the_full_path_does(caller: Caller, name: str) -> None:
    tensor, kinds = Tensors(caller.memory), []
    for batch in (5, 6, 7, 100, 1 << 15, 1 << 20):
        call = call_of(name, tensor, caller.runtime, batch, batch, 32)
        table = caller.memory.tensor("int32", batch, 16 << 10)
        changed = call.changed(page_table=table, max_seq_len=1 << 20)
        came = caller.outcome(changed)
        assert came == planned_anew_or_refused(caller, changed)
        kinds.append(came[0] != "UsageError")
    assert kinds == [True, True, True, True, False, False]


@pytest.mark.parametrize("name", ["paged_decode of ragged queries"])
def test_outputs_whose_tokens_lie_between_heads_have_as_many_as_there_is_room_for(caller: Caller, name: str) -> None:
    tensor, outcomes = Tensors(caller.memory), []
    for tokens in (20, 30, 40, 64, 65):
        out = replace(caller.memory.tensor("bfloat16", tokens, 64, 128), strides=(128, 64 * 128, 1))
        call = call_of(name, tensor, caller.runtime, tokens, 3, 9).changed(out=out)
        outcomes.append(caller.outcome(call))
        assert outcomes[-1] == planned_anew_or_refused(caller, call)
    assert ["symbol" in came[0] for came in outcomes] == [True] * 4 + [False]


@pytest.mark.parametrize("name", ["context_attention over pages", "paged_decode of ragged queries"])
def test_layers_with_caches_of_their_own_share_what_is_kept_for_a_size(
    caller: Caller, calls: list[Call], full_paths: FullPaths
) -> None:
    named = replace(BUFFERS, context=caller.runtime.driver.primary_context(0))
    own = [call.changed(workspace=named) for call in calls[:4]]
    caches = [name for name in ("k", "v", "k_cache", "v_cache") if name in calls[0].arguments]
    for call in own:
        for _ in range(5):
            layer = call.changed(**{name: caller.memory.tensor("bfloat16", 100, 64, 8, 128) for name in caches})
            assert caller.outcome(layer) == caller.in_full(layer)
    path, *_ = next(iter(caller.runtime.family_paths.values())).entries
    assert len(path._paths) > 1
    assert {len(kept._senders.by_key) for kept in path._paths.values()} == {1}


def test_integers_may_begin_anywhere_among_others(caller: Caller, calls: list[Call], full_paths: FullPaths) -> None:
    for number, call in enumerate(calls):
        integers = {
            name: replace(value, pointer=value.pointer + 4 * (number % 4))
            for name, value in call.arguments.items()
            if isinstance(value, TensorView) and value.dtype == "int32"
        }
        assert integers
        assert caller.outcome(call.changed(**integers)) == caller.in_full(call.changed(**integers))
    assert full_paths.count == 2


def test_sizes_of_a_path_are_kept_up_to_a_number(
    caller: Caller, calls: list[Call], full_paths: FullPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(any_size, "_MOST_SIZES", 4)
    outcomes = [caller.outcome(call) for call in calls]
    ((path,),) = (paths.entries for paths in caller.runtime.family_paths.values())
    assert len(path._plans) == 4
    assert [caller.outcome(call) for call in calls] == outcomes
    assert full_paths.count == 2


def test_a_plan_that_the_runtime_dropped_is_made_again(
    caller: Caller, calls: list[Call], full_paths: FullPaths
) -> None:
    runtime = caller.runtime
    runtime.plans = PlanCache(4)
    outcomes = [caller.outcome(call) for call in calls]
    gc.collect()
    assert (
        len([plan for plan in gc.get_objects() if isinstance(plan, OperatorPlan) and plan.runtime is runtime.for_plans])
        <= 6
    )
    assert [caller.outcome(call) for call in calls] == outcomes
    assert full_paths.count == 2
    ((path,),) = (paths.entries for paths in runtime.family_paths.values())
    assert len(path._plans) <= 6  # others went with their plans


@pytest.mark.parametrize("name", ["context_attention over pages"])
def test_calls_of_other_options_have_a_path_of_their_own(
    caller: Caller, calls: list[Call], full_paths: FullPaths
) -> None:
    for number, call in enumerate(calls):
        caller.outcome(call.changed(window_left=100 if number % 2 else -1))
    assert full_paths.count == 4
    assert [len(paths.entries) for paths in caller.runtime.family_paths.values()] == [2]


@pytest.mark.parametrize("name", ["context_attention over pages"])
def test_families_are_known_up_to_a_number(caller: Caller, calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_function, "_MOST_FAMILIES", 4)
    for number, call in enumerate(calls):
        caller.outcome(call.changed(window_left=number))
    assert len(caller.runtime.families) == 4


@pytest.mark.parametrize("name", ["context_attention over pages"])
@pytest.mark.parametrize("streams", ["default", "own"])
def test_a_workspace_without_a_context_is_in_that_of_each_call(
    caller: Caller, standin: StandIn, calls: list[Call], streams: str
) -> None:
    driver = caller.runtime.driver
    primary, own = driver.primary_context(0), standin.make_context(0)
    for number, call in enumerate(calls):
        context = (primary, own)[number % 2]
        driver.set_current(context)
        call = call.changed(stream=0 if streams == "default" else driver.create_stream())
        came = caller.outcome(call)
        assert came == caller.in_full(call) == caller.outcome(call)
        assert f"('context', '{context:#x}')" in came[0]


@pytest.mark.parametrize("name", ["append_kv", "paged_decode of ragged queries"])
def test_calls_without_a_workspace_use_that_of_their_plan(caller: Caller, calls: list[Call]) -> None:
    for call in calls:
        own = call.changed(workspace=None)
        assert caller.outcome(own) == caller.in_full(own)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_scales_on_the_device_of_any_number_of_dimensions_have_a_path(
    caller: Caller, calls: list[Call], full_paths: FullPaths, shape: tuple[int, ...]
) -> None:
    scale = caller.memory.tensor("float32", *shape)
    names = [name for name in ("softmax_scale", "output_scale") if name in calls[0].arguments]
    for call in calls:
        scaled = call.changed(**dict.fromkeys(names, scale))
        came = caller.outcome(scaled)
        assert "symbol" in came[0], came
        assert came == caller.in_full(scaled)
    assert full_paths.count == 2
