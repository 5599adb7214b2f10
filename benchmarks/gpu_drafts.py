"""Verifying 1 to 64 draft tokens per request: paged decode with a tree's mask, beside context attention without one.

Run: ``python benchmarks/gpu_drafts.py --out DIR`` on a machine with a Hopper GPU, torch and triton. A time is the
median over rounds of triton's do_bench median, which clears L2 before each call; in a round all rows take turns.
``context_us`` is causal context attention over the same pages and query tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_environment import built_sources, gpu_environment
from triton.testing import do_bench

from cubin_runtime import Config
from cubin_runtime.attention import Runtime, context_attention, paged_decode

PAGE = 64
BATCH, KEYS, KV_HEADS, HEAD_DIM = 64, 16384, 8, 128
TOKENS = (1, 4, 8, 16, 24, 32, 48, 64)
DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--heads", type=int, nargs="*", default=[32, 64], help="query heads over 8 KV heads (32 64)")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS, help="query tokens per request")
    parser.add_argument("--rep", type=float, default=40, help="ms of device time for one median (%(default)s)")
    return parser.parse_args()


def integers(values: Any) -> torch.Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def tree_masks(q_len: int) -> torch.Tensor:
    """Random trees, packed: bit j of a row is set for the token itself and its ancestors."""
    generator = torch.Generator().manual_seed(q_len)
    rows = []
    for _ in range(BATCH):
        words: list[int] = []
        for token in range(q_len):
            parent = int(torch.randint(-1, token, (1,), generator=generator)) if token else -1
            words.append((words[parent] if parent >= 0 else 0) | 1 << token)
        rows.append([[word >> shift & 0xFFFFFFFF for shift in range(0, q_len, 32)] for word in words])
    return torch.tensor(rows, dtype=torch.int64).to(torch.uint32).cuda()


def rows_of(runtime: Runtime, heads: int, tokens: Sequence[int]) -> dict[str, Callable[[], Any]]:
    """Every row's call by its name."""
    columns = KEYS // PAGE
    cache = [torch.randn(BATCH * columns, PAGE, KV_HEADS, HEAD_DIM, device="cuda").bfloat16() for _ in range(2)]
    caches = {"bf16": cache, "e4m3": [part.to(torch.float8_e4m3fn) for part in cache]}
    table = torch.randperm(BATCH * columns, device="cuda").int().reshape(BATCH, columns)
    lengths = integers([KEYS] * BATCH)
    calls: dict[str, Callable[[], Any]] = {}
    for q_len in tokens:
        q = torch.randn(BATCH, q_len, heads, HEAD_DIM, device="cuda").bfloat16()
        out = torch.empty_like(q)
        common = {"max_seq_len": KEYS, "runtime": runtime, "out": out}
        mask = tree_masks(q_len)
        for dtype, (k, v) in caches.items():
            for invariant in (False, True) if dtype == "bf16" else (False,):
                name = f"{dtype} {heads}/8 heads q_len {q_len}{' invariant' if invariant else ''}"
                call = partial(paged_decode, q, k, v, table, lengths, mask=mask, batch_invariant=invariant, **common)
                calls[name] = call
        flat = {**common, "out": out.flatten(0, 1), "max_q_len": q_len}
        starts = integers([q_len * i for i in range(BATCH + 1)])
        pages = {"page_table": table, "seq_lens": lengths, "q_cu_seq_lens": starts}
        calls[f"context {heads}/8 heads q_len {q_len}"] = partial(
            context_attention, q.flatten(0, 1), *cache, **pages, **flat
        )
    return calls


def main() -> int:
    """Measure all rows and write ``drafts.json``."""
    chosen = options()
    torch.manual_seed(0)
    store = Path(os.environ.get("CUBIN_RUNTIME_CACHE", chosen.out / "store"))
    runtime = Runtime(Config(store=store, sources=built_sources(), offline=True))
    chosen.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"schema": 1, "question": "what more draft tokens per request cost"}
    result |= {"release": runtime.native_release().pin.manifest_sha256, "environment": gpu_environment()}
    result |= {"batch": BATCH, "keys": KEYS, "rows": []}
    for heads in chosen.heads:
        calls = rows_of(runtime, heads, chosen.tokens)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(chosen.rounds):
            for name, call in calls.items():
                times[name].append(do_bench(call, warmup=5, rep=chosen.rep, return_mode="median") * 1e3)
        for name, found in times.items():
            us, q_len = statistics.median(found), int(name.split("q_len ")[1].split()[0])
            flops = 4 * BATCH * KEYS * heads * HEAD_DIM * q_len
            result["rows"].append({"case": name, "us": us, "tflop_per_s": flops / us / 1e6})
            print(f"{name}: {us:.1f} us, {flops / us / 1e6:.0f} TFLOP/s", flush=True)
        (chosen.out / "drafts.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
