"""What batch_invariant costs in prefill and paged decode: times beside the default on the same tensors.

Run: ``python benchmarks/gpu_invariant.py --out DIR`` on a machine with a Hopper GPU, torch and triton. A time is the
median over rounds of triton's do_bench median, which clears L2 before each call; in a round the two take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from gpu_environment import built_sources, gpu_environment
from row_origin import keep, origin_of
from triton.testing import do_bench

from cubin_runtime import Config
from cubin_runtime.attention import Runtime, plan_context_attention, plan_paged_decode

PAGE = 64
Call = Callable[[], torch.Tensor]
Plans = dict[bool, tuple[Any, Call]]  # a plan and a run of it, by whether it is batch-invariant
# head_dim, query heads, KV heads, batch, query tokens, keys
DECODES = [
    *((128, heads, 8, 1, 1, keys) for heads, keys in product((32, 64), (1024, 4096, 8192, 32768, 131072))),
    *((128, 32, 8, batch, 1, keys) for batch, keys in ((4, 8192), (16, 1024), (16, 8192), (64, 1024), (64, 8192))),
    *((128, 64, 8, batch, q_len, 8192) for batch, q_len in ((16, 1), (64, 1), (16, 4), (16, 8), (64, 8))),
    *((64, 64, 8, batch, 1, keys) for batch, keys in ((1, 1024), (1, 8192), (1, 32768), (16, 8192), (64, 8192))),
    (64, 64, 8, 16, 8, 8192),
]
# head_dim, batch, query tokens, keys: causal, 32 query heads over 8 KV heads
PREFILLS = [(128, 8, 2048, 2048), (128, 2, 8192, 8192), (128, 1, 16384, 16384), (128, 4, 512, 8192)]
PREFILLS += [(64, *sizes) for _, *sizes in PREFILLS]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rep", type=float, default=30, help="ms of device time for one median (%(default)s)")
    parser.add_argument("--only", default="", help="decode or prefill; empty: both")
    parser.add_argument("--uneven", action="store_true", help="decodes of requests whose lengths differ too")
    return parser.parse_args()


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def integers(values: Any) -> torch.Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def decode_of(runtime: Runtime, case: tuple[int, ...], lengths: list[int]) -> Plans:
    head_dim, heads, kv_heads, batch, q_len, keys = case
    columns = -(-keys // PAGE)
    q = normal(batch, q_len, heads, head_dim)
    k, v = (normal(batch * columns, PAGE, kv_heads, head_dim) for _ in range(2))
    table = torch.randperm(batch * columns, device="cuda").int().reshape(batch, columns)
    tensors = (q, k, v, table, integers(lengths))

    def planned(invariant: bool) -> tuple[Any, Call]:
        out = torch.empty_like(q)
        plan = plan_paged_decode(*tensors, out, max_seq_len=keys, batch_invariant=invariant, runtime=runtime)
        return plan, partial(run, plan, (*tensors, out), {}, out)

    return {invariant: planned(invariant) for invariant in (False, True)}


def prefill_of(runtime: Runtime, case: tuple[int, ...]) -> Plans:
    head_dim, batch, q_len, keys = case
    q, k, v = normal(batch * q_len, 32, head_dim), normal(batch * keys, 8, head_dim), normal(batch * keys, 8, head_dim)
    sums = {"q_cu_seq_lens": q_len, "kv_cu_seq_lens": keys}
    ragged = {name: integers([length * i for i in range(batch + 1)]) for name, length in sums.items()}
    bounds: dict[str, Any] = {"max_seq_len": keys, "max_q_len": q_len, "runtime": runtime}

    def planned(invariant: bool) -> tuple[Any, Call]:
        out = torch.empty_like(q)
        plan = plan_context_attention(q, k, v, out, **ragged, **bounds, batch_invariant=invariant)
        return plan, partial(run, plan, (q, k, v, out), ragged, out)

    return {invariant: planned(invariant) for invariant in (False, True)}


def run(plan: Any, tensors: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor], out: torch.Tensor) -> Any:
    """Run a plan; its output."""
    plan.run(*tensors, **named)
    return out


def measured(plans: Plans, rounds: int, rep: float) -> dict[str, Any]:
    """Microseconds by whether it was invariant, the ratio, and what was launched."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for invariant, found in times.items():
            found.append(do_bench(plans[invariant][1], warmup=5, rep=rep, return_mode="median") * 1e3)
    default, invariant = (statistics.median(times[which]) for which in (False, True))
    difference = (plans[True][1]().float() - plans[False][1]().float()).abs().max().item()
    row = {"default_us": default, "invariant_us": invariant, "ratio": invariant / default, "differ_by": difference}
    return row | origin_of(*(plan for plan, _ in plans.values()))


def main() -> int:
    """Measure all cases and write ``invariant.json``."""
    chosen = options()
    torch.manual_seed(0)
    store = Path(os.environ.get("CUBIN_RUNTIME_CACHE", chosen.out / "store"))
    runtime = Runtime(Config(store=store, sources=built_sources(), offline=True))
    cases: list[tuple[str, Callable[[], Plans]]] = []
    if chosen.only != "prefill":
        for case in DECODES:
            name = "decode d{} {}/{} heads, batch {}, q_len {}, keys {}".format(*case)
            cases.append((name, partial(decode_of, runtime, case, [case[-1]] * case[3])))
            if chosen.uneven and case[3] > 1:
                lengths = torch.randint(case[-1] // 16, case[-1] + 1, (case[3],)).tolist()
                cases.append((f"{name} at most", partial(decode_of, runtime, case, lengths)))
    if chosen.only != "decode":
        for case in PREFILLS:
            cases.append(("prefill d{}, batch {}, q_len {}, keys {}".format(*case), partial(prefill_of, runtime, case)))
    result: dict[str, Any] = {"schema": 1, "question": "what batch_invariant costs"}
    result |= {"environment": gpu_environment(), "rows": []}
    for name, make in cases:
        row = {"case": name, **measured(make(), chosen.rounds, chosen.rep)}
        result["rows"].append(row)
        print(f"{name}: {row['default_us']:.1f} us, {row['invariant_us']:.1f} us, {row['ratio']:.3f}", flush=True)
        keep(result, chosen.out / "invariant.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
