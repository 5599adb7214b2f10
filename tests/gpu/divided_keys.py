"""Decodes whose keys are divided over ranks, as torch tensors on a GPU. Imported only where torch is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cubin_runtime.attention import mla_decode, paged_decode
from cubin_runtime.distributed import KvPartition

LATENT, ROPE = 512, 64


@dataclass(frozen=True)
class DividedDecode:
    """``lens``: keys of each request on all ranks; ``kv_heads`` 0: latent attention of ``heads`` heads."""

    lens: tuple[int, ...] = (0, 1, 2, 5, 17, 700, 3001)
    q_len: int = 1
    heads: int = 16
    kv_heads: int = 2
    head_dim: int = 128
    dtype: Any = torch.bfloat16
    kv_dtype: Any = torch.bfloat16
    window: int = -1
    page_size: int = 64
    batch_invariant: bool = False

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.kv_heads else LATENT

    @property
    def key_dim(self) -> int:
        return self.head_dim if self.kv_heads else LATENT + ROPE

    @property
    def tokens(self) -> int:
        return len(self.lens) * self.q_len


class DividedProblem:
    """Queries, and the keys and values of each request, the same ones on every rank that makes it."""

    def __init__(self, case: DividedDecode, device: str, seed: int = 1) -> None:
        self.case, self.device = case, device
        generator = torch.Generator().manual_seed(seed)
        rows = max(case.lens)
        parts = 2 if case.kv_heads else 1
        shape = (parts, len(case.lens), rows, case.kv_heads or 1, case.key_dim)
        self.q = torch.randn(case.tokens, case.heads, case.key_dim, generator=generator).to(device, case.dtype)
        self.kv = torch.randn(shape, generator=generator).to(device, case.kv_dtype).to(torch.bfloat16)
        self.lens = torch.tensor(case.lens, dtype=torch.int32, device=device)

    def caches(self, partition: KvPartition) -> tuple[list[Any], Any, Any]:
        """The pools of one rank, NaN where no key is, its page table and lengths."""
        case, size = self.case, self.case.page_size
        columns = max(1, -(-partition.own_keys(max(case.lens)) // size))
        pages = len(case.lens) * columns
        pools = []
        for part in self.kv:
            pool = torch.full((pages, size, *part.shape[2:]), float("nan"), device=self.device, dtype=torch.bfloat16)
            for request, length in enumerate(case.lens):
                places = partition.own_positions(torch.arange(length, device=self.device))
                own = part[request, :length][places >= 0]
                rows = pool.view(len(case.lens), columns * size, *part.shape[2:])
                rows[request, : len(own)] = own
            pools.append(pool.to(case.kv_dtype))
        table = torch.arange(pages, dtype=torch.int32, device=self.device).view(len(case.lens), columns)
        return pools, table, partition.own_lens(self.lens)

    def decode(
        self, runtime: Any, partition: KvPartition, out: Any, lse: Any, sinks: Any = None, caches: Any = None
    ) -> None:
        """The queries on the keys of one rank, ``out`` and ``lse`` as ``[tokens, heads, ...]``.

        ``caches``: what ``caches`` gave before.
        """
        case = self.case
        pools, table, lens = self.caches(partition) if caches is None else caches
        shaped = [t.unflatten(0, (len(case.lens), case.q_len)) if case.q_len > 1 else t for t in (self.q, out, lse)]
        given: dict[str, Any] = {
            "max_seq_len": table.shape[1] * case.page_size,
            "out": shaped[1],
            "lse": shaped[2],
            "sinks": sinks,
            "batch_invariant": case.batch_invariant,
            "softmax_scale": 0.1,
            "runtime": runtime,
        }
        if partition.world > 1:
            given |= {"global_seq_lens": self.lens, "cp_world": partition.world, "cp_rank": partition.rank}
            given |= {"cp_interleave": partition.interleave}
        if case.kv_heads:
            paged_decode(shaped[0], *pools, table, lens, window_left=case.window, **given)
        else:
            mla_decode(shaped[0], pools[0].view(*pools[0].shape[:2], -1), table, lens, **given)

    def empty(self, heads: int | None = None) -> tuple[Any, Any]:
        """Memory for an output and its log-sum-exp, filled with NaN."""
        shape = (self.case.tokens, heads or self.case.heads)
        out = torch.full((*shape, self.case.value_dim), float("nan"), dtype=torch.bfloat16, device=self.device)
        return out, torch.full(shape, float("nan"), device=self.device)

    def whole(self, runtime: Any, sinks: Any = None) -> tuple[Any, Any]:
        """On one rank."""
        out, lse = self.empty()
        self.decode(runtime, KvPartition(1, 0), out, lse, sinks)
        return out, lse


def assert_same(came: Sequence[Any], expected: Sequence[Any]) -> None:
    """Outputs to what bf16 parts allow, log-sum-exps closely; infinities are the same ones."""
    torch.testing.assert_close(came[0].float(), expected[0].float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(came[1], expected[1], atol=2e-3, rtol=1e-4)
