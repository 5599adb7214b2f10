"""Paged decode as an engine calls it: planned for the model's longest context, with lengths far below it, and mixed.

Run: ``python benchmarks/gpu_engine_regime.py --out DIR`` on a machine with a Hopper GPU, torch and triton. Times are
those in a sequence of layers (``sequence/timing.py``). Peers are FlashInfer's fa2, which plans with the real lengths,
and FlashAttention-3 as vLLM calls it, for the real lengths and for the longest context, where ``vllm.vllm_flash_attn``
can be imported; the result says why not.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from decode.cases import Case, same
from decode.peers import describe, fa2
from decode.problem import Pool, Problem, difference
from decode.timing import Call
from gpu_environment import built_sources, gpu_environment
from row_origin import keep, origin_of
from sequence.timing import Layers, Maker, Method, sequence_times

from cubin_runtime import Config
from cubin_runtime.attention import Runtime, plan_paged_decode

SCHEMA = 1
HIDDEN = 4096
PAGE = 16
BOUNDS = (8192, 131072)
SEED = 3
FA3_SPLITS = 32  # as vLLM asks for where it captures graphs


def mixed(draw: random.Random, batch: int, mean: int) -> tuple[int, ...]:
    """Lengths from a twentieth to nearly twice the mean."""
    return tuple(max(1, int(mean * draw.uniform(0.05, 1.95))) for _ in range(batch))


def cases() -> list[Case]:
    """Shapes of an 8B model, one of them as a rank of eight sees it, and of a model with head_dim 64."""
    draw = random.Random(SEED)
    lengths: dict[str, tuple[int, ...]] = {
        "1 x 1024": same(1, 1024),
        "8 x 1024": same(8, 1024),
        "16 x 7000": same(16, 7000),
        "64 x 1024": same(64, 1024),
        "64 x 1024, mixed": mixed(draw, 64, 1024),
        "128 x 2048, mixed": mixed(draw, 128, 2048),
        "256 x 200": same(256, 200),
        "256 x 200, mixed": mixed(draw, 256, 200),
    }
    found = [Case("32/8 heads", name, own, q_heads=32, page=PAGE) for name, own in lengths.items()]
    few = mixed(draw, 64, 1024), mixed(draw, 256, 200)
    found += [Case("8/1 heads", f"{len(n)} requests, mixed", n, q_heads=8, kv_heads=1, page=PAGE) for n in few]
    return [*found, Case("64/8 heads, D 64", "64 x 1024, mixed", few[0], head_dim=64, page=PAGE)]


def tables_of(problem: Problem, bound: int) -> list[torch.Tensor]:
    """Its page tables with columns for ``bound`` keys."""
    columns = -(-bound // problem.case.page)
    return [torch.nn.functional.pad(table, (0, columns - table.shape[1])) for table in problem.tables]


def ours_of(problem: Problem, runtime: Runtime, bound: int) -> tuple[Any, Maker]:
    """The plan for contexts of ``bound``, and its calls of all page tables."""
    p, tables = problem, tables_of(problem, bound)
    k, v = p.kv[:, 0], p.kv[:, 1]
    plan = plan_paged_decode(p.q, k, v, tables[0], p.lens, p.out, max_seq_len=bound, runtime=runtime)

    def make(stream: torch.cuda.Stream) -> list[Call]:
        handle = stream.cuda_stream
        workspace = plan.prepare(handle)

        def call_of(table: torch.Tensor) -> Call:
            return lambda: plan.run(p.q, k, v, table, p.lens, p.out, workspace=workspace, stream=handle)

        return [call_of(table) for table in tables]

    return plan, make


def fa3_of(problem: Problem, bound: int) -> list[Call]:
    """FlashAttention-3 for contexts of ``bound``, with the scheduler metadata that vLLM makes once a step.

    Raises:
        ImportError: there is no vLLM.
    """
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

    p, case = problem, problem.case
    out = torch.empty_like(p.out)
    starts = torch.arange(case.batch + 1, device="cuda", dtype=torch.int32)
    common = {"max_seqlen_q": 1, "max_seqlen_k": bound, "cu_seqlens_q": starts, "causal": True}
    heads = {"num_heads_q": case.q_heads, "num_heads_kv": case.kv_heads, "headdim": case.head_dim}
    sizes = {"batch_size": case.batch, "page_size": case.page, "cache_seqlens": p.lens, "qkv_dtype": p.q.dtype}
    metadata = get_scheduler_metadata(**common, **heads, **sizes, window_size=(-1, -1), num_splits=FA3_SPLITS)
    options = {"softmax_scale": p.scale, "scheduler_metadata": metadata, "fa_version": 3, "num_splits": FA3_SPLITS}
    tensors = {"q": p.q, "k": p.kv[:, 0], "v": p.kv[:, 1], "out": out, "seqused_k": p.lens}

    def call_of(table: torch.Tensor) -> Call:
        return lambda: flash_attn_varlen_func(**tensors, **common, **options, block_table=table)

    return [call_of(table) for table in tables_of(problem, bound)]


def peers_of(name: str, problem: Problem) -> dict[str, Callable[[], list[Call]]]:
    """What makes the calls of a peer, by what it is planned for."""
    if name == "fa2":
        return {"fa2": partial(fa2, problem)}
    bounds = {"tight": problem.case.longest, str(BOUNDS[-1]): BOUNDS[-1]}
    return {f"fa3, {words}": partial(fa3_of, problem, bound) for words, bound in bounds.items()}


PEERS = ("fa2", "fa3")


def row_of(case: Case, runtime: Runtime, pool: Pool, peers: list[str], method: Method) -> dict[str, Any]:
    """Microseconds by contestant: ours by bound, the tight one first, and the peers; their outputs beside ours."""
    problem = Problem(case, pool, method.layers)
    row = {"section": case.section, "label": case.label, "longest": case.longest, "kv_bytes": case.kv_bytes}
    plans, makers = {}, {}
    for bound in (case.longest, *BOUNDS):
        name = "ours, tight" if bound == case.longest else f"ours, {bound}"
        plans[name], makers[name] = ours_of(problem, runtime, bound)
    makers["ours, tight"](torch.cuda.current_stream())[0]()
    row["difference"], row["errors"] = {}, {}
    for name, make in (item for peer in peers for item in peers_of(peer, problem).items()):
        try:
            row["difference"][name] = difference(make()[0](), problem.out)
            makers[name] = lambda _, make=make: make()
        except Exception as failure:  # of a peer, is a result
            row["errors"][name] = describe(failure)
    times = sequence_times(Layers(problem.q, problem.out, method), makers, method)
    row["us"] = {name: times[name]["us"] for name in makers if "us" in times[name]}
    row["rounds_us"] = {name: found["rounds_us"] for name, found in times.items() if "us" in found}
    row["errors"] |= {name: found["error"] for name, found in times.items() if "error" in found}
    return row | origin_of(*plans.values())


def main() -> int:
    """Measure and write ``engine_regime.json``; 1 if a call of ours failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", default=",".join(PEERS), help="by comma (%(default)s); empty: nobody")
    parser.add_argument("--rounds", type=int, default=Method().rounds, help="of a sequence (%(default)s)")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    store = Path(os.environ.get("CUBIN_RUNTIME_CACHE", chosen.out / "store"))
    runtime = Runtime(Config(store=store, sources=built_sources(), offline=True))
    method = Method(rounds=chosen.rounds, hidden=HIDDEN)
    pool = Pool(method.layers * max(case.pages * case.page_bytes for case in cases()))
    peers, skipped = [name for name in chosen.peers.split(",") if name], {}
    if "fa3" in peers:
        try:
            import vllm.vllm_flash_attn  # noqa: F401
        except Exception as failure:  # why there is no such peer is a result
            peers.remove("fa3")
            skipped["fa3"] = describe(failure)
    result: dict[str, Any] = {"schema": SCHEMA, "question": "decode planned for more than the lengths"}
    result |= {"method": method.record(), "page": PAGE, "bounds": BOUNDS, "skipped": skipped}
    result |= {"environment": gpu_environment(), "rows": []}
    for case in cases():
        row = row_of(case, runtime, pool, peers, method)
        result["rows"].append(row)
        keep(result, chosen.out / "engine_regime.json")
        print(f"{row['section']}, {row['label']}: {row['us']} {row['errors'] or ''}", flush=True)
    return int(any(name.startswith("ours") for row in result["rows"] for name in row["errors"]))


if __name__ == "__main__":
    raise SystemExit(main())
