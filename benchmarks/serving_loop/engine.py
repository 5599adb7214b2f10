"""Runs a schedule on the device: fixed buffers by slot, a CUDA graph for each bucket of decodes, eager mixed steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .attention import Attention, HostRows, Rows
from .model import HEAD_DIM, HEADS, KV_HEADS, Model
from .schedule import Active, Scheduler, Step

PAGE = 64
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
MOST = BUCKETS[-1]


@dataclass(slots=True)
class Served:
    """What came of a run: seconds to each request's tokens from its arrival, its tokens, and last outputs.

    Of steps that only decode, ``verified`` counts the requests and ``accepted`` their tokens.
    """

    seconds: float = 0.0
    token_times: dict[int, list[float]] = field(default_factory=dict)
    tokens: dict[int, np.ndarray] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    graph_steps: int = 0
    mixed_steps: int = 0
    verified: int = 0
    accepted: int = 0


class Engine:
    """The caches of all layers and the state of all slots; the last slot belongs to rows that nobody has.

    ``longest`` is the most keys of a request, ``most_made`` the most tokens that one is to make, and ``ahead`` how many
    keys and tokens more a step may write. On a CPU nothing is captured.
    """

    def __init__(
        self, model: Model, attention: Attention, *, pages: int, longest: int, most_made: int, ahead: int = 0
    ) -> None:
        self.model, self.attention, self.pages, self.longest, self.ahead = model, attention, pages, longest, ahead
        self.device = model.weights.device
        on: dict[str, Any] = {"device": self.device, "dtype": torch.int32}
        ids: dict[str, Any] = {"device": self.device, "dtype": torch.int64}
        halves: dict[str, Any] = {"device": self.device, "dtype": torch.bfloat16}
        columns = -(-longest // PAGE)
        shape = (pages + 1, PAGE, KV_HEADS, HEAD_DIM)
        self.caches = [(torch.zeros(shape, **halves), torch.zeros(shape, **halves)) for _ in model.q]
        self.last = torch.zeros(MOST + 1, **ids)
        self.lens = torch.zeros(MOST + 1, **on)
        self.made = torch.zeros(MOST + 1, **ids)
        self.table = torch.full((MOST + 1, columns), pages, **on)
        self.history = torch.zeros((MOST + 1, most_made + ahead + 1), **ids)
        self.outputs = torch.zeros((MOST + 1, HEADS, HEAD_DIM), **halves)
        self.slots = {bucket: torch.full((bucket,), MOST, **ids) for bucket in BUCKETS}
        self.offsets = torch.arange(MOST + 1, **on)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self) -> None:
        """A graph of a decode step for each bucket."""
        if self.device.type != "cuda":
            return
        pool = None
        for bucket in reversed(BUCKETS):
            self.attention.plan(self.host_rows(bucket, []))
            self.decode_step(bucket)  # loads and plans
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self.decode_step(bucket)
            pool = pool or graph.pool()
            self.graphs[bucket] = graph
        self.lens.zero_()
        self.made.zero_()

    def host_rows(self, bucket: int, active: Sequence[Active]) -> HostRows:
        """The rows of a decode step; those that nobody has are one key of a page of their own."""
        empty = bucket - len(active)
        lens = [one.length + 1 for one in active] + [1] * empty
        pages = [one.pages[: -(-(one.length + 1) // PAGE)] for one in active] + [[self.pages]] * empty
        return HostRows(bucket, lens, torch.arange(bucket + 1, dtype=torch.int32), pages)

    def decode_step(self, bucket: int) -> None:
        """A token for each slot of the bucket, all on the device."""
        slots = self.slots[bucket]
        lens = self.lens[slots] + 1
        self.attention.rows = Rows(bucket, self.table[slots], lens, self.offsets[: bucket + 1], self.longest)
        out = self.layers(self.last[slots])
        self.lens[slots] = lens
        self.finish(slots, out)
        self.lens[MOST].zero_()
        self.made[MOST].zero_()

    def layers(self, tokens: torch.Tensor) -> torch.Tensor:
        """The last layer's output of all rows."""
        x, model = None, self.model
        for q_table, k_table, v_table, caches in zip(model.q, model.k, model.v, self.caches, strict=True):
            q = q_table[tokens] if x is None else q_table[tokens] + x
            self.attention.append(k_table[tokens], v_table[tokens], caches)
            x = self.attention.attend(q, caches)
        assert x is not None
        return x

    def finish(self, slots: torch.Tensor, out: torch.Tensor) -> None:
        """Keep the tokens that follow from the outputs of ``slots``."""
        tokens = self.model.next_tokens(out)
        self.last[slots] = tokens
        self.history[slots, self.made[slots]] = tokens
        self.made[slots] += 1
        self.outputs[slots] = out

    def admit(self, admitted: Sequence[Active]) -> None:
        """Give admitted requests their slots."""
        for active in admitted:
            pages = torch.tensor(active.pages, dtype=torch.int32)
            self.table[active.slot, : len(pages)] = pages.to(self.device)
            self.made[active.slot] = 0

    def run(self, step: Step) -> int:
        """Run a step; the bucket of a step that only decodes, else 0."""
        if step.chunks:
            self.mixed_step(step)
            return 0
        bucket = next(bucket for bucket in BUCKETS if bucket >= len(step.decodes))
        slots = [active.slot for active in step.decodes] + [MOST] * (bucket - len(step.decodes))
        self.slots[bucket].copy_(torch.tensor(slots))
        self.prepare(bucket, step)
        if bucket in self.graphs:
            self.graphs[bucket].replay()
        else:
            self.decode_step(bucket)
        return bucket

    def prepare(self, bucket: int, step: Step) -> None:
        """What the host does for a step of decodes."""
        self.attention.plan(self.host_rows(bucket, step.decodes))

    def counted(self, bucket: int, step: Step) -> list[int]:
        """The tokens that each request made in a step of decodes."""
        return [1] * len(step.decodes)

    def mixed_step(self, step: Step) -> None:
        """Decodes and chunks of prompts side by side."""
        active = [*step.decodes, *(chunk.active for chunk in step.chunks)]
        counts = np.array([1] * len(step.decodes) + [chunk.tokens for chunk in step.chunks])
        ends = np.cumsum(counts)
        lens = np.array([one.length for one in active]) + counts
        host = [chunk.active.request.prompt[chunk.active.length :][: chunk.tokens] for chunk in step.chunks]
        prompts = torch.from_numpy(np.concatenate(host)).to(self.device)
        slots = torch.tensor([one.slot for one in active], device=self.device)
        offsets = torch.from_numpy(np.concatenate([[0], ends])).int()
        on_device = torch.from_numpy(lens).int().to(self.device)
        rows = Rows(
            decodes=len(step.decodes),
            table=self.table[slots],
            lens=on_device,
            offsets=offsets.to(self.device),
            longest=self.longest,
            most_tokens=max(chunk.tokens for chunk in step.chunks),
        )
        pages = [one.pages[: -(-keys // PAGE)] for one, keys in zip(active, lens.tolist(), strict=True)]
        self.attention.plan(HostRows(rows.decodes, lens.tolist(), offsets, pages))
        self.attention.rows = rows
        out = self.layers(torch.cat([self.last[slots[: rows.decodes]], prompts]))
        self.lens[slots] = on_device
        ended = [row for row, chunk in enumerate(step.chunks, rows.decodes) if chunk.ends_prompt]
        making = [*range(rows.decodes), *ended]
        if making:
            self.finish(slots[making], out[torch.from_numpy(ends[making] - 1).to(self.device)])

    def serve(self, scheduler: Scheduler, sampled: set[int]) -> Served:
        """Serve all requests; outputs are kept of those ``sampled``. A step is over when its tokens can be read."""
        served, began = Served(), time.perf_counter()
        while not scheduler.is_over:
            now = time.perf_counter() - began
            self.admit(scheduler.admit(now))
            step = scheduler.step()
            if not step.decodes and not step.chunks:
                time.sleep(max(0.0, min(0.001, scheduler.waiting[0].arrival - now)))
                continue
            bucket = self.run(step)
            served.graph_steps += bucket > 0
            served.mixed_steps += not bucket
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter() - began
            counts = self.counted(bucket, step) if bucket else None
            served.verified += len(step.decodes) if bucket else 0
            served.accepted += sum(counts or ())
            made, gone = scheduler.done(step, counts)
            for active in made:
                request, times = active.request, served.token_times.setdefault(active.request.number, [])
                times += [now - request.arrival] * (min(active.made, request.wanted) - len(times))
            for active in gone:
                number = active.request.number
                served.tokens[number] = self.history[active.slot, : active.made].cpu().numpy()
                if number in sampled:
                    served.outputs[number] = self.outputs[active.slot].clone()
        served.seconds = time.perf_counter() - began
        return served
