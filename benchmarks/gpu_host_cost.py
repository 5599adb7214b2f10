"""Host time of one call: plans, bound steps, plain functions and FlashInfer's names, beside a C loop over the launch.

    gpu_host_cost.py --out FOLDER [--peers] [--rounds N]

Every figure is the mean of 40 calls while the queue is not full: the least and the median of many such means, in
microseconds. The floor of a row is a C loop over ``cuLaunchKernelEx`` that makes the same launch, with the row's own
kernel, parameters and attributes, and takes turns with the calls: clocks of hosts change from one second to the next.
Each of the rounds is a process of its own; ratios are medians over the rounds of medians over the turns. torch records
no gradients, as in engines. ``--peers`` adds FlashInfer's own functions, which it compiles first.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from row_origin import origin_of

ROUNDS, REPEATS, CALLS = 5, 25, 40
LAYERS = 16  # the queue has room for those of all calls
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
# Rows of the JSON -> the most that this project wants them to cost, as a ratio to the C loop; kept in the JSON alone.
TARGETS = {
    "plan.run, same tensors": 1.4,
    "plan.run, other q and out": 1.4,
    "bound step(q, table, lens, out), other q and out": 1.25,
    "everything bound": 1.1,
    "paged_decode(out=out)": 1.6,
    "paged_decode()": 2.2,
    "compat xqa_batch_decode_with_kv_cache": 1.7,
    "compat trtllm_batch_decode_with_kv_cache": 1.7,
    "MLA plan.run": 1.4,
    "compat xqa_batch_decode_with_kv_cache_mla": 1.7,
    "compat trtllm_batch_decode_with_kv_cache_mla": 1.7,
}
Figures = dict[str, dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="processes (%(default)s)")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        print(json.dumps(measure(peers=asked.peers)))
        return
    rounds = [_in_process(peers=asked.peers) for _ in range(asked.rounds)]
    from gpu_environment import gpu_environment

    table = {}
    for row in rounds[0]:
        each = [found[row] for found in rounds if row in found]
        table[row] = {
            "least": min(found["least"] for found in each),
            "median": statistics.median(found["median"] for found in each),
            "floor": statistics.median(found["floor"] for found in each),
            "ratio": statistics.median(found["ratio"] for found in each),
            **({"target": TARGETS[row]} if row in TARGETS else {}),
            **{name: each[0][name] for name in ("cubins", "commit") if name in each[0]},
        }
    from cubin_runtime.launch.accelerator import accelerator

    report = {"environment": gpu_environment(), "accelerator": accelerator() is not None}
    report |= {"microseconds": table, "rounds": rounds}
    if asked.out:
        (asked.out / "host_cost.json").write_text(json.dumps(report, indent=1) + "\n")
    for row, found in table.items():
        least, median, floor, ratio = (found[name] for name in ("least", "median", "floor", "ratio"))
        print(f"{row:58} {least:7.2f} {median:7.2f} us, floor {floor:5.2f} {ratio:6.2f}")


def _in_process(*, peers: bool) -> Figures:
    command = [sys.executable, __file__, "--measure", *(["--peers"] if peers else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


class Table:
    """The rows of one process."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.rows: Figures = {}
        self.origin: dict[str, Any] = {}  # what the rows that follow launch
        self._synchronize = synchronize

    def add(self, row: str, call: Callable[[], Any], loop: CLoop, *, calls: int = 1) -> None:
        """Measure what makes so many calls, each of which makes the launch of the loop in C."""
        for _ in range(200):
            call()
        self._synchronize()
        found, floors = [], []
        for _ in range(REPEATS):
            floors.append(loop.run())
            self._synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            found.append((time.perf_counter() - begin) / CALLS / calls * 1e6)
            self._synchronize()
        self.put(row, found, floors, **self.origin)

    def put(self, row: str, found: list[float], floors: list[float], **origin: Any) -> None:
        """Keep the figures of a row."""
        ratio = statistics.median(one / other for one, other in zip(found, floors, strict=True))
        figures = {"least": min(found), "median": statistics.median(found), "floor": statistics.median(floors)}
        self.rows[row] = {**figures, "ratio": ratio, **origin}


class CLoop:
    """Launches of the last kernel once more by a loop in C, with its grid, attributes and parameters."""

    def __init__(self, runtime: Any) -> None:
        from cubin_runtime.launch.plan import launch_config

        folder = Path(tempfile.mkdtemp())
        (folder / "loop.c").write_text(LOOP)
        include = os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/include"
        library = folder / "loop.so"
        command = ["cc", "-O2", "-shared", "-fPIC", f"-I{include}", str(folder / "loop.c"), "-o", str(library)]
        subprocess.run(command, check=True)
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        self._loop = ctypes.CDLL(str(library)).loop
        self._loop.restype, self._loop.argtypes = ctypes.c_double, [ctypes.c_void_p] * 3 + [ctypes.c_int]
        (launch, parameters, _) = runtime.driver.history(runtime.driver.current_context()).ring.entries()[-1]
        plan = launch.plan
        config = launch_config(plan.grid, plan.block, plan.shared_bytes, plan.attributes)
        size, alignment = plan.layout.size, plan.layout.alignment
        memory = ctypes.create_string_buffer(size + alignment)
        start = -ctypes.addressof(memory) % alignment + ctypes.addressof(memory)
        ctypes.memmove(start, parameters, size)
        arguments = (ctypes.c_void_p * 1)(start)
        self._kept = config, memory, arguments
        self._arguments = ctypes.addressof(config), launch.function, ctypes.addressof(arguments)

    def run(self) -> float:
        """Microseconds of a launch."""
        return float(self._loop(*self._arguments, CALLS))


def measure(*, peers: bool) -> Figures:  # noqa: PLR0915
    """The rows, in microseconds."""
    import torch

    from cubin_runtime.attention import default_runtime, mla_decode, paged_decode, plan_mla_decode, plan_paged_decode
    from cubin_runtime.compat import flashinfer

    torch.set_grad_enabled(False)
    runtime = default_runtime()
    table = Table(torch.cuda.synchronize)
    on: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    pages = torch.arange(8, device="cuda", dtype=torch.int32).view(2, 4)
    lens = torch.tensor([1, 1], device="cuda", dtype=torch.int32)
    q, out = torch.randn(2, 32, 128, **on), torch.empty(2, 32, 128, **on)
    k, v = torch.randn(8, 64, 4, 128, **on), torch.randn(8, 64, 4, 128, **on)
    latent, lq = torch.randn(8, 64, 576, **on), torch.randn(2, 16, 576, **on)
    lout = torch.empty(2, 16, 512, **on)
    buffer = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    q2, out2 = torch.randn_like(q), torch.empty_like(out)
    plan = plan_paged_decode(q, k, v, pages, lens, out, max_seq_len=256)
    plan.run(q, k, v, pages, lens, out)
    torch.cuda.synchronize()
    floor = CLoop(runtime)
    table.add("torch x.add_(1)", lambda: lens.add_(0), floor)
    table.origin = origin_of(plan)
    table.add("plan.run, same tensors", lambda: plan.run(q, k, v, pages, lens, out), floor)

    def runs() -> None:
        plan.run(q, k, v, pages, lens, out)
        plan.run(q2, k, v, pages, lens, out2)

    layer = plan.bind(k_cache=k, v_cache=v)

    def steps() -> None:
        layer.step(q, pages, lens, out)
        layer.step(q2, pages, lens, out2)

    table.add("plan.run, other q and out", runs, floor, calls=2)
    table.add("bound step(q, table, lens, out), other q and out", steps, floor, calls=2)
    every = plan.bind(q=q, k_cache=k, v_cache=v, page_table=pages, seq_lens=lens, out=out)
    table.add("everything bound", every.step, floor)
    table.add("paged_decode(out=out)", lambda: paged_decode(q, k, v, pages, lens, max_seq_len=256, out=out), floor)
    table.add("paged_decode()", lambda: paged_decode(q, k, v, pages, lens, max_seq_len=256), floor)

    _compiled(table, (q, k, v, pages, lens), floor)
    batch = {"bmm1_scale": 0.1, "bmm2_scale": 1.0, "kv_layout": "NHD", "out": out}
    for function in (flashinfer.xqa_batch_decode_with_kv_cache, flashinfer.trtllm_batch_decode_with_kv_cache):
        table.add(f"compat {function.__name__}", partial(function, q, (k, v), buffer, pages, lens, 256, **batch), floor)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        table.add("plan.run on a stream", lambda: plan.run(q, k, v, pages, lens, out), floor)
        on_side = plan.bind(q=q, k_cache=k, v_cache=v, page_table=pages, seq_lens=lens, out=out)
        table.add("everything bound on a stream", on_side.step, floor)
    torch.cuda.synchronize()
    mla = plan_mla_decode(lq, latent, pages, lens, lout, max_seq_len=256, softmax_scale=0.1)
    mla.run(lq, latent, pages, lens, lout)
    torch.cuda.synchronize()
    mla_floor = CLoop(runtime)
    table.origin = origin_of(mla)
    table.add("MLA plan.run", lambda: mla.run(lq, latent, pages, lens, lout), mla_floor)
    mla_options = {"max_seq_len": 256, "softmax_scale": 0.1, "out": lout}
    table.add("mla_decode(out=out)", lambda: mla_decode(lq, latent, pages, lens, **mla_options), mla_floor)
    nested, nested_out = lq.view(2, 1, 16, 576), lout.view(2, 1, 16, 512)
    for function in (
        flashinfer.xqa_batch_decode_with_kv_cache_mla,
        flashinfer.trtllm_batch_decode_with_kv_cache_mla,
    ):
        table.add(
            f"compat {function.__name__}",
            partial(function, nested, latent, buffer, 512, 512, 64, pages, lens, 256, bmm1_scale=0.1, out=nested_out),
            mla_floor,
        )
    _prompts(table, runtime)
    batches = []
    for size in range(3, 40):
        of_batch = (torch.randn(size, 32, 128, **on), k, v, pages[:1].repeat(size, 1), lens[:1].repeat(size))
        batches.append((*of_batch, torch.empty_like(of_batch[0])))
    new_batch: dict[str, Callable[..., Any]] = {
        "a new batch size: plan": lambda *tensors, out: plan_paged_decode(*tensors, out, max_seq_len=256),
        "a new batch size: plan and first call": lambda *tensors, out: paged_decode(*tensors, max_seq_len=256, out=out),
    }
    for row, call in new_batch.items():
        found, floors = [], []
        for *tensors, made in batches:
            floors.append(floor.run())
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call(*tensors, out=made)
            found.append((time.perf_counter() - begin) * 1e6)
        table.put(row, found, floors)
    if peers:
        _peers(table, (q, k, v, pages, lens, out), (lq, latent, lout), floor, mla_floor)
    return table.rows


def _prompts(table: Table, runtime: Any) -> None:
    """Prompts of two requests as the layers of an engine ask for them: of one size, and of a new one in each step."""
    import torch

    from cubin_runtime.attention import SemaphoreWorkspace, Workspace, context_attention, plan_context_attention

    on: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    caches = [torch.randn(2, 8, 64, 4, 128, **on) for _ in range(LAYERS)]
    q, out = torch.randn(4096, 32, 128, **on), torch.empty(4096, 32, 128, **on)
    context = runtime.driver.current_context()
    memory = Workspace.allocate(runtime.driver, context, 32 << 20, 0)
    places = (memory.address, 1 << 20), (memory.address + (1 << 20), 31 << 20)
    given: dict[str, Any] = {
        "page_table": torch.arange(8, device="cuda", dtype=torch.int32).view(2, 4),
        "seq_lens": torch.tensor([256, 256], device="cuda", dtype=torch.int32),
        "q_cu_seq_lens": torch.tensor([0, 1, 2], device="cuda", dtype=torch.int32),
        "max_seq_len": 256,
        "max_q_len": 128,
    }
    options = {**given, "workspace": SemaphoreWorkspace(*places, context, owner=memory)}

    def layer(number: int, tokens: int) -> None:
        k, v = caches[number]
        context_attention(q[:tokens], k, v, **options, out=out[:tokens])

    counts = itertools.cycle(range(200, 4000))  # more than the runtime keeps plans of

    def step() -> None:
        tokens = next(counts)
        for number in range(LAYERS):
            layer(number, tokens)

    k, v = caches[0]
    table.origin = origin_of(plan_context_attention(q[:128], k, v, **given, out=out[:128]))
    layer(0, 128)
    torch.cuda.synchronize()
    floor = CLoop(runtime)
    one = partial(context_attention, q[:128], k, v, **options, out=out[:128])
    table.add("context_attention(out=out)", one, floor)
    table.add(f"context_attention(out=out), a layer of {LAYERS} in a step of new sizes", step, floor, calls=LAYERS)


def _compiled(table: Table, tensors: tuple[Any, ...], floor: CLoop) -> None:
    """What one more op costs a compiled function, whose call costs tens of microseconds with no op of ours in it."""
    import torch

    from cubin_runtime.attention import paged_decode

    def traced(layers: int) -> Callable[..., Any]:
        def model(q: Any, *cache: Any) -> Any:
            for _ in range(layers):
                q = paged_decode(q, *cache, max_seq_len=256)
            return q + 1

        return torch.compile(model, fullgraph=True)

    rows = {layers: f"torch.compile, {layers} x paged_decode()" for layers in (0, 1, 9)}
    for layers, row in rows.items():
        table.add(row, partial(traced(layers), *tensors), floor)
    one, nine = (table.rows[rows[layers]] for layers in (1, 9))
    found = {figure: (nine[figure] - one[figure]) / 8 for figure in ("least", "median", "ratio")}
    table.rows["torch.compile, one more paged_decode()"] = {**found, "floor": nine["floor"], **table.origin}


def _peers(table: Table, decode: tuple[Any, ...], mla: tuple[Any, ...], floor: CLoop, mla_floor: CLoop) -> None:
    """FlashInfer's own functions on the same tensors."""
    sys.path.insert(0, str(Path(__file__).parent))
    import torch
    from decode.peers import library

    flashinfer = library()
    table.origin = {}
    q, k, v, pages, lens, out = decode
    buffer = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")
    unsigned = lens.to(torch.uint32)
    scales = {"bmm1_scale": 0.1, "bmm2_scale": 1.0, "kv_layout": "NHD", "out": out}
    table.add(
        "FlashInfer xqa_batch_decode_with_kv_cache",
        lambda: flashinfer.decode.xqa_batch_decode_with_kv_cache(q, (k, v), buffer, pages, unsigned, 256, **scales),
        floor,
    )
    lq, latent, lout = mla
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(buffer, backend="fa3")
    indptr, ones = torch.arange(3, device="cuda", dtype=torch.int32), torch.ones(2, device="cuda", dtype=torch.int32)
    wrapper.plan(indptr, indptr, pages[:, 0].contiguous(), ones, 16, 512, 64, 64, False, 0.1, q.dtype, q.dtype)
    parts = (lq[..., :512].contiguous(), lq[..., 512:].contiguous(), latent[..., :512], latent[..., 512:])
    table.add("FlashInfer BatchMLAPagedAttentionWrapper.run", lambda: wrapper.run(*parts, out=lout), mla_floor)


if __name__ == "__main__":
    main()
