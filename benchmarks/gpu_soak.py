"""Context attention launched a million times on all GPUs at once, every output compared with the first one's bits.

Run: ``python benchmarks/gpu_soak.py --out DIR [--launches 1000000]`` on a machine with Hopper GPUs and torch. All GPUs
work at the same time, first from a thread each of one process, then from a process each. Two streams of each GPU replay
graphs, each of its own case, workspace and outputs: a replay fills all outputs with NaN, launches the operator once
into each, and counts elements that differ; every few replays the same launches are made without a graph. ``soak.json``
in DIR is the result.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from threading import Barrier
from typing import Any

import torch
from gpu_environment import built_sources, gpu_environment
from prefill.cases import PrefillCase
from prefill.problem import PrefillProblem
from row_origin import keep, origin_of

from cubin_runtime import Config
from cubin_runtime.attention import Runtime, plan_context_attention

OF_A_GRAPH = 50
IN_FLIGHT = 8  # replays of each stream, before it launches without a graph and the host waits
CASES = (
    PrefillCase("soak", "paged", 128, (200, 1, 77, 130), (1300, 900, 77, 641), heads=8, kv_heads=2, page=64),
    PrefillCase("soak", "ragged", 64, (333, 0, 64, 1), (333, 500, 1000, 2000), heads=4, kv_heads=4),
)
Row = dict[str, Any]


class Soak:
    """A case on a stream of its own on the current device: a graph of launches, and what differed."""

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
        self.origin = origin_of(plan)

        def launches() -> None:
            outs.fill_(float("nan"))
            for out in outs:
                plan.run(problem.q, k, v, out, **named, workspace=workspace, stream=self.stream.cuda_stream)
            self.different.add_((outs.view(torch.int16) != self.wanted).sum())

        self.launches = launches
        torch.cuda.synchronize()
        self.launch()
        self.stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            launches()

    def launch(self) -> None:
        """The launches of a replay, from the host."""
        with torch.cuda.stream(self.stream):
            self.launches()

    def replay(self) -> None:
        with torch.cuda.stream(self.stream):
            self.graph.replay()


def work(device: int, soaks: list[Soak], launches: int, wait: Callable[[], object]) -> Row:
    """Launch and compare on one GPU, from when ``wait`` returns."""
    torch.cuda.set_device(device)
    rounds = -(-launches // ((IN_FLIGHT + 1) * OF_A_GRAPH * len(soaks)))
    wait()
    began = time.time()
    for _ in range(rounds):
        for _, soak in product(range(IN_FLIGHT), soaks):
            soak.replay()
        for soak in soaks:
            soak.launch()
        torch.cuda.synchronize(device)
    row: Row = {"device": device, "began": round(began, 3), "ended": round(time.time(), 3)}
    row["launches"] = rounds * (IN_FLIGHT + 1) * OF_A_GRAPH * len(soaks)
    row["different_elements"] = {soak.case.name: int(soak.different) for soak in soaks}
    cubins: dict[str, str] = {}
    for soak in soaks:
        cubins |= soak.origin["cubins"]
    return row | {"cubins": cubins, "commit": soaks[0].origin["commit"]}


def soaks_of(device: int, runtime: Runtime) -> list[Soak]:
    """Both cases on a GPU."""
    torch.manual_seed(device)
    with torch.cuda.device(device):
        return [Soak(case, runtime) for case in CASES]


def runtime_of(store: str) -> Runtime:
    """A runtime with the kernels that the benchmarks measure."""
    return Runtime(Config(store=Path(store), sources=built_sources(), offline=True))


def by_threads(devices: int, launches: int, store: str) -> list[Row]:
    """A thread for each GPU, in one process, on one runtime."""
    runtime = runtime_of(store)
    soaks = [soaks_of(device, runtime) for device in range(devices)]
    start = Barrier(devices)
    with ThreadPoolExecutor(devices) as pool:
        given = ((device, soaks[device], launches, start.wait) for device in range(devices))
        return list(pool.map(lambda each: work(*each), given))


def by_process(device: int, launches: int, store: str, start: Any, rows: Any) -> None:
    """One process, with its GPU."""
    torch.cuda.set_device(device)
    rows.put(work(device, soaks_of(device, runtime_of(store)), launches, start.wait))


def by_processes(devices: int, launches: int, store: str) -> list[Row]:
    """A process for each GPU."""
    context = torch.multiprocessing.get_context("spawn")
    start, rows = context.Barrier(devices), context.Queue()
    given = (launches, store, start, rows)
    processes = torch.multiprocessing.start_processes(by_process, given, devices, join=False, start_method="spawn")
    while not processes.join():  # which ends all of them, with its error, when one fails
        pass
    return sorted((rows.get(timeout=10) for _ in range(devices)), key=lambda row: row["device"])


def main() -> int:
    """Launch and compare; 1 if a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--launches", type=int, default=1_000_000, help="of all GPUs together (%(default)s)")
    chosen = parser.parse_args()
    devices = torch.cuda.device_count()
    launches = -(-chosen.launches // (2 * devices))
    result: Row = {"schema": 2, "question": "do launches under load give equal bits"}
    result |= {"environment": gpu_environment(), "devices": devices, "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        store = os.environ.get("CUBIN_RUNTIME_CACHE", f"{folder}/store")
        for by, soak in (("threads", by_threads), ("processes", by_processes)):
            rows = soak(devices, launches, store)
            result["rows"] += [{"by": by, **row} for row in rows]
            keep(result, chosen.out / "soak.json")
            for row in result["rows"][-devices:]:
                print({name: value for name, value in row.items() if name != "cubins"}, flush=True)
    return int(any(count for row in result["rows"] for count in row["different_elements"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
