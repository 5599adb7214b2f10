"""The launches of our kernels behind a recorded one."""

from __future__ import annotations

from functools import cache

from cubin_runtime.cli.recorded_cases import occupancy_of, problem_of
from cubin_runtime.kernels.native.layouts import LAYOUTS
from cubin_runtime.kernels.native.reduction.plan import KV_REDUCTION, LSE_FROM_STATISTICS
from cubin_runtime.kernels.trtllm_gen.decision import Decision, decide
from tests.kernels.trtllm_examples import recorded_cases, recorded_kernels

STRUCTS = {KV_REDUCTION: "KvReductionParams", LSE_FROM_STATISTICS: "LseFromStatisticsParams"}


@cache
def planned_cases() -> list[tuple[dict[str, object], Decision]]:
    """Recorded cases that a reduction follows, with what was recorded of it."""
    return [
        (record["reduction"], decide(problem_of(record["case"]), recorded_kernels(), occupancy_of(record["case"])))
        for record in recorded_cases()
        if record["ok"] and record["reduction"]
    ]


def test_every_field_of_the_struct_is_filled() -> None:
    for _, decision in planned_cases():
        for after in decision.following:
            assert LAYOUTS[STRUCTS[after.operation]].pack(after.values)


def test_geometry_is_what_was_recorded() -> None:
    for recorded, decision in planned_cases():
        after = decision.following[0]
        assert [list(after.grid), list(after.block)] == [recorded["grid"], recorded["block"]]
        assert after.values["ctas_per_tile"] == recorded["numCtasForReduction"]
        assert after.values["value_ctas"] == recorded["numHeadDimCtasV"]
        assert after.pdl == bool(recorded["pdl"])


def test_the_grid_covers_every_head_and_value() -> None:
    for _, decision in planned_cases():
        after, values = decision.following[0], decision.following[0].values
        heads = after.grid[1] // int(values["value_ctas"]) * int(values["heads_per_cta"])  # type: ignore[call-overload]
        assert heads == values["heads_q"]
        assert int(values["value_ctas"]) * int(values["head_dim"]) == values["head_dim_v"]  # type: ignore[call-overload]


def test_an_lse_comes_last() -> None:
    found = [decision.following for _, decision in planned_cases() if decision.lse is not None]
    assert found
    assert {tuple(after.operation for after in launches) for launches in found} == {(KV_REDUCTION, LSE_FROM_STATISTICS)}
