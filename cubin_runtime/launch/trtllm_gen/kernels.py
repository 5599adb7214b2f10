"""Kernels of a release by what a selection asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ...artifacts.metadata import KernelMeta
from .problem import Problem
from .traits import KernelKey

DYNAMIC_PAGE = 128


class SetKey(NamedTuple):
    """What a problem fixes before any selection: dtypes and SageAttention blocks (Q, K, P, V)."""

    dtype_q: str
    dtype_k: str
    dtype_v: str
    dtype_o: str
    sage_blocks: tuple[int, int, int, int]


def key_of(meta: KernelMeta) -> KernelKey:
    """What a row of the metadata is found by.

    A row with pages of 128 tokens takes any larger page too, unless its name has the page size in it.
    """
    page = meta.tokens_per_page
    return KernelKey(
        meta.qkv_layout,
        meta.mask_type,
        meta.kernel_type,
        meta.tile_scheduler,
        meta.multi_ctas_kv_mode,
        meta.head_dim_per_cta_v,
        meta.head_dim_qk,
        meta.head_dim_v,
        meta.tile_q,
        meta.tile_kv,
        page,
        page == DYNAMIC_PAGE and f"P{DYNAMIC_PAGE}" not in meta.symbol,
        meta.reuses_smem_k_for_v,
        meta.two_cta_mma,
        meta.sparse_attention,
        meta.skips_softmax,
    )


class KernelSet:
    """The kernels of one GPU model and one set of dtypes."""

    def __init__(self, found: Mapping[KernelKey, KernelMeta]) -> None:
        self._found = found

    def find(self, key: KernelKey) -> KernelMeta | None:
        """The kernel for ``key``, the one built for this very GPU before the family's; None if there is none."""
        return self._found.get(key)


class KernelTable:
    """All kernels of a release, in sets."""

    def __init__(self, rows: Iterable[KernelMeta]) -> None:
        self._sets: dict[tuple[str, SetKey], dict[KernelKey, KernelMeta]] = {}
        for row in rows:
            set_key = SetKey(
                row.dtype_q,
                row.dtype_k,
                row.dtype_v,
                row.dtype_o,
                (row.sage_block_q, row.sage_block_k, row.sage_block_p, row.sage_block_v),
            )
            self._sets.setdefault((row.sm, set_key), {})[key_of(row)] = row

    def for_problem(self, problem: Problem) -> KernelSet:
        set_key = SetKey(problem.dtype_q, problem.dtype_k, problem.dtype_v, problem.dtype_o, problem.sage_blocks)
        return KernelSet({**self._sets.get(("100f", set_key), {}), **self._sets.get((str(problem.sm), set_key), {})})
