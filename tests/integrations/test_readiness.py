"""What readiness plans of a layer's steps stands for all numbers of requests."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cubin_runtime.attention import Runtime, plan_paged_decode  # noqa: E402
from cubin_runtime.errors import WorkspaceError  # noqa: E402
from cubin_runtime.integrations import latent_readiness, readiness  # noqa: E402
from cubin_runtime.integrations.latent_batch import LatentOptions  # noqa: E402
from cubin_runtime.integrations.latent_readiness import LatentKind, warm_up_latent  # noqa: E402
from cubin_runtime.integrations.paged_batch import LayerOptions, few_tokens, is_decoded  # noqa: E402
from cubin_runtime.integrations.scratch import Limits, SharedScratch, launch  # noqa: E402
from cubin_runtime.launch.workspace import workspace_size  # noqa: E402

pytestmark = pytest.mark.torch
MOST = 140
BOUNDS = (1024, 4096, 1 << 20)  # on keys, of a model with a million of them


def needs(plan: Any) -> tuple[int, int, set[str]]:
    """Zeroed scratch, other scratch and kernels of a plan."""
    zeroed, other = (workspace_size([each for each in plan.regions if each.zeroed == kind]) for kind in (True, False))
    return zeroed, other, {launch.selection.kernel.name for launch in plan.launches}


def most(plans: list[Any]) -> tuple[int, int, set[str]]:
    """What all plans need together."""
    each = [needs(plan) for plan in plans]
    return max(one[0] for one in each), max(one[1] for one in each), set().union(*(one[2] for one in each))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (8, 1), (4, 4)])
def test_a_few_numbers_of_requests_need_as_much_as_all(
    hopper: Runtime, heads: int, kv_heads: int, tokens: int, batch_invariant: bool
) -> None:
    options = LayerOptions(0.125, -1, 0.0, None, batch_invariant)
    limits = Limits(MOST, 4096, 8192, tokens)
    q = torch.zeros(4096, heads, 128, dtype=torch.bfloat16)
    few = list(readiness._plans(q, kv_heads, 16, "HND", options, limits, q.dtype))
    cache = torch.zeros(1, kv_heads, 16, 256, dtype=torch.bfloat16).split(128, dim=-1)
    every = []
    for requests in range(1, MOST + 1):
        table, lengths = torch.zeros(requests, 512, dtype=torch.int32), torch.zeros(requests, dtype=torch.int32)
        given = q[: requests * tokens].unflatten(0, (requests, tokens))
        every.append(
            plan_paged_decode(
                *(given, *cache, table, lengths, given),
                max_seq_len=8192,
                softmax_scale=0.125,
                kv_layout="HND",
                batch_invariant=batch_invariant,
            )
        )
    least, enough = most(every), most(few)
    assert enough[0] >= least[0]
    assert enough[1] >= least[1]
    assert enough[2] >= least[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (8, 1), (64, 8), (4, 4), (8, 4)])
def test_few_new_tokens_of_any_number_need_no_more_than_what_is_planned(
    hopper: Runtime, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    options, limits = LayerOptions(0.125, -1, 0.0, None, batch_invariant=False), Limits(MOST, 600, 8192)
    q = torch.zeros(600, heads, 128, dtype=torch.bfloat16)
    few = list(readiness._plans(q, kv_heads, 16, "HND", options, limits, dtype))
    cache = torch.zeros(1, kv_heads, 16, 256, dtype=torch.bfloat16).to(dtype).split(128, dim=-1)
    draw, every = random.Random(7), []
    bound = few_tokens(heads, kv_heads, 128, options)
    for requests in range(1, MOST + 1):
        tokens = draw.randint(requests, min(600, requests * bound))
        bounds = [keys for keys in (1024, 8192) if is_decoded(requests, kv_heads, keys, -1)]
        table, lengths = torch.zeros(requests, 512, dtype=torch.int32), torch.zeros(requests + 1, dtype=torch.int32)
        every.append(
            plan_paged_decode(
                *(q[:tokens], *cache, table, lengths[:-1], q[:tokens]),
                q_cu_seq_lens=lengths,
                max_q_len=bound,
                max_seq_len=draw.choice(bounds),
                softmax_scale=0.125,
                kv_layout="HND",
            )
        )
    least, enough = most(every), most(few)
    assert enough[0] >= least[0]
    assert enough[1] >= least[1]
    assert enough[2] >= least[2]


@pytest.mark.parametrize(("heads", "kv_heads", "requests"), [(8, 1, 133), (16, 2, 67), (32, 4, 34)])
def test_the_first_requests_with_more_kv_heads_than_multiprocessors_are_planned_for(
    hopper: Runtime, heads: int, kv_heads: int, requests: int
) -> None:
    assert (requests - 1) * kv_heads == hopper.driver.device(0).multiprocessors
    options, limits = LayerOptions(0.125, -1, 0.0, None, batch_invariant=False), Limits(MOST, 4096, 8192)
    q = torch.zeros(4096, heads, 128, dtype=torch.bfloat16)
    plans = readiness._plans(q, kv_heads, 16, "HND", options, limits, q.dtype)
    sizes = {(plan.specs[0].shape[0], plan.specs[4].shape[0]) for plan in plans if plan.options.max_q_len == 8}
    assert (requests, requests) in sizes


@pytest.mark.parametrize("window_left", [-1, 4095])
def test_many_requests_of_a_long_model_leave_few_new_tokens_to_context_attention(
    hopper: Runtime, window_left: int
) -> None:
    options, limits = LayerOptions(0.125, window_left, 0.0, None, batch_invariant=False), Limits(2048, 8192, 1 << 20)
    q = torch.zeros(8192, 32, 128, dtype=torch.bfloat16)
    plans = readiness._plans(q, 8, 64, "HND", options, limits, q.dtype)
    decodes = [plan for plan in plans if plan.operator.name == "paged_decode" and plan.options.max_q_len]
    requests = {keys: max(plan.specs[4].shape[0] for plan in decodes if plan.bounds[1] == keys) for keys in BOUNDS}
    assert requests == {1024: 2048, 4096: 2048, 1 << 20: 1024}


@pytest.mark.parametrize(("window_left", "least"), [(-1, 4), (100, 1)])
def test_few_new_tokens_that_run_on_context_attention_are_not_prepared_as_decodes(
    hopper: Runtime, monkeypatch: pytest.MonkeyPatch, window_left: int, least: int
) -> None:
    options, limits = LayerOptions(0.125, window_left, 0.0, None, batch_invariant=False), Limits(20, 600, 8192)
    q, parts = torch.zeros(600, 8, 128, dtype=torch.bfloat16), list[Any]()
    plans = readiness._plans(q, 2, 16, "HND", options, limits, q.dtype)
    few = [plan for plan in plans if plan.options.max_q_len == 16]
    assert {plan.operator.name for plan in few} == {"paged_decode"}
    for keys, first in ((1024, 1), (4096, 1), (8192, least)):
        assert min(plan.specs[4].shape[0] for plan in few if plan.bounds[1] == keys) == first
    monkeypatch.setattr(readiness, "attend", lambda *given: parts.append(given[4].prefills))
    readiness.shared_scratch(0).cover([], limits)
    cache = torch.zeros(1, 2, 16, 256, dtype=torch.bfloat16).split(128, dim=-1)
    readiness.warm_up(q, *cache, "HND", options, limits, 512)
    few_parts = [part for part in parts if part and part.max_q_len == 16]
    assert min(len(part.table) for part in few_parts if part.max_seq_len == 8192) == least
    assert {len(part.table) for part in few_parts if part.max_seq_len == 1024} == {*range(1, 17)}


@pytest.mark.parametrize("keys", [8192, 1 << 17, 1 << 20])
def test_prompts_over_e4m3_need_the_kernels_of_both_ways_and_no_memory_of_the_copy(hopper: Runtime, keys: int) -> None:
    options = LayerOptions(0.125, -1, 0.0, None, batch_invariant=False)
    q = torch.zeros(4096, 32, 128, dtype=torch.bfloat16)
    plans = list(readiness._plans(q, 8, 16, "HND", options, Limits(MOST, 4096, keys), torch.float8_e4m3fn))
    operations = {launch.selection.kernel.operation for plan in plans for launch in plan.launches}
    assert operations == {"paged_decode", "cache_conversion", "context_attention"}
    dtypes = {str(launch.selection.kernel.traits.get("kv_dtype")) for plan in plans for launch in plan.launches}
    assert dtypes >= {"e4m3", "bf16"}
    scratch = SharedScratch(0, hopper.memory, hopper.driver)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scratch, "_made_for", lambda _: None)
        scratch.cover(plans, Limits(MOST, 4096, keys))
    assert scratch._sizes[1] < 24 << 20 < max(plan.workspace_bytes for plan in plans)


@pytest.mark.parametrize(("heads", "q_len"), [(128, 1), (16, 4)])
def test_many_requests_over_a_latent_cache_need_no_more_than_what_is_planned(
    hopper: Runtime, monkeypatch: pytest.MonkeyPatch, heads: int, q_len: int
) -> None:
    kind, limits = LatentKind(heads, 512, 64, "bfloat16", "bfloat16", q_len, 0), Limits(600, 8192, 1 << 17, q_len)
    few = list(latent_readiness._plans(kind, LatentOptions(1.0, 1.0, False), limits))
    monkeypatch.setattr(latent_readiness, "_FULL_GRID", limits.requests)
    every = list(latent_readiness._plans(kind, LatentOptions(1.0, 1.0, False), limits))
    assert len(few) < len(every) / 2
    assert most(few) == most(every)


@pytest.mark.parametrize("latent", [False, True])
def test_layers_under_another_bound_of_keys_get_fast_paths_of_their_own(hopper: Runtime, latent: bool) -> None:
    readiness.shared_scratch(0).cover([], Limits(8, 64, 1 << 14))
    plain, kind = LayerOptions(0.125, -1, 0.0, None, False), LatentKind(16, 512, 64, "bfloat16", "bfloat16", 1, 0)
    q, cache = torch.zeros(64, 8, 128, dtype=torch.bfloat16), torch.zeros(4, 2, 64, 256, dtype=torch.bfloat16)
    plans = []
    for keys in (1 << 12, 1 << 12, 1 << 14):  # of two layers, and of another model's over a cache like theirs
        limits = Limits(8, 64, keys)
        if latent:
            warm_up_latent(kind, cache[:, 0, :, :].repeat(1, 1, 3)[..., :576], LatentOptions(1, 1, False), limits, 256)
        else:
            readiness.warm_up(q, *cache.split(128, dim=-1), "HND", plain, limits, 256)
        plans.append(hopper.stats().plans_made)
    assert 0 < plans[0] == plans[1] < plans[2]


def test_layers_of_smaller_limits_leave_the_scratch_of_the_others(hopper: Runtime) -> None:
    scratch = SharedScratch(0, hopper.memory, hopper.driver)
    for limits in (Limits(4, 100, 5000), Limits(8, 50, 1000)):
        scratch.cover([], limits)
    assert scratch.of_launch(4, 100, 5000) is not None
    assert scratch.of_launch(8, 50, 1000) is not None
    assert scratch.of_launch(8, 101, 1000) is None


def test_a_stream_that_comes_later_gets_scratch_too(hopper: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = SharedScratch(0, hopper.memory, hopper.driver)
    scratch.cover([], Limits(4, 100, 5000))
    first = scratch.of_launch(1, 1, 1)
    scratch.serve(7)
    assert scratch.of_launch(1, 1, 1) is first
    monkeypatch.setattr(hopper.memory, "current_stream", lambda _: 7)
    assert scratch.of_launch(1, 1, 1) not in (None, first)


def test_a_launch_that_needs_more_than_the_shared_scratch_has_its_own() -> None:
    launches: list[dict[str, object]] = []
    workspace: Any = object()

    def operator(*_: object, **arguments: object) -> None:
        launches.append(arguments)
        if arguments.get("workspace"):
            raise WorkspaceError("too small")

    launch(operator, workspace, 1, scale=2.0)
    assert launches == [{"scale": 2.0, "workspace": workspace}, {"scale": 2.0}]
