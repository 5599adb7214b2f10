"""What bounds the rows of the decode benchmarks that miss their bars, by Nsight Compute: bytes, pipes, stalls.

Run: ``python benchmarks/gpu_profile.py --out DIR`` on a machine with a GPU, torch and ``ncu``. It runs itself under
``ncu``, which launches each kernel many times with caches cleared and leaves the clocks as they are; shares are of the
hardware's peak, not of what a kernel of ours reaches. ``profile.json`` in DIR is the result, ``profile.csv`` the
profiler's own table. ``--launch`` only launches the kernels, each once before it is looked at.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from decode.cases import PEERS, SECTIONS, Case, cases_of
from decode.mla_cases import MlaCase, mla_cases
from gpu_environment import built_sources, gpu_environment
from row_origin import keep, origin_of

# Rows of the benchmarks by section and label, those of one type of keys and values together.
DECODE = (
    ("gqa", "1 x 1024"),
    ("gqa", "1 x 16384"),
    ("gqa", "8 x 4096"),
    ("gqa", "128 x 2048"),
    ("speculative", "D 128, q_len 2, 16 x 16384"),
    ("speculative", "D 128, q_len 8, 16 x 16384"),
    ("speculative", "D 64, q_len 1, 32 x 16384"),
    ("speculative", "D 64, q_len 4, 32 x 16384"),
    ("speculative", "D 64, q_len 8, 64 x 16384"),
    ("ragged", "131072 beside 63 of 512"),
    ("grouped_bf16", "Qwen3-480B, q_len 8, 64 x 16384"),
    ("fp8", "q bf16, 128 x 2048"),
    ("grouped", "Qwen3-480B, q_len 1, 64 x 16384"),
    ("grouped", "Qwen3-480B, q_len 4, 32 x 16384"),
    ("grouped", "Qwen3-480B, q_len 2, 64 x 16384"),
    ("grouped", "Qwen3-480B, q_len 4, 64 x 16384"),
    ("grouped", "GPT-OSS, q_len 1, 64 x 16384"),
    ("grouped", "GPT-OSS, q_len 4, 32 x 16384"),
    ("grouped", "GPT-OSS, q_len 4, 40 x 16384"),
    ("grouped", "GPT-OSS, q_len 4, 64 x 16384"),
    ("grouped", "GPT-OSS, q_len 8, 32 x 16384"),
    ("grouped", "GPT-OSS, q_len 8, 40 x 16384"),
    ("grouped", "GPT-OSS, q_len 8, 64 x 16384"),
)
MLA = (
    ("bf16", "128 heads, 1 x 4096"),
    ("bf16", "128 heads, 16 x 4096"),
    ("bf16", "128 heads, 64 x 4096"),
    ("bf16", "128 heads, 64 x 4096, q_len 2"),
    ("bf16", "16 heads, 128 x 1024"),
)
NCU_SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis", "SchedulerStats", "WarpStateStats")
EXTRA_METRICS = "dram__bytes_read.sum,dram__bytes_write.sum"
# The profiler's names; of several that match, the largest counts.
FIGURES = {
    "dram_share": r"(gpu__)?dram_?_throughput\.avg\.pct_of_peak_sustained_elapsed",
    "l2_share": r"lts__throughput\.avg\.pct_of_peak_sustained_elapsed",
    "tensor_share": r"sm__(inst_executed_)?pipe_tensor\w*\.avg\.pct_of_peak_sustained_active",
}
ISSUED = "smsp__issue_active.avg.per_cycle_active"  # of a quarter of a multiprocessor, one at most
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
BYTES = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
MICROSECONDS = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3}
TOP_STALLS = 3
ORIGINS = "profiled.json"  # what the profiled process launched, for the one that reads the profiler's table


def chosen_cases() -> list[Case | MlaCase]:
    """The cases in the order in which their kernels are launched."""
    decode = {(case.section, case.label): case for case in cases_of(SECTIONS, PEERS)}
    mla = {(case.section, case.label): case for case in mla_cases()}
    return [*(decode[key] for key in DECODE), *(mla[key] for key in MLA)]


def launch(out: Path) -> None:
    """Launch the kernel of each case, then once more under the profiler; ``ORIGINS`` in ``out`` says what they were."""
    import torch
    from decode.mla_measuring import MlaProblem, ours_of
    from decode.ours import Ours
    from decode.problem import Pool, Problem

    from cubin_runtime import Config
    from cubin_runtime.attention import Runtime

    with tempfile.TemporaryDirectory() as store:
        runtime = Runtime(Config(store=Path(store), sources=built_sources(), offline=True))
        stream = torch.cuda.current_stream().cuda_stream
        cases = chosen_cases()
        pool = Pool(max(case.kv_bytes for case in cases))
        origins = []
        for case in cases:
            if isinstance(case, Case):
                ours = Ours(Problem(case, pool), runtime)
                plan, call = ours.plan, ours.call(stream)
            else:
                plan, (call, *_) = ours_of(MlaProblem(case, pool), runtime, stream, False)
            origins.append(origin_of(plan))
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        keep({"rows": origins}, out / ORIGINS)


def profile(out: Path) -> str:
    """The profiler's table of all launches."""
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--page", "raw", "--csv"]
    command += ["--kernel-name", "regex:paged_decode|mla_decode", "--metrics", EXTRA_METRICS]
    for section in NCU_SECTIONS:
        command += ["--section", section]
    done = subprocess.run(
        [*command, sys.executable, __file__, "--launch", "--out", str(out)], check=False, capture_output=True, text=True
    )
    text = done.stdout
    (out / "profile.csv").write_text(text)
    if done.returncode:
        raise SystemExit(f"ncu ended with {done.returncode}:\n{text[-2000:]}{done.stderr[-2000:]}")
    return text


def launches_in(text: str) -> Iterator[dict[str, tuple[float, str]]]:
    """Of each launch the figures by the profiler's names, with their units."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    head, units, *rows = csv.reader(lines)
    for row in rows:
        found = {}
        for name, unit, value in zip(head, units, row, strict=True):
            try:
                found[name] = float(value.replace(",", "")), unit
            except ValueError:
                continue  # a name, or what this GPU does not count
        yield found


def figures_of(launch: Mapping[str, tuple[float, str]]) -> dict[str, Any]:
    """What one launch says, in microseconds, bytes and shares; what the profiler did not tell is left out."""
    row: dict[str, Any] = {}
    if (time := launch.get("gpu__time_duration.sum")) is not None:
        row["us"] = round(time[0] * MICROSECONDS[time[1]], 1)
    for key in ("read", "write"):
        if (moved := launch.get(f"dram__bytes_{key}.sum")) is not None:
            row[f"dram_{key}_mb"] = round(moved[0] * BYTES[moved[1]] / 1e6, 1)
    for key, pattern in FIGURES.items():
        of_name = [value for name, (value, _) in launch.items() if re.fullmatch(pattern, name)]
        if of_name:
            row[key] = round(max(of_name), 1)
    if (issued := launch.get(ISSUED)) is not None:
        row["issue_share"] = round(100 * issued[0], 1)
    stalls = {match[1]: value for name, (value, _) in launch.items() if (match := STALL.fullmatch(name))}
    stalls.pop("selected", None)  # the cycle of the issue itself
    largest = sorted(stalls, key=stalls.__getitem__, reverse=True)[:TOP_STALLS]
    row["stalls_per_issue"] = {name: round(stalls[name], 2) for name in largest}
    return row


def row_of(case: Case | MlaCase, launch: Mapping[str, tuple[float, str]]) -> dict[str, Any]:
    """A case, which benchmark it is of, and what its launch says."""
    named = {"benchmark": "decode" if isinstance(case, Case) else "mla", "section": case.section, "label": case.label}
    return named | {"kv_mb": round(case.kv_bytes / 1e6, 1)} | figures_of(launch)


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
    launches = launches_in(profile(given.out))
    origins = json.loads((given.out / ORIGINS).read_text())["rows"]
    rows = [row_of(case, found) | origin for case, found, origin in zip(chosen_cases(), launches, origins, strict=True)]
    result = {"schema": 1, "question": "what bounds the rows that miss their bars", "environment": gpu_environment()}
    (given.out / "profile.json").write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")
    for row in rows:
        print(json.dumps(row))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
