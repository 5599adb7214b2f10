"""From a cold process with a warm store to the first finished kernel: medians over fresh processes, by step.

Run: ``python benchmarks/gpu_first_launch.py --out DIR`` on a machine with a GPU; needs no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from gpu_environment import built_sources, gpu_environment

from cubin_runtime import Config
from cubin_runtime.attention import Runtime
from cubin_runtime.attention.runtime import NATIVE_RELEASE

PROCESSES = 11
CHILD = """
import json, time
began = time.perf_counter()
marks = {}
def mark(name):
    global began
    now = time.perf_counter(); marks[name] = (now - began) * 1e3; began = now
from cubin_runtime.attention import Runtime, TensorView, plan_paged_decode
mark("import")
runtime = Runtime()
driver = runtime.driver
driver.set_current(driver.primary_context(0))
mark("CUDA context")
def tensor(shape, dtype, item):
    n = item
    for size in shape: n *= size
    address = driver.allocate(n); driver.fill(address, 0, n, 0)
    return TensorView.contiguous(address, dtype, shape)
q, out = (tensor((4, 64, 128), "bfloat16", 2) for _ in range(2))
k, v = (tensor((64, 64, 8, 128), "bfloat16", 2) for _ in range(2))
table, lens = tensor((4, 16), "int32", 4), tensor((4,), "int32", 4)
driver.fill_words(lens.pointer, 1000, 4, 0)
driver.synchronize(0)
mark("allocate tensors")
plan = plan_paged_decode(q, k, v, table, lens, out, max_seq_len=1024, runtime=runtime)
mark("plan: manifest, kernels.json, selection")
plan.preload()
mark("verify, load and gate the cubin")
workspace = plan.prepare(0)
plan.run(q, k, v, table, lens, out, workspace=workspace)
driver.synchronize(0)
mark("workspace, launch and finish")
print(json.dumps(marks))
"""


def main() -> None:
    """Measure and write ``first_launch.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    store = Path(os.environ.get("CUBIN_RUNTIME_CACHE", chosen.out / "store"))
    filling = Runtime(Config(store=store, sources=built_sources(), offline=True))
    filling.library.fetch(filling.library.pins.get(NATIVE_RELEASE))
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"CUBIN_RUNTIME_CACHE": str(store), "CUBIN_RUNTIME_OFFLINE": "1", "PYTHONPATH": path}
    environment.pop("CUBIN_RUNTIME_SOURCES", None)
    runs = []
    for _ in range(PROCESSES):
        done = subprocess.run(
            [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        runs.append(json.loads(done.stdout))
    steps = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    total = statistics.median(sum(run.values()) for run in runs)
    for name, ms in steps.items():
        print(f"{ms:8.1f} ms  {name}")
    print(f"{total:8.1f} ms  in all (median of {PROCESSES} processes)")
    chosen.out.mkdir(parents=True, exist_ok=True)
    result = {"schema": 1, "question": "first launch of a cold process", "environment": gpu_environment()}
    result |= {"processes": PROCESSES, "median_ms": steps, "total_ms": total}
    (chosen.out / "first_launch.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
