"""A decode loop with continuous batching: requests come and go, and a CUDA graph for each bucket of batch sizes runs.

    make install  # in a clone, then the line with which it ends
    python examples/continuous_batching.py

A graph is captured once over fixed buffers. Lengths, page tables and queries are written into them before a replay:
kernels read lengths on the device, so nothing is planned, allocated or captured while requests are served.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from cubin_runtime.testing import require_module

require_module("numpy", "pip install numpy")

import numpy as np

from cubin_runtime import TensorView, plan_paged_decode
from cubin_runtime.attention.reference import paged_decode_reference
from cubin_runtime.testing import Device, assert_attention_close, from_bits, on_first_device, to_bits

BUCKETS = (1, 2, 4, 8)
PAGE, PAGES, BOUND = 16, 256, 512  # tokens of a page, pages of the pool, most keys of a request
HEADS, KV_HEADS, DIM = 32, 8, 128
ARRIVALS = {0: (40, 130), 3: (17, 300, 65), 6: (5, 90, 33, 250)}  # step -> prompts' lengths, in tokens
STEPS_OF_A_REQUEST = 6
NAN = 0x7FC0


@dataclass
class Request:
    """A request that is being served: its keys so far, its pages, and how many tokens it still wants."""

    length: int = 0
    pages: list[int] = field(default_factory=list)
    wanted: int = STEPS_OF_A_REQUEST


class Engine:
    """The paged cache, the fixed buffers, and one executable graph for each bucket."""

    def __init__(self, device: Device) -> None:
        self.device, self.driver = device, device.driver
        self.rng = np.random.default_rng(0)
        self.free = list(range(PAGES))
        self.mirror = [np.full((PAGES, PAGE, KV_HEADS, DIM), NAN, dtype=np.uint16) for _ in range(2)]
        self.caches = [device.array(cache, "bfloat16") for cache in self.mirror]
        most = BUCKETS[-1]
        self.q = device.poisoned((most, HEADS, DIM), "bfloat16")
        self.out = device.poisoned((most, HEADS, DIM), "bfloat16")
        self.table = device.array(np.full((most, BOUND // PAGE), -1, dtype=np.int32))
        self.lengths = device.array(np.zeros(most, dtype=np.int32))
        self.stream = self.driver.create_stream(blocking=True)  # copies, which are the default stream's, come first
        self.kept: list[object] = []  # plans own the workspaces that graphs use
        self.graphs = {bucket: self.capture(bucket) for bucket in BUCKETS}

    def capture(self, bucket: int) -> int:
        """An executable graph that decodes the first ``bucket`` rows of the buffers."""
        rows = [replace(view, shape=(bucket, *view.shape[1:])) for view in (self.q, self.table, self.lengths, self.out)]
        tensors = (rows[0], *self.caches, *rows[1:])
        plan = plan_paged_decode(*tensors, max_seq_len=BOUND)
        plan.preload()
        plan.prepare(self.stream, graphs=1)  # none may be made during the capture
        self.driver.begin_capture(self.stream)
        plan.run(*tensors, stream=self.stream)
        graph = self.driver.end_capture(self.stream)
        self.kept.append(plan)
        return self.driver.instantiate(graph)

    def append(self, request: Request, tokens: int) -> None:
        """Write keys and values of new tokens, on pages of the pool; a model's projections give them."""
        for _ in range(tokens):
            if request.length % PAGE == 0:
                request.pages.append(self.free.pop())
            place = (request.pages[-1], request.length % PAGE)
            for cache, mirror in zip(self.caches, self.mirror, strict=True):
                mirror[place] = to_bits("bfloat16", self.rng.standard_normal((KV_HEADS, DIM), dtype=np.float32))
                offset = (place[0] * PAGE + place[1]) * KV_HEADS * DIM * 2
                self.driver.copy_to_device(cache.pointer + offset, np.ascontiguousarray(mirror[place]))
            request.length += 1

    def step(self, active: list[Request]) -> tuple[int, float]:
        """Decode one token of each request by the smallest graph that holds them; its bucket, the relative error."""
        bucket = next(size for size in BUCKETS if size >= len(active))
        table = np.full((bucket, BOUND // PAGE), -1, dtype=np.int32)
        lengths = np.zeros(bucket, dtype=np.int32)  # of rows that nobody has: their output is 0
        for row, request in enumerate(active):
            self.append(request, 1)
            table[row, : len(request.pages)] = request.pages
            lengths[row] = request.length
        q = to_bits("bfloat16", self.rng.standard_normal((bucket, HEADS, DIM), dtype=np.float32))
        for view, host in ((self.q, q), (self.table, table), (self.lengths, lengths)):
            self.write(view, host)
        self.driver.launch_graph(self.graphs[bucket], self.stream)
        self.driver.synchronize(self.stream)
        if not self.device.computes:
            return bucket, 0.0
        caches = [from_bits("bfloat16", mirror) for mirror in self.mirror]
        expected, _ = paged_decode_reference(from_bits("bfloat16", q), *caches, table, lengths, DIM**-0.5)
        return bucket, assert_attention_close(self.device.numpy(self.out)[:bucket], expected)

    def write(self, view: TensorView, host: np.ndarray) -> None:
        """Copy into the first rows of a fixed buffer."""
        self.driver.copy_to_device(view.pointer, host)


def main(device: Device) -> None:
    """Serve all arrivals and say which graph ran how often."""
    engine, active, step = Engine(device), list[Request](), 0
    replays, worst = Counter[int](), 0.0
    while active or step <= max(ARRIVALS):
        for prompt in ARRIVALS.get(step, ()):
            active.append(Request())
            engine.append(active[-1], prompt)
        bucket, error = engine.step(active) if active else (0, 0.0)
        replays[bucket] += 1
        worst = max(worst, error)
        lengths = " ".join(f"{request.length:3d}" for request in active)
        print(f"step {step:2d}: {len(active)} requests by the graph for {bucket}, lengths {lengths}")
        for request in active:
            request.wanted -= 1
        for request in (request for request in active if not request.wanted):
            engine.free += request.pages
        active = [request for request in active if request.wanted]
        step += 1
    print("replays   " + ", ".join(f"{count} x bucket {bucket}" for bucket, count in sorted(replays.items())))
    if device.computes:
        print(f"compared  each step with float64: relative error at most {worst:.1e}")


if __name__ == "__main__":
    on_first_device(main)
