"""Our calls of a problem: planned once, with a workspace of the stream that they run on.

They may begin while the kernel before them ends, as FlashInfer's functions let theirs by default.
"""

from __future__ import annotations

import torch

from cubin_runtime.attention import Runtime, plan_paged_decode

from .problem import Problem
from .timing import Call


class Ours:
    """One plan of a problem; ``batch_invariant`` may differ from the case's."""

    def __init__(self, problem: Problem, runtime: Runtime, *, batch_invariant: bool = False) -> None:
        self.problem = problem
        p = problem
        self.k, self.v = p.kv[:, 0], p.kv[:, 1]
        self.q, self.out = p.by_request(p.q), p.by_request(p.out)
        tensors = (self.q, self.k, self.v, p.tables[0], p.lens, self.out)
        self.plan = plan_paged_decode(
            *tensors,
            max_seq_len=p.case.longest,
            batch_invariant=batch_invariant,
            enable_pdl=True,
            runtime=runtime,
        )

    def call(self, stream: int) -> Call:
        """The call on ``stream``, with the first page table."""
        return self.calls(stream)[0]

    def calls(self, stream: int) -> list[Call]:
        """One call for each page table, on ``stream``, which has the workspace to itself."""
        workspace = self.plan.prepare(stream)
        run, q, k, v, lens, out = self.plan.run, self.q, self.k, self.v, self.problem.lens, self.out

        def call_of(table: torch.Tensor) -> Call:
            return lambda: run(q, k, v, table, lens, out, workspace=workspace, stream=stream)

        return [call_of(table) for table in self.problem.tables]

    def explanation(self) -> dict[str, object]:
        """Which kernel runs, on how many CTAs, and how many rows a KV head of a request takes with padding."""
        (selection,) = self.plan.selections
        return {
            "kernel": selection.kernel.name,
            "ctas": selection.ctas,
            "splits": selection.splits,
            "padded_rows": selection.row_tiles * int(selection.kernel.traits["rows"]),
            "expected_us": selection.microseconds,
        }


def ungrouped(problem: Problem, runtime: Runtime, stream: int) -> list[Call]:
    """By page table, one launch for each query token, as kernels that take one token a CTA need.

    Token i of n sees all keys but the last n - 1 - i.
    """
    case = problem.case
    k, v = problem.kv[:, 0], problem.kv[:, 1]
    tokens = problem.by_request(problem.q)
    qs = [tokens[:, i].contiguous() for i in range(case.q_len)]
    outs = [torch.empty_like(part, dtype=problem.out.dtype) for part in qs]
    lens = [problem.lens - (case.q_len - 1 - i) for i in range(case.q_len)]
    plan = plan_paged_decode(
        qs[0],
        k,
        v,
        problem.tables[0],
        lens[0],
        outs[0],
        max_seq_len=case.longest,
        enable_pdl=True,
        runtime=runtime,
    )
    workspace = plan.prepare(stream)

    def call_of(table: torch.Tensor) -> Call:
        def call() -> None:
            for q, out, length in zip(qs, outs, lens, strict=True):
                plan.run(q, k, v, table, length, out, workspace=workspace, stream=stream)

        return call

    return [call_of(table) for table in problem.tables]
