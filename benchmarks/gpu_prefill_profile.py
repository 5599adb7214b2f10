"""Context attention in Nsight Compute: how evenly CTAs end, and how many products masks save.

Run: ``python benchmarks/gpu_prefill_profile.py --out DIR`` on a machine with a Hopper GPU, torch and ``ncu``. A CTA
stays on its multiprocessor from the beginning to the end, so the multiprocessors' active cycles are how long the CTAs
took. ``prefill_profile.json`` in DIR is the result. ``--launch`` only launches the kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path

from gpu_environment import built_sources, gpu_environment
from gpu_profile import ORIGINS, launches_in
from prefill.cases import PrefillCase
from row_origin import keep, origin_of

METRICS = (
    "sm__cycles_active.min,sm__cycles_active.avg,sm__cycles_active.max,gpu__time_duration.sum,"
    "sm__inst_executed_pipe_tensor.sum,dram__bytes_read.sum,lts__t_sectors_op_read.sum,"
    "sm__inst_executed_pipe_tensor_op_gmma.sum,sm__pipe_tensor_op_gmma_cycles_active.avg.pct_of_peak_sustained_active"
)


def cases() -> list[PrefillCase]:
    """What is looked at."""
    rng = random.Random(1)
    ragged = tuple(rng.randrange(128, 8193) for _ in range(32))
    one = (8192,)
    return [
        PrefillCase("profile", "ragged: 32 requests of 128 to 8192", 128, ragged, ragged),
        PrefillCase("profile", "causal D 128 S 8192", 128, one, one),
        PrefillCase("profile", "full D 128 S 8192", 128, one, one, causal=False),
        PrefillCase("profile", "window 1024 D 128 S 8192", 128, one, one, window_left=1023),
        PrefillCase("profile", "causal D 128 S 16384", 128, (16384,), (16384,)),
        PrefillCase("profile", "causal D 64 S 8192", 64, one, one),
        PrefillCase("profile", "causal D 256 S 8192", 256, one, one, heads=16, kv_heads=4),
        PrefillCase("profile", "causal D 192 S 8192", 192, one, one, heads=16, kv_heads=16),
    ]


def launch(out: Path) -> None:
    """Launch the kernel of each case once, then once under the profiler; ``ORIGINS`` in ``out`` says what they were."""
    import torch
    from prefill.problem import PrefillProblem

    from cubin_runtime import Config
    from cubin_runtime.attention import Runtime

    store = Path(os.environ.get("CUBIN_RUNTIME_CACHE", out / "store"))
    runtime = Runtime(Config(store=store, sources=built_sources(), offline=True))
    origins = []
    for case in cases():
        plan, call = PrefillProblem(case).planned(runtime)
        origins.append(origin_of(plan))
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    keep({"rows": origins}, out / ORIGINS)


def main() -> int:
    """Profile, or launch what is profiled."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--launch", action="store_true", help="only launch the kernels")
    given = parser.parse_args()
    if given.launch:
        launch(given.out)
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--page", "raw", "--csv"]
    command += ["--kernel-name", "regex:context_attention", "--metrics", METRICS]
    command += [sys.executable, __file__, "--launch", "--out", str(given.out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    (given.out / "prefill_profile.csv").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise SystemExit(f"ncu ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    rows = []
    origins = json.loads((given.out / ORIGINS).read_text())["rows"]
    for case, found, origin in zip(cases(), launches_in(done.stdout), origins, strict=True):
        row = {name: list(value) for name, value in found.items() if name.partition(".")[0] in METRICS}
        rows.append({"case": case.name, "flop": case.flop, "metrics": row, **origin})
        print(json.dumps(rows[-1]))
    result = {"schema": 1, "question": "how evenly CTAs end, and how many products masks save"}
    result |= {"environment": gpu_environment(), "rows": rows}
    (given.out / "prefill_profile.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
