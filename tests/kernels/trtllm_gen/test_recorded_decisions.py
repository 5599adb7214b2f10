"""Every recorded decision of the reference launcher, key by key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from cubin_runtime.cli.recorded_decisions import record_of_case
from cubin_runtime.kernels.trtllm_gen.traits import Policy
from tests.kernels.trtllm_examples import recorded_cases, recorded_kernels

KEYS = (
    "ok",
    "error_kind",
    "kernel",
    "grid",
    "block",
    "smem",
    "attrs",
    "nonportable_cluster_set_for",
    "tma",
    "params_hex",
    "reduction",
    "lse",
)
FAMILIES = {
    "decode_gqa": 1200,
    "decode_gqa_tileq": 250,
    "decode_gqa_kvfp4": 80,
    "decode_gqa_nvfp4out": 70,
    "mla_decode": 550,
    "mla_decode_sparse": 250,
    "mla_decode_sparse_dsv4": 125,
    "context_paged": 400,
    "context_ragged": 250,
}


@cache
def decisions() -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Each record with our decision by the reference's policy."""
    kernels = recorded_kernels()
    return [(record, record_of_case(record["case"], kernels, Policy.REFERENCE)) for record in recorded_cases()]


@cache
def best_decisions() -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    kernels = recorded_kernels()
    return [(record, record_of_case(record["case"], kernels, Policy.BEST)) for record in recorded_cases()]


def test_all_families_are_there() -> None:
    assert Counter(record["case"]["family"] for record, _ in decisions()) == FAMILIES


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_decisions_are_those_of_the_reference(family: str, key: str) -> None:
    of_family = [(record, ours) for record, ours in decisions() if record["case"]["family"] == family]
    assert [r["case"]["id"] for r, ours in of_family if r.get(key) != ours.get(key)] == []


def test_our_policy_keeps_every_decision_that_the_reference_makes() -> None:
    kept = [(record, ours) for record, ours in best_decisions() if record["ok"]]
    assert [r["case"]["id"] for r, ours in kept if any(r[key] != ours[key] for key in KEYS)] == []


def test_our_policy_differs_only_where_the_reference_missed_a_kernel_on_the_way() -> None:
    differing = {r["error_kind"] for r, ours in best_decisions() if r["ok"] != ours["ok"]}
    assert differing == {"missing_kernel_in_selection"}
