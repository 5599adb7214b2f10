"""Continuous batching as a schedule: admission by free pages, chunks of prompts beside decodes. No GPU is needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of token ids that arrives at ``arrival`` seconds and wants ``wanted`` tokens."""

    number: int
    arrival: float
    prompt: np.ndarray
    wanted: int


@dataclass(slots=True, eq=False)
class Active:
    """An admitted request: its slot of the engine and its pages, keys in the cache, tokens made so far."""

    request: Request
    slot: int
    pages: list[int]
    length: int = 0
    made: int = 0

    @property
    def prompt_left(self) -> int:
        """Prompt tokens whose keys are not in the cache yet."""
        return max(0, len(self.request.prompt) - self.length)


class Chunk(NamedTuple):
    """The next ``tokens`` tokens of a prompt."""

    active: Active
    tokens: int

    @property
    def ends_prompt(self) -> bool:
        """Whether the request's first token comes with it."""
        return self.tokens == self.active.prompt_left


class Step(NamedTuple):
    """One step of the engine: a token of each of ``decodes``, and ``chunks`` of prompts."""

    decodes: list[Active]
    chunks: list[Chunk]


def requests_at_random(
    count: int, seed: int, *, per_second: float, vocabulary: int, longest: int, shuffle: int | None = None
) -> list[Request]:
    """Requests of log-normal prompt lengths up to ``longest`` at random (Poisson) arrivals.

    ``shuffle`` draws other arrivals, in another order, for the same requests.
    """
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(5.3, 0.9, count).astype(int), 1, longest)
    wanted = rng.integers(4, 64, count)
    prompts = [rng.integers(0, vocabulary, length) for length in lengths]
    order = np.random.default_rng((seed, shuffle or 0))
    arrivals = np.cumsum(order.exponential(1 / per_second, count))
    if shuffle is not None:
        arrivals = order.permutation(arrivals)
    made = zip(range(count), arrivals.tolist(), prompts, wanted.tolist(), strict=True)
    return sorted((Request(*one) for one in made), key=lambda request: request.arrival)


@dataclass(slots=True)
class Scheduler:
    """Admits requests in the order of arrival and says what each step does.

    A request gets all its pages when it is admitted, so none has to be taken back, with room for ``ahead`` tokens more
    than it wants. Decodes come first; chunks of prompts fill the step up to ``step_tokens``.
    """

    waiting: deque[Request]
    page_size: int
    free: list[int]
    slots: list[int]
    step_tokens: int
    ahead: int = 0
    active: list[Active] = field(default_factory=list)

    @classmethod
    def of(
        cls, requests: Sequence[Request], *, pages: int, page_size: int, slots: int, step_tokens: int, ahead: int = 0
    ) -> Scheduler:
        """A schedule of ``requests``, sorted by arrival, on a pool of ``pages``."""
        return cls(deque(requests), page_size, list(range(pages)), list(range(slots)), step_tokens, ahead)

    @property
    def is_over(self) -> bool:
        """Whether no request is waiting or active."""
        return not self.waiting and not self.active

    def admit(self, now: float) -> list[Active]:
        """Those that arrived until ``now`` (in seconds), as far as pages and slots go."""
        admitted = []
        while self.waiting and self.waiting[0].arrival <= now and self.slots:
            request = self.waiting[0]
            needed = -(-(len(request.prompt) + request.wanted + self.ahead) // self.page_size)
            if needed > len(self.free):
                break
            self.waiting.popleft()
            pages = [self.free.pop() for _ in range(needed)]
            admitted.append(Active(request, self.slots.pop(), pages))
        self.active += admitted
        return admitted

    def step(self) -> Step:
        """The next step; empty if nobody is active."""
        decodes = [active for active in self.active if not active.prompt_left]
        chunks, left = [], self.step_tokens - len(decodes)
        for active in self.active:
            if active.prompt_left and left > 0:
                chunks.append(Chunk(active, min(left, active.prompt_left)))
                left -= chunks[-1].tokens
        return Step(decodes, chunks)

    def done(self, step: Step, counts: Sequence[int] | None = None) -> tuple[list[Active], list[Active]]:
        """Note that the step ran; who made tokens, and who of them has all and is gone.

        ``counts`` are the tokens of each decode; None: one. The last ones may be more than were wanted.
        """
        made = list(step.decodes)
        for active, count in zip(step.decodes, counts or [1] * len(step.decodes), strict=True):
            active.length += count
            active.made += count
        for chunk in step.chunks:
            if chunk.ends_prompt:
                made.append(chunk.active)
                chunk.active.made += 1
            chunk.active.length += chunk.tokens
        gone = [active for active in made if active.made >= active.request.wanted]
        for active in gone:
            self.free += active.pages
            self.slots.append(active.slot)
        self.active = [active for active in self.active if active.made < active.request.wanted]
        return made, gone
