"""Batch-invariant selection: one kernel for a form, whatever batch and bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cubin_runtime.kernels.trtllm_gen.batch_invariance import InvarianceRefused, canonical, select_invariant
from cubin_runtime.kernels.trtllm_gen.problem import Problem
from cubin_runtime.kernels.trtllm_gen.select import Selection
from tests.kernels.trtllm_examples import MLA, PROBLEM, SPARSE_MLA, recorded_kernels

FORMS = {
    "gqa": PROBLEM,
    "gqa with a window": replace(PROBLEM, window=1024),
    "mla of 16 heads": MLA,
    "mla of 128 heads": replace(MLA, heads_q=128),
    "sparse mla": replace(SPARSE_MLA, heads_q=128),
}


def alone(problem: Problem, **changes: object) -> Problem:
    """The form with one CTA a tile of queries, as a batch-invariant call asks."""
    return replace(problem, multi_ctas=False, **changes)  # type: ignore[arg-type]


def select(problem: Problem) -> Selection:
    return select_invariant(problem, recorded_kernels().for_problem(problem))


@pytest.mark.parametrize("form", FORMS)
def test_batch_and_bounds_do_not_enter_the_choice(form: str) -> None:
    chosen = {
        (selection.meta.symbol, selection.key, selection.geometry.ctas_kv, selection.geometry.cluster_x)
        for batch in (1, 2, 64, 256)
        for max_q in (1, 2, 16)
        for max_kv in (1, 1000, 1 << 20)
        for selection in (select(alone(FORMS[form], batch=batch, max_q=max_q, max_kv=max_kv, tokens_q=batch * max_q)),)
    }
    assert len(chosen) == 1


def test_the_grid_is_that_of_the_call_itself() -> None:
    assert select(alone(PROBLEM, batch=7)).geometry.grid == (1, 8, 7)


def test_a_window_enters_by_being_there() -> None:
    with_window = select(alone(replace(PROBLEM, window=1 << 30), max_kv=64))
    assert "SlidingOrChunkedCausal" in with_window.meta.symbol


def test_the_canonical_call_is_one_request_of_one_token() -> None:
    problem = canonical(replace(PROBLEM, batch=9, max_q=4, tokens_q=36))
    assert (problem.batch, problem.max_q, problem.tokens_q) == (1, 1, 1)


def test_without_a_kernel_it_is_refused() -> None:
    with pytest.raises(InvarianceRefused, match="batch_invariant: the release has no kernel"):
        select(alone(PROBLEM, page=8))
