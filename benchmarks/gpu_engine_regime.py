"""Attention as an engine calls it: decodes planned for the model's longest context, with lengths far below it, and
mixed; new query tokens behind cached contexts (``--kind engine_chunks``); MLA (``--kind engine_regime_mla``).

Run: ``python benchmarks/gpu_engine_regime.py --out DIR`` on a machine with a Hopper GPU, torch and triton. Times are
those in a sequence of layers (``sequence/timing.py``). Peers are FlashInfer's fa2, which plans with the real lengths,
and FlashAttention-3 as vLLM calls it, for the real lengths and (of decodes) for the longest context, where
``vllm.vllm_flash_attn`` can be imported; the result says why not.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from decode import mla_regime
from decode.cases import FA3_SPLITS, Case, mixed, same
from decode.peers import describe, fa2
from decode.problem import Pool, Problem, difference, tables_of
from decode.timing import Call
from gpu_environment import built_sources, gpu_environment
from row_origin import keep, origin_of
from sequence.timing import Layers, Maker, Method, sequence_times

from cubin_runtime import Config
from cubin_runtime.attention import Runtime, plan_context_attention, plan_paged_decode
from cubin_runtime.integrations.paged_batch import LayerOptions, few_tokens, is_decoded

SCHEMA = 1
HIDDEN = 4096
PAGE = 16
BOUNDS = (8192, 131072)
SEED = 3


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
    of_rank = {f"1 x {keys}": same(1, keys) for keys in (1024, 4096, 16384)}
    of_rank |= {f"{len(each)} requests, mixed": each for each in few}
    found += [Case("8/1 heads", name, own, q_heads=8, kv_heads=1, page=PAGE) for name, own in of_rank.items()]
    return [*found, Case("64/8 heads, D 64", "64 x 1024, mixed", few[0], head_dim=64, page=PAGE)]


def chunk_cases() -> list[Case]:
    """A question behind a document, the last chunk of a prompt: 8 to 512 tokens, of one request or a few."""
    shapes = {
        "32/8 heads": (32, 8, 128),
        "8/1 heads": (8, 1, 128),
        "64/8 heads, D 64": (64, 8, 64),
        "16/8 heads, D 256": (16, 8, 256),
    }
    sizes = [(1, keys, new) for keys in (1024, 4096, 16384, 65536) for new in (8, 64, 256)]
    sizes += [(1, 16384, 128), (1, 16384, 512), *((batch, 4096, new) for batch in (4, 16, 64) for new in (8, 16, 64))]
    return [
        Case(
            section,
            f"{batch} x {keys}, {new} new",
            same(batch, keys),
            q_len=new,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            page=PAGE,
        )
        for section, (q_heads, kv_heads, head_dim) in shapes.items()
        for batch, keys, new in (sizes if section == "32/8 heads" else sizes[3:9])
    ]


def ours_of(problem: Problem, runtime: Runtime, bound: int) -> tuple[Any, Maker]:
    """The plan for contexts of ``bound``, and its calls of all page tables."""
    p, case, tables = problem, problem.case, tables_of(problem, bound)
    k, v = p.kv[:, 0], p.kv[:, 1]
    given: dict[str, Any] = {"q": p.q, "seq_lens": p.lens, "out": p.out}
    options: dict[str, Any] = {"page_table": tables[0], "max_seq_len": bound, "runtime": runtime}
    if case.q_len == 1:
        given |= {"k_cache": k, "v_cache": v}
        plan = plan_paged_decode(**given, **options)
    elif few := decoded_tokens(case, bound):
        given |= {"k_cache": k, "v_cache": v, "q_cu_seq_lens": starts_of(case)}
        plan = plan_paged_decode(**given, **options, max_q_len=few)
    else:
        given |= {"k": k, "v": v, "q_cu_seq_lens": starts_of(case)}
        plan = plan_context_attention(**given, **options, max_q_len=case.q_len)

    def make(stream: torch.cuda.Stream) -> list[Call]:
        handle = stream.cuda_stream
        workspace = plan.prepare(handle)

        def call_of(table: torch.Tensor) -> Call:
            return lambda: plan.run(**given, page_table=table, workspace=workspace, stream=handle)

        return [call_of(table) for table in tables]

    return plan, make


def decoded_tokens(case: Case, bound: int) -> int:
    """The bound on the new tokens of a request with which engines have them decoded; 0: they do not."""
    plain = LayerOptions(1.0, -1, 0.0, None, batch_invariant=False)
    few = few_tokens(case.q_heads, case.kv_heads, case.head_dim, plain)
    return few if case.q_len <= few and is_decoded(case.batch, case.kv_heads, bound, plain.window_left) else 0


def starts_of(case: Case) -> torch.Tensor:
    """The running sums of the query tokens."""
    return torch.arange(case.batch + 1, device="cuda", dtype=torch.int32) * case.q_len


def fa3_of(problem: Problem, bound: int) -> list[Call]:
    """FlashAttention-3 for contexts of ``bound``, with the scheduler metadata that vLLM makes once a step.

    Raises:
        ImportError: there is no vLLM.
    """
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

    p, case = problem, problem.case
    out = torch.empty_like(p.out)
    splits = FA3_SPLITS if case.q_len == 1 else 0  # steps with new tokens are not captured: as many as it likes
    common = {"max_seqlen_q": case.q_len, "max_seqlen_k": bound, "cu_seqlens_q": starts_of(case), "causal": True}
    heads = {"num_heads_q": case.q_heads, "num_heads_kv": case.kv_heads, "headdim": case.head_dim}
    sizes = {"batch_size": case.batch, "page_size": case.page, "cache_seqlens": p.lens, "qkv_dtype": p.q.dtype}
    metadata = get_scheduler_metadata(**common, **heads, **sizes, window_size=(-1, -1), num_splits=splits)
    options = {"softmax_scale": p.scale, "scheduler_metadata": metadata, "fa_version": 3, "num_splits": splits}
    tensors = {"q": p.q, "k": p.kv[:, 0], "v": p.kv[:, 1], "out": out, "seqused_k": p.lens}

    def call_of(table: torch.Tensor) -> Call:
        return lambda: flash_attn_varlen_func(**tensors, **common, **options, block_table=table)

    return [call_of(table) for table in tables_of(problem, bound)]


def peers_of(name: str, problem: Problem) -> dict[str, Callable[[], list[Call]]]:
    """What makes the calls of a peer, by what it is planned for."""
    if name == "fa2":
        return {"fa2": partial(fa2, problem)}
    if problem.case.q_len > 1:  # such a step is planned with its own lengths
        return {"fa3": partial(fa3_of, problem, problem.case.longest)}
    bounds = {"tight": problem.case.longest, str(BOUNDS[-1]): BOUNDS[-1]}
    return {f"fa3, {words}": partial(fa3_of, problem, bound) for words, bound in bounds.items()}


PEERS = ("fa2", "fa3")


@dataclass(frozen=True, slots=True)
class Kind:
    """What a run measures: the question that it answers, cases, tensors of a case, and what makes the calls."""

    question: str
    page: int
    cases: Callable[[], list[Any]]
    problem: Callable[[Any, Pool, int], Any]
    ours: Callable[[Any, Runtime, int], tuple[Any, Maker]]
    peers: Callable[[str, Any], dict[str, Callable[[], list[Call]]]]


KINDS = {
    "engine_regime": Kind("decode planned for more than the lengths", PAGE, cases, Problem, ours_of, peers_of),
    "engine_chunks": Kind("new tokens behind cached contexts", PAGE, chunk_cases, Problem, ours_of, peers_of),
    "engine_regime_mla": Kind(
        "MLA decode planned for more than the lengths",
        mla_regime.PAGE,
        mla_regime.cases,
        mla_regime.MlaProblem,
        mla_regime.ours_of,
        mla_regime.peers_of,
    ),
}


def row_of(kind: Kind, case: Any, runtime: Runtime, pool: Pool, peers: list[str], method: Method) -> dict[str, Any]:
    """Microseconds by contestant: ours by bound, the tight one first, and the peers; their outputs beside ours."""
    problem = kind.problem(case, pool, method.layers)
    row = {"section": case.section, "label": case.label, "longest": case.longest, "kv_bytes": case.kv_bytes}
    plans, makers = {}, {}
    for bound in (case.longest, *[bound for bound in BOUNDS if bound >= case.longest]):
        name = "ours, tight" if bound == case.longest else f"ours, {bound}"
        plans[name], makers[name] = kind.ours(problem, runtime, bound)
    makers["ours, tight"](torch.cuda.current_stream())[0]()
    row["difference"], row["errors"] = {}, {}
    for name, make in (item for peer in peers for item in kind.peers(peer, problem).items()):
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
    parser.add_argument("--kind", choices=KINDS, default="engine_regime", help="what to measure (%(default)s)")
    parser.add_argument("--rounds", type=int, default=Method().rounds, help="of a sequence (%(default)s)")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    store = Path(os.environ.get("CUBIN_RUNTIME_CACHE", chosen.out / "store"))
    runtime = Runtime(Config(store=store, sources=built_sources(), offline=True))
    kind, method = KINDS[chosen.kind], Method(rounds=chosen.rounds, hidden=HIDDEN)
    every = kind.cases()
    pool = Pool(method.layers * max(case.pages * case.page_bytes for case in every))
    peers, skipped = [name for name in chosen.peers.split(",") if name], {}
    if "fa3" in peers:
        try:
            import vllm.vllm_flash_attn  # noqa: F401
        except Exception as failure:  # why there is no such peer is a result
            peers.remove("fa3")
            skipped["fa3"] = describe(failure)
    result: dict[str, Any] = {"schema": SCHEMA, "question": kind.question}
    result |= {"method": method.record(), "page": kind.page, "bounds": BOUNDS, "skipped": skipped}
    result |= {"environment": gpu_environment(), "rows": []}
    for case in every:
        row = row_of(kind, case, runtime, pool, peers, method)
        result["rows"].append(row)
        keep(result, chosen.out / f"{chosen.kind}.json")
        print(f"{row['section']}, {row['label']}: {row['us']} {row['errors'] or ''}", flush=True)
    return int(any(name.startswith("ours") for row in result["rows"] for name in row["errors"]))


if __name__ == "__main__":
    raise SystemExit(main())
