"""Context attention over e4m3 keys and values beside the same over 16-bit ones, in turns, with their bits compared.

Run: ``python benchmarks/gpu_context_e4m3.py --out DIR`` on a machine with a Hopper GPU and torch. ``--experiments``
names builds of ``python -m kernels_src.experiment``, which take turns too. A ratio is the time over the 16-bit cache by
that over the e4m3 cache: above 1 the e4m3 cache is faster. "In the kernel" no cache is converted before, as scales by
head do not allow it. ``context_e4m3.json`` in DIR is the result.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
from gpu_environment import built_sources, gpu_environment
from row_origin import origin_of_calls

from cubin_runtime import Config
from cubin_runtime.attention import Runtime, plan_context_attention
from cubin_runtime.attention.runtime import NATIVE_RELEASE

EXPERIMENTS = Path(__file__).resolve().parents[1] / "build" / "experiments"
PAGE = 64
CALLS_SECONDS = 0.004  # of the calls between two events
E4M3 = torch.float8_e4m3fn
# Name, lengths of queries and of keys, KV heads of 32 heads.
SHAPES = (
    ("prompt of 8192", (8192,), (8192,), 8),
    ("chunk of 1024 over 65536", (1024,), (65536,), 8),
    ("4 prompts of 2048", (2048,) * 4, (2048,) * 4, 8),
    ("8 chunks of 512 over 8192, a KV head per head", (512,) * 8, (8192,) * 8, 32),
    ("32 chunks of 8 over 16384, a KV head per head", (8,) * 32, (16384,) * 32, 32),
)


@dataclass(frozen=True)
class Case:
    """Queries, and keys and values in pages in random order, as e4m3 and as the same numbers in the queries' type."""

    head_dim: int
    dtype: torch.dtype
    name: str
    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    kv_heads: int
    batch_invariant: bool
    heads: int = 32

    def calls(self, runtimes: dict[str, Runtime]) -> dict[str, Callable[[], torch.Tensor]]:
        """Runs of plans by name, giving outputs."""
        value_dim = 128 if self.head_dim == 192 else self.head_dim
        pages = [-(-n // PAGE) for n in self.kv_lens]
        ids = torch.randperm(sum(pages), device="cuda", dtype=torch.int32)
        table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device="cuda")
        for row, own in zip(table, ids.split(pages), strict=True):
            row[: len(own)] = own
        lengths = partial(torch.tensor, dtype=torch.int32, device="cuda")
        named = {
            "page_table": table,
            "seq_lens": lengths(self.kv_lens),
            "q_cu_seq_lens": lengths([0, *accumulate(self.q_lens)]),
        }
        q = torch.randn(sum(self.q_lens), self.heads, self.head_dim, device="cuda").to(self.dtype)
        caches = [
            torch.randn(sum(pages), PAGE, self.kv_heads, n, device="cuda").to(E4M3) for n in (self.head_dim, value_dim)
        ]
        wide = [cache.to(self.dtype) for cache in caches]

        def planned(
            runtime: Runtime, k: torch.Tensor, v: torch.Tensor, k_scale: torch.Tensor | None = None
        ) -> Callable[[], torch.Tensor]:
            out = q.new_empty(len(q), self.heads, value_dim)
            bounds = {"max_seq_len": max(self.kv_lens), "max_q_len": max(self.q_lens)}
            plan = plan_context_attention(
                q,
                k,
                v,
                out,
                **named,
                **bounds,
                k_scale=k_scale,
                batch_invariant=self.batch_invariant,
                runtime=runtime,
            )

            def call() -> torch.Tensor:
                plan.run(q, k, v, out, **named, k_scale=k_scale)
                return out

            return call

        first = next(iter(runtimes.values()))
        ones = torch.ones(self.kv_heads, device="cuda")
        return {
            "16 bits": planned(first, *wide),
            **{n: planned(r, *caches) for n, r in runtimes.items()},
            "e4m3, in the kernel": planned(first, *caches, ones),
        }


def cases(chosen: argparse.Namespace) -> list[Case]:
    """What is measured."""
    dims = [int(word) for word in chosen.head_dims.split(",")]
    dtypes = [getattr(torch, word) for word in chosen.dtypes.split(",")]
    modes = [False, True] if chosen.batch_invariant else [False]
    names = [word for word in chosen.shapes.split(",") if word]
    shapes = [SHAPES[int(word)] for word in names] if names else SHAPES
    return [
        Case(dim, dtype, *shape, batch_invariant=mode)
        for mode, dtype, dim, shape in product(modes, dtypes, dims, shapes)
        if not mode or dim in (64, 128)
    ]


def microseconds(call: Callable[[], Any], count: int) -> float:
    """Of one of ``count`` calls."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(count):
        call()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) * 1e3 / count


def row_of(case: Case, runtimes: dict[str, Runtime], rounds: int) -> dict[str, Any]:
    """Times in turns, and whether all outputs have the same bits."""
    calls = case.calls(runtimes)
    outputs = {name: call().clone().view(torch.int16) for name, call in calls.items()}
    torch.cuda.synchronize()
    counts = {name: max(1, int(CALLS_SECONDS * 1e6 / microseconds(call, 1))) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(round(microseconds(call, counts[name]), 1))
    us = {name: statistics.median(own) for name, own in times.items()}
    return {
        "case": case.name,
        "head_dim": case.head_dim,
        "dtype": str(case.dtype).removeprefix("torch."),
        "batch_invariant": case.batch_invariant,
        "us": us,
        "rounds_us": times,
        "ratio": {name: round(us["16 bits"] / own, 3) for name, own in us.items() if name != "16 bits"},
        **origin_of_calls(
            runtimes["e4m3"].driver, *(calls[name] for name in ("16 bits", "e4m3", "e4m3, in the kernel"))
        ),
        "same_bits": {name: torch.equal(own, outputs["16 bits"]) for name, own in outputs.items()},
    }


def main() -> int:
    """Measure and write ``context_e4m3.json``; 1 if the bits of the release differ or a call failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--experiments", default="", help="names, by comma")
    parser.add_argument("--head-dims", default="128,64,192,256")
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--shapes", default="", help="indices, by comma; empty: all")
    parser.add_argument("--batch-invariant", action="store_true", help="those kernels, too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row later than this")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    chosen.out.mkdir(parents=True, exist_ok=True)
    names = [word for word in chosen.experiments.split(",") if word]
    pins = {"pin_files": (EXPERIMENTS / "pins.toml",)} if names else {}
    sources = (*built_sources(), str(EXPERIMENTS)) if names else built_sources()
    store = Path(os.environ.get("CUBIN_RUNTIME_CACHE", chosen.out / "store"))
    config = Config(store=store, sources=sources, offline=True, **pins)
    runtimes = {"e4m3": Runtime(config)}
    runtimes |= {f"e4m3, {name}": Runtime(config, release=f"{NATIVE_RELEASE}-{name}") for name in names}
    release = runtimes["e4m3"].native_release().pin.manifest_sha256
    result: dict[str, Any] = {
        "schema": 2,
        "question": "context attention over an e4m3 cache beside the same over a 16-bit cache",
        "environment": gpu_environment(),
        "release": release,
        "rows": [],
    }
    began = time.monotonic()
    for case in cases(chosen):
        if time.monotonic() - began > chosen.seconds:
            break
        try:
            row = row_of(case, runtimes, chosen.rounds)
        except Exception as error:
            row = {"case": case.name, "head_dim": case.head_dim, "error": f"{type(error).__name__}: {error}"[:500]}
        result["rows"].append(row | {"clock": gpu_environment()["gpu"]})
        (chosen.out / "context_e4m3.json").write_text(json.dumps(result, indent=1) + "\n")
        print(*(row.get(key) for key in ("head_dim", "dtype", "case", "us", "ratio", "same_bits", "error")), flush=True)
        torch.cuda.empty_cache()
    return int(any("error" in row or not row["same_bits"]["e4m3"] for row in result["rows"]))


if __name__ == "__main__":
    raise SystemExit(main())
