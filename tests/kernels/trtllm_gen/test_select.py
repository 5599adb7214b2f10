from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from cubin_runtime.kernels.trtllm_gen.errors import MISSING_FIRST, MISSING_LATER, KernelMissing, PlanRefused
from cubin_runtime.kernels.trtllm_gen.kernel_finder import KernelSet
from cubin_runtime.kernels.trtllm_gen.select import (
    check_key,
    dense_mla_key,
    first_key,
    select,
    sparse_mla_key,
    with_page,
    with_window,
)
from cubin_runtime.kernels.trtllm_gen.traits import (
    KernelType,
    MaskType,
    MultiCtasMode,
    Policy,
    QkvLayout,
    TileScheduler,
)
from tests.kernels.trtllm_examples import (
    MLA,
    PROBLEM,
    ROW,
    SPARSE_MLA,
    decode_rows,
    finder,
    named,
    never_asked,
    room_for,
)


def choose(problem, rows, occupancy=never_asked, policy: Policy = Policy.REFERENCE):
    return select(problem, finder(*rows).for_problem(problem), occupancy, policy)


def settled(problem):
    return dense_mla_key(problem, first_key(problem))


def sparse(problem):
    return sparse_mla_key(problem, first_key(problem))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, (32, False)),
        ({"page": 64}, (64, False)),
        ({"page": 128}, (128, True)),
        ({"page": 512}, (128, True)),
        ({"page": 128, "heads_kv": 32}, (128, False)),
        ({"page": 256, "head_dim_v": 64}, (256, False)),
        ({"layout": QkvLayout.SEPARATE, "page": 0}, (0, False)),
    ],
)
def test_kernels_are_found_by_page(changed, expected) -> None:
    key = with_page(replace(PROBLEM, **changed), first_key(PROBLEM))
    assert (key.tokens_per_page, key.dynamic_page) == expected


def test_sparse_kv_has_pages_of_one_token() -> None:
    assert with_page(SPARSE_MLA, first_key(SPARSE_MLA)).tokens_per_page == 1


@pytest.mark.parametrize("page", [0, 3, 48, 192, 384])
def test_a_page_that_is_no_power_of_two_is_refused(page: int) -> None:
    with pytest.raises(PlanRefused, match=f"page size {page}"):
        choose(replace(PROBLEM, page=page), decode_rows())


@pytest.mark.parametrize("change", [{"tile_q": 24}, {"tile_q": 256}, {"tile_q": 0}, {"tile_kv": 96}])
def test_a_tile_that_no_table_has_is_refused_before_the_lookup(change) -> None:
    with pytest.raises(PlanRefused, match="tile"):
        check_key(first_key(PROBLEM)._replace(**change))


def test_kv_beyond_the_window_masks_a_window() -> None:
    assert with_window(replace(PROBLEM, max_kv=129, window=128), first_key(PROBLEM)).mask == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"max_kv": 128, "window": 128},
        {"max_kv": 129, "window": 128, "sparse": 1},
        {"max_kv": 129, "window": 128, "mask": MaskType.DENSE, "kernel_type": KernelType.CONTEXT},
    ],
    ids=["all visible", "sparse", "dense context"],
)
def test_other_masks_stay(changed) -> None:
    problem = replace(PROBLEM, **changed)
    assert with_window(problem, first_key(problem)).mask == problem.mask


def test_generation_masks_a_window_even_from_dense() -> None:
    problem = replace(PROBLEM, mask=MaskType.DENSE, max_kv=129, window=128)
    assert with_window(problem, first_key(problem)).mask == MaskType.SLIDING_OR_CHUNKED_CAUSAL


@pytest.mark.parametrize(("heads", "tile"), [(1, 8), (8, 8), (16, 16), (32, 16)])
def test_mla_of_few_heads_has_low_latency(heads: int, tile: int) -> None:
    key = settled(replace(MLA, heads_q=heads, batch=1000, max_kv=10**6))
    assert (key.kernel_type, key.tile_q) == (KernelType.SWAPS_AB, tile)


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"heads_q": 64, "batch": 1, "max_kv": 1024 * 37}, KernelType.SWAPS_AB),
        ({"heads_q": 64, "batch": 1, "max_kv": 1024 * 37 + 1}, KernelType.KEEPS_AB),
        ({"heads_q": 64, "batch": 37, "max_kv": 1024}, KernelType.SWAPS_AB),
        ({"heads_q": 64, "batch": 38, "max_kv": 1}, KernelType.KEEPS_AB),
    ],
)
def test_mla_of_many_heads_has_low_latency_while_splits_stay_short(changed, kind) -> None:
    assert settled(replace(MLA, **changed)).kernel_type == kind


def test_high_throughput_reduces_in_a_separate_kernel() -> None:
    key = settled(replace(MLA, heads_q=64, batch=100))
    assert (key.tile_q, key.multi_ctas, key.two_cta) == (64, MultiCtasMode.SEPARATE_KERNEL, False)


def test_high_throughput_without_splits_stays_without() -> None:
    assert settled(replace(MLA, heads_q=64, batch=100, multi_ctas=False)).multi_ctas == MultiCtasMode.DISABLED


def test_128_heads_run_on_two_ctas() -> None:
    key = settled(replace(MLA, heads_q=128, batch=100))
    assert (key.two_cta, key.head_dim_per_cta_v) == (True, 256)


def test_mla_refuses_a_window_that_hides_kv() -> None:
    with pytest.raises(PlanRefused, match="window of 128 tokens"):
        settled(replace(MLA, window=128))


@pytest.mark.parametrize(
    ("changed", "tile"),
    [
        ({"heads_q": 32, "top_k": 2048, "batch": 1}, 16),
        ({"heads_q": 32, "top_k": 2048, "batch": 2}, 32),
        ({"heads_q": 32, "top_k": 2048, "batch": 2, "max_kv": 1024}, 16),
        ({"heads_q": 32, "top_k": 128, "batch": 18}, 16),
        ({"heads_q": 32, "top_k": 128, "batch": 19}, 32),
        ({"heads_q": 8, "batch": 1}, 8),
    ],
)
def test_sparse_mla_halves_its_tile_while_the_gpu_has_room(changed, tile) -> None:
    key = sparse(replace(SPARSE_MLA, **changed))
    assert (key.kernel_type, key.tile_q, key.tile_kv) == (KernelType.SWAPS_AB, tile, 128)


@pytest.mark.parametrize(
    ("changed", "two_cta"),
    [
        ({"heads_q": 128, "batch": 9}, False),
        ({"heads_q": 128, "batch": 9, "multiprocessors": 144}, False),
        ({"heads_q": 128, "batch": 10}, True),
        ({"heads_q": 128, "batch": 9, "multiprocessors": 143}, True),
        ({"heads_q": 128, "batch": 1, "max_q": 2}, True),
        ({"heads_q": 64, "batch": 100}, False),
    ],
)
def test_sparse_mla_runs_on_two_ctas_where_it_fills_the_gpu(changed, two_cta) -> None:
    key = sparse(replace(SPARSE_MLA, **changed))
    assert (key.kernel_type, key.two_cta) == (KernelType.KEEPS_AB, two_cta)


@pytest.mark.parametrize(("heads", "tile"), [(64, 8), (128, 16), (512, 16)])
def test_other_kv_types_swap_the_operands_whatever_the_rows(heads: int, tile: int) -> None:
    rows = decode_rows(dtype_k="e4m3", dtype_v="e4m3", dtype_kv="e4m3")
    problem = replace(PROBLEM, heads_q=heads, dtype_k="e4m3", dtype_v="e4m3", max_q=16, batch=300)
    assert choose(problem, rows, room_for(0)).meta.tile_q == tile


def test_wide_values_are_halved_where_the_operands_are_kept() -> None:
    wide = {"head_dim_qk": 512, "head_dim_v": 512}
    rows = decode_rows(**wide, head_dim_per_cta_v=256)
    problem = replace(PROBLEM, **wide, heads_q=64 * 8, batch=200)
    assert choose(problem, rows).meta.head_dim_per_cta_v == 256


def test_a_long_sequence_ends_on_a_cluster() -> None:
    selection = choose(PROBLEM, decode_rows(), room_for(8))
    assert [MultiCtasMode(done.key.multi_ctas) for done in selection.passes] == [1, 3]
    assert (selection.meta.multi_ctas_kv_mode, selection.left_cluster) == (3, False)


def test_a_cluster_that_does_not_fit_is_left_for_global_memory() -> None:
    selection = choose(PROBLEM, decode_rows(), room_for(7))
    assert (selection.meta.multi_ctas_kv_mode, selection.left_cluster) == (1, True)
    assert (selection.asked.cluster_x, selection.asked.grid, selection.asked.active_clusters) == (16, (16, 8, 1), 7)


def test_occupancy_is_asked_only_about_clusters() -> None:
    assert choose(replace(PROBLEM, max_kv=100), decode_rows()).asked is None


def test_a_miss_at_the_first_lookup_says_so() -> None:
    with pytest.raises(KernelMissing) as caught:
        choose(PROBLEM, [])
    assert caught.value.kind == MISSING_FIRST


def test_a_miss_in_a_later_pass_says_so() -> None:
    rows = [row for row in decode_rows() if row.multi_ctas_kv_mode == 1]
    with pytest.raises(KernelMissing) as caught:
        choose(PROBLEM, rows, room_for(100))
    assert (caught.value.kind, caught.value.key.multi_ctas) == (MISSING_LATER, MultiCtasMode.CGA)


def test_a_missing_kernel_is_named_by_all_that_was_asked() -> None:
    with pytest.raises(
        KernelMissing,
        match=r"bf16/bf16/bf16/bf16: paged, causal, swaps ab, static, multi-CTA gmem, .*, tile 8x128, page 32",
    ):
        choose(PROBLEM, [])


def test_a_number_that_no_enumeration_lists_is_printed_as_it_is() -> None:
    assert str(first_key(PROBLEM)._replace(mask=99, kernel_type=-1, sparse=7)).startswith("paged, 99, -1, static")


def test_no_kernel_of_another_model_is_taken() -> None:
    with pytest.raises(KernelMissing):
        choose(replace(PROBLEM, sm=120), decode_rows())


@pytest.fixture
def suggest_again(monkeypatch: pytest.MonkeyPatch):
    """Let the grid of the first ``times`` passes suggest to select again."""
    from cubin_runtime.kernels.trtllm_gen import select as module

    def install(times: int) -> None:
        lay_out, passes = module.lay_out, count(1)

        def restless(problem, meta, key, *, allows_cga):
            again = next(passes) <= times
            return replace(lay_out(problem, meta, key, allows_cga=allows_cga), next_key=key if again else None)

        monkeypatch.setattr(module, "lay_out", restless)

    return install


def test_the_selection_may_settle_in_its_fourth_pass(suggest_again) -> None:
    suggest_again(3)
    assert len(choose(PROBLEM, decode_rows()).passes) == 4


def test_the_selection_ends_after_four_passes(suggest_again) -> None:
    suggest_again(4)
    with pytest.raises(PlanRefused, match="no convergence after 4 passes"):
        choose(PROBLEM, decode_rows())


def test_a_kernel_for_the_very_model_comes_before_the_family() -> None:
    rows = named([ROW, replace(ROW, sm="103"), replace(ROW, sm="100")])
    key = first_key(PROBLEM)._replace(kernel_type=KernelType.SWAPS_AB, tile_q=16, tokens_per_page=32)
    kernels = finder(*rows)
    assert [kernels.for_problem(replace(PROBLEM, sm=sm)).find(key).sm for sm in (100, 103)] == ["100", "103"]


def test_the_family_stands_in_for_the_model() -> None:
    key = first_key(PROBLEM)._replace(kernel_type=KernelType.SWAPS_AB, tile_q=16, tokens_per_page=32)
    assert finder(ROW).for_problem(PROBLEM).find(key) == ROW


def test_sage_blocks_are_part_of_what_a_kernel_is_found_by() -> None:
    key = first_key(PROBLEM)._replace(kernel_type=KernelType.SWAPS_AB, tile_q=16, tokens_per_page=32)
    assert finder(ROW).for_problem(replace(PROBLEM, sage_blocks=(1, 4, 0, 1))).find(key) is None


def test_a_page_in_the_name_is_no_dynamic_page() -> None:
    rows = named(
        [replace(ROW, tokens_per_page=128, symbol="fmhaSm100fKernel_P128V"), replace(ROW, tokens_per_page=128)]
    )
    key = first_key(PROBLEM)._replace(kernel_type=KernelType.SWAPS_AB, tile_q=16, tokens_per_page=128)
    found: KernelSet = finder(*rows).for_problem(PROBLEM)
    assert [found.find(key._replace(dynamic_page=any_page)) for any_page in (False, True)] == rows


def test_context_keeps_its_type_and_scheduler() -> None:
    row = replace(
        ROW,
        kernel_type=KernelType.CONTEXT,
        tile_q=128,
        step_q=256,
        tile_scheduler=TileScheduler.PERSISTENT,
        multi_ctas_kv_mode=0,
        groups_heads_q=False,
        groups_tokens_heads_q=False,
    )
    problem = replace(PROBLEM, kernel_type=KernelType.CONTEXT, multi_ctas=False, max_q=4096)
    assert choose(problem, [row]).geometry.grid == (16, 32, 1)
