"""Sparse MLA decode for a minute: graphs replayed with other lists and lengths, memory watched, outputs compared.

Run: ``python benchmarks/gpu_sparse_mla_soak.py --out DIR [--seconds 60]`` on a machine with a Hopper GPU and torch.
Each case has a stream, a plan and a captured graph of its own, and all streams work at the same time. Before each
replay its lists and lengths change: holes from none to all, slots outside the cache, empty lists, lengths from 0 on.
At intervals a launch without the graph must give the same bits, and tokens are compared with float64. Every few seconds
a case is planned and captured anew. ``sparse_mla_soak.json`` in DIR is the result; the exit status is 1 if an output
differs or memory grows.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from decode.mla_measuring import SCALE
from decode.sparse_mla_measuring import LATENT, RowPool, keys_of
from gpu_environment import built_sources, gpu_environment
from row_origin import keep, origin_of

from cubin_runtime import Config
from cubin_runtime.attention import Runtime, plan_sparse_mla_decode

COLUMNS = 576
POOL_BYTES = 1 << 30
BETWEEN_COMPARISONS = 51  # replays of each case, an odd number, so that each of HOLES comes to be compared
REBUILD_SECONDS, SAMPLE_SECONDS = 2.0, 5.0
HOLES = (0.0, 0.1, 0.9, 1.0)
OUTSIDE = 0.001  # of all slots
COMPARED = 4  # tokens
TOLERANCE = 0.01  # norm of a token's difference from float64 over the norm of its output
# Of device or host memory: a block of torch's allocator, and a few modules that are loaded late.
GROWTH_BYTES = 32 << 20
Row = dict[str, Any]


class SoakCase(NamedTuple):
    """Sizes and options of one plan."""

    rows: str
    tokens: int
    heads: int
    width: int
    sinks: bool = False
    batch_invariant: bool = False

    @property
    def label(self) -> str:
        """The case in words."""
        rows = "656 bytes" if self.rows == "e4m3" else self.rows
        more = ", sinks" * self.sinks + ", invariant" * self.batch_invariant
        return f"{self.heads} heads, {self.tokens} x {self.width:,}, rows of {rows}{more}"


CASES = (
    SoakCase("e4m3", 1, 128, 2048),
    SoakCase("e4m3", 64, 128, 2048),
    SoakCase("e4m3", 37, 16, 2048, sinks=True),
    SoakCase("e4m3", 300, 32, 500, batch_invariant=True),
    SoakCase("e4m3", 130, 64, 2048, sinks=True, batch_invariant=True),
    SoakCase("bf16", 33, 16, 2048),
    SoakCase("bf16", 4, 128, 300, sinks=True),
)


class Soak:
    """A case on a stream of its own: tensors that stay, a plan and a graph that are made anew at times."""

    def __init__(self, case: SoakCase, pool: torch.Tensor, runtime: Runtime) -> None:
        self.case, self.pool, self.runtime, self.stream = case, pool, runtime, torch.cuda.Stream()
        shape = (case.tokens, case.heads)
        self.q = torch.randn(*shape, COLUMNS, device="cuda", dtype=torch.bfloat16)
        self.out, self.again = (torch.empty(*shape, LATENT, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.lists = torch.full((case.tokens, case.width), -1, device="cuda", dtype=torch.int32)
        self.lens = torch.zeros(case.tokens, device="cuda", dtype=torch.int32)
        self.sinks = torch.randn(case.heads, device="cuda") if case.sinks else None
        self.holes = cycle(HOLES)
        self.different = torch.zeros((), device="cuda", dtype=torch.int64)
        self.worst = torch.zeros((), device="cuda", dtype=torch.float64)
        self.replays = self.comparisons = self.plans = 0
        self.build()

    def build(self) -> None:
        """Plan and capture."""
        torch.cuda.synchronize()
        self.graph: Any = None  # before the workspace that it has the address of
        tensors = {"topk_lens": self.lens, "sinks": self.sinks}
        self.plan = plan_sparse_mla_decode(
            self.q,
            self.pool,
            self.lists,
            self.out,
            softmax_scale=SCALE,
            batch_invariant=self.case.batch_invariant,
            runtime=self.runtime,
            **tensors,
        )
        self.plan.preload()
        self.workspace = self.plan.prepare(self.stream.cuda_stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.launch(self.out)
        self.plans += 1

    def launch(self, out: torch.Tensor) -> None:
        """Fill the output with NaN, and launch once."""
        out.fill_(float("nan"))
        given = {"topk_lens": self.lens, "sinks": self.sinks, "workspace": self.workspace}
        self.plan.run(self.q, self.pool, self.lists, out, **given, stream=self.stream.cuda_stream)

    def replay(self) -> None:
        """Replay with other lists and lengths."""
        with torch.cuda.stream(self.stream):
            self.lists.random_(0, len(self.pool))
            chance = torch.rand(self.lists.shape, device="cuda")
            self.lists.masked_fill_(chance < next(self.holes), -1)
            self.lists.masked_fill_(chance > 1 - OUTSIDE, 2**31 - 1)
            self.lens.random_(0, self.case.width + 1)
            self.graph.replay()
        self.replays += 1

    def compare(self) -> None:
        """Compare the last replay with a launch, bit for bit, and random tokens with float64."""
        with torch.cuda.stream(self.stream):
            self.launch(self.again)
            self.different.add_((self.out.view(torch.int16) != self.again.view(torch.int16)).sum())
            for token in torch.randint(self.case.tokens, (COMPARED,)).tolist():
                expected = self.reference(token)
                error = (self.out[token].double() - expected).norm() / (expected.norm() + 1e-6)
                self.worst = torch.maximum(self.worst, error)  # NaN, if it is
        self.comparisons += 1

    def reference(self, token: int) -> torch.Tensor:
        """The output of a token in float64."""
        slots = self.lists[token].long()
        counted = torch.arange(len(slots), device="cuda") < self.lens[token]
        counted &= (slots >= 0) & (slots < len(self.pool))
        keys = keys_of(self.pool[torch.where(counted, slots, 0)])
        scores = (self.q[token].double() @ keys.T * SCALE).masked_fill(~counted, float("-inf"))
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.double()[:, None]], dim=1)
        weights = scores.softmax(dim=1).nan_to_num(0.0)  # of an empty list
        return weights[:, : len(slots)] @ keys[:, :LATENT]

    def row(self) -> Row:
        """What came out."""
        counts = {"replays": self.replays, "comparisons": self.comparisons, "plans": self.plans}
        found = {"different_elements": int(self.different), "largest_difference": float(self.worst)}
        return {"label": self.case.label, **self.case._asdict(), **counts, **found, **origin_of(self.plan)}


def memory() -> dict[str, int]:
    """Bytes of the device's that are in use, and those of this process that are resident."""
    free, total = torch.cuda.mem_get_info()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"device": total - free, "host": pages * os.sysconf("SC_PAGE_SIZE")}


def growth(samples: list[dict[str, Any]]) -> dict[str, int]:
    """Bytes more in the last third than in the second, by medians: what a new plan takes comes and goes.

    In the first, libraries are loaded.
    """
    third = -(-len(samples) // 3)
    early, late = samples[third : 2 * third], samples[-third:]
    return {
        name: round(median(sample[name] for sample in late) - median(sample[name] for sample in early))
        for name in ("device", "host")
    }


def main() -> int:
    """Replay, compare and watch; 1 if an output differs or memory grows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60, help="(%(default)s)")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    result: Row = {"schema": 2, "question": "do replays with changing lists stay right, in as much memory"}
    result |= {"environment": gpu_environment(), "seconds": chosen.seconds, "tolerance": TOLERANCE}
    with tempfile.TemporaryDirectory() as folder:
        store = Path(os.environ.get("CUBIN_RUNTIME_CACHE", f"{folder}/store"))
        runtime = Runtime(Config(store=store, sources=built_sources(), offline=True))
        pools = {
            "e4m3": RowPool(POOL_BYTES).flat("e4m3").view(-1, 656),
            "bf16": RowPool(POOL_BYTES // (2 * COLUMNS) * 2 * COLUMNS).flat("bf16").view(-1, COLUMNS),
        }
        soaks = [Soak(case, pools[case.rows], runtime) for case in CASES]
        turns, samples = cycle(soaks), list[dict[str, Any]]()
        began = rebuilt = time.monotonic()
        while (now := time.monotonic() - began) < chosen.seconds:
            for _ in range(BETWEEN_COMPARISONS):
                for soak in soaks:
                    soak.replay()
            for soak in soaks:
                soak.compare()
            torch.cuda.synchronize()
            if time.monotonic() - rebuilt > REBUILD_SECONDS:
                next(turns).build()
                rebuilt = time.monotonic()
            if not samples or now - samples[-1]["second"] > SAMPLE_SECONDS:
                gc.collect()
                samples.append({"second": round(now, 1), **memory()})
        result |= {"rows": [soak.row() for soak in soaks], "memory": samples, "growth": growth(samples)}
        keep(result, chosen.out / "sparse_mla_soak.json")
    for row in result["rows"]:
        print({name: value for name, value in row.items() if name != "cubins"}, flush=True)
    print(result["growth"])
    wrong = [row for row in result["rows"] if row["different_elements"] or not row["largest_difference"] < TOLERANCE]
    return int(bool(wrong) or any(grown > GROWTH_BYTES for grown in result["growth"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
