"""What batch_invariant costs in prefill and paged decode: times beside the default on the same tensors.

Run: ``python benchmarks/gpu_invariant.py --out DIR`` on a machine with a Hopper GPU, torch and triton. Times are those
in a sequence of layers (``sequence/timing.py``), in whose rounds both take turns; beside them stand medians of single
calls, ``single_us``, before each of which triton's do_bench fills L2 with zeros.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_environment import built_sources, gpu_environment
from row_origin import keep, origin_of
from sequence.timing import Layers, Maker, Method, sequence_times
from triton.testing import do_bench

from cubin_runtime import Config
from cubin_runtime.attention import Runtime, plan_context_attention, plan_paged_decode

SCHEMA = 2
PAGE = 64
E4M3 = torch.float8_e4m3fn
HIDDEN = 4096
NAMES = {False: "default", True: "batch_invariant"}
Call = Callable[[], Any]


class Planned(NamedTuple):
    """A plan, the output that its runs write, and what makes a call for each layer."""

    plan: Any
    out: torch.Tensor
    make: Maker


class Comparison(NamedTuple):
    """Queries ``[tokens, heads, head_dim]``, and both plans on them by whether they are batch-invariant."""

    queries: torch.Tensor
    plans: dict[bool, Planned]


# head_dim, query heads, KV heads, batch, query tokens, keys
DECODES = [
    *((128, heads, 8, 1, 1, keys) for heads, keys in product((32, 64), (1024, 4096, 8192, 32768, 131072))),
    *((128, 32, 8, batch, 1, keys) for batch, keys in ((4, 8192), (16, 1024), (16, 8192), (64, 1024), (64, 8192))),
    *((128, 64, 8, batch, q_len, 8192) for batch, q_len in ((16, 1), (64, 1), (16, 4), (16, 8), (64, 8))),
    *((64, 64, 8, batch, 1, keys) for batch, keys in ((1, 1024), (1, 8192), (1, 32768), (16, 8192), (64, 8192))),
    (64, 64, 8, 16, 8, 8192),
]
# Likewise over e4m3 caches.
E4M3_DECODES = [
    *((128, 32, 8, 1, 1, keys) for keys in (1024, 8192, 32768, 131072)),
    *((128, 32, 8, batch, 1, keys) for batch, keys in ((4, 8192), (16, 1024), (16, 8192), (64, 1024), (64, 8192))),
    *((128, 32, 8, batch, 1, 4096) for batch in (16, 64)),
    *((128, 64, 8, batch, q_len, 8192) for batch, q_len in ((16, 1), (64, 1), (16, 2), (16, 4), (16, 8))),
    *((64, 64, 8, batch, 1, keys) for batch, keys in ((1, 8192), (16, 8192), (64, 1024), (64, 8192))),
    *((64, 64, 8, batch, 1, 4096) for batch in (16, 64)),
    *((64, 64, 8, 16, q_len, 8192) for q_len in (2, 8)),
]
# head_dim, batch, query tokens, keys: causal, 32 query heads over 8 KV heads
PREFILLS = [(128, 8, 2048, 2048), (128, 2, 8192, 8192), (128, 1, 16384, 16384), (128, 4, 512, 8192)]
PREFILLS += [(64, *sizes) for _, *sizes in PREFILLS]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=Method().rounds, help="of a sequence (%(default)s)")
    parser.add_argument("--rep", type=float, default=30, help="ms of device time for one median (%(default)s)")
    parser.add_argument("--only", default="", help="decode, e4m3 (decodes over such caches) or prefill; empty: all")
    parser.add_argument("--uneven", action="store_true", help="decodes of requests whose lengths differ too")
    return parser.parse_args()


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def integers(values: Any) -> torch.Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def decode_of(
    runtime: Runtime, case: tuple[int, ...], lengths: list[int], layers: int, cache: torch.dtype = torch.bfloat16
) -> Comparison:
    head_dim, heads, kv_heads, batch, q_len, keys = case
    columns = -(-keys // PAGE)
    pages = layers * batch * columns
    q = normal(batch, q_len, heads, head_dim)
    k, v = (normal(pages, PAGE, kv_heads, head_dim).to(cache) for _ in range(2))
    tables, lens = torch.randperm(pages, device="cuda").int().view(layers, batch, columns), integers(lengths)

    def planned(invariant: bool) -> Planned:
        out = torch.empty_like(q)
        options: dict[str, Any] = {"max_seq_len": keys, "batch_invariant": invariant, "runtime": runtime}
        plan = plan_paged_decode(q, k, v, tables[0], lens, out, **options)

        def make(stream: torch.cuda.Stream) -> list[Call]:
            handle = stream.cuda_stream
            run = partial(plan.run, workspace=plan.prepare(handle), stream=handle)
            return [partial(run, q, k, v, table, lens, out) for table in tables]

        return Planned(plan, out, make)

    return Comparison(q.flatten(0, 1), {invariant: planned(invariant) for invariant in NAMES})


def prefill_of(runtime: Runtime, case: tuple[int, ...], layers: int) -> Comparison:
    head_dim, batch, q_len, keys = case
    q = normal(batch * q_len, 32, head_dim)
    caches = [(normal(batch * keys, 8, head_dim), normal(batch * keys, 8, head_dim)) for _ in range(layers)]
    sums = {"q_cu_seq_lens": q_len, "kv_cu_seq_lens": keys}
    ragged = {name: integers([length * i for i in range(batch + 1)]) for name, length in sums.items()}
    bounds: dict[str, Any] = {"max_seq_len": keys, "max_q_len": q_len, "runtime": runtime}

    def planned(invariant: bool) -> Planned:
        out = torch.empty_like(q)
        plan = plan_context_attention(q, *caches[0], out, **ragged, **bounds, batch_invariant=invariant)
        return Planned(plan, out, lambda _: [partial(plan.run, q, k, v, out, **ragged) for k, v in caches])

    return Comparison(q, {invariant: planned(invariant) for invariant in NAMES})


def measured(comparison: Comparison, method: Method, rep: float) -> dict[str, Any]:
    """Microseconds by whether it was invariant, the ratio, and what was launched."""
    queries, plans = comparison
    makers = {NAMES[invariant]: planned.make for invariant, planned in plans.items()}
    times = sequence_times(Layers(queries, plans[False].out.view_as(queries), method), makers, method)
    default, invariant = (times[name]["us"] for name in NAMES.values())
    row: dict[str, Any] = {"default_us": default, "invariant_us": invariant, "ratio": invariant / default}
    row["rounds_us"] = {name: found["rounds_us"] for name, found in times.items()}
    stream = torch.cuda.current_stream()
    calls = {name: make(stream)[0] for name, make in makers.items()}
    row["single_us"] = {name: do_bench(call, 5, rep, return_mode="median") * 1e3 for name, call in calls.items()}
    row["differ_by"] = (plans[True].out.float() - plans[False].out.float()).abs().max().item()
    return row | origin_of(*(planned.plan for planned in plans.values()))


def main() -> int:
    """Measure all cases and write ``invariant.json``."""
    chosen = options()
    torch.manual_seed(0)
    store = Path(os.environ.get("CUBIN_RUNTIME_CACHE", chosen.out / "store"))
    runtime = Runtime(Config(store=store, sources=built_sources(), offline=True))
    method = Method(rounds=chosen.rounds, hidden=HIDDEN)
    cases: list[tuple[str, Callable[[], Comparison]]] = []
    if chosen.only in ("", "e4m3"):
        for case in E4M3_DECODES:
            name = "decode d{} {}/{} heads, batch {}, q_len {}, keys {}, e4m3".format(*case)
            cases.append((name, partial(decode_of, runtime, case, [case[-1]] * case[3], method.layers, E4M3)))
    if chosen.only in ("", "decode"):
        for case in DECODES:
            name = "decode d{} {}/{} heads, batch {}, q_len {}, keys {}".format(*case)
            cases.append((name, partial(decode_of, runtime, case, [case[-1]] * case[3], method.layers)))
            if chosen.uneven and case[3] > 1:
                lengths = torch.randint(case[-1] // 16, case[-1] + 1, (case[3],)).tolist()
                cases.append((f"{name} at most", partial(decode_of, runtime, case, lengths, method.layers)))
    if chosen.only in ("", "prefill"):
        for case in PREFILLS:
            name = "prefill d{}, batch {}, q_len {}, keys {}".format(*case)
            cases.append((name, partial(prefill_of, runtime, case, method.layers)))
    result: dict[str, Any] = {"schema": SCHEMA, "question": "what batch_invariant costs", "method": method.record()}
    result |= {"environment": gpu_environment(), "rows": []}
    for name, make in cases:
        row = {"case": name, **measured(make(), method, chosen.rep)}
        result["rows"].append(row)
        print(f"{name}: {row['default_us']:.1f} us, {row['invariant_us']:.1f} us, {row['ratio']:.3f}", flush=True)
        keep(result, chosen.out / "invariant.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
