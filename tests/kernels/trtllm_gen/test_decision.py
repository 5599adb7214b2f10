from __future__ import annotations

from dataclasses import replace

import pytest

from cubin_runtime.artifacts.path import ArtifactPath
from cubin_runtime.kernels.trtllm_gen.decision import Decision, decide
from cubin_runtime.kernels.trtllm_gen.params import KERNEL_PARAMS
from tests.kernels.trtllm_examples import PROBLEM, decode_rows, finder, room_for

KERNELS = finder(*decode_rows())
THROUGH_MEMORY = replace(PROBLEM, max_kv=100_000)


def decided(problem=PROBLEM, clusters: int = 1000) -> Decision:
    return decide(problem, KERNELS, room_for(clusters))


def test_a_cluster_is_spread_and_over_eight_not_portable() -> None:
    attributes = decided().attributes
    assert (attributes.cluster, attributes.scheduling_policy, attributes.nonportable_cluster) == ((16, 1, 1), 1, True)


def test_a_small_cluster_is_portable() -> None:
    assert decided(replace(PROBLEM, max_kv=2048)).attributes.nonportable_cluster is False


def test_single_ctas_have_the_default_policy() -> None:
    attributes = decided(THROUGH_MEMORY).attributes
    assert (attributes.cluster, attributes.scheduling_policy) == ((1, 1, 1), 0)


@pytest.mark.parametrize("pdl", [True, False])
def test_programmatic_launch_is_as_asked(pdl: bool) -> None:
    assert decided(replace(PROBLEM, pdl=pdl)).attributes.programmatic_serialization is pdl


def test_threads_and_shared_memory_are_those_of_the_metadata() -> None:
    launch = decided().launch_plan(ArtifactPath("release/fmha"))
    assert (launch.block, launch.shared_bytes, launch.layout) == ((384, 1, 1), 100_000, KERNEL_PARAMS)


def test_a_launch_names_its_cubin_and_why() -> None:
    made = decided()
    launch = made.launch_plan(ArtifactPath("release/fmha"))
    assert launch.path.text == f"release/fmha/{made.meta.symbol}.cubin"
    assert launch.reason.startswith("bf16/bf16/bf16/bf16: paged, causal, swaps ab")


def test_a_launch_that_merges_through_memory_takes_counters_and_scratch() -> None:
    made = decided(THROUGH_MEMORY)
    assert (made.workspace_bytes, made.counter_bytes) == (made.scratch_bytes, 4 * 152)
    assert made.scratch_bytes > 0


def test_a_launch_that_merges_in_a_cluster_takes_neither() -> None:
    assert (decided().workspace_bytes, decided().counter_bytes) == (0, 0)


def test_planning_twice_gives_the_same() -> None:
    assert decided() == decided()
