"""A case's tensors on the device, and our call of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from cubin_runtime.attention import Runtime, plan_context_attention

from .cases import PrefillCase


def sums(lengths: Sequence[int]) -> torch.Tensor:
    """Prefix sums from 0 on the device."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")


def problems_of_layers(case: PrefillCase, layers: int) -> list[PrefillProblem]:
    """A problem for each layer: keys and values of their own, the same queries."""
    first = PrefillProblem(case)
    return [first, *(PrefillProblem(case, first.q) for _ in range(layers - 1))]


class PrefillProblem:
    """Queries, and keys and values both ragged and, for a paged case, in pages in random order."""

    def __init__(self, case: PrefillCase, q: torch.Tensor | None = None) -> None:
        self.case = case
        keys = sum(case.kv_lens)
        self.q = self._random(sum(case.q_lens), case.heads, case.head_dim) if q is None else q
        self.k, self.v = (self._random(keys, case.kv_heads, n) for n in (case.head_dim, case.value_dim))
        self.q_sums, self.kv_sums = sums(case.q_lens), sums(case.kv_lens)

    @cached_property
    def pages_of(self) -> tuple[int, ...]:
        """Pages of each request."""
        return tuple(-(-length // self.case.page) for length in self.case.kv_lens)

    @cached_property
    def page_ids(self) -> torch.Tensor:
        """The page ids of all requests, one after another."""
        return torch.randperm(sum(self.pages_of), device="cuda", dtype=torch.int32)

    @cached_property
    def page_table(self) -> torch.Tensor:
        """The page ids of each request."""
        table = torch.zeros(len(self.pages_of), max(self.pages_of), dtype=torch.int32, device="cuda")
        for row, ids in zip(table, self.page_ids.split(self.pages_of), strict=True):
            row[: len(ids)] = ids
        return table

    @cached_property
    def seq_lens(self) -> torch.Tensor:
        """Keys of each request."""
        return torch.tensor(self.case.kv_lens, dtype=torch.int32, device="cuda")

    @cached_property
    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in pages."""
        return self._paged(self.k), self._paged(self.v)

    def ours(self, runtime: Runtime, **options: Any) -> Callable[[], torch.Tensor]:
        """A run of a plan, giving the output; options as for ``planned``."""
        return self.planned(runtime, **options)[1]

    def planned(
        self, runtime: Runtime, *, ragged: bool = False, device_facts: Any = None
    ) -> tuple[Any, Callable[[], torch.Tensor]]:
        """A plan, and a run of it, giving the output; ``device_facts``: planned for the device that they describe."""
        case, out = self.case, torch.full_like(self.q[..., : self.case.value_dim], float("nan")).contiguous()
        k, v = self.caches if case.page and not ragged else (self.k, self.v)
        named: dict[str, Any] = {"q_cu_seq_lens": self.q_sums}
        if case.page and not ragged:
            named |= {"page_table": self.page_table, "seq_lens": self.seq_lens}
        else:
            named["kv_cu_seq_lens"] = self.kv_sums
        bounds = {"max_seq_len": max(case.kv_lens), "max_q_len": max(case.q_lens)}
        masks = {"causal": case.causal, "window_left": case.window_left}
        of = {"runtime": runtime, "device_facts": device_facts}
        plan = plan_context_attention(self.q, k, v, out, **named, **bounds, **masks, **of)

        def call() -> torch.Tensor:
            plan.run(self.q, k, v, out, **named)
            return out

        return plan, call

    @staticmethod
    def _random(tokens: int, heads: int, columns: int) -> torch.Tensor:
        return torch.randn(tokens, heads, columns, device="cuda", dtype=torch.bfloat16)

    def _paged(self, ragged: torch.Tensor) -> torch.Tensor:
        page = self.case.page
        pool = ragged.new_zeros(sum(self.pages_of), page, *ragged.shape[1:])
        own = zip(ragged.split(self.case.kv_lens), self.page_ids.split(self.pages_of), strict=True)
        for tokens, ids in own:
            whole = tokens.new_zeros(len(ids) * page, *tokens.shape[1:])
            whole[: len(tokens)] = tokens
            pool[ids.long()] = whole.view(len(ids), page, *tokens.shape[1:])
        return pool
