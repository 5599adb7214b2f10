"""Selection that looks at no neighbour: one kernel for a request, whatever batch and bounds it comes with."""

from __future__ import annotations

from dataclasses import replace

from .grid import lay_out
from .kernels import KernelSet
from .problem import Problem
from .refusals import PlanRefused
from .select import Selection, select
from .traits import INT32_MAX, Policy

# Over every window, and as long as a length can be: a bound below it could not hide behind a power of two.
CANONICAL_KV = INT32_MAX


class InvarianceRefused(PlanRefused):
    """No kernel gives a request the same bits whatever its neighbours."""


def canonical(problem: Problem) -> Problem:
    """The call as far as a request's own form tells it: batch 1, one query token, the longest KV there is."""
    return replace(problem, batch=1, max_q=1, max_kv=CANONICAL_KV, tokens_q=1)


def select_invariant(problem: Problem, kernels: KernelSet) -> Selection:
    """The kernel of the canonical call, laid out for this one.

    ``problem`` must keep one CTA a tile of queries (``multi_ctas`` off), so no KV is split and nothing is merged.

    Raises:
        InvarianceRefused: the canonical call has no kernel.
        PlanRefused: the kernel does not take this call's heads.
    """
    try:
        chosen = select(canonical(problem), kernels, lambda meta, cluster, grid: 0, Policy.BEST)
    except PlanRefused as error:
        raise InvarianceRefused(f"batch_invariant: {error}") from error
    # What laying out would rather have for this batch is not asked: that is the very thing that must not matter.
    geometry = lay_out(problem, chosen.meta, chosen.state, allows_cga=False)
    return replace(chosen, geometry=replace(geometry, asks_for=None))
