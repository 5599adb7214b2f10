"""Binding other addresses gives the values that a decision for those addresses has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

import pytest

from cubin_runtime.artifacts.path import ArtifactPath
from cubin_runtime.cli.recorded_cases import occupancy_of, problem_of
from cubin_runtime.kernels.trtllm_gen.decision import Decision, decide, decide_selected
from cubin_runtime.kernels.trtllm_gen.problem import Bindings, Problem
from cubin_runtime.launch.tensormap import TensorMapSpec
from tests.kernels.trtllm_examples import recorded_cases, recorded_kernels

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
RELEASE = ArtifactPath("release/fmha")


@cache
def decisions() -> dict[str, list[Decision]]:
    """Decisions about some recorded cases of each family."""
    found: dict[str, list[Decision]] = {family: [] for family in FAMILIES}
    for record in recorded_cases():
        case = record["case"]
        if record["ok"] and len(found.get(case["family"], [None] * EACH)) < EACH:
            found[case["family"]].append(decide(problem_of(case), recorded_kernels(), occupancy_of(case)))
    return found


def elsewhere(problem: Problem) -> Problem:
    """The same call at other addresses, with other scales."""
    steps = (1 << (20 + place) for place in range(len(Bindings._fields)))
    moved = Bindings(*(value and value + step for value, step in zip(problem.bindings, steps, strict=True)))
    scales = {"softmax_scale_log2": 0.25, "output_scale": 3.0, "scale_out_scales": 0.5, "first_out_scale_token": 7}
    return replace(problem, bindings=moved._replace(**scales))


def pairs(family: str) -> Iterator[tuple[Decision, Decision, Bindings]]:
    """Decisions, those that other addresses would have had, and these addresses."""
    for decision in decisions()[family]:
        problem = elsewhere(decision.problem)
        bindings = problem.bindings.with_partial_out(decision.partial_offset)
        yield decision, decide_selected(problem, decision.selection), bindings


def bound(values: Mapping[str, object], inputs: Mapping[str, str], bindings: Bindings) -> dict[str, object]:
    """``values`` as a run with ``bindings`` sends them."""
    given = {field: getattr(bindings, name) for field, name in inputs.items()}
    moved = {
        field: spec._replace(address=given[field]) for field, spec in values.items() if isinstance(spec, TensorMapSpec)
    }
    return {**values, **given, **moved}


@pytest.mark.parametrize("family", FAMILIES)
def test_bound_values_are_those_of_a_fresh_decision(family: str) -> None:
    for decision, fresh, bindings in pairs(family):
        plan = decision.launch_plan(RELEASE)
        assert bound(plan.values, plan.inputs, bindings) == fresh.values


@pytest.mark.parametrize("family", FAMILIES)
def test_what_follows_is_bound_along(family: str) -> None:
    for decision, fresh, bindings in pairs(family):
        for ours, theirs in zip(decision.following, fresh.following, strict=True):
            assert replace(ours, values=bound(ours.values, ours.inputs, bindings)) == theirs


def test_a_descriptor_that_is_not_built_is_not_bound() -> None:
    (decision, *_) = decisions()["mla_decode"]
    assert not {"tmaKSf_", "tmaVSf_"} & set(decision.launch_plan(RELEASE).inputs)
