"""Speculative decoding in the serving loop: a tree of draft tokens per request, verified in one decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from cubin_runtime import draft_mask

from .attention import Attention, Rows
from .engine import BUCKETS, MOST, PAGE, Engine
from .model import HEAD_DIM, HEADS, Model
from .schedule import Active, Step

# The parent of each node; node 0 is the token that was accepted last, the others are drafts, at most 4 levels deep.
PARENTS = (-1, 0, 0, 1, 1, 3, 3, 5)
NODES = len(PARENTS)
LEVELS = 4
_CHILDREN = [[child for child, parent in enumerate(PARENTS) if parent == node] for node in range(NODES)]


class Drafter(Protocol):
    """Proposes the tokens of the drafts."""

    def propose(self, active: Active) -> Sequence[int]:
        """``NODES - 1`` tokens, in the order of the nodes."""
        ...


@dataclass(slots=True)
class KnownTokens:
    """A drafter that knows what each request makes, and is right with ``probability`` at each level.

    It stands for a trained draft model, of which only the share of accepted tokens matters here. The right token is at
    a random child; the others are random tokens.
    """

    known: Mapping[int, np.ndarray]
    probability: float
    vocabulary: int
    rng: np.random.Generator

    def propose(self, active: Active) -> list[int]:
        """As ``Drafter.propose``."""
        tokens = self.rng.integers(0, self.vocabulary, NODES)
        node, right = 0, self.known[active.request.number][active.made :]
        for token in right[:LEVELS]:
            if not _CHILDREN[node] or self.rng.random() >= self.probability:
                break
            node = int(self.rng.choice(_CHILDREN[node]))
            tokens[node] = token
        return tokens[1:].tolist()


class TreeEngine(Engine):
    """An engine whose decode steps verify a tree for each request; steps with prompts make one token per request."""

    def __init__(self, model: Model, attention: Attention, drafter: Drafter, **sizes: int) -> None:
        super().__init__(model, attention, ahead=NODES, **sizes)
        self.drafter = drafter
        on = self.device
        self.drafts = {bucket: torch.zeros((bucket, NODES - 1), dtype=torch.int64, device=on) for bucket in BUCKETS}
        self.counts = {bucket: torch.zeros(bucket, dtype=torch.int64, device=on) for bucket in BUCKETS}
        self.mask = draft_mask(parents=torch.tensor([PARENTS], dtype=torch.int32, device=on).repeat(MOST, 1))
        children = [[*kids, *[NODES] * (2 - len(kids))] for kids in _CHILDREN]
        self.children = torch.tensor(children, device=on)
        self.tree_offsets = torch.arange(MOST + 1, dtype=torch.int32, device=on) * NODES

    def decode_step(self, bucket: int) -> None:
        """As many tokens for each slot of the bucket as its drafts are right, and one more."""
        slots = self.slots[bucket]
        before, table = self.lens[slots], self.table[slots]
        tokens = torch.cat([self.last[slots][:, None], self.drafts[bucket]], 1)
        offsets = self.tree_offsets[: bucket + 1]
        self.attention.rows = Rows(bucket, table, before + NODES, offsets, self.longest, mask=self.mask[:bucket])
        out = self.layers(tokens.flatten())
        wanted = self.model.next_tokens(out).view(bucket, NODES)
        path, accepted = self.accept(tokens, wanted)
        self.keep(table, before, path)
        made = accepted + 1
        self.lens[slots] = before + made.int()
        rows = torch.arange(bucket, device=self.device)
        # The columns behind the accepted ones are written again by the next step.
        places = self.made[slots][:, None] + torch.arange(LEVELS + 1, device=self.device)
        self.history[slots[:, None], places] = wanted.gather(1, path)
        self.made[slots] += made
        ends = path[rows, accepted]
        self.last[slots] = wanted[rows, ends]
        self.outputs[slots] = out.view(bucket, NODES, HEADS, HEAD_DIM)[rows, ends]
        self.counts[bucket].copy_(made)
        self.lens[MOST].zero_()
        self.made[MOST].zero_()

    def accept(self, tokens: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The nodes of the accepted path, then each level in the place of a node; and the number of accepted drafts."""
        rows = torch.arange(len(tokens), device=self.device)
        padded = torch.cat([tokens, torch.full_like(tokens[:, :1], -1)], 1)
        node, alive = torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool)
        path, accepted = [node], torch.zeros_like(rows)
        for level in range(1, LEVELS + 1):
            kids = self.children[node]
            right = padded.gather(1, kids) == wanted[rows, node][:, None]
            alive = alive & right.any(1)
            node = torch.where(alive, kids[rows, right.int().argmax(1)], node)
            path.append(torch.where(alive, node, level))
            accepted = accepted + alive
        return torch.stack(path, 1), accepted

    def keep(self, table: torch.Tensor, before: torch.Tensor, path: torch.Tensor) -> None:
        """Move the keys and values of the accepted drafts to the places of their levels."""
        levels = torch.arange(1, LEVELS + 1, device=self.device)
        sources, targets = (before[:, None] + nodes for nodes in (path[:, 1:], levels))
        places = [(table.gather(1, at // PAGE).long(), at % PAGE) for at in (sources.long(), targets.long())]
        for caches in self.caches:
            for cache in caches:
                cache[places[1]] = cache[places[0]]

    def prepare(self, bucket: int, step: Step) -> None:
        """The drafts of a step."""
        tokens = [self.drafter.propose(active) for active in step.decodes]
        tokens += [[0] * (NODES - 1)] * (bucket - len(tokens))
        self.drafts[bucket].copy_(torch.tensor(tokens))

    def counted(self, bucket: int, step: Step) -> list[int]:
        """The tokens that each request made."""
        return self.counts[bucket][: len(step.decodes)].tolist()
