"""What runs the attention of a serving step: our operators, or FlashInfer's wrappers on the same caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from cubin_runtime.attention import SemaphoreWorkspace, append_kv, context_attention, paged_decode

from .model import HEAD_DIM, HEADS, KV_HEADS

Caches = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one step on the device, decodes first.

    ``offsets`` are the prefix sums of the requests' tokens, ``lens`` their keys with the new ones, at most ``longest``;
    a chunk has at most ``most_tokens``. With a ``mask``, uint16 ``[decodes, nodes, 2]``, a decode is a tree of tokens.
    """

    decodes: int
    table: torch.Tensor
    lens: torch.Tensor
    offsets: torch.Tensor
    longest: int
    most_tokens: int = 1
    mask: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class HostRows:
    """The same on the host, where wrappers plan by it; the pages of each request as far as it has keys."""

    decodes: int
    lens: list[int]
    offsets: torch.Tensor
    pages: list[list[int]]


class Attention(Protocol):
    """One step's attention on paged caches ``[pages, page_size, KV heads, head_dim]``."""

    name: str
    rows: Rows  # of the step whose layers run

    def plan(self, rows: HostRows) -> None:
        """Prepare a step, outside of graphs."""
        ...

    def append(self, k: torch.Tensor, v: torch.Tensor, caches: Caches) -> None:
        """Write the new keys and values of all rows."""
        ...

    def attend(self, q: torch.Tensor, caches: Caches) -> torch.Tensor:
        """The output of all rows."""
        ...


class Ours:
    """Append, paged decode and context attention of this package, which read lengths and pages on the device.

    All calls share one workspace, since they are on one stream.
    """

    def __init__(self, *, batch_invariant: bool) -> None:
        self.name = "ours, batch invariant" if batch_invariant else "ours"
        self.rows: Rows
        buffers = (torch.zeros(n << 20, dtype=torch.uint8, device="cuda") for n in (1, 128))
        self.workspace = SemaphoreWorkspace.of(*buffers)
        self.options: Any = {"workspace": self.workspace, "batch_invariant": batch_invariant}

    def plan(self, rows: HostRows) -> None:
        pass

    def append(self, k: torch.Tensor, v: torch.Tensor, caches: Caches) -> None:
        rows = self.rows
        append_kv(k, v, *caches, rows.table, rows.lens, q_cu_seq_lens=rows.offsets, workspace=self.workspace)

    def attend(self, q: torch.Tensor, caches: Caches) -> torch.Tensor:
        rows, n, out = self.rows, self.rows.decodes, torch.empty_like(q)
        if rows.mask is not None:
            return self.verify(q, caches, rows.mask)
        if n:
            tensors = (q[:n], *caches, rows.table[:n], rows.lens[:n])
            paged_decode(*tensors, max_seq_len=rows.longest, out=out[:n], **self.options)
        if n < len(q):
            context_attention(
                q[n:],
                *caches,
                page_table=rows.table[n:],
                seq_lens=rows.lens[n:],
                q_cu_seq_lens=rows.offsets[n:] - n,  # of the chunks alone
                out=out[n:],
                max_seq_len=rows.longest,
                max_q_len=rows.most_tokens,
                **self.options,
            )
        return out

    def verify(self, q: torch.Tensor, caches: Caches, mask: torch.Tensor) -> torch.Tensor:
        """The output of all nodes of the requests' trees."""
        rows = self.rows
        nodes = q.view(rows.decodes, -1, HEADS, HEAD_DIM)
        tensors = (nodes, *caches, rows.table, rows.lens)
        out = paged_decode(*tensors, max_seq_len=rows.longest, mask=mask, **self.options)
        return out.view_as(q)


class FlashInfer:
    """FlashInfer's paged wrappers, planned for each step; ``buckets`` have wrappers for graphs."""

    name = "flashinfer"

    def __init__(self, pages: int, page_size: int, buckets: tuple[int, ...]) -> None:
        from decode.peers import library

        self.flashinfer = flashinfer = library()
        self.page_size = page_size
        self.rows: Rows

        def workspace() -> torch.Tensor:
            return torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")

        def ints(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device="cuda")

        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper
        self.prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", backend="fa3")
        self.decode = decode(workspace(), "NHD", use_tensor_cores=True)
        shared = workspace()
        self.of_bucket = {
            bucket: decode(
                shared,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=ints(bucket + 1),
                paged_kv_indices_buffer=ints(pages + bucket),
                paged_kv_last_page_len_buffer=ints(bucket),
            )
            for bucket in buckets
        }
        self.decoding: Any = None

    def plan(self, rows: HostRows) -> None:
        n, batch = rows.decodes, len(rows.pages)
        counts = torch.tensor([0, *map(len, rows.pages)], dtype=torch.int32)
        indptr = counts.cumsum(0).int()
        ids = torch.tensor([page for pages in rows.pages for page in pages], dtype=torch.int32, device="cuda")
        last = (torch.tensor(rows.lens, dtype=torch.int32) - 1) % self.page_size + 1
        sizes = (HEADS, KV_HEADS, HEAD_DIM, self.page_size)
        dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        if n:
            self.decoding = self.of_bucket[n] if n == batch else self.decode
            self.decoding.plan(indptr[: n + 1], ids[: indptr[n]], last[:n], *sizes, **dtypes)
        if n < batch:
            chunks = (rows.offsets[n:] - n, indptr[n:] - indptr[n], ids[indptr[n] :], last[n:])
            self.prefill.plan(*chunks, *sizes, causal=True, **dtypes)

    def append(self, k: torch.Tensor, v: torch.Tensor, caches: Caches) -> None:
        rows, (batch, columns) = self.rows, self.rows.table.shape
        numbers = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
        places = (numbers[:-1], rows.lens - 1)
        if len(k) > batch or rows.decodes < batch:
            places = self.flashinfer.get_batch_indices_positions(rows.offsets, rows.lens, len(k))
        last = (rows.lens - 1) % self.page_size + 1
        paging = (rows.table.reshape(-1), numbers * columns, last)
        self.flashinfer.append_paged_kv_cache(k, v, *places, caches, *paging, kv_layout="NHD")

    def attend(self, q: torch.Tensor, caches: Caches) -> torch.Tensor:
        n, parts = self.rows.decodes, []
        if n:
            parts.append(self.decoding.run(q[:n], caches))
        if n < len(q):
            parts.append(self.prefill.run(q[n:], caches))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
