"""Appending to paged KV caches: the operators of ``flashinfer.page``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...attention.operators.append_kv import append_kv
from ...errors import UsageError, WorkspaceError
from ..renaming import renamed
from ..shapes import is_torch, shape_of
from .layouts import cache_pair

if TYPE_CHECKING:
    from ...protocols import KvLayout
    from ...tensor import Tensor

# Arguments of our operator -> those of these operators, where the names differ.
_NAMES = {
    "k": "append_key",
    "v": "append_value",
    "k_cache": "paged_kv_cache (K)",
    "v_cache": "paged_kv_cache (V)",
    "page_table": "kv_indices",
    "page_indptr": "kv_indptr",
}
_MLA_NAMES = {**_NAMES, "k": "append_ckv", "v": "append_kpe", "k_cache": "ckv_cache", "v_cache": "kpe_cache"}


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Tensor | Sequence[Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: KvLayout = "NHD",
) -> None:
    """Write new keys and values into a paged KV cache.

    A token with a negative position or request is padding; one whose page is not among its request's or not in the
    pool is skipped (FlashInfer writes out of bounds). The call may be captured.

    Args:
        append_key, append_value: ``[tokens, kv_heads, head_dim]``, of the cache's dtype (bf16, fp16 or e4m3), or bf16
            or fp16 to be quantised into an e4m3 cache; any strides in multiples of 16 bytes.
        batch_indices, positions: int32 or uint32 ``[tokens]``: the request of each token, and its position there.
        paged_kv_cache: a pair of K and V, or ``[pages, 2, ...]``; each ``[pages, page_size, kv_heads, head_dim]`` (NHD)
            or ``[pages, kv_heads, page_size, head_dim]`` (HND), of any page size and any strides in multiples of 16
            bytes.
        kv_indices: int32 page ids of all requests, one after another.
        kv_indptr: int32 or uint32 ``[batch + 1]``: where those of each request begin.
        kv_last_page_len: ``[batch]``; positions say all that is needed, so it is not read.
        kv_layout: "NHD" or "HND".
    """
    pool: Any = paged_kv_cache
    if is_torch(pool) and len(shape := shape_of(pool, "paged_kv_cache")) == 5 and shape[1] == 2:
        k_cache, v_cache = pool[:, 0], pool[:, 1]
    elif isinstance(pool, (tuple, list)) and len(pool) == 2:
        k_cache, v_cache = pool
    else:
        k_cache, v_cache = cache_pair(pool, kv_layout, "paged_kv_cache")
    for name, cache in (("K", k_cache), ("V", v_cache)):
        shape_of(cache, f"paged_kv_cache ({name})", 4)
    _check_places(batch_indices, positions, kv_last_page_len, kv_indptr)
    try:
        append_kv(
            append_key,
            append_value,
            k_cache,
            v_cache,
            kv_indices,
            positions=positions,
            batch_indices=batch_indices,
            page_indptr=kv_indptr,
            kv_layout=kv_layout,
            enable_pdl=True,
        )
    except (UsageError, WorkspaceError) as error:
        raise renamed(error, _NAMES) from error


def append_paged_mla_kv_cache(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    """Write the latent and rope columns of new tokens into the paged caches of MLA.

    Args:
        append_ckv: ``[tokens, latent]`` (512 in FlashInfer; here any multiple of 16 from 32 to 1024).
        append_kpe: ``[tokens, rope]``, likewise (64).
        ckv_cache: ``[pages, page_size, latent]``; it and ``kpe_cache`` may be columns of one tensor.
        kpe_cache: ``[pages, page_size, rope]``.
        batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len: as for ``append_paged_kv_cache``.
    """
    pairs: tuple[tuple[str, Any, int], ...] = (
        ("append_ckv", append_ckv, 2),
        ("append_kpe", append_kpe, 2),
        ("ckv_cache", ckv_cache, 3),
        ("kpe_cache", kpe_cache, 3),
    )
    for name, tensor, rank in pairs:
        shape_of(tensor, name, rank)
    _check_places(batch_indices, positions, kv_last_page_len, kv_indptr)
    try:
        append_kv(
            append_ckv,
            append_kpe,
            ckv_cache,
            kpe_cache,
            kv_indices,
            positions=positions,
            batch_indices=batch_indices,
            page_indptr=kv_indptr,
            enable_pdl=True,
        )
    except (UsageError, WorkspaceError) as error:
        raise renamed(error, _MLA_NAMES) from error


def _check_places(requests: Any, positions: Any, lengths: Any, indptr: Any) -> None:
    """Check that all that says where tokens go is there, and the numbers of requests against each other."""
    for name, tensor in (("batch_indices", requests), ("positions", positions)):
        shape_of(tensor, name, 1)
    shape, bounds = shape_of(lengths, "kv_last_page_len"), shape_of(indptr, "kv_indptr")
    if len(shape) != 1 or bounds != (shape[0] + 1,):
        raise UsageError(
            f"shape {shape} with kv_indptr of shape {bounds}, expected [batch], [batch + 1]",
            argument="kv_last_page_len",
        )
