"""One row of the result: our call and the peers' on the same tensors, the figures that bars speak of, the verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from row_origin import origin_of
from sequence.timing import Layers, Maker, Method, sequence_times

from cubin_runtime.attention import Runtime

from . import peers as peer_calls
from .cases import Case, published_speedup
from .ours import Ours, ungrouped
from .problem import Pool, Problem, difference
from .reading import StreamingReads, bandwidth_of, enter_times
from .rows import Row, add_figures, sizes
from .timing import Call, host_us, median_us

# Planning again is work of the host, which no graph holds: it is compared in single calls alone.
SINGLE_CALLS_ONLY = frozenset({"fa2_plan_run"})


READ_TOKENS = 64  # of the layers around what only reads


def reading(makers: Mapping[str, Maker], nbytes: int, method: Method) -> dict[str, Any]:
    """The read bandwidth in a sequence whose layers read ``nbytes`` each, by contestants that only read."""
    queries = torch.randn(READ_TOKENS, method.hidden, device="cuda", dtype=torch.bfloat16)
    layers = Layers(queries, torch.empty_like(queries), method)
    return bandwidth_of(sequence_times(layers, makers, method), nbytes)


class Bench:
    """What all rows share: runtime, pool of keys and values, ceilings, and times that later rows refer to."""

    def __init__(
        self,
        runtime: Runtime,
        pool: Pool,
        reads: StreamingReads,
        read_tb_per_s: float,
        matrix_tflop_per_s: float,
        rep: float,
        method: Method,
    ) -> None:
        self.runtime, self.pool, self.reads, self.rep, self.method = runtime, pool, reads, rep, method
        self.read_tb_per_s, self.matrix_tflop_per_s = read_tb_per_s, matrix_tflop_per_s
        self.stream = torch.cuda.current_stream().cuda_stream
        self._of_one_token: dict[tuple[str, str, int], float] = {}

    def row(self, case: Case) -> Row:
        """Measure one case; an error of ours or of a peer stands in its place and stops nothing else."""
        row: Row = sizes(case)
        problem = Problem(case, self.pool, self.method.layers)
        try:
            row["ours"] = self._ours(case, problem, row)
        except Exception as failure:  # one row that fails must not cost the others
            row["ours"] = {"error": peer_calls.describe(failure)}
        compared = "error" not in row["ours"]
        row["peers"] = {name: self._peer(name, case, problem, compared) for name in case.peers}
        self._in_sequence(case, problem, row)
        add_figures(row, case.bar, self.read_tb_per_s, self.matrix_tflop_per_s)
        return row

    def _in_sequence(self, case: Case, problem: Problem, row: Row) -> None:
        """Fill in the times in a sequence: ours, the peers', those of reading alone, and of what the case compares."""
        makers: dict[str, Maker] = {
            name: partial(self._peer_calls, name, problem)
            for name, found in row["peers"].items()
            if "error" not in found and name not in SINGLE_CALLS_ONLY
        }
        if "error" not in row["ours"]:
            makers["ours"] = self._our_calls(problem, case.batch_invariant)
            if case.batch_invariant:
                makers["default"] = self._our_calls(problem, False)
            if case.model and case.q_len > 1:
                makers["ungrouped"] = lambda stream: ungrouped(problem, self.runtime, stream.cuda_stream)
        makers |= self.reads.makers(problem.kv.data_ptr(), case.kv_bytes, self.method.layers)
        times = sequence_times(Layers(problem.q, problem.out, self.method), makers, self.method)
        enter_times(row, times)
        us = row["ours"].get("us")
        if us and case.model:
            self._grouping(case, us, times.get("ungrouped", {}).get("us"), row)

    def _our_calls(self, problem: Problem, batch_invariant: bool) -> Maker:
        def make(stream: torch.cuda.Stream) -> list[Call]:
            return Ours(problem, self.runtime, batch_invariant=batch_invariant).calls(stream.cuda_stream)

        return make

    @staticmethod
    def _peer_calls(name: str, problem: Problem, _: torch.cuda.Stream) -> list[Call]:
        return peer_calls.MAKERS[name](problem)

    def _ours(self, case: Case, problem: Problem, row: Row) -> dict[str, Any]:
        ours = Ours(problem, self.runtime, batch_invariant=case.batch_invariant)
        call = ours.call(self.stream)
        call()
        row |= origin_of(ours.plan)
        found = {"single_us": self._single(call), **ours.explanation()}
        if case.host:
            found["host_us"] = host_us(call)
        call()  # the peers' outputs are compared with this one
        return found

    def _peer(self, name: str, case: Case, problem: Problem, compared: bool) -> dict[str, Any]:
        try:
            call = peer_calls.MAKERS[name](problem)[0]
            theirs = call()
            torch.cuda.synchronize()
            found: dict[str, Any] = {"difference": difference(theirs, problem.out)} if compared else {}
            found["single_us"] = self._single(call)
            if case.host and name == "xqa":
                found["host_us"] = host_us(call)
        except Exception as failure:  # a peer's failure is a result
            return {"error": peer_calls.describe(failure)}
        return found

    def _single(self, call: Callable[[], Any]) -> float:
        return median_us(call, self.rep)

    def _grouping(self, case: Case, us: float, ungrouped_us: float | None, row: Row) -> None:
        key = (case.section, case.model, case.batch)
        if case.q_len == 1:
            self._of_one_token[key] = us
        one = self._of_one_token.get(key)
        if case.q_len == 1 or one is None or ungrouped_us is None:
            return
        row["time_over_q1"] = us / one
        row["ungrouped_measured_us"] = ungrouped_us
        row["ungrouped_us"] = min(ungrouped_us, case.q_len * one)
        row["grouped_speedup"] = row["ungrouped_us"] / us
        row["published_speedup"] = published_speedup(case.model, case.q_len, case.batch)
