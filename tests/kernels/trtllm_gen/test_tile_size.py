from __future__ import annotations

from dataclasses import replace
from math import ceil

import numpy as np
import pytest

from cubin_runtime.kernels.trtllm_gen.errors import MISSING_LATER, KernelMissing
from cubin_runtime.kernels.trtllm_gen.grid import Geometry
from cubin_runtime.kernels.trtllm_gen.select import Selection, first_key, select
from cubin_runtime.kernels.trtllm_gen.tile_size import (
    MAIN_COST,
    MERGE_COST,
    Candidate,
    TileChoice,
    choose_tile,
    kernel_type_of,
    largest_tile,
    modelled_cost,
)
from cubin_runtime.kernels.trtllm_gen.traits import KernelType, MaskType, MultiCtasMode, Policy
from tests.kernels.trtllm_examples import PROBLEM, ROW, decode_rows, finder, never_asked, room_for

# Few CTAs: one sequence, one KV head, four tokens of sixteen heads each.
FEW = replace(PROBLEM, heads_q=16, heads_kv=1, max_q=4, tokens_q=4, max_kv=4096)


def choose(problem, rows, policy: Policy = Policy.REFERENCE) -> Selection:
    kernels = finder(*rows)
    return select(problem, kernels.for_problem(problem), room_for(1000), policy)


@pytest.mark.parametrize(
    ("rows", "tile"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (65, 128), (999, 128)]
)
def test_the_first_estimate_holds_all_rows_of_a_group(rows: int, tile: int) -> None:
    assert largest_tile(rows) == tile


@pytest.mark.parametrize("tile", [8, 16, 32])
def test_small_tiles_swap_the_operands(tile: int) -> None:
    assert kernel_type_of(tile) is KernelType.SWAPS_AB


@pytest.mark.parametrize("tile", [64, 128])
def test_large_tiles_keep_the_operands(tile: int) -> None:
    assert kernel_type_of(tile) is KernelType.KEEPS_AB


@pytest.mark.parametrize("tile", MAIN_COST)
@pytest.mark.parametrize("max_kv", [1, 999, 131_072, 16_777_217])
@pytest.mark.parametrize("ctas_kv", [1, 7])
def test_the_cost_is_rounded_to_float32_at_every_step(tile: int, max_kv: int, ctas_kv: int) -> None:
    geometry = Geometry((500, 1, 1), 1, 1, ctas_kv, 1, None)
    steps = ceil(ceil(max_kv / 128) / ctas_kv)
    main = np.float32(MAIN_COST[tile]) * np.float32(steps * 128)
    merge = np.float32(MERGE_COST[tile]) * np.float32(128) * np.float32(ctas_kv)
    expected = (main + merge) * np.float32(4)
    assert modelled_cost(tile, ROW, geometry, replace(PROBLEM, max_kv=max_kv)) == float(expected)


def test_cost_constants_are_float32() -> None:
    assert [float(np.float32(c)) for c in (2.2, 1.68, 1.48, 1.2, 1.0)] == list(MAIN_COST.values())
    assert [float(np.float32(c)) for c in (1.32, 1.2, 1.08, 1.03, 1.0)] == list(MERGE_COST.values())


def test_one_token_is_never_compared() -> None:
    assert choose(replace(FEW, max_q=1), decode_rows()).passes[0].candidates == ()


def test_a_launch_that_fills_half_the_gpu_keeps_its_first_estimate() -> None:
    selection = choose(replace(FEW, batch=75, tokens_q=300), decode_rows())
    assert [done.candidates for done in selection.passes] == [()] * len(selection.passes)
    assert selection.meta.tile_q == 64


def test_the_smallest_tile_is_not_compared() -> None:
    problem = replace(FEW, heads_q=2, max_q=2, max_kv=300)
    assert choose(problem, decode_rows()).passes[0].candidates == ()


def test_few_ctas_take_the_cheapest_tile() -> None:
    selection = choose(replace(FEW, max_kv=512), decode_rows())
    compared = selection.passes[0].candidates
    assert [c.tile_q for c in compared] == [64, 32, 16]
    assert selection.meta.tile_q == min(compared, key=lambda c: c.cost).tile_q


def test_a_tile_below_the_group_is_no_candidate() -> None:
    compared = choose(replace(FEW, max_kv=512), decode_rows()).passes[0].candidates
    assert min(c.tile_q for c in compared) >= FEW.group


def test_a_smaller_tile_may_cost_more() -> None:
    key = first_key(FEW)._replace(tile_q=16, kernel_type=KernelType.SWAPS_AB)
    layouts = {16: Geometry((1, 1, 1), 1, 1, 1, 1, None), 8: Geometry((149, 1, 1), 1, 1, 1, 1, None)}
    problem = replace(FEW, heads_q=8, max_kv=1)
    choice = choose_tile(problem, key, lambda probed: (replace(ROW, step_kv=1), layouts[probed.tile_q]))
    assert choice.tile_q == 16


def test_of_equal_costs_the_larger_tile_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cubin_runtime.kernels.trtllm_gen.tile_size.modelled_cost", lambda *sizes: 1.0)
    key = first_key(FEW)._replace(tile_q=64, kernel_type=KernelType.KEEPS_AB)
    choice = choose_tile(FEW, key, lambda probed: (ROW, Geometry((1, 1, 1), 1, 1, 1, 1, None)))
    assert (choice.tile_q, len(choice.candidates)) == (64, 3)


def test_each_candidate_is_priced_by_its_own_kernel() -> None:
    """A kernel that takes more KV a step costs what it costs, whatever came before it."""
    rows = [replace(row, step_kv=4096) if row.tile_q == 16 else row for row in decode_rows()]
    problem = replace(FEW, max_kv=4100, multi_ctas=False)
    costs = {c.tile_q: c.cost for c in choose(problem, rows).passes[0].candidates}
    alone = Geometry((1, 1, 1), 1, 1, 1, 1, None)
    wide = next(row for row in rows if row.tile_q == 16)
    narrow = next(row for row in rows if row.tile_q == 32)
    assert costs[16] == modelled_cost(16, wide, alone, problem)
    assert costs[32] == modelled_cost(32, narrow, alone, problem)


def test_what_laying_out_one_candidate_changes_carries_over_to_the_next() -> None:
    asked = []
    changed = first_key(FEW)._replace(multi_ctas=MultiCtasMode.CGA)

    def probe(key):
        asked.append(key.multi_ctas)
        return ROW, Geometry((1, 1, 1), 1, 1, 2, 1, changed)

    choose_tile(FEW, first_key(FEW)._replace(tile_q=32, kernel_type=KernelType.SWAPS_AB), probe)
    assert asked == [MultiCtasMode.GMEM, MultiCtasMode.CGA, MultiCtasMode.CGA]


def test_what_a_candidate_changes_carries_over_to_the_next_candidate() -> None:
    asked = []
    changed = first_key(FEW)._replace(multi_ctas=MultiCtasMode.CGA)

    def probe(key):
        asked.append((key.tile_q, key.multi_ctas))
        return ROW, Geometry((1, 1, 1), 1, 1, 2, 1, changed if len(asked) == 2 else None)

    choose_tile(FEW, first_key(FEW)._replace(tile_q=32, kernel_type=KernelType.SWAPS_AB), probe)
    assert asked == [(32, MultiCtasMode.GMEM), (32, MultiCtasMode.GMEM), (16, MultiCtasMode.CGA)]


def without_tile(tile: int):
    return [row for row in decode_rows() if row.tile_q != tile]


def test_the_reference_ends_at_a_candidate_without_a_kernel() -> None:
    with pytest.raises(KernelMissing) as caught:
        choose(replace(FEW, max_kv=512), without_tile(32), Policy.REFERENCE)
    assert (caught.value.kind, caught.value.key.tile_q) == (MISSING_LATER, 32)


def test_our_policy_passes_over_a_candidate_without_a_kernel() -> None:
    selection = choose(replace(FEW, max_kv=512), without_tile(32), Policy.BEST)
    assert Candidate(32, None, None) in selection.passes[0].candidates
    assert selection.meta.tile_q in (64, 16)


def test_our_policy_goes_on_where_the_first_estimate_has_no_kernel() -> None:
    assert choose(replace(FEW, max_kv=512), without_tile(64), Policy.BEST).meta.tile_q in (32, 16)


def test_our_policy_still_refuses_where_no_candidate_has_a_kernel() -> None:
    with pytest.raises(KernelMissing):
        choose(replace(FEW, max_kv=512), decode_rows(tiles=(128,)), Policy.BEST)


def test_nothing_priced_leaves_the_first_estimate() -> None:
    key = first_key(FEW)._replace(tile_q=64, kernel_type=KernelType.KEEPS_AB)
    choice = choose_tile(FEW, key, lambda probed: None)
    assert (choice.tile_q, choice.kernel_type) == (64, KernelType.KEEPS_AB)
    assert [c.cost for c in choice.candidates] == [None] * 3


def test_a_choice_is_a_value() -> None:
    assert TileChoice(8, KernelType.SWAPS_AB, ()) == TileChoice(8, KernelType.SWAPS_AB, ())


def test_comparing_asks_nothing_of_the_device() -> None:
    problem = replace(FEW, multi_ctas=False, mask=MaskType.CAUSAL)
    kernels = finder(*decode_rows())
    assert select(problem, kernels.for_problem(problem), never_asked, Policy.BEST).passes[0].candidates
