"""Context attention launched a million times under load, every output compared with the first one's bits.

Run: ``python benchmarks/gpu_soak.py --out DIR [--launches 1000000]`` on a machine with a Hopper GPU and torch. Two
streams replay graphs at once, each of its own case, workspace and outputs: a replay fills all outputs with NaN,
launches the operator once into each, and counts elements that differ. ``soak.json`` in DIR is the result.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from gpu_environment import built_sources, gpu_environment
from prefill.cases import PrefillCase
from prefill.problem import PrefillProblem

from cubin_runtime import Config
from cubin_runtime.attention import Runtime, plan_context_attention

OF_A_GRAPH = 50
IN_FLIGHT = 8  # replays of each stream, before the host waits
CASES = (
    PrefillCase("soak", "paged", 128, (200, 1, 77, 130), (1300, 900, 77, 641), heads=8, kv_heads=2, page=64),
    PrefillCase("soak", "ragged", 64, (333, 0, 64, 1), (333, 500, 1000, 2000), heads=4, kv_heads=4),
)


class Soak:
    """A case on a stream of its own: a graph of launches, and what differed."""

    def __init__(self, case: PrefillCase, runtime: Runtime) -> None:
        problem = PrefillProblem(case)
        self.case, self.stream = case, torch.cuda.Stream()
        self.wanted = problem.ours(runtime)().clone().view(torch.int16)
        k, v = problem.caches if case.page else (problem.k, problem.v)
        outs = torch.empty(OF_A_GRAPH, *problem.q.shape, device="cuda", dtype=torch.bfloat16)
        named: dict[str, Any] = {"q_cu_seq_lens": problem.q_sums}
        if case.page:
            named |= {"page_table": problem.page_table, "seq_lens": problem.seq_lens}
        else:
            named["kv_cu_seq_lens"] = problem.kv_sums
        bound = max(case.kv_lens)
        plan = plan_context_attention(problem.q, k, v, outs[0], **named, max_seq_len=bound, runtime=runtime)
        workspace = plan.prepare(self.stream.cuda_stream)
        # The graph has their addresses, and another capture gives freed memory back to the driver.
        self.kept = (problem, outs, workspace)
        self.different = torch.zeros((), device="cuda", dtype=torch.int64)

        def launches() -> None:
            outs.fill_(float("nan"))
            for out in outs:
                plan.run(problem.q, k, v, out, **named, workspace=workspace, stream=self.stream.cuda_stream)
            self.different.add_((outs.view(torch.int16) != self.wanted).sum())

        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            launches()
        self.stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            launches()

    def replay(self) -> None:
        with torch.cuda.stream(self.stream):
            self.graph.replay()


def main() -> int:
    """Launch and compare; 1 if a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--launches", type=int, default=1_000_000, help="of both cases together (%(default)s)")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    chosen.out.mkdir(parents=True, exist_ok=True)
    store = Path(os.environ.get("CUBIN_RUNTIME_CACHE", chosen.out / "store"))
    runtime = Runtime(Config(store=store, sources=built_sources(), offline=True))
    soaks = [Soak(case, runtime) for case in CASES]
    replays = -(-chosen.launches // (OF_A_GRAPH * len(soaks)))
    began = time.perf_counter()
    for index in range(replays):
        for soak in soaks:
            soak.replay()
        if index % IN_FLIGHT == IN_FLIGHT - 1:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    different = {soak.case.name: int(soak.different) for soak in soaks}
    result = {
        "schema": 1,
        "question": "do launches under load give equal bits",
        "environment": gpu_environment(),
        "launches": replays * OF_A_GRAPH * len(soaks),
        "seconds": round(seconds, 1),
        "different_elements": different,
    }
    (chosen.out / "soak.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['launches']} launches in {seconds:.1f} s, elements that differ: {different}")
    return int(any(different.values()))


if __name__ == "__main__":
    raise SystemExit(main())
