"""Host time of calls with a new number of query tokens, as each mixed step of a server has one.

Run ``python benchmarks/host_new_tokens.py`` after ``make artifacts``; it needs a C compiler and no GPU. Kernels are
launched with the stand-in driver of the tests, which writes a log of each launch, so only differences between rows of a
case count. The first call with a number of tokens needs a plan and gets a fast path, which later ones take, as the
other layers of a step do. "tokens": the number of query tokens changes from call to call; "all sizes": that of requests
and, for context attention, the bound on the tokens of one change too. Tensors are views of addresses, not torch's.
Results go to benchmarks/results/host_new_tokens.json.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gpu_environment import built_sources

from cubin_runtime import Config, Runtime, __version__
from cubin_runtime.attention import SemaphoreWorkspace, TensorView, append_kv, context_attention, paged_decode
from cubin_runtime.launch.driver import Driver
from cubin_runtime.testing.standin import StandIn, build_standin

RESULTS = Path(__file__).parent / "results" / "host_new_tokens.json"
HEADS, KV_HEADS, DIM = 32, 8, 128
PAGES, PAGE, COLUMNS = 4096, 64, 64
ROWS = ("new", "second", "third", "repeated")
COUNT = 200
Call = Callable[[int, bool], Any]


def main() -> None:
    """Measure and write the results; ``--profile CASE`` prints where the first calls of a case spend their time."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--profile", metavar="CASE")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        standin = StandIn(build_standin(Path(folder)))
        standin.reset()
        standin.describe("NVIDIA H200", (9, 0), 132, 233472, 60 << 20, 0)
        config = Config(store=Path(folder) / "store", sources=built_sources(), offline=True)
        runtime = Runtime(config, driver=Driver(standin.path))
        for kernel in runtime.native_release().kernels:
            standin.add_kernel(kernel.symbol, (kernel.struct_bytes,), kernel.threads)
        runtime.driver.set_current(runtime.driver.primary_context(0))
        found = cases(runtime)
        if chosen.profile:
            profile(found[chosen.profile], standin)
            return
        rows = {name: figures(call, standin) for name, call in found.items()}
    for name, row in rows.items():
        print(f"{name:42}", "  ".join(f"{key} {value:7.1f}" for key, value in row.items()))
    machine = {"system": platform.platform(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}
    report = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine,
        "versions": {"cubin_runtime": __version__, "python": platform.python_version()},
        "microseconds": rows,
    }
    chosen.out.write_text(json.dumps(report, indent=1) + "\n")


def cases(runtime: Runtime) -> dict[str, Call]:
    """By name, a call with a number of tokens; its second argument: whether other sizes follow from that number."""
    context = runtime.driver.primary_context(0)
    scratch = SemaphoreWorkspace((0x7E00_0000_0000, 1 << 20), (0x7E10_0000_0000, 128 << 20), context)
    k, v = (view(address, "bfloat16", PAGES, PAGE, KV_HEADS, DIM) for address in (0x7F10_0000_0000, 0x7F20_0000_0000))
    on: dict[str, Any] = {"workspace": scratch, "runtime": runtime}

    def lengths(batch: int) -> dict[str, Any]:
        return {"page_table": view(0x7F00_0010_0000, "int32", batch, COLUMNS), "seq_lens": ints(1, batch)}

    def queries(tokens: int) -> dict[str, Any]:
        return {
            name: view(0x7F30_0000_0000 + place, "bfloat16", tokens, HEADS, DIM)
            for place, name in ((0, "q"), (1 << 32, "out"))
        }

    def context(tokens: int, others: bool) -> Callable[[], Any]:
        batch = 1 + tokens % 5 if others else 3
        given = {**queries(tokens), "k": k, "v": v, **lengths(batch), "q_cu_seq_lens": ints(2, batch + 1)}
        bounds = {"max_seq_len": 4000, "max_q_len": max(1, tokens * 2 // 3) if others else 2048}
        return lambda: context_attention(**given, **bounds, **on)

    def append(tokens: int, others: bool) -> Callable[[], Any]:
        batch = 1 + tokens % 64 if others else 40
        new = [view(0x7F30_0000_0000 + (place << 32), "bfloat16", tokens, KV_HEADS, DIM) for place in (0, 1)]
        given = {**lengths(batch), "q_cu_seq_lens": ints(2, batch + 1)}
        return lambda: append_kv(*new, k, v, **given, **on)

    def decode(invariant: bool) -> Any:
        def call(tokens: int, others: bool) -> Callable[[], Any]:
            batch = 1 + tokens % 64 if others else 40
            given = {**queries(tokens), "k_cache": k, "v_cache": v, **lengths(batch)}
            more: dict[str, Any] = {"max_seq_len": 4000, "max_q_len": 9, "batch_invariant": invariant}
            return lambda: paged_decode(**given, q_cu_seq_lens=ints(2, batch + 1), **more, **on)

        return call

    operators = {
        "context_attention": context,
        "append_kv": append,
        "ragged paged_decode": decode(False),
        "ragged paged_decode, batch invariant": decode(True),
    }
    made = {}
    for name, make in operators.items():
        made[f"{name}: tokens"] = lambda tokens, make=make: make(tokens, False)
        made[f"{name}: all sizes"] = lambda tokens, make=make: make(tokens, True)
    return made


def view(address: int, dtype: Any, *shape: int) -> TensorView:
    return TensorView.contiguous(address, dtype, shape)


def ints(place: int, count: int) -> TensorView:
    return view(0x7F00_0000_0000 + (place << 16), "int32", count)


def new_counts() -> list[int]:
    return random.Random(0).sample(range(20, 2000), COUNT)


def figures(case: Any, standin: StandIn) -> dict[str, float]:
    """Medians of the first, second, third and later calls, and how much longer the first takes than these."""
    seen: dict[str, list[float]] = {row: [] for row in ROWS}
    gc.collect()
    gc.disable()
    for number, tokens in enumerate(new_counts()):
        call = case(tokens)
        for row in ROWS:
            standin.clear_log()
            begin = time.perf_counter()
            call()
            spent = time.perf_counter() - begin
            if number >= COUNT // 10:  # what is loaded and generated once
                seen[row].append(spent * 1e6)
    made = {row: round(statistics.median(times), 1) for row, times in seen.items()}
    return {**made, "new - repeated": round(made["new"] - made["repeated"], 1)}


def profile(case: Any, standin: StandIn) -> None:
    import pstats

    calls = [case(tokens) for tokens in new_counts()]
    for call in calls[:20]:
        call()
    profiler = cProfile.Profile()
    for call in calls[20:]:
        standin.clear_log()
        profiler.enable()
        call()
        profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
    pstats.Stats(profiler).sort_stats("cumtime").print_stats(60)


if __name__ == "__main__":
    main()
