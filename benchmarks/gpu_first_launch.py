"""From a cold process with a warm store to the first finished kernel: medians over fresh processes, by step.

Once without torch, and once with torch imported and its CUDA context made before, as in a server. The total without
context and tensors is what this package adds.

Run: ``python benchmarks/gpu_first_launch.py --out DIR`` on a machine with a GPU; without torch its half is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
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
# What is not this package's: made before by whoever has tensors, or after the first result.
_APART = ("CUDA context", "allocate tensors", "later: plan a new batch size", "later: its first launch")
CHILD = """
import json, sys, time
if sys.argv[1] == "torch":
    import torch
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
began = time.perf_counter()
marks = {}
def mark(name):
    global began
    now = time.perf_counter(); marks[name] = (now - began) * 1e3; began = now
from cubin_runtime.attention import Runtime, TensorView, plan_paged_decode
mark("import")
runtime = Runtime()
mark("runtime")
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
mark("plan")
plan.preload()
mark("verify and load")
plan.run(q, k, v, table, lens, out, stream=0)
driver.synchronize(0)
mark("first launch")
other = tensor((5, 64, 128), "bfloat16", 2), tensor((5, 64, 128), "bfloat16", 2)
rest = tensor((5, 16), "int32", 4), tensor((5,), "int32", 4)
driver.synchronize(0)
began = time.perf_counter()
new = plan_paged_decode(other[0], k, v, *rest, other[1], max_seq_len=1024, runtime=runtime)
mark("later: plan a new batch size")
new.run(other[0], k, v, *rest, other[1], stream=0)
mark("later: its first launch")
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
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    result = {"schema": 2, "question": "first launch of a cold process", "environment": gpu_environment()}
    result |= {"processes": PROCESSES, "plain": measured("plain", environment)}
    if importlib.util.find_spec("torch"):
        result["torch"] = measured("torch", environment)
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "first_launch.json").write_text(json.dumps(result, indent=1) + "\n")


def measured(before: str, environment: dict[str, str]) -> dict[str, object]:
    """Medians over fresh processes; ``before``: ``torch`` to import it first and make its context, else ``plain``."""
    command = [sys.executable, "-c", CHILD, before]
    runs: list[dict[str, float]] = []
    for _ in range(PROCESSES + 1):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
        runs.append(json.loads(done.stdout))
    del runs[0]  # which may have written bytecode
    steps = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    own = statistics.median(sum(ms for name, ms in run.items() if name not in _APART) for run in runs)
    print(f"{before}: medians of {PROCESSES} processes")
    for name, ms in steps.items():
        print(f"{ms:8.2f} ms  {name}")
    print(f"{own:8.2f} ms  to the first result, but for context and tensors")
    return {"median_ms": steps, "own_ms": own}


if __name__ == "__main__":
    main()
