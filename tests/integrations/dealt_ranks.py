"""Ranks of decode context parallelism as threads, and the float64 references in place of the kernels they launch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from cubin_runtime.attention.context_reference import context_attention_reference
from cubin_runtime.attention.reference import paged_decode_reference
from cubin_runtime.distributed import KvPartition
from cubin_runtime.integrations import dealt_batch
from tests.integrations.step_records import array

PAGE, DIM = 16, 128


class Group:
    """As vLLM's group of ranks, of which each is a thread."""

    def __init__(self, world: int) -> None:
        self.world_size = world
        self._local = threading.local()
        self._barrier = threading.Barrier(world, timeout=30)
        self._slots: list[Any] = [None] * world

    @property
    def rank_in_group(self) -> int:
        rank: int = getattr(self._local, "rank", 0)
        return rank

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What each rank returns of the same work, all at the same time."""

        def of_rank(rank: int) -> Any:
            self._local.rank = rank
            return work(rank)

        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(of_rank, range(self.world_size)))

    def exchange(self, value: Any) -> list[Any]:
        self._slots[self.rank_in_group] = value
        self._barrier.wait()
        everybody = list(self._slots)
        self._barrier.wait()
        return everybody

    def all_gather(self, tensor: Any, dim: int) -> Any:
        return torch.cat(self.exchange(tensor), dim)

    def own_heads(self, *states: Any) -> tuple[Any, ...]:
        return tuple(each.chunk(self.world_size, 1)[self.rank_in_group] for each in states)


def merged(outs: Any, lses: Any) -> tuple[Any, Any]:
    """The result over all parts, ``[parts, rows, heads, ...]``; log-sum-exps are in base 2."""
    total = torch.logsumexp(lses.double() * np.log(2), 0) / np.log(2)
    weights = torch.exp2(lses.double() - total).nan_to_num(0.0)
    return (outs.double().nan_to_num(0.0) * weights[..., None]).sum(0), total


def use_references(monkeypatch: Any) -> list[str]:
    """Have ``attend_dealt`` compute in float64; the names of the operators that it calls."""
    called: list[str] = []

    def decode(q: Any, k: Any, v: Any, table: Any, lengths: Any, *, out: Any, lse: Any, **options: Any) -> None:
        called.append("decode")
        assert int(lengths.max()) <= options["max_seq_len"] <= table.shape[1] * PAGE
        pages = [array(half.transpose(1, 2)) for half in (k, v)]
        made = paged_decode_reference(array(q), *pages, array(table), array(lengths), options["softmax_scale"])
        for tensor, values in zip((out, lse), made, strict=True):
            tensor.copy_(torch.from_numpy(values))

    def context(q: Any, k: Any, v: Any, *, out: Any, lse: Any, **options: Any) -> None:
        sums, table = options.get("q_cu_seq_lens"), options.get("page_table")
        called.append("new keys" if table is None else "context")
        q_lens = [q.shape[1]] * len(q) if sums is None else sums.diff().tolist()
        k_lens = (options["kv_cu_seq_lens"].diff() if table is None else options["seq_lens"]).tolist()
        assert max(k_lens) <= options["max_seq_len"] <= (len(k) if table is None else table.shape[1] * PAGE)
        made = context_attention_reference(
            array(q.reshape(-1, *q.shape[-2:])),
            *(array(half if table is None else half.transpose(1, 2)) for half in (k, v)),
            q_lens,
            k_lens,
            options["softmax_scale"],
            page_table=None if table is None else array(table),
            causal=options.get("causal", True),
            logit_soft_cap=options["logit_soft_cap"],
        )
        for tensor, values in zip((out, lse), made, strict=True):
            if tensor is not None:
                tensor.copy_(torch.from_numpy(values).view(tensor.shape))

    def merge(part: Any, its_lse: Any, *, other: Any, other_lse: Any, out: Any, workspace: Any) -> None:
        called.append("merge")
        out.copy_(merged(torch.stack([part, other]), torch.stack([its_lse, other_lse]))[0])

    for name, function in (("paged_decode", decode), ("context_attention", context), ("merge_states", merge)):
        monkeypatch.setattr(dealt_batch, name, function)
    return called


class Requests:
    """Requests of one KV head whose last tokens are new, all their keys, and the caches of ranks that hold them."""

    def __init__(self, q_lens: list[int], kv_lens: list[int], heads: int, dtype: Any) -> None:
        torch.manual_seed(0)
        self.q_lens, self.kv_lens, self.dtype = q_lens, kv_lens, dtype
        self.q = torch.randn(sum(q_lens), heads, DIM).to(dtype)
        self.keys, self.values = ([torch.randn(length, 1, DIM).to(dtype) for length in kv_lens] for _ in range(2))

    def new(self, of_requests: list[Any]) -> Any:
        """The keys or values of all new tokens."""
        return torch.cat([each[len(each) - new :] for each, new in zip(of_requests, self.q_lens, strict=True)])

    def cache(self, partition: KvPartition, columns: int) -> tuple[Any, Any]:
        """A rank's cache ``[pages, 1, page size, 2 * head_dim]``, NaN where nobody wrote, and its page table."""
        pages = torch.full((len(self.kv_lens) * columns, 1, PAGE, 2 * DIM), torch.nan, dtype=self.dtype)
        table = torch.arange(len(pages), dtype=torch.int32).flip(0).view(len(self.kv_lens), columns)
        for row, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            own = partition.own_positions(torch.arange(len(keys)))
            places = own[own >= 0]
            both = torch.cat([keys, values], -1)[own >= 0]
            pages[table[row, places // PAGE].long(), :, places % PAGE] = both
        return pages, table

    def expected(self, softmax_scale: float, soft_cap: float = 0.0) -> Any:
        """The output of one rank that holds all keys."""
        states = (array(torch.cat(each)) for each in (self.keys, self.values))
        given = (self.q_lens, self.kv_lens, softmax_scale)
        return context_attention_reference(array(self.q), *states, *given, logit_soft_cap=soft_cap)[0]
