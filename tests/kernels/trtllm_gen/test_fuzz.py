"""No input makes the planner loop, hang or read outside its tables: it plans, or refuses by name."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cubin_runtime.artifacts.tables.metadata import KernelMeta
from cubin_runtime.cli.example_call import DTYPES, Shapes
from cubin_runtime.cli.recorded_decisions import record_of_case
from cubin_runtime.errors import CubinRuntimeError, UsageError
from cubin_runtime.kernels.trtllm_gen.arithmetic import INT32_MAX
from cubin_runtime.kernels.trtllm_gen.decision import Decision, decide
from cubin_runtime.kernels.trtllm_gen.kernel_finder import KernelFinder
from cubin_runtime.kernels.trtllm_gen.select import MAX_PASSES
from cubin_runtime.kernels.trtllm_gen.traits import KernelType, MaskType, Policy, QkvLayout, SparseType
from cubin_runtime.launch.tensormap import TensorMapError, TensorMapSpec
from tests.kernels.example_cases import case_of
from tests.kernels.trtllm_examples import PROBLEM, ROW, finder, named, recorded_cases, recorded_kernels

EDGES = [0, 1, 2, 7, 8, 16, 31, 32, 64, 127, 128, 256, 512, 576, 1000, 4096, 65536, INT32_MAX]
sizes = st.sampled_from(EDGES) | st.integers(0, INT32_MAX)
counts = st.sampled_from([n for n in EDGES if n]) | st.integers(1, INT32_MAX)
head_dims = st.sampled_from([(64, 64), (128, 128), (256, 256), (512, 512), (192, 128), (576, 512), (320, 256)])
policies = st.sampled_from(Policy)
occupancies = st.integers(-1, 1000)

problems = st.builds(
    lambda heads, group, **rest: replace(
        PROBLEM, **rest, head_dim_qk=heads[0], head_dim_v=heads[1], heads_q=rest["heads_kv"] * group
    ),
    heads=head_dims | st.tuples(counts, counts),
    group=st.sampled_from([1, 2, 3, 5, 8, 16, 24, 32, 64, 96, 128, 129, 1024]),
    heads_kv=st.sampled_from([1, 2, 3, 8, 128]),
    sm=st.sampled_from([0, 90, 100, 103, 120]),
    multiprocessors=counts,
    layout=st.sampled_from(QkvLayout),
    mask=st.sampled_from(MaskType),
    kernel_type=st.sampled_from(KernelType),
    multi_ctas=st.booleans(),
    dtype_q=st.sampled_from(["bf16", "fp16", "e4m3", "int8"]),
    dtype_k=st.sampled_from(["bf16", "fp16", "e4m3", "e2m1", "int8"]),
    dtype_v=st.sampled_from(["bf16", "fp16", "e4m3", "e2m1"]),
    dtype_o=st.sampled_from(["bf16", "fp16", "e4m3", "e2m1"]),
    batch=counts,
    max_q=counts,
    max_kv=counts,
    tokens_q=counts,
    tokens_kv=sizes,
    page=sizes,
    pages=sizes,
    window=sizes | st.just(-(2**31)),
    sparse=st.sampled_from(SparseType),
    top_k=sizes,
    skip_softmax_factor=st.sampled_from([0.0, 1000.0]),
    allows_tile_kv_64=st.booleans(),
)

rows = st.lists(
    st.builds(
        lambda **changes: replace(ROW, **changes),
        tile_q=st.sampled_from([8, 16, 32, 64, 128]),
        step_q=counts,
        step_kv=counts,
        head_dim_per_cta_v=st.sampled_from([64, 128, 256, 512]),
        mask_type=st.sampled_from(MaskType),
        kernel_type=st.sampled_from([0, 2, 3]),
        tile_scheduler=st.sampled_from([0, 1]),
        multi_ctas_kv_mode=st.sampled_from([0, 1, 2, 3]),
        groups_heads_q=st.booleans(),
        groups_tokens_heads_q=st.booleans(),
        two_cta_mma=st.booleans(),
    ),
    max_size=60,
)


def planned_or_refused(problem, kernels: KernelFinder, clusters: int, policy: Policy) -> Decision | None:
    def occupancy(meta: KernelMeta, cluster: int, grid: tuple[int, int, int]) -> int:
        return clusters

    try:
        return decide(problem, kernels, occupancy, policy)
    except UsageError:  # refused, or of a size that no cluster has
        return None


@settings(max_examples=400, deadline=None)
@given(problem=problems, clusters=occupancies, policy=policies)
def test_any_problem_is_planned_or_refused_on_the_release(problem, clusters: int, policy: Policy) -> None:
    made = planned_or_refused(problem, recorded_kernels(), clusters, policy)
    assert made is None or len(made.selection.passes) <= MAX_PASSES + 1


@settings(max_examples=300, deadline=None)
@given(problem=problems, kernels=rows, clusters=occupancies, policy=policies)
def test_any_problem_is_planned_or_refused_on_any_kernels(problem, kernels, clusters: int, policy: Policy) -> None:
    planned_or_refused(problem, finder(*named(kernels)), clusters, policy)


@settings(max_examples=300, deadline=None)
@given(problem=problems, clusters=occupancies)
def test_what_the_reference_plans_our_policy_plans_alike(problem, clusters: int) -> None:
    theirs = planned_or_refused(problem, recorded_kernels(), clusters, Policy.REFERENCE)
    ours = planned_or_refused(problem, recorded_kernels(), clusters, Policy.BEST)
    assert theirs is None or theirs == ours


shapes = st.builds(
    Shapes,
    operation=st.sampled_from(["decode", "context", "ragged"]),
    sm=st.sampled_from([100, 103]),
    batch=st.integers(1, 300),
    q_len=st.integers(1, 20),
    kv_len=st.integers(1, 200_000),
    heads_q=st.sampled_from([1, 8, 12, 32, 64, 128]),
    heads_kv=st.sampled_from([1, 2, 8]),
    head_dim=st.sampled_from([64, 128, 256, 512]),
    dtype_q=st.sampled_from(sorted(DTYPES)),
    dtype_kv=st.sampled_from(sorted(DTYPES)),
    dtype_out=st.sampled_from(sorted(DTYPES)),
    page=st.sampled_from([1, 16, 32, 48, 64, 128, 256]),
    window=st.sampled_from([0, 1, 128]),
    top_k=st.sampled_from([0, 4, 128, 129]),
    lse=st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(shapes=shapes, policy=policies)
def test_descriptors_of_contiguous_tensors_keep_the_rules_of_the_driver(shapes: Shapes, policy: Policy) -> None:
    from cubin_runtime.cli.recorded_cases import problem_of

    try:
        made = planned_or_refused(problem_of(case_of(shapes)), recorded_kernels(), 10, policy)
    except (CubinRuntimeError, TensorMapError):
        return
    for value in made.values.values() if made else ():
        if isinstance(value, TensorMapSpec):
            value.check()


@cache
def a_few_cases() -> list[dict[str, Any]]:
    return [record["case"] for record in list(recorded_cases())[::40]]


leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.lists(st.integers(-9, 99), max_size=5)
)


@settings(max_examples=400, deadline=None)
@given(data=st.data(), value=leaves, policy=policies)
def test_a_case_with_one_wild_value_is_decided_or_refused_by_name(data, value, policy: Policy) -> None:
    case = copy.deepcopy(data.draw(st.sampled_from(a_few_cases())))
    holder = data.draw(st.sampled_from([case, case["scalars"], case["tensors"], *case["tensors"].values()]))
    holder[data.draw(st.sampled_from(sorted(holder)))] = value
    with suppress(CubinRuntimeError):
        record_of_case(case, recorded_kernels(), policy)
