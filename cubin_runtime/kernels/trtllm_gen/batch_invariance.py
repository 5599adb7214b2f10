"""Batch-invariant selection: the kernel depends on the request's form alone, not on batch size or bounds."""

from __future__ import annotations

from dataclasses import replace

from .arithmetic import INT32_MAX
from .errors import PlanRefused
from .grid import lay_out
from .kernel_finder import KernelSet
from .problem import Problem
from .select import Selection, select
from .traits import Policy

# The longest length, so that every window hides keys, whatever the call's bound.
CANONICAL_KV = INT32_MAX


class InvarianceRefused(PlanRefused):
    """No kernel gives a request the same bits with any neighbours."""


def canonical(problem: Problem) -> Problem:
    """The problem without what neighbours and bounds contribute: batch 1, one query token, the longest KV."""
    return replace(problem, batch=1, max_q=1, max_kv=CANONICAL_KV, tokens_q=1)


def select_invariant(problem: Problem, kernels: KernelSet) -> Selection:
    """The kernel of the canonical problem, with the grid of this one.

    ``problem`` must have ``multi_ctas`` off: one CTA per query tile, so that no KV is split or merged.

    Raises:
        InvarianceRefused: no kernel serves the canonical problem.
        PlanRefused: the kernel does not take the problem's heads.
    """
    try:
        chosen = select(canonical(problem), kernels, lambda meta, cluster, grid: 0, Policy.BEST)
    except PlanRefused as error:
        raise InvarianceRefused(f"batch_invariant: {error}") from error
    # The kernel that would suit this batch better is ignored: the batch must not matter.
    geometry = lay_out(problem, chosen.meta, chosen.key, allows_cga=False)
    return replace(chosen, geometry=replace(geometry, next_key=None))
