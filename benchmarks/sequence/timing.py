"""Times of attention inside a sequence of layers, as a model runs it.

A sequence is so many layers. In each, something is written just before (the queries), attention reads a cache of the
layer's own, and a projection follows; the time of attention is that of the sequence less that of the same sequence
without it, by layer. All contestants of a row run in turns, in an order that varies, in every round.
"""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch

# Device time of one measurement of a sequence, in microseconds, and the fewest replays.
MEASURED_US, FEWEST_REPLAYS = 5000.0, 3
WARMUPS = 2
NOTHING = "nothing"  # the sequence without attention

Call = Callable[[], Any]
# Makes a call for each layer, for the stream that it runs on.
Maker = Callable[[torch.cuda.Stream], Sequence[Call]]


@dataclass(frozen=True, slots=True)
class Method:
    """How a sequence runs. ``graph``: as one CUDA graph, else launched call by call from the host."""

    layers: int = 4
    rounds: int = 5
    graph: bool = True
    hidden: int = 8192

    def record(self) -> dict[str, Any]:
        """The method as a result states it."""
        return asdict(self)


class Layers:
    """What surrounds attention in a layer: its queries are written before it, and its output is projected after it.

    ``queries`` are the tensor that attention reads and ``out`` the one that it writes, contiguous, tokens first. The
    weights are each layer's own. Queries of at most twice ``hidden`` columns come from a product, wider ones (of MLA,
    which a model multiplies by a small matrix for each head) and those of 8 bits from a copy; of such an output, a
    tensor of ``hidden`` columns is projected in its place.
    """

    def __init__(self, queries: torch.Tensor, out: torch.Tensor, method: Method) -> None:
        tokens, hidden, dtype, widest = len(queries), method.hidden, out.dtype, 2 * method.hidden
        self.queries, flat = queries.view(tokens, -1), out.view(tokens, -1)
        self._copied = self.queries.clone()
        self._states = torch.randn(tokens, hidden, device="cuda", dtype=dtype)
        self._from_product = queries.dtype == dtype and self.queries.shape[1] <= widest
        self._projected = flat if flat.shape[1] <= widest else self._states
        self._w_in = weights(method.layers, hidden, self.queries.shape[1], dtype) if self._from_product else ()
        self._w_out = weights(method.layers, self._projected.shape[1], hidden, dtype)
        self._sums = torch.empty(tokens, hidden, device="cuda", dtype=dtype)

    def before(self, layer: int) -> None:
        """Write the queries."""
        if self._from_product:
            torch.matmul(self._states, self._w_in[layer], out=self.queries)
        else:
            self.queries.copy_(self._copied)

    def after(self, layer: int) -> None:
        """Project the output."""
        torch.matmul(self._projected, self._w_out[layer], out=self._sums)


@lru_cache(maxsize=4)
def weights(layers: int, rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """A matrix for each layer, whose products of normal values are normal."""
    made = (torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(layers))
    return tuple((each * rows**-0.5).to(dtype) for each in made)


class _Contestant:
    """A sequence that can be timed; it keeps its calls, whose tensors a graph reads but does not own."""

    def __init__(self, name: str, run: Call, calls: Sequence[Call]) -> None:
        self.name, self.run, self.calls, self.replays = name, run, calls, FEWEST_REPLAYS
        self.times: list[float] = []


def sequence_times(
    layers: Layers, makers: Mapping[str, Maker], method: Method = Method(), seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Microseconds of attention in a layer by contestant: ``us``, the median of the rounds, and ``rounds_us``.

    A contestant that fails has ``error`` instead, and stops none of the others.
    """
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    gc.collect()
    result: dict[str, dict[str, Any]] = {}
    contestants = [_contestant(NOTHING, [], layers, method, stream)]
    for name, make in makers.items():
        try:
            with torch.cuda.stream(stream):
                calls = make(stream)
            torch.cuda.synchronize()
            contestants.append(_contestant(name, calls, layers, method, stream))
        except Exception as failure:  # of a contestant, is a result
            result[name] = {"error": describe(failure)}
    order = random.Random(seed)
    for _ in range(method.rounds):
        for contestant in order.sample(contestants, len(contestants)):
            contestant.times.append(_measured(contestant, stream) / method.layers)
    base, *others = contestants
    for contestant in others:
        own = [us - nothing for us, nothing in zip(contestant.times, base.times, strict=True)]
        result[contestant.name] = {"us": statistics.median(own), "rounds_us": [round(us, 2) for us in own]}
    result[NOTHING] = {"us": statistics.median(base.times), "rounds_us": [round(us, 2) for us in base.times]}
    return result


def describe(failure: BaseException) -> str:
    """The kind and the words of an error, not more of them than a table can hold."""
    return f"{type(failure).__name__}: {failure}"[:600]


def _contestant(
    name: str, calls: Sequence[Call], layers: Layers, method: Method, stream: torch.cuda.Stream
) -> _Contestant:
    def body() -> None:
        for layer in range(method.layers):
            layers.before(layer)
            if calls:
                calls[layer % len(calls)]()
            layers.after(layer)

    with torch.cuda.stream(stream):
        for _ in range(WARMUPS):
            body()
        stream.synchronize()
        contestant = _Contestant(name, _captured(body).replay if method.graph else body, calls)
    once = _measured(contestant, stream)
    contestant.replays = max(FEWEST_REPLAYS, int(MEASURED_US / once))
    return contestant


def _captured(body: Call) -> torch.cuda.CUDAGraph:
    """The graph of a body on the current stream; nothing is collected meanwhile, since a freed graph ends a capture."""
    graph = torch.cuda.CUDAGraph()
    gc.disable()
    try:
        graph.capture_begin()
        try:
            body()
        finally:
            graph.capture_end()
    finally:
        gc.enable()
    return graph


def _measured(contestant: _Contestant, stream: torch.cuda.Stream) -> float:
    """Microseconds of one sequence."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        contestant.run()
        begin.record(stream)
        for _ in range(contestant.replays):
            contestant.run()
        end.record(stream)
        stream.synchronize()
    return float(1e3 * begin.elapsed_time(end) / contestant.replays)
