"""The tensors of a case on the device: views of one pool of random keys and values, so they cost nothing to make."""

from __future__ import annotations

import math
from typing import Any

import torch

from .cases import Case

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
_CHUNK = 1 << 28


class Pool:
    """Normal values of each type, as many bytes as the largest case needs; made once a type."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._flat: dict[str, torch.Tensor] = {}

    def flat(self, dtype: str) -> torch.Tensor:
        if dtype not in self._flat:
            self._flat.clear()  # one type at a time: cases of a section share it
            self._flat[dtype] = self._values(dtype)
        return self._flat[dtype]

    def _values(self, dtype: str) -> torch.Tensor:
        made = torch.empty(self.nbytes // DTYPES[dtype].itemsize, device="cuda", dtype=DTYPES[dtype])
        for part in made.split(_CHUNK):
            part.copy_(torch.randn(part.shape, device="cuda", dtype=torch.bfloat16))
        return made


class Problem:
    """Tensors of one case; the KV cache is one tensor ``[pages, 2, page, heads, dim]``, its pages permuted.

    ``sets`` page tables name pages of their own each, so that calls that go round them find nothing in L2.
    """

    def __init__(self, case: Case, pool: Pool, sets: int = 1) -> None:
        self.case = case
        pages = case.pages * sets
        shape = (pages, 2, case.page, case.kv_heads, case.head_dim)
        self.kv = pool.flat(case.kv_dtype)[: math.prod(shape)].view(shape)
        self.counts = [-(-length // case.page) for length in case.lengths]
        order = torch.randperm(pages, dtype=torch.int32).view(sets, case.pages)
        self.indices = [part.cuda() for part in order]
        self.tables = [page_table_of(part, self.counts) for part in order]
        self.lens = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
        rows = (case.batch * case.q_len, case.q_heads, case.head_dim)
        random = torch.randn(rows, device="cuda", dtype=torch.bfloat16)
        self.q = random.to(DTYPES[case.q_dtype])
        # The peers take no 8-bit queries: they get the same numbers in bf16.
        self.peer_q = self.q.to(torch.bfloat16) if case.q_dtype == "e4m3" else self.q
        self.out = torch.empty(rows, device="cuda", dtype=self.peer_q.dtype)
        self.scale = 1 / math.sqrt(case.head_dim)

    def by_request(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[tokens, heads, dim]`` as our call takes it: ``[batch, q_len, heads, dim]``, or without q_len where 1."""
        return tokens if self.case.q_len == 1 else tokens.unflatten(0, (self.case.batch, self.case.q_len))

    def causal_mask(self) -> torch.Tensor:
        """Bit j of token i's word: token i sees draft token j; uint16 ``[batch, q_len, 2]``, as the peer takes it."""
        words = [(2 << token) - 1 for token in range(self.case.q_len)]
        mask = torch.tensor(words, dtype=torch.int32, device="cuda").view(1, -1, 1)
        return mask.expand(self.case.batch, -1, -1).contiguous().view(torch.uint16)


def page_table_of(ids: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """A page table with as many of the page ids for each request."""
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, part in enumerate(ids.split(counts)):
        table[row, : len(part)] = part
    return table.cuda()


def tables_of(problem: Any, bound: int) -> list[torch.Tensor]:
    """The page tables of a problem with columns for ``bound`` keys."""
    columns = -(-bound // problem.case.page)
    return [torch.nn.functional.pad(table, (0, columns - table.shape[1])) for table in problem.tables]


def difference(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    """Norm of the difference over the norm of the peer's output."""
    a, b = theirs.float().flatten(), ours.float().flatten()
    return float((a - b).norm() / a.norm())
