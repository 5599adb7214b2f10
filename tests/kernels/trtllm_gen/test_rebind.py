"""A plan at other addresses is the plan that those addresses would have had."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache

import pytest
from trtllm_examples import recorded_cases, recorded_kernels

from cubin_runtime.cli.recorded_cases import occupancy_of, problem_of
from cubin_runtime.kernels.trtllm_gen.plan import Planned, plan, plan_selected
from cubin_runtime.kernels.trtllm_gen.problem import Pointers, Problem
from cubin_runtime.kernels.trtllm_gen.rebind import moved_to
from cubin_runtime.kernels.trtllm_gen.reduction_launches import launches_after

FAMILIES = (
    "decode_gqa",
    "decode_gqa_kvfp4",
    "decode_gqa_nvfp4out",
    "mla_decode",
    "mla_decode_sparse",
    "mla_decode_sparse_dsv4",
    "context_paged",
    "context_ragged",
)
EACH = 25


@cache
def plans() -> dict[str, list[Planned]]:
    """Some recorded cases of each family, planned."""
    found: dict[str, list[Planned]] = {family: [] for family in FAMILIES}
    for record in recorded_cases():
        case = record["case"]
        if record["ok"] and len(found.get(case["family"], [None] * EACH)) < EACH:
            found[case["family"]].append(plan(problem_of(case), recorded_kernels(), occupancy_of(case)))
    return found


def elsewhere(problem: Problem) -> Problem:
    """The same call at other addresses, with other scales."""
    step = {member.name: 1 << (20 + place) for place, member in enumerate(fields(Pointers))}
    pointers = {name: (at := getattr(problem.pointers, name)) and at + by for name, by in step.items()}
    return replace(
        problem,
        pointers=Pointers(**pointers),
        softmax_scale_log2=0.25,
        output_scale=3.0,
        scale_out_scales=0.5,
        first_out_scale_token=7,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_moved_values_are_those_of_a_fresh_plan(family: str) -> None:
    for planned in plans()[family]:
        problem = elsewhere(planned.problem)
        fresh = plan_selected(problem, planned.selection).values
        moved = {**planned.values, **moved_to(planned, problem).values}
        assert {name: value or None for name, value in moved.items()} == {n: v or None for n, v in fresh.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_follows_moves_along(family: str) -> None:
    for planned in plans()[family]:
        problem = elsewhere(planned.problem)
        assert launches_after(moved_to(planned, problem)) == launches_after(plan_selected(problem, planned.selection))


def test_nothing_else_is_among_the_moved_values() -> None:
    for planned in plans()["mla_decode"]:
        assert set(moved_to(planned, planned.problem).values) < set(planned.values)
