"""Host time of one launch: planned runs, plain functions and FlashInfer's names, beside a C loop over the driver call.

    gpu_host_cost.py --out FOLDER [--beside CHECKOUT ...]

Each figure is the minimum over repeats of the mean of many calls, in microseconds, while the queue is not full. The
floor is a C loop over ``cuLaunchKernelEx`` with the same kernel, parameters and attributes. ``--beside`` measures other
checkouts (with a built release in ``build/artifacts``) in turns with this one; the ratio to compare is that of one run.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROUNDS, REPEATS, CALLS = 3, 25, 40
LOOP = """
#include <cuda.h>
#include <time.h>
double loop(const CUlaunchConfig *config, CUfunction function, void **arguments, int count) {
  struct timespec begin, end;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  for (int i = 0; i < count; i++) cuLaunchKernelEx(config, function, arguments, 0);
  clock_gettime(CLOCK_MONOTONIC, &end);
  return ((end.tv_sec - begin.tv_sec) * 1e9 + (end.tv_nsec - begin.tv_nsec)) / count / 1e3;
}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--beside", type=Path, action="append", default=[])
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        print(json.dumps(measure()))
        return
    checkouts = [ROOT, *(path.resolve() for path in asked.beside)]
    rounds: dict[str, list[dict[str, float]]] = {str(path.name): [] for path in checkouts}
    for _ in range(ROUNDS):
        for path in checkouts:
            rounds[path.name].append(_in_process(path))
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from gpu_environment import gpu_environment

    figures = {
        name: {call: statistics.median(found[call] for found in each) for call in each[0]}
        for name, each in rounds.items()
    }
    report = {"environment": gpu_environment(), "microseconds": figures, "rounds": rounds}
    if asked.out:
        (asked.out / "host_cost.json").write_text(json.dumps(report, indent=1) + "\n")
    for name, found in figures.items():
        for call, us in found.items():
            print(f"{name:12} {call:44} {us:7.2f} us {us / found['C loop']:6.2f}")


def _in_process(checkout: Path) -> dict[str, float]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")]),
        "CUBIN_RUNTIME_SOURCES": str(checkout / "build" / "artifacts"),
        "CUBIN_RUNTIME_CACHE": tempfile.mkdtemp(),
    }
    command = [sys.executable, __file__, "--measure", str(checkout)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=checkout)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure() -> dict[str, float]:
    """Microseconds of each call with the package that is first on the path."""
    import torch

    from cubin_runtime.attention import default_runtime, mla_decode, paged_decode, plan_mla_decode, plan_paged_decode
    from cubin_runtime.compat import flashinfer

    runtime = default_runtime()
    runtime.library.fetch(runtime.library.pins.get("hopper-0.1.0"))

    def us(call: Callable[[], Any]) -> float:
        for _ in range(200):
            call()
        torch.cuda.synchronize()
        found = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            found.append((time.perf_counter() - begin) / CALLS * 1e6)
            torch.cuda.synchronize()
        return min(found)

    on: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    table = torch.arange(8, device="cuda", dtype=torch.int32).view(2, 4)
    lens = torch.tensor([1, 1], device="cuda", dtype=torch.int32)
    q, out = torch.randn(2, 32, 128, **on), torch.empty(2, 32, 128, **on)
    caches = (torch.randn(8, 64, 4, 128, **on), torch.randn(8, 64, 4, 128, **on))
    latent, lq = torch.randn(8, 64, 576, **on), torch.randn(2, 16, 576, **on)
    lout = torch.empty(2, 16, 512, **on)
    buffer = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    found = {}
    with torch.cuda.stream(stream):
        handle = stream.cuda_stream
        plan = plan_paged_decode(q, *caches, table, lens, out, max_seq_len=256)
        space = plan.prepare(handle)
        others = cycle([(torch.randn_like(q), torch.empty_like(out)) for _ in range(2)])
        plan.run(q, *caches, table, lens, out, workspace=space, stream=handle)
        torch.cuda.synchronize()
        found["C loop"] = _c_loop(runtime, plan, handle)
        found["plan.run"] = us(lambda: plan.run(q, *caches, table, lens, out, workspace=space, stream=handle))

        def alternating() -> None:
            a, b = next(others)
            plan.run(a, *caches, table, lens, b, workspace=space, stream=handle)

        found["plan.run, other q and out"] = us(alternating)
        found["paged_decode(out=out)"] = us(lambda: paged_decode(q, *caches, table, lens, max_seq_len=256, out=out))
        found["paged_decode()"] = us(lambda: paged_decode(q, *caches, table, lens, max_seq_len=256))
        mla = plan_mla_decode(lq, latent, table, lens, lout, max_seq_len=256, softmax_scale=0.1)
        mla_space = mla.prepare(handle)
        found["MLA plan.run"] = us(lambda: mla.run(lq, latent, table, lens, lout, workspace=mla_space, stream=handle))
        found["mla_decode(out=out)"] = us(
            lambda: mla_decode(lq, latent, table, lens, max_seq_len=256, softmax_scale=0.1, out=lout)
        )
        found["compat xqa_batch_decode_with_kv_cache"] = us(
            lambda: flashinfer.xqa_batch_decode_with_kv_cache(
                q, caches, buffer, table, lens, 256, bmm1_scale=0.1, bmm2_scale=1.0, kv_layout="NHD", out=out
            )
        )
    return found


def _c_loop(runtime: Any, plan_of: Any, stream: int) -> float:
    """Microseconds of a launch in C: the last launch once more, with its kernel, grid and parameters."""
    folder = Path(tempfile.mkdtemp())
    (folder / "loop.c").write_text(LOOP)
    include = os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/include"
    library = folder / "loop.so"
    command = ["cc", "-O2", "-shared", "-fPIC", f"-I{include}", str(folder / "loop.c"), "-o", str(library)]
    subprocess.run(command, check=True)
    ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    loop = ctypes.CDLL(str(library)).loop
    loop.restype, loop.argtypes = ctypes.c_double, [ctypes.c_void_p] * 3 + [ctypes.c_int]
    history = runtime.driver.history
    context = runtime.driver.current_context()
    record = (history(context) if callable(history) else history).records()[-1]
    (kernel,) = (k for k in runtime.modules._kernels.values() if k.symbol == record.symbol)
    try:
        from cubin_runtime.launch.plan import launch_config
    except ImportError:  # an earlier version
        from cubin_runtime.launch.launcher import launch_config
    plan = plan_of.launch_plans()[0]
    config = launch_config(plan.grid, plan.block, plan.shared_bytes, plan.attributes)
    config.stream = stream
    size, alignment = record.layout.size, record.layout.alignment
    memory = ctypes.create_string_buffer(size + alignment)
    start = -ctypes.addressof(memory) % alignment + ctypes.addressof(memory)
    ctypes.memmove(start, record.parameters, size)
    arguments = (ctypes.c_void_p * 1)(start)
    given = (ctypes.addressof(config), kernel.function, ctypes.addressof(arguments))
    loop(*given, 200)
    runtime.driver.synchronize(stream)
    found = []
    for _ in range(REPEATS):
        found.append(loop(*given, CALLS))
        runtime.driver.synchronize(stream)
    return min(found)


if __name__ == "__main__":
    main()
