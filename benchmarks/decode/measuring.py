"""One row of the result: our call and the peers' on the same tensors, the figures that bars speak of, the verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cubin_runtime.attention import Runtime

from . import peers as peer_calls
from .cases import Case, published_speedup
from .ours import Ours, ungrouped
from .problem import Pool, Problem, difference
from .reading import StreamingReads
from .rows import Row, add_figures, sizes
from .timing import Call, host_us, median_us, replay_us

# Below this, launch and clearing of L2 show in a median: graph replays are measured too.
SHORT_US = 20.0
MAX_SETS = 64


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
    ) -> None:
        self.runtime, self.pool, self.reads, self.rep = runtime, pool, reads, rep
        self.read_tb_per_s, self.matrix_tflop_per_s = read_tb_per_s, matrix_tflop_per_s
        self.stream = torch.cuda.current_stream().cuda_stream
        self.l2_bytes = runtime.driver.device(0).l2_bytes
        self._of_one_token: dict[tuple[str, str, int], float] = {}

    def median(self, call: Call) -> float:
        return median_us(call, self.rep)

    def row(self, case: Case) -> Row:
        """Measure one case; an error of ours or of a peer stands in its place and stops nothing else."""
        row: Row = sizes(case)
        problem = Problem(case, self.pool)
        row["read_alone_us"] = self.reads.alone_us(problem.kv.data_ptr(), case.kv_bytes)
        try:
            row["ours"] = self._ours(case, problem, row)
        except Exception as failure:  # one row that fails must not cost the others
            row["ours"] = {"error": peer_calls.describe(failure)}
        compared = "us" in row["ours"]
        row["peers"] = {name: self._peer(name, case, problem, compared) for name in case.peers}
        shortest = min((one["us"] for one in (row["ours"], *row["peers"].values()) if "us" in one), default=SHORT_US)
        if case.peers and shortest < SHORT_US:
            self._replays(case, row)
        add_figures(row, case.bar, self.read_tb_per_s, self.matrix_tflop_per_s)
        return row

    def _ours(self, case: Case, problem: Problem, row: Row) -> dict[str, Any]:
        ours = Ours(problem, self.runtime, batch_invariant=case.batch_invariant)
        call = ours.call(self.stream)
        call()
        found = {"us": self.median(call), **ours.explanation()}
        if case.host:
            found["host_us"] = host_us(call)
        if case.batch_invariant:
            default = Ours(problem, self.runtime).call(self.stream)
            row["default_us"] = self.median(default)
            row["over_default"] = found["us"] / row["default_us"]
        if case.model:
            self._grouping(case, problem, found["us"], row)
        call()  # the peers' outputs are compared with this one
        return found

    def _grouping(self, case: Case, problem: Problem, us: float, row: Row) -> None:
        key = (case.section, case.model, case.batch)
        if case.q_len == 1:
            self._of_one_token[key] = us
        one = self._of_one_token.get(key)
        if case.q_len == 1 or one is None:
            return
        measured = self.median(ungrouped(problem, self.runtime, self.stream))
        row["time_over_q1"] = us / one
        row["ungrouped_measured_us"] = measured
        row["ungrouped_us"] = min(measured, case.q_len * one)
        row["grouped_speedup"] = row["ungrouped_us"] / us
        row["published_speedup"] = published_speedup(case.model, case.q_len, case.batch)

    def _peer(self, name: str, case: Case, problem: Problem, compared: bool) -> dict[str, Any]:
        try:
            call = peer_calls.MAKERS[name](problem)[0]
            theirs = call()
            torch.cuda.synchronize()
            found: dict[str, Any] = {"difference": difference(theirs, problem.out)} if compared else {}
            found["us"] = self.median(call)
            if case.host and name == "xqa":
                found["host_us"] = host_us(call)
        except Exception as failure:  # a peer's failure is a result
            return {"error": peer_calls.describe(failure)}
        return found

    def _replays(self, case: Case, row: Row) -> None:
        """Times in graphs that go round more keys and values than twice L2 holds."""
        room = self.pool.nbytes // (case.pages * case.page_bytes)
        sets = max(1, min(MAX_SETS, 2 * self.l2_bytes // case.kv_bytes + 2, room))
        problem = Problem(case, self.pool, sets)
        row["graph_sets"] = sets
        if "us" in row["ours"]:
            ours = Ours(problem, self.runtime, batch_invariant=case.batch_invariant)
            row["ours"] |= _replayed(lambda stream: ours.calls(stream.cuda_stream))
        for name, found in row["peers"].items():
            if "us" not in found or name == "fa2_plan_run":
                continue
            found |= _replayed(lambda _, name=name: peer_calls.MAKERS[name](problem))


def _replayed(calls: Callable[[torch.cuda.Stream], list[Call]]) -> dict[str, Any]:
    """The time in a graph, or why there is none: a call that cannot be captured is a result."""
    try:
        return {"graph_us": replay_us(calls)}
    except Exception as failure:
        return {"graph_error": peer_calls.describe(failure)}
