"""Context-parallel decode on all GPUs of a machine: decode, exchange and merge, beside one GPU with all keys.

Run: ``python benchmarks/gpu_context_parallel.py --out DIR`` on a machine with Hopper GPUs and torch; one process a GPU,
as many as there are or ``--ranks``. Every time is of CUDA graph replays on the slowest rank: of the decode of a rank's
keys, of the collectives alone, of the merge kernels alone, and of the whole step. Keys lie in pages of a pool that is
far larger than L2; long requests share its pages. ``context_parallel.json`` also has the rate of the link between the
GPUs, how far outputs are from those of one GPU, and a model for 4 and 8 GPUs.

``--alone 2 8 64`` needs one GPU: it does what a rank of each of these groups does, one group after another, in a
process group that moves nothing. All is measured but the exchange; ``context_parallel_alone.json``.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from divided.model import predictions
from divided.ranks import GQA, MLA, POOL_BYTES, largest_error, measure, measured_link
from gpu_environment import built_sources, gpu_environment
from row_origin import keep

from cubin_runtime import Config
from cubin_runtime.attention import Runtime
from cubin_runtime.attention.tolerances import ELEMENT_TOLERANCE

KV_LENS, BATCHES = (2 << 10, 8 << 10, 32 << 10, 128 << 10, 1 << 20), (1, 8, 64)
MODELLED = (4, 8)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, help="processes, one a GPU (all GPUs)")
    parser.add_argument("--alone", type=int, nargs="+", help="sizes of groups, of which one GPU is a rank")
    parser.add_argument("--kv-lens", type=int, nargs="+", default=KV_LENS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    return parser.parse_args()


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as they come."""
    for row in rows:
        print(
            {
                name: round(value, 2) if isinstance(value, float) else value
                for name, value in row.items()
                if name != "cubins"
            },
            flush=True,
        )


def run_rank(rank: int, world: int, meeting: str, chosen: argparse.Namespace, store: str) -> None:
    """One process: rank 0 prints rows and writes the result."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=rank, world_size=world)
    runtime = Runtime(Config(store=Path(store), sources=built_sources(), offline=True))
    torch.manual_seed(0)
    result: dict[str, Any] = {"schema": 1, "question": "context-parallel decode", "environment": gpu_environment()}
    result |= {"world": world, "link": measured_link() if world > 1 else None, "errors": {}, "rows": []}
    began = time.perf_counter()
    for layout, exchange in product((GQA, MLA), ("all_to_all", "gather_reduce")):
        result["errors"][f"{layout.name} {exchange}"] = largest_error(runtime, layout, exchange)
    pool = torch.randn(POOL_BYTES // 2, device="cuda", dtype=torch.bfloat16)
    try:
        for layout, kv_len, batch in product((GQA, MLA), chosen.kv_lens, chosen.batches):
            rows = measure(runtime, pool, layout, batch, kv_len)
            result["rows"] += rows
            if rank == 0:
                show(rows)
                keep(result, chosen.out / "context_parallel.json")
        if world > 1:
            result["model"] = predictions(result["rows"], MODELLED)
    finally:  # what was measured before a fault is kept
        result["seconds"] = round(time.perf_counter() - began, 1)
        if rank == 0:
            keep(result, chosen.out / "context_parallel.json")
    if rank == 0:
        print(f"errors: {result['errors']}; seconds: {result['seconds']}")
    dist.destroy_process_group()
    if max(result["errors"].values()) > ELEMENT_TOLERANCE:
        raise SystemExit("a step differs from one GPU with all keys")


def run_alone(chosen: argparse.Namespace, store: str) -> None:
    """One process as the first rank of each group in turn; writes the result."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    runtime = Runtime(Config(store=Path(store), sources=built_sources(), offline=True))
    result: dict[str, Any] = {"schema": 1, "question": "context-parallel decode of one rank, without the exchange"}
    result |= {"environment": gpu_environment(), "rows": []}
    began = time.perf_counter()
    pool = torch.randn(POOL_BYTES // 2, device="cuda", dtype=torch.bfloat16)
    for world in chosen.alone:
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        for layout, kv_len, batch in product((GQA, MLA), chosen.kv_lens, chosen.batches):
            rows = measure(runtime, pool, layout, batch, kv_len, exchanges=False)
            result["rows"] += rows
            show(rows)
        dist.destroy_process_group()
    result["seconds"] = round(time.perf_counter() - began, 1)
    keep(result, chosen.out / "context_parallel_alone.json")


def main() -> None:
    """Start the ranks."""
    chosen = options()
    chosen.out.mkdir(parents=True, exist_ok=True)
    world = chosen.ranks or torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        store = os.environ.get("CUBIN_RUNTIME_CACHE", f"{folder}/store")
        if chosen.alone:
            run_alone(chosen, store)
            return
        torch.multiprocessing.spawn(run_rank, (world, f"{folder}/meeting", chosen, store), nprocs=world)


if __name__ == "__main__":
    main()
