"""One row of the MLA benchmark: our call, FlashInfer's fa3 and FlashMLA on the same tensors, figures, the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from row_origin import origin_of
from sequence.timing import Layers, Maker, Method, sequence_times

from cubin_runtime.attention import Runtime, plan_mla_decode

from .mla_cases import MlaCase
from .peers import describe, library
from .problem import DTYPES, Pool, difference
from .reading import StreamingReads, enter_times
from .rows import Row, add_figures, mla_sizes
from .timing import Call, median_us

SCALE = 1 / math.sqrt(192)
SCRATCH_BYTES = 256 << 20
MlaMaker = Callable[["MlaProblem"], list[Call]]


class MlaProblem:
    """Tensors of one case: a cache ``[pages, page, width]`` whose pages are permuted over ``sets`` page tables."""

    def __init__(self, case: MlaCase, pool: Pool, sets: int = 1) -> None:
        self.case = case
        self.cache, self.tables = self._rows(pool, sets)
        self.lens = torch.full((case.batch,), case.length, dtype=torch.int32, device="cuda")
        self.q = self._queries()
        self.out = torch.empty(*self.q.shape[:-1], case.latent, device="cuda", dtype=torch.bfloat16)

    def _rows(self, pool: Pool, sets: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        pages = self.case.pages * sets
        shape = (pages, self.case.page, self.case.width)
        order = torch.randperm(pages, dtype=torch.int32, device="cuda")
        cache = pool.flat(self.case.kv_dtype)[: math.prod(shape)].view(shape)
        return cache, list(order.view(sets, self.case.batch, -1))

    def _queries(self) -> torch.Tensor:
        case = self.case
        lead = (case.batch, case.q_len) if case.q_len > 1 else (case.batch,)
        random = torch.randn(*lead, case.heads, case.width, device="cuda", dtype=torch.bfloat16)
        return random.to(DTYPES[case.q_dtype])


def ours_of(problem: MlaProblem, runtime: Runtime, stream: int, batch_invariant: bool) -> tuple[Any, list[Call]]:
    """The plan, and a call for each page table."""
    p = problem
    options = {"max_seq_len": p.case.length, "softmax_scale": SCALE, "batch_invariant": batch_invariant}
    plan = plan_mla_decode(p.q, p.cache, p.tables[0], p.lens, p.out, **options, backend="native", runtime=runtime)
    workspace = plan.prepare(stream)

    def call_of(table: torch.Tensor) -> Call:
        return lambda: plan.run(p.q, p.cache, table, p.lens, p.out, workspace=workspace, stream=stream)

    return plan, [call_of(table) for table in p.tables]


@cache
def _scratch() -> torch.Tensor:
    return torch.zeros(SCRATCH_BYTES, dtype=torch.uint8, device="cuda")


def fa3_of(problem: MlaProblem) -> list[Call]:
    """FlashInfer's fa3, planned before, on views of the same tensors."""
    p, case = problem, problem.case
    latent, rope = p.cache[..., : case.latent], p.cache[..., case.latent :]
    q = p.q.view(-1, case.heads, case.width)
    q_latent, q_rope = q[..., : case.latent], q[..., case.latent :]
    out = torch.empty_like(p.out).view(-1, case.heads, case.latent)
    steps = torch.arange(case.batch + 1, dtype=torch.int32, device="cuda")
    types = (DTYPES[case.q_dtype], DTYPES[case.kv_dtype])

    def call_of(table: torch.Tensor) -> Call:
        wrapper = library().mla.BatchMLAPagedAttentionWrapper(_scratch(), backend="fa3")
        pages = (steps * case.q_len, steps * table.shape[1], table.flatten(), p.lens)
        sizes = (case.heads, case.latent, case.width - case.latent, case.page)
        wrapper.plan(*pages, *sizes, case.q_len > 1, SCALE, *types)
        return lambda: wrapper.run(q_latent, q_rope, latent, rope, out=out)

    return [call_of(table) for table in p.tables]


class MlaBench:
    """What all rows share: runtime, pool, ceilings, and times that later rows refer to."""

    problem_type = MlaProblem
    plan_calls = staticmethod(ours_of)

    def __init__(
        self,
        runtime: Runtime,
        pool: Pool,
        reads: StreamingReads,
        read: float,
        matrix: float,
        rep: float,
        method: Method,
    ) -> None:
        self.runtime, self.pool, self.reads, self.rep, self.method = runtime, pool, reads, rep, method
        self.read, self.matrix = read, matrix
        self.stream = torch.cuda.current_stream().cuda_stream
        self._bf16_us: dict[tuple[int, ...], float] = {}

    def row(self, case: MlaCase, peers: Mapping[str, MlaMaker]) -> Row:
        """Measure one case; an error of ours or of a peer stands in its place and stops nothing else."""
        row = mla_sizes(case)
        problem = self.problem_type(case, self.pool, self.method.layers)
        try:
            row["ours"] = self._ours(case, problem, row)
        except Exception as failure:  # one row that fails must not cost the others
            row["ours"] = {"error": describe(failure)}
        beside = peers if case.peer else {}
        row["peers"] = {name: self._peer(make, problem) for name, make in beside.items()}
        self._in_sequence(case, problem, row, beside)
        add_figures(row, case.bar, self._read_limit(case), self.matrix)
        return row

    def _in_sequence(self, case: MlaCase, problem: MlaProblem, row: Row, peers: Mapping[str, MlaMaker]) -> None:
        """Fill in the times in a sequence: ours, the peers', those of reading alone, and of what the case compares."""
        makers: dict[str, Maker] = {
            name: lambda _, make=make: make(problem)
            for name, make in peers.items()
            if "error" not in row["peers"][name]
        }
        if "error" not in row["ours"]:
            makers["ours"] = self._our_calls(problem, case.batch_invariant)
            if case.batch_invariant:
                makers["default"] = self._our_calls(problem, False)
        makers |= self._read_makers(case, problem)
        times = sequence_times(Layers(problem.q, problem.out, self.method), makers, self.method)
        enter_times(row, times)
        us = row["ours"].get("us")
        if not us or "over_default" in row:
            return
        if case.kv_dtype == "bf16":
            self._bf16_us[case.sizes] = us
        elif case.sizes in self._bf16_us:
            row["over_bf16"] = self._bf16_us[case.sizes] / us

    def _read_makers(self, case: MlaCase, problem: MlaProblem) -> dict[str, Maker]:
        """Contestants that read as many bytes."""
        return self.reads.makers(problem.cache.data_ptr(), case.kv_bytes, self.method.layers)

    def _read_limit(self, case: MlaCase) -> float:
        """TB/s that a kernel reaches that only reads such a cache."""
        return self.read

    def _our_calls(self, problem: MlaProblem, batch_invariant: bool) -> Maker:
        return lambda stream: self.plan_calls(problem, self.runtime, stream.cuda_stream, batch_invariant)[1]

    def _ours(self, case: MlaCase, problem: MlaProblem, row: Row) -> Row:
        plan, (call, *_) = self.plan_calls(problem, self.runtime, self.stream, case.batch_invariant)
        call()
        chosen = plan.selections[0]
        found = {"single_us": median_us(call, self.rep), "kernel": chosen.kernel.name, "ctas": chosen.ctas}
        found |= {"splits": chosen.splits, "tiles_together": chosen.cta_group_size}
        row |= origin_of(plan)
        call()  # the peers' outputs are compared with this one
        return found

    def _peer(self, make: MlaMaker, problem: MlaProblem) -> Row:
        try:
            call = make(problem)[0]
            theirs = call()
            torch.cuda.synchronize()
            return {"difference": difference(theirs, problem.out), "single_us": median_us(call, self.rep)}
        except Exception as failure:  # the peer's failure is a result
            return {"error": describe(failure)}
